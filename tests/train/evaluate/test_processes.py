"""Processes that share an evaluation: what each is told, which GPU it sees, and what a failure says."""

import sys

import pytest

from train.evaluate import processes


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["--draft", "d", "--processes", "4", "--seed", "1"], ["--draft", "d", "--seed", "1"]),
        (["--processes=4", "--report=r.html", "--no-plain"], ["--no-plain"]),
        (["--report", "r.html"], []),
    ],
)
def test_options_of_the_whole_are_not_passed_on(given, kept):
    assert processes.without(given, "--processes", "--report") == kept


@pytest.mark.parametrize(
    ("visible", "expected"), [("0,1", ["0", "1", "0"]), ("GPU-a", ["GPU-a"] * 3), ("", [None] * 3)]
)
def test_each_process_sees_one_gpu(visible, expected, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [processes._one_gpu(i).get("CUDA_VISIBLE_DEVICES") for i in range(3)] == expected


def stand_in(folder, monkeypatch, program: str):
    """`draft-jax eval` replaced by a program that sees the same arguments."""
    script = folder / "stand_in.py"
    script.write_text(program)
    real = processes.subprocess.Popen

    def start(command, **options):
        assert command[1:4] == ["-m", "train.cli", "eval"]
        return real([sys.executable, str(script), *command[4:]], **options)

    monkeypatch.setattr(processes.subprocess, "Popen", start)


def test_every_process_gets_its_share_and_a_log(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "import sys; print(sys.argv[1:])")
    processes.run_shares(["--draft", "d", "--processes", "2"], 2, tmp_path / "rows")
    for index in (1, 2):
        told = (tmp_path / "rows" / f"process-{index}.log").read_text()
        assert told.strip() == str(["--draft", "d", "--share", f"{index}/2", "--resume"])


def test_a_failure_shows_its_end_after_all_have_ended(tmp_path, monkeypatch):
    program = """
import pathlib, sys
if "2/2" in sys.argv:
    print("torn", "GPU memory", sep=" ")
    sys.exit(1)
pathlib.Path(__file__).with_name("done").touch()
"""
    stand_in(tmp_path, monkeypatch, program)
    with pytest.raises(processes.ProcessError, match=r"(?s)process 2 of 2 ended with 1 .*torn GPU memory"):
        processes.run_shares([], 2, tmp_path / "rows")
    assert (tmp_path / "done").exists()
