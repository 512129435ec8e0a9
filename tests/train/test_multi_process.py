"""The whole loop in several processes: the curve of one, exact resume, and failures.

Starting processes is most of the time of these tests, so a launch does many runs one after another. What is split over
which devices is the matter of test_many_devices.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.train.conftest import nest
from tests.train.processes import ROOT, Ended, run_processes
from tests.train.test_optimizer import formula
from train.checkpoint import complete_steps, load_trained
from train.config_file import build
from train.loop import run

pytestmark = pytest.mark.usefixtures("quick_compilation")

#: Before any run: `go` trains as the configuration with changes says and prints how that ended.
HEADER = """
import json, os, signal, sys, traceback
from pathlib import Path
sys.path.insert(0, os.environ["PLACE_ROOT"])
from tests.train.conftest import nest
from train import assembly, feeding, launch, loop, resume, steps
from train.config_file import build
from train.distributed import DistributedError
place = Path(os.environ["PLACE"])
tree = json.loads((place / "tree.json").read_text())

def go(world, name, again=False, **changes):
    if again:
        changes["resume"] = "auto"
    folder, name = place / name, name + " again" * again
    try:
        result = loop.run(build(nest(tree, run_dir=str(folder), **changes)), world=world)
        print("RESULT", json.dumps({"name": name, "code": result.exit_code, "steps": result.steps}), flush=True)
    except Exception as error:
        if not str(error):
            traceback.print_exc()
        print("RESULT", json.dumps({"name": name, "error": type(error).__name__ + ": " + str(error)}), flush=True)

def copy(world, source, name, steps=(2, 4)):
    \"\"\"A run as it was after its step 4.\"\"\"
    import shutil
    if world.is_first:
        for step in steps:
            shutil.copytree(place / source / "checkpoints" / str(step), place / name / "checkpoints" / str(step))
    world.barrier("copy")

original = loop.Loop._micro_steps
def at_step(number, rank, action):
    \"\"\"From now on `action(loop)` happens on that rank (None: on all) before the micro-steps of that step.\"\"\"
    def micro_steps(self, stop):
        if self.step + 1 == number and self.world.rank == (self.world.rank if rank is None else rank):
            action(self)
        return original(self, stop)
    loop.Loop._micro_steps = micro_steps
def as_ever():
    loop.Loop._micro_steps = original
"""

TWO = """
with launch.joined() as world:
    go(world, "two")
    go(world, "two_fsdp", train__fsdp=2)
    # Both processes capture every row, and each keeps the states of half of its tokens.
    go(world, "two_seq", train__seq=2, train__sharding="sharded_moments")
    copy(world, "two", "two_again")
    go(world, "two_again", resume="auto")

    # A signal while the first of two micro-steps is at work.
    met = []
    def between(run):
        met.append(run)
        prefetch = run.feeder.prefetch
        def once():
            run.feeder.prefetch = prefetch
            os.kill(os.getpid(), signal.SIGTERM)
            prefetch()
        run.feeder.prefetch = once
    at_step(3, 1, between)
    go(world, "terminated")
    as_ever()
    if met:
        print("TAKEN", met[0].feeder.position["next_batch"], met[0].position["next_batch"])
    go(world, "terminated", again=True)

    def fail(run):
        raise OSError("the target fell over")
    at_step(4, 1, fail)
    go(world, "fell")
    as_ever()

    # Rank 1's host sees a file of step 6 cut short.
    copy(world, "two", "disagreed", (2, 4, 6))
    look = resume.complete_steps
    if world.rank == 1:
        import shutil
        there = place / "disagreed as host 1 sees it"
        shutil.copytree(place / "disagreed" / "checkpoints", there)
        file = max((there / "6" / "params").rglob("d/*"), key=lambda path: path.stat().st_size)
        with file.open("r+b") as opened:
            opened.truncate(100)
        resume.complete_steps = lambda folder: look(there)
    go(world, "disagreed", resume="auto", train__stop_at=5)
    resume.complete_steps = look

    # Step 20 wrecks the draft; the last good checkpoint is of step 15.
    def wreck(run):
        if not run._rollbacks:
            import dataclasses, jax
            run.state = dataclasses.replace(run.state, params=jax.tree.map(lambda x: x * 30, run.state.params))
    at_step(20, None, wreck)
    go(world, "collapsed", train__steps=32, train__on_collapse="rollback", checkpoint__every=5,
       optimizer__lr=2e-3, optimizer__resume_rewarm_steps=8)
    from train.collapse import Collapse
    def imagine(run):
        run._collapse = Collapse(3, 5, 1, "step size", "the draft has collapsed")
    at_step(3, 1, imagine)
    go(world, "imagined", train__on_collapse="rollback", checkpoint__every=5)
    as_ever()

    # Another value in one process; a host without the evaluation's prompts, and one with others.
    read_back, steps._COMPARE_EVERY = steps.read_back, 2
    def nudged(step, metrics):
        sums, values = read_back(step, metrics)
        return sums, {**values, "grad_norm": values["grad_norm"] * (1 + world.rank * 1e-9)}
    steps.read_back = nudged
    go(world, "nudged")
    steps.read_back, steps._COMPARE_EVERY = read_back, 100
    home = os.getcwd()
    prompts = {"eval__every": 6, "eval__prompts": "prompts.jsonl", "eval__max_new_tokens": 4}
    for case in ("without_prompts", "other_prompts"):
        os.chdir(place / case / f"host{world.rank}")
        go(world, case + "/run", **prompts)
    os.chdir(home)

    go(world, "another_value", optimizer__lr_scale=1.0 + world.rank)
    schedule = assembly.make_schedule
    if world.rank == 1:
        assembly.make_schedule = lambda config, steps: schedule(config, steps + 1)
    go(world, "another_program")
    assembly.make_schedule = schedule
    go(world, "odd", train__batch_rows=3)
