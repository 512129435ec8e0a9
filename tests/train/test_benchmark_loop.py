"""`benchmarks.loop` over a real run: the numbers of its line come from what the run logged."""

import json
from pathlib import Path

import pytest

from benchmarks import loop


def test_the_loop_is_measured(tree, write_config, capsys):
    loop.main(["--config", write_config(tree), "--skip=2", "--train.steps=5"])
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["steps"] == 3
    assert line["tokens_per_second"] > 0
    assert line["rows_per_second"] == pytest.approx(4 / line["seconds_per_step"], rel=1e-2)
    assert line["target_share"] + line["draft_share"] + line["idle_share"] == pytest.approx(1, abs=1e-2)
    assert {"accumulate": 1, "apply": 1}.items() <= line["compiles"].items()
    logged = [json.loads(text) for text in (Path(tree["run_dir"]) / "metrics.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in logged] == [1, 2, 3, 4, 5]


def test_the_last_step_is_recorded_and_nothing_is_saved(tree, write_config, capsys, tmp_path):
    folder = tmp_path / "trace"
    loop.main(["--config", write_config(tree), "--skip=1", f"--profile={folder}", "--train.steps=4"])
    averages, recorded = (json.loads(line) for line in capsys.readouterr().out.splitlines()[-2:])
    assert averages["steps"] == 2  # of four: the first is skipped, the last is slowed down by the profiler
    assert recorded["recorded_seconds"] > 0
    assert recorded["recorded_rows"] == 4
    assert "idle" not in recorded  # a CPU has no streams
    assert len(list(folder.rglob("*.trace.json.gz"))) == 1
    assert not list((Path(tree["run_dir"]) / "checkpoints").glob("[0-9]*"))


def test_too_few_steps_are_named(tree, write_config):
    with pytest.raises(SystemExit, match=r"logged no step behind the first 10; give more train\.steps"):
        loop.main(["--config", write_config(tree), "--train.steps=2"])
