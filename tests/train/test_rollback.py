"""A run whose draft is really wrecked in the middle goes back, re-warms, and takes the data that come next."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from tests.train.test_optimizer import formula
from train import runtime
from train.checkpoint import complete_steps, load_trained, read_saved
from train.collapse import SPAN, CollapseError
from train.config import ConfigError
from train.config_file import build
from train.loop import run
from train.steps import Loop

pytestmark = pytest.mark.usefixtures("quick_compilation")

STEPS, REWARM, WRECKED = 40, 8, 22


@pytest.fixture(scope="module")
def target(target_folder):
    config = build({"target": {"path": str(target_folder), "device": "cpu"}, "data": {"path": "x"}, "run_dir": "x"})
    return runtime.load_target(config, (0, 2), "cpu", "float32")


@pytest.fixture
def guarded(tree, change):
    return change(
        tree,
        train={"steps": STEPS, "batch_rows": 2, "accumulation": 1, "seed": 7, "on_collapse": "rollback"},
        checkpoint={"every": 5, "keep": 3, "keep_best": 0},
        optimizer={"lr": 2e-3, "warmup_ratio": 0.1, "resume_rewarm_steps": REWARM},
    )


class Accident(Exception):
    """The test ends a run here."""


@pytest.fixture
def before_step(monkeypatch):
    """Register `action(loop)` to happen before the micro-steps of a step, so many times at most."""
    original, actions = Loop._micro_steps, []

    def micro_steps(self, stop):
        for index, (number, times, action) in enumerate(actions):
            if self.step + 1 == number and times:
                actions[index] = (number, times - 1, action)
                action(self)
        return original(self, stop)

    monkeypatch.setattr(Loop, "_micro_steps", micro_steps)
    return lambda number, action, times=1: actions.append((number, times, action))


def wreck(loop):
    """Parameters far from any that were learned: as after a step much too large."""
    params = jax.tree.map(lambda x: x * 30, loop.state.params)
    loop.state = dataclasses.replace(loop.state, params=params)


def lines_of(run_dir, name="metrics.jsonl"):
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def test_back_to_the_last_good_checkpoint(guarded, tmp_path, target, before_step, capsys):
    run_dir = tmp_path / "run"
    before_step(WRECKED, wreck)
    result = run(build(guarded), target=target)
    assert (result.exit_code, result.steps) == (0, STEPS)
    assert (result.compiles["accumulate"], result.compiles["apply"]) == (1, 1)

    [back] = lines_of(run_dir, "rollbacks.jsonl")
    assert (back["number"], back["to"], back["found"]) == (1, 15, WRECKED + 2)
    told = capsys.readouterr()
    assert f"WARNING step {WRECKED + 2}: the draft has collapsed from step {WRECKED} on" in told.err
    assert "ROLLED BACK to the checkpoint of step 15 (roll-back 1 of at most 3): 9 step(s) are done again" in told.err
    assert "20 is not older than the collapse; set aside as 20.collapsed" in told.out
    assert (run_dir / "checkpoints" / "20.collapsed").is_dir()
    assert complete_steps(run_dir / "checkpoints") == [30, 35, 40]

    lines = lines_of(run_dir)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["step"] for line in lines if "rollback" in line] == [16]
    assert (lines[15]["rollback"], lines[15]["rollback_from"]) == (1, WRECKED + 2)
    assert lines[15]["rollback_kind"] == back["kind"]
    lost = lines_of(run_dir, "metrics.rolled_back.jsonl")
    # Step 25 was done when 24 was looked at, and read because a checkpoint was due, which was not written.
    assert [line["step"] for line in lost] == list(range(16, WRECKED + 4))
    usual = np.median([line["loss"] for line in lines[:15]])
    assert all(line["loss"] > 2 * usual for line in lost[-3:])
    assert all(math.isfinite(line["loss"]) and line["loss"] < 2 * usual for line in lines[15:])
    for line in lines:
        step = line["step"]
        ramp = min(1.0, (step - 15) / REWARM) if step > 15 else 1.0
        assert line["lr"] == pytest.approx(ramp * formula(step - 1, STEPS, 4, 2e-3), rel=1e-5), step
    # The window behind the one in which it was found had been taken, too: 25 of one batch, then 25 more from step 15.
    assert back["position"]["next_batch"] == WRECKED + 3
    assert read_saved(run_dir / "checkpoints", 40).position["next_batch"] == WRECKED + 3 + (STEPS - 15)


def test_killed_after_a_rollback_it_goes_on_behind_the_collapse(guarded, tmp_path, target, before_step, capsys):
    """The run that is killed before its next checkpoint equals the one that is not, to the bit."""
    before_step(WRECKED, wreck)
    run(build(guarded), target=target)

    def accident(loop):
        if loop._rollbacks:
            raise Accident

    before_step(WRECKED, wreck)
    before_step(18, accident, times=2)
    killed = {**guarded, "run_dir": str(tmp_path / "killed")}
    with pytest.raises(Accident):
        run(build(killed), target=target)
    assert complete_steps(tmp_path / "killed" / "checkpoints")[-1] == 15
    capsys.readouterr()
    assert run(build({**killed, "resume": "auto"}), target=target).steps == STEPS
    assert "step 15 of 40 (rolled back to it from step 24: the data go on behind that step)" in capsys.readouterr().out
    (_, ours), (_, theirs) = load_trained(tmp_path / "killed"), load_trained(tmp_path / "run")
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    again = {line["step"]: line for line in lines_of(tmp_path / "killed")}
    assert (len(again), again[16]["rollback"]) == (STEPS, 1)


def test_rollbacks_are_bounded_and_need_a_good_checkpoint(guarded, tmp_path, target, before_step, change):
    before_step(WRECKED, wreck, times=3)
    with pytest.raises(
        CollapseError, match=r"collapsed from step 22 on.* rolled back 2 time\(s\), to step 15, step 15"
    ):
        run(build(change(guarded, train__max_rollbacks=2)), target=target)
    assert len(lines_of(tmp_path / "run", "rollbacks.jsonl")) == 2
    assert complete_steps(tmp_path / "run" / "checkpoints")[-1] <= 20

    before_step(WRECKED, wreck)
    late = change(guarded, run_dir=str(tmp_path / "late"), checkpoint__every=21)
    with pytest.raises(CollapseError, match=r"no checkpoint to roll back to: one before step 19 .* there are 21"):
        run(build(late), target=target)


@pytest.mark.parametrize(("every", "keep"), [(0, 9), (SPAN, 1), (2, 3)])
def test_checkpoints_that_could_all_be_bad_are_refused(guarded, change, every, keep):
    with pytest.raises(ConfigError, match=r"every x \(keep - 1\) at least 6"):
        build(change(guarded, checkpoint__every=every, checkpoint__keep=keep))


def test_weights_alone(guarded, tmp_path, target, change, capsys):
    """From a checkpoint's parameters: step, data and schedule go on, moments are new, the rate rises anew."""
    from train import assembly
    from train.checkpoint import Checkpoints
    from train.config import CheckpointConfig
    from train.distributed import World
    from train.start import begin
    from train.topology import Topology

    short = change(guarded, train__stop_at=10)
    run(build(short), target=target)
    weights = build({**short, "resume": "weights"})
    parts = assembly.assemble(weights, target)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", CheckpointConfig(keep=3))
    start = begin(weights, parts, checkpoints, 10, World(Topology()))
    checkpoints.close()
    _, params = load_trained(tmp_path / "run", 10)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(start.state.params), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert (int(start.state.step), int(start.state.rewarm_from), start.step) == (10, 10, 10)
    assert parts.rows.get_state()["next_batch"] == 10
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(start.state.opt_state))

    assert run(build(change(guarded, resume="weights", train__stop_at=20)), target=target).steps == 20
    assert "step 10 of 40 (from its weights alone: moments are new, the learning rate re-warms over 8 steps)" in (
        capsys.readouterr().out
    )
    # Continued in the middle of the ramp it goes on rising.
    for line in lines_of(tmp_path / "run")[10:]:
        ramp = min(1.0, (line["step"] - 10) / REWARM)
        assert line["lr"] == pytest.approx(ramp * formula(line["step"] - 1, STEPS, 4, 2e-3), rel=1e-5)
    with pytest.raises(ConfigError, match=r"resume is 'weights', but .* holds no checkpoint"):
        run(build(change(guarded, resume="weights", run_dir=str(tmp_path / "new"))), target=target)
