"""Runs that end early, in real processes: what comes after is the run that was never interrupted, bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from train.checkpoint import complete_steps, load_trained, read_saved

ROOT = Path(__file__).resolve().parents[2]

#: `draft-jax` with every optimizer step slowed down, so that a signal meets it at work.
SLOW = """
import sys, time
import train.loop
step = train.loop.Loop._window
def slow(self, stop):
    time.sleep(0.4)
    return step(self, stop)
train.loop.Loop._window = slow
from train.cli import main
sys.exit(main(sys.argv[1:]))
"""

#: `draft-jax` whose checkpoint of step 4 takes forever after its arrays are written; it tells when it is there.
HANGS_IN_SAVE = """
import sys, time
from pathlib import Path
import orbax.checkpoint._src.path.atomicity as atomicity
finalize = atomicity.AtomicRenameTemporaryPath.finalize
async def hang(self):
    if self._final_path.name == "4":
        Path(sys.argv[1]).touch()
        time.sleep(600)
    await finalize(self)
atomicity.AtomicRenameTemporaryPath.finalize = hang
from train.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, target_folder, tokens_file):
    """A folder for the module's runs, and their configuration."""
    folder = tmp_path_factory.mktemp("resume")
    tree = {
        "target": {"path": str(target_folder), "device": "cpu"},
        "data": {"path": str(tokens_file), "max_length": 24, "min_loss_tokens": 2, "seed": 3},
        "run_dir": "set by each test",
        "draft": {
            "layers": 1, "target_layer_ids": [0, 2], "block_size": 3, "mask_token_id": 5, "markov_rank": 4,
            "intermediate_size": 20,
        },
        "objective": {"num_anchors": 4},
        "optimizer": {"lr": 1e-2, "warmup_ratio": 0.2},
        "train": {"steps": 6, "batch_rows": 2, "accumulation": 2, "seed": 7},
        "checkpoint": {"every": 2, "keep": 9},
        "logging": {"progress": False},
    }  # fmt: skip
    import yaml

    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return folder


@pytest.fixture(scope="module")
def environment(quick_compilation):
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "JAX_PLATFORMS": "cpu",
    }


@pytest.fixture(scope="module")
def train(place, environment):
    """Run `draft-jax train` into a run_dir of the given name; returns (exit code, output)."""

    def run(name: str, *options: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "train.cli", "train", "--config", str(place / "config.yaml")]
        done = subprocess.run(
            [*command, f"--run_dir={place / name}", *options],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
            check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    return run


@pytest.fixture(scope="module")
def straight(place, train):
    """Six steps without interruption."""
    code, output = train("straight")
    assert code == 0, output
    return place / "straight"


def start(code: str, *arguments: str, environment: dict) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(condition, process: subprocess.Popen, seconds: float = 200) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode} too early: {process.communicate()[0][-2000:]}")
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def curve(run_dir: Path) -> list[dict]:
    """Logged lines without the clock's numbers."""
    timed = ("tokens_per_second", "seconds_per_step", "capture_share", "draft_share")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in timed} for line in lines]


def assert_same_end(run_dir: Path, straight: Path) -> None:
    """Equal bits of parameters, moments and data position after the last step, and the same logged curve."""
    ours, theirs = (load_everything(folder) for folder in (run_dir, straight))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()
    saved = [read_saved(folder / "checkpoints", 6) for folder in (run_dir, straight)]
    assert saved[0].position == saved[1].position
    assert curve(run_dir) == curve(straight)


def load_everything(run_dir: Path):
    """Parameters, moments, step and key of the checkpoint of step 6, as orbax itself reads them."""
    from orbax.checkpoint import v1 as ocp

    loaded = ocp.load_checkpointables(run_dir / "checkpoints" / "6")
    return jax.tree.map(np.asarray, {name: loaded[name] for name in ("params", "optimizer")})


def next_sample_ids(run_dir: Path, step: int, tokens_file: Path) -> list[list[str]]:
    from train.data.config import DataConfig
    from train.data.pipeline import load_dataset
    from train.data.rows import RowIterator

    samples = load_dataset(DataConfig(path=str(tokens_file), min_loss_tokens=2, max_length=24), None, 61).samples
    rows = RowIterator(samples, 2, 24, seed=3)
    rows.set_state(read_saved(run_dir / "checkpoints", step).position)
    return [next(rows).sample_ids for _ in range(8)]