"""

KILLED = """
def die(run):
    import time
    time.sleep(2)  # the checkpoint of step 2 is written in the background
    (place / "died").touch()
    os.kill(os.getpid(), signal.SIGKILL)
at_step(4, 1, die)
from train import cli
sys.exit(cli.main(["train", "--config", str(place / "config.yaml"), f"--run_dir={place / 'killed'}"]))
"""

#: From step 4 on rank 1 can write no file longer than a few bytes: as on a full disk, the parts of a checkpoint fail.
FULL = """
def fill(run):
    import resource
    run.checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
at_step(4, 1, fill)
filled = loop.Loop._micro_steps
def heard(self, stop):
    # The error is there when step 5 begins, while the other process still waits for this one's part of step 4.
    import time
    while self.step == 4 and self.world.rank == 1 and self.checkpoints._background.error is None:
        time.sleep(0.05)
    return filled(self, stop)
loop.Loop._micro_steps = heard
from train import cli
sys.exit(cli.main(["train", "--config", str(place / "config.yaml"), f"--run_dir={place / 'full'}"]))
"""


class Runs:
    """A folder of runs, and what the processes of each launch printed."""

    def __init__(self, place: Path, tree: dict):
        self.place, self.tree = place, tree

    def environment(self) -> dict[str, str]:
        """Programs are compiled once for all launches."""
        return {
            "PLACE": str(self.place),
            "PLACE_ROOT": str(ROOT),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(self.place / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def launch(self, code: str, size: int, limit: float = 900, **extra: str) -> list[Ended]:
        return run_processes(HEADER + code, size, limit=limit, extra={**self.environment(), **extra})

    def lines(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (self.place / name / "metrics.jsonl").read_text().splitlines()]

    def losses(self, name: str) -> list[float]:
        return [line["loss"] for line in self.lines(name)]

    def params(self, name: str, step: int = 6) -> list[np.ndarray]:
        return [np.asarray(leaf) for leaf in jax.tree.leaves(load_trained(self.place / name, step)[1])]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, target_folder, tokens_file):
    import yaml

    place = tmp_path_factory.mktemp("several")
    tree = {
        "target": {"path": str(target_folder), "device": "cpu"},
        "data": {"path": str(tokens_file), "max_length": 24, "min_loss_tokens": 2, "seed": 3},
        "run_dir": str(place / "set by each run"),
        "draft": {
            "layers": 1, "target_layer_ids": [0, 2], "block_size": 3, "mask_token_id": 5, "markov_rank": 4,
            "intermediate_size": 20,
        },
        "objective": {"num_anchors": 4},
        "optimizer": {"lr": 1e-2, "warmup_ratio": 0.2},
        "train": {"steps": 6, "batch_rows": 4, "accumulation": 2, "seed": 7},
        "checkpoint": {"every": 2, "keep": 9},
        "logging": {"progress": False},
    }  # fmt: skip
    (place / "tree.json").write_text(json.dumps(tree))
    (place / "config.yaml").write_text(yaml.safe_dump(tree))
    for case, texts in (("without_prompts", ("w6 w9", None)), ("other_prompts", ("w6 w9", "w6 w10"))):
        for rank, text in enumerate(texts):
            (place / case / f"host{rank}").mkdir(parents=True)
            if text is not None:
                (place / case / f"host{rank}" / "prompts.jsonl").write_text(json.dumps({"turns": [text]}) + "\n")
    return Runs(place, tree)


def results(ended: list[Ended]) -> list[dict[str, dict]]:
    """By rank, what each of its runs ended with."""
    found = []
    for process in ended:
        assert process.code == 0, process.output
        lines = [json.loads(line[7:]) for line in process.output.splitlines() if line.startswith("RESULT ")]
        found.append({line["name"]: line for line in lines})
    return found


@pytest.fixture(scope="module")
def two(runs):
    ended = runs.launch(TWO, 2)
    return results(ended), [process.output for process in ended]


@pytest.fixture(scope="module")
def one(runs):
    """The same run in this process alone."""
    assert run(build(nest(runs.tree, run_dir=str(runs.place / "one")))).steps == 6


def ended_well(found: dict[str, dict], *names: str) -> None:
    for name in names:
        assert found[name] == {"name": name, "code": 0, "steps": 6}


def test_the_curve_does_not_depend_on_processes(runs, two, one):
    for rank in two[0]:
        ended_well(rank, "two", "two_fsdp", "two_seq")
    expected = runs.losses("one")
    assert len(expected) == 6
    for name in ("two", "two_fsdp", "two_seq"):
        np.testing.assert_allclose(runs.losses(name), expected, rtol=1e-5, err_msg=name)


def test_resume_on_the_same_processes_is_bit_equal(runs, two):
    for rank in two[0]:
        ended_well(rank, "two_again")
    for ours, theirs in zip(runs.params("two_again"), runs.params("two"), strict=True):
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("source", ["two_fsdp", "two_seq"])
def test_one_process_resumes_what_two_saved(runs, two, one, source):
    name = f"{source}_on_one"
    for step in (2, 4):
        shutil.copytree(runs.place / source / "checkpoints" / str(step), runs.place / name / "checkpoints" / str(step))
    assert run(build(nest(runs.tree, run_dir=str(runs.place / name), resume="auto"))).steps == 6
    resumed, straight = runs.losses(name), runs.losses("one")[4:]
    assert len(resumed) == 2
    np.testing.assert_allclose(resumed, straight, rtol=1e-5)


def test_sigterm_in_the_middle_of_accumulation_saves_a_common_step(runs, two):
    found, output = two
    for rank in found:
        # Rank 1 left the window of step 3 after one of its two micro-steps, so nobody did that step.
        assert rank["terminated"] == {"name": "terminated", "code": 128 + signal.SIGTERM, "steps": 2}
        assert rank["terminated again"] == {"name": "terminated again", "code": 0, "steps": 6}
    assert "TAKEN 5 4" in output[1]
    np.testing.assert_array_equal(runs.losses("terminated"), runs.losses("two"))


def test_a_failure_of_one_process_ends_all_with_its_reason(two):
    (first, second), _ = two
    assert second["fell"]["error"] == "OSError: the target fell over"
    assert "DistributedError: optimizer step 4 failed on another process:\n  rank 1 on " in first["fell"]["error"]
    assert "OSError: the target fell over" in first["fell"]["error"]


def test_processes_that_see_other_checkpoints_take_the_newest_common_one(runs, two):
    found, output = two
    for rank in found:
        assert rank["disagreed"] == {"name": "disagreed", "code": 0, "steps": 5}
    assert "WARNING: the processes do not see the same complete checkpoints" in output[0]
    assert "All continue from step 4" in output[0]
    assert "resumed" in output[0]
    assert "resumed" not in output[1]  # one process speaks
    assert re.search(r"rank 0 on \S+: 2, 4, 6\n  rank 1 on \S+: 2, 4\n", output[0])
    assert (runs.place / "disagreed" / "checkpoints" / "6.incomplete").is_dir()
    assert complete_steps(runs.place / "disagreed" / "checkpoints") == [2, 4, 5]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("another_value", ("the configuration differs", "optimizer.lr_scale: 1.0 on rank 0", "2.0 on rank 1")),
        ("another_program", ("the lowered programs (CRC-32) differs", "apply:", "on rank 1")),
        ("odd", ("train.batch_rows is 3; make it a multiple of the 2 devices of all processes",)),
        ("other_prompts/run", ("the evaluation's prompts differs", "checksum:", "on rank 1")),
    ],
)
def test_processes_that_cannot_work_as_one_are_refused(runs, two, name, words):
    for rank in two[0]:
        for word in words:
            assert word in rank[name]["error"]
    assert not (runs.place / name / "metrics.jsonl").exists()


def test_a_host_without_the_prompts_is_named_with_the_file(two):
    (first, second), _ = two
    assert re.search(r"ValueError: .*prompts\.jsonl does not exist", second["without_prompts/run"]["error"])
    assert re.search(
        r"DistributedError: reading evaluation prompts failed on another process:\n"
        r"  rank 1 on \S+: ValueError: .*prompts\.jsonl does not exist",
        first["without_prompts/run"]["error"],
    )


def test_numbers_that_differ_between_processes_end_the_run(runs, two):
    for rank in two[0]:
        assert "what the processes computed in step 2 differs between the processes:" in rank["nudged"]["error"]
        assert re.search(r"grad_norm: \S+ on rank 0 .*\n  grad_norm: \S+ on rank 1", rank["nudged"]["error"])
    assert complete_steps(runs.place / "nudged" / "checkpoints") == []


def test_a_collapse_rolls_all_processes_back_to_the_same_step(runs, two):
    found, output = two
    for rank in found:
        assert rank["collapsed"] == {"name": "collapsed", "code": 0, "steps": 32}
    told = r"WARNING step 22: the draft has collapsed from step 20 on.* ROLLED BACK to the checkpoint of step 15"
    assert re.search(told, output[0])
    assert "ROLLED BACK" not in output[1]
    lines = runs.lines("collapsed")
    assert [line["step"] for line in lines] == list(range(1, 33))
    assert [line["step"] for line in lines if "rollback" in line] == [16]
    assert np.isfinite(runs.losses("collapsed")).all()
    assert max(runs.losses("collapsed")) < 2 * np.median(runs.losses("collapsed"))
    for line in lines[15:]:
        ramp = min(1.0, (line["step"] - 15) / 8)
        np.testing.assert_allclose(line["lr"], ramp * formula(line["step"] - 1, 32, 6, 2e-3), rtol=1e-5)


def test_a_collapse_that_only_one_process_sees_ends_the_run(two):
    for rank in two[0]:
        assert "the collapse that was found differs between the processes" in rank["imagined"]["error"]


def test_a_killed_process_ends_the_others_and_the_job_resumes(runs, one):
    first, second = runs.launch(KILLED, 2, limit=300)
    assert time.time() - (runs.place / "died").stat().st_mtime < 120
    assert second.code == -signal.SIGKILL
    assert first.code == 1, first.output
    assert "waiting for the other processes at 'optimizer step 4' ended" in first.output
    assert "One of them has died or is stuck" in first.output
    assert complete_steps(runs.place / "killed" / "checkpoints") == [2]
    shutil.copytree(runs.place / "killed", runs.place / "killed_resumed")
    tree = {**runs.tree, "run_dir": str(runs.place / "killed_resumed"), "resume": "auto"}
    assert run(build(tree)).steps == 6
    np.testing.assert_allclose(runs.losses("killed_resumed"), runs.losses("one"), rtol=1e-5)


def test_a_full_disk_of_one_host_ends_all_and_torchrun_resumes(runs, two):
    """The second half is the documented way to start: examples/launch/one_host.sh, hence torchrun itself."""
    first, second = runs.launch(FULL, 2, limit=240)
    assert second.code == 1, second.output
    assert first.code == 1, first.output
    assert re.search(r"checkpoint of step 4 could not be written to .* --resume auto", second.output)
    assert re.search(
        r"failed on another process:\n  rank 1 on \S+: CheckpointError: checkpoint of step 4", first.output
    )
    assert complete_steps(runs.place / "full" / "checkpoints") == [2]

    script = ROOT / "examples" / "launch" / "one_host.sh"
    done = subprocess.run(
        ["bash", str(script), "--config", str(runs.place / "config.yaml"), f"--run_dir={runs.place / 'full'}"],
        env={
            **os.environ,
            **runs.environment(),
            "GPUS": "2",
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1",
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
        },
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "at optimizer step 2 of 6" in done.stdout
    np.testing.assert_array_equal(runs.losses("full"), runs.losses("two"))


def test_no_process_leaves_its_rows_to_another():
    """Shares of a batch are its rows in order, whatever their number."""
    from tests.train.data.test_row_iterator import make_samples
    from train.data.rows import RowIterator

    samples = make_samples(11)
    whole = RowIterator(samples, 4, 6, seed=9, epochs=2)
    for size in (2, 4):
        shares = [RowIterator(samples, 4, 6, seed=9, epochs=2, share=(rank, size)) for rank in range(size)]
        assert all(share.get_state() == whole.get_state() for share in shares)
        for batch in RowIterator(samples, 4, 6, seed=9, epochs=2):
            parts = [next(share) for share in shares]
            np.testing.assert_array_equal(np.concatenate([part.input_ids for part in parts]), batch.input_ids)
            np.testing.assert_array_equal(np.concatenate([part.loss_mask for part in parts]), batch.loss_mask)
            assert [name for part in parts for name in part.sample_ids] == batch.sample_ids
            assert {part.epoch for part in parts} == {batch.epoch}
    with pytest.raises(ValueError, match="batch_rows is 4; it must be a multiple of the 3 processes"):
        RowIterator(samples, 4, 6, share=(0, 3))
