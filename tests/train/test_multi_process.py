"""Training in several processes: the curve of one device, exact resume on other numbers of processes, and failures.

Starting processes is most of the time of these tests, so a launch does many runs one after another.
"""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.train.conftest import write_tokens
from tests.train.processes import Ended, run_processes
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
from train import sharding
sharding.MIN_ELEMENTS_TO_SPLIT = 64  # a tiny model has no larger leaves
from train import assembly, feeding, launch, loop, resume
from train.config_file import build
from train.distributed import DistributedError
place = Path(os.environ["PLACE"])
tree = json.loads((place / "tree.json").read_text())

def go(world, name, **changes):
    try:
        result = loop.run(build(nest(tree, run_dir=str(place / name), **changes)), world=world)
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
    \"\"\"From now on `action` happens on that rank between the micro-steps of that step.\"\"\"
    def micro_steps(self, stop):
        if self.step + 1 == number and self.world.rank == rank:
            action()
        return original(self, stop)
    loop.Loop._micro_steps = micro_steps
def as_ever():
    loop.Loop._micro_steps = original
"""

TWO = """
with launch.joined() as world:
    go(world, "two")
    go(world, "two_fsdp", train__fsdp=2)
    go(world, "two_zeroed", data__path=str(place / "zeroed.jsonl"), data__shuffle=False, data__min_retention=0.0)
    copy(world, "two", "two_again")
    go(world, "two_again", resume="auto")

    at_step(3, 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
    go(world, "terminated")
    as_ever()

    def fail():
        raise OSError("the target fell over")
    at_step(4, 1, fail)
    go(world, "fell")
    as_ever()

    # Only rank 1 does not see step 6.
    copy(world, "two", "disagreed", (2, 4, 6))
    look = resume.complete_steps
    if world.rank == 1:
        resume.complete_steps = lambda folder: look(folder)[:-1]
    go(world, "disagreed", resume="auto", train__stop_at=5)
    resume.complete_steps = look

    go(world, "another_value", optimizer__lr_scale=1.0 + world.rank)
    schedule = assembly.make_schedule
    if world.rank == 1:
        assembly.make_schedule = lambda config, steps: schedule(config, steps + 1)
    go(world, "another_program")
    assembly.make_schedule = schedule
    go(world, "odd", train__batch_rows=3)
"""

ONE = """
with launch.joined() as world:
    go(world, "one")
    go(world, "one_zeroed", data__path=str(place / "zeroed.jsonl"), data__shuffle=False, data__min_retention=0.0)
    go(world, "devices", train__devices=4)
    go(world, "devices_fsdp", train__devices=4, train__fsdp=2)
    for devices in (1, 4):
        copy(world, "two_fsdp", f"from_two_on_{devices}")
        go(world, f"from_two_on_{devices}", resume="auto", train__devices=devices)
"""

FOUR = """
with launch.joined() as world:
    go(world, "four")
    copy(world, "devices_fsdp", "four_from_devices")
    go(world, "four_from_devices", resume="auto", train__fsdp=2)
    copy(world, "two", "four_from_two")
    go(world, "four_from_two", resume="auto")
"""

KILLED = """
def die():
    import time
    time.sleep(2)  # the checkpoint of step 2 is written in the background
    os.kill(os.getpid(), signal.SIGKILL)
at_step(4, 1, die)
from train import cli
sys.exit(cli.main(["train", "--config", str(place / "config.yaml"), f"--run_dir={place / 'killed'}"]))
"""


class Runs:
    """A folder of runs, and what the processes of each launch printed."""

    def __init__(self, place: Path, tree: dict):
        self.place, self.tree = place, tree

    def launch(self, code: str, size: int, limit: float = 900, **extra: str) -> list[Ended]:
        root = str(Path(__file__).resolve().parents[2])
        environment = {
            "PLACE": str(self.place),
            "PLACE_ROOT": root,
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_COMPILATION_CACHE_DIR": str(self.place / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            **extra,
        }
        return run_processes(HEADER + code, size, limit=limit, extra=environment)

    def losses(self, name: str) -> list[float]:
        lines = (self.place / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

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
    # In the order of the file, rows 2 and 3 of each batch of 4 belong to the second of two processes.
    rows = [json.loads(line) for line in write_tokens(place / "zeroed.jsonl", rows=12, seed=5).open()]
    for index, row in enumerate(rows):
        if index % 4 >= 2:
            row["loss_mask"] = [0] * len(row["loss_mask"])
    (place / "zeroed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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
def one(runs, two):
    return results(runs.launch(ONE, 1, JAX_NUM_CPU_DEVICES="4"))[0]


@pytest.fixture(scope="module")
def four(runs, one):
    return results(runs.launch(FOUR, 4))


def ended_well(found: dict[str, dict], *names: str) -> None:
    for name in names:
        assert found[name] == {"name": name, "code": 0, "steps": 6}


def test_the_curve_does_not_depend_on_devices_and_processes(runs, two, one, four):
    for rank in two[0]:
        ended_well(rank, "two", "two_fsdp", "two_zeroed")
    ended_well(one, "one", "one_zeroed", "devices", "devices_fsdp")
    for rank in four:
        ended_well(rank, "four")
    expected = runs.losses("one")
    assert len(expected) == 6
    for name in ("two", "two_fsdp", "devices", "devices_fsdp", "four"):
        np.testing.assert_allclose(runs.losses(name), expected, rtol=1e-5, err_msg=name)


def test_a_process_without_a_supervised_token_stays_in_step(runs, two, one):
    np.testing.assert_allclose(runs.losses("two_zeroed"), runs.losses("one_zeroed"), rtol=1e-5)
    assert not np.allclose(runs.losses("one_zeroed"), runs.losses("one"), rtol=1e-2)


def test_resume_on_the_same_processes_is_bit_equal(runs, two):
    for rank in two[0]:
        ended_well(rank, "two_again")
    for ours, theirs in zip(runs.params("two_again"), runs.params("two"), strict=True):
        assert ours.tobytes() == theirs.tobytes()


def test_resume_on_other_numbers_of_devices_and_processes(runs, two, one, four):
    ended_well(one, "from_two_on_1", "from_two_on_4")
    for rank in four:
        ended_well(rank, "four_from_devices", "four_from_two")
    expected = runs.losses("one")[4:]
    reached = runs.params("one")
    for name in ("from_two_on_1", "from_two_on_4", "four_from_devices", "four_from_two"):
        np.testing.assert_allclose(runs.losses(name), expected, rtol=1e-5, err_msg=name)
        for ours, theirs in zip(runs.params(name), reached, strict=True):
            # Two optimizer steps later: Adam turns rounding of small gradients into more than rounding.
            np.testing.assert_allclose(ours, theirs, atol=1e-4, err_msg=name)


def test_sigterm_to_one_process_saves_a_common_step(runs, two):
    for rank in two[0]:
        assert rank["terminated"]["code"] == 128 + signal.SIGTERM
        # Rank 1 left the window of step 3 before its first micro-step, so nobody did that step.
        assert rank["terminated"]["steps"] == 2
    assert complete_steps(runs.place / "terminated" / "checkpoints") == [2]


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
    assert (runs.place / "disagreed" / "checkpoints" / "6.incomplete").is_dir()
    assert complete_steps(runs.place / "disagreed" / "checkpoints") == [2, 4, 5]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("another_value", ("the configuration differs", "optimizer.lr_scale: 1.0 on rank 0", "2.0 on rank 1")),
        ("another_program", ("the lowered programs (CRC-32) differs", "apply:", "on rank 1")),
        ("odd", ("train.batch_rows is 3; make it a multiple of the 2 devices of all processes",)),
    ],
)
def test_processes_that_cannot_work_as_one_are_refused(runs, two, name, words):
    for rank in two[0]:
        for word in words:
            assert word in rank[name]["error"]
    assert not (runs.place / name / "metrics.jsonl").exists()


def test_a_killed_process_ends_the_others_and_the_job_resumes(runs, one):
    first, second = runs.launch(KILLED, 2, limit=300)
    assert second.code == -signal.SIGKILL
    assert first.code == 1, first.output
    assert "waiting for the other processes at 'optimizer step 4' ended" in first.output
    assert "One of them has died or is stuck" in first.output
    assert complete_steps(runs.place / "killed" / "checkpoints") == [2]
    shutil.copytree(runs.place / "killed", runs.place / "killed_resumed")
    tree = {**runs.tree, "run_dir": str(runs.place / "killed_resumed"), "resume": "auto"}
    assert run(build(tree)).steps == 6
    np.testing.assert_allclose(runs.losses("killed_resumed"), runs.losses("one"), rtol=1e-5)


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