def test_three_and_three_in_a_new_process_equal_six(place, train, straight, tokens_file):
    code, output = train("halves", "--train.stop_at=3")
    assert code == 0, output
    assert complete_steps(place / "halves" / "checkpoints") == [2, 3]
    assert [line["step"] for line in curve(place / "halves")] == [1, 2, 3]
    code, output = train("halves", "--resume", "auto")
    assert code == 0, output
    assert "at optimizer step 3 of 6" in output
    assert_same_end(place / "halves", straight)
    ids = next_sample_ids(place / "halves", 6, tokens_file)
    assert ids == next_sample_ids(straight, 6, tokens_file)
    # 3 steps of 2 micro-steps of 2 rows: the whole first epoch is behind step 3, and it goes on in the second.
    assert next_sample_ids(place / "halves", 3, tokens_file)[6:8] == ids[:2]


def test_a_packed_run_goes_on_as_if_never_interrupted(place, train):
    packed = ("--data.packing=first_fit", "--data.row_length=48", "--objective.anchors_per_document=2")
    code, output = train("packed", *packed)
    assert code == 0, output
    assert "packed    12 documents into" in output
    code, output = train("packed_halves", *packed, "--train.stop_at=3")
    assert code == 0, output
    code, output = train("packed_halves", *packed, "--resume", "auto")
    assert code == 0, output
    assert_same_end(place / "packed_halves", place / "packed")
    # Four anchors a row and two a document: two documents share each row, none is left with fewer.
    assert [line["sampled_anchors_abs"] for line in curve(place / "packed")] == [4.0] * 6
    code, output = train("packed_halves", "--resume", "auto")
    assert code == 1
    assert "data.packing: checkpoint" in output
    assert "data.length: checkpoint 48, this run 24" in output


def test_sigterm_saves_and_can_be_continued(place, environment, train, straight):
    run_dir = place / "terminated"
    metrics = run_dir / "metrics.jsonl"
    arguments = ["train", "--config", str(place / "config.yaml"), f"--run_dir={run_dir}", "--checkpoint.every=0"]
    process = start(SLOW, *arguments, environment=environment)
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 1, process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 143, output
    assert "SIGTERM: saving and stopping" in output
    assert "Traceback" not in output
    steps = complete_steps(run_dir / "checkpoints")
    assert len(steps) == 1
    assert 1 <= steps[0] < 6
    assert curve(run_dir)[-1]["step"] == steps[0], "the last finished step is logged too"
    code, output = train("terminated", "--resume", "auto", "--checkpoint.every=0")
    assert code == 0, output
    assert_same_end(run_dir, straight)


def test_kill_9_during_a_save(place, environment, train, straight):
    run_dir = place / "killed"
    marker = place / "saving"
    arguments = ["train", "--config", str(place / "config.yaml"), f"--run_dir={run_dir}"]
    process = start(HANGS_IN_SAVE, str(marker), *arguments, environment=environment)
    wait_for(marker.exists, process)
    assert complete_steps(run_dir / "checkpoints") == [2]
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert complete_steps(run_dir / "checkpoints") == [2]
    assert any("tmp" in entry.name for entry in (run_dir / "checkpoints").iterdir()), "nothing was being saved"
    code, output = train("killed", "--resume", "auto")
    assert code == 0, output
    assert "at optimizer step 2 of 6" in output
    assert complete_steps(run_dir / "checkpoints") == [2, 4, 6]
    assert not any("tmp" in entry.name for entry in (run_dir / "checkpoints").iterdir())
    assert_same_end(run_dir, straight)


def test_another_target_data_or_seed_is_refused_by_name(
    place, train, straight, tmp_path_factory, tokens_file, tmp_path
):
    """One refusal names everything that differs; changed rates are allowed and told."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("trainer_conftest", Path(__file__).with_name("conftest.py"))
    helpers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(helpers)
    wider = helpers.build_target(tmp_path / "wider", hidden=32)
    before = sorted(entry.name for entry in (straight / "checkpoints").iterdir())
    code, output = train("straight", "--resume=auto", f"--target.path={wider}", "--train.seed=8")
    assert code == 1
    assert "belongs to another run" in output
    assert "draft.hidden_size: checkpoint 16, this run 32" in output
    assert "train.seed: checkpoint 7, this run 8" in output
    assert "Traceback" not in output
    assert sorted(entry.name for entry in (straight / "checkpoints").iterdir()) == before
    _, params = load_trained(straight)
    assert params["fc"]["kernel"].shape == (32, 16)

    code, output = train("straight", "--resume=auto", "--optimizer.lr=0.5", "--logging.every=2")
    assert code == 0, output
    assert "changed since step 6: optimizer.lr: 0.01 -> 0.5" in output
