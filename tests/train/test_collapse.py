"""Injected collapses of both kinds are found within three steps; noise and ordinary training are not taken for one."""

import json

import numpy as np
import pytest

from train import loop, steps
from train.checkpoint import complete_steps
from train.collapse import Collapse, CollapseError, CollapseGuard, Step
from train.config_file import build

pytestmark = pytest.mark.usefixtures("quick_compilation")


def curve(count: int, seed: int = 0) -> list[Step]:
    """An ordinary run: tau rises from 1 to 4 with noise, loss falls, gradient norms vary by a factor of two."""
    rng = np.random.default_rng(seed)
    steps = []
    for number in range(1, count + 1):
        learned = 1 - np.exp(-number / 40)
        tau = 1 + 3 * learned * (1 + 0.1 * rng.standard_normal())
        loss = (3 - 1.5 * learned) * (1 + 0.05 * rng.standard_normal())
        steps.append(Step(number, float(loss), float(tau), float(0.3 * rng.uniform(0.7, 1.4))))
    return steps


def said(curve: list[Step]) -> list[tuple[int, Collapse]]:
    guard = CollapseGuard()
    found = [(step.number, guard.add(step)) for step in curve]
    return [(number, collapse) for number, collapse in found if collapse is not None]


@pytest.mark.parametrize("seed", range(20))
def test_an_ordinary_run_is_none(seed):
    assert said(curve(300, seed)) == []


def test_two_hard_batches_are_none():
    steps = curve(200)
    for index in (120, 121, 150):
        steps[index] = Step(index + 1, 9.0, 1.0, 0.3)
    assert said(steps) == []


def fall(steps: list[Step], at: int, norm: float) -> list[Step]:
    """From step `at` on tau is 1 and the loss has doubled; the step before has that gradient norm."""
    before = steps[at - 2]
    fallen = [Step(s.number, 3.6, 1.05, 0.3) for s in steps[at - 1 :]]
    return [*steps[: at - 2], Step(before.number, before.loss, before.tau, norm), *fallen]


def test_a_step_too_large():
    [(number, found)] = said(fall(curve(250), 200, 0.35))
    assert number == 202
    assert (found.first, found.found, found.good_before, found.kind) == (200, 202, 197, "step size")
    assert "collapsed from step 200 on: tau 1.05 at step 202 (best 4." in found.text
    assert "stayed flat" in found.text
    assert "lower optimizer.lr_scale" in found.text


def test_a_gradient_that_exploded():
    [(number, found)] = said(fall(curve(250), 200, 80.0))
    assert number == 202
    assert found.kind == "gradient norm"
    assert "The gradient norm exploded: 80 at step 199, usually 0.3" in found.text


def test_loss_alone_is_enough():
    """A draft that has learned little has no tau to lose."""
    steps = [Step(number, 2.0 if number < 60 else 5.0, 1.1, 0.3) for number in range(1, 80)]
    [(number, _)] = said(steps)
    assert number == 62


def test_nothing_is_said_before_there_is_anything_to_compare_with():
    assert said([Step(number, 10.0**number, 1.0, 1.0) for number in range(1, 16)]) == []


def test_a_guard_goes_on_from_its_saved_memory():
    """Cut anywhere, also within a fall, and saved as JSON between: the same is found at the same step."""
    steps = fall(curve(250), 200, 80.0)
    whole = said(steps)
    for cut in (5, 150, 200, 201):
        first, found = CollapseGuard(), []
        for step in steps[:cut]:
            found.append((step.number, first.add(step)))
        second = CollapseGuard.from_state(json.loads(json.dumps(first.state())))
        found += [(step.number, second.add(step)) for step in steps[cut:]]
        assert [pair for pair in found if pair[1] is not None] == whole


def test_a_run_stops_or_warns(tree, tmp_path, change, monkeypatch, capsys):
    """The loss read back is five times what it was from step 18 on: three such steps, and nothing later is saved."""
    real = steps.read_back

    def spoiled(step, metrics):
        sums, values = real(step, metrics)
        return {**sums, "loss_num": sums["loss_num"] * (5 if step >= 18 else 1)}, values

    monkeypatch.setattr(steps, "read_back", spoiled)
    changed = change(tree, train__steps=24, train__accumulation=1, checkpoint__every=5, optimizer__lr=1e-4)
    with pytest.raises(CollapseError, match=r"collapsed from step 18 on: .* Checkpoints before step 15 are good"):
        loop.run(build(change(changed, train__on_collapse="stop")))
    assert complete_steps(tmp_path / "run" / "checkpoints")[-1] == 15
    result = loop.run(build(change(changed, run_dir=str(tmp_path / "warned"))))
    assert result.steps == 24
    assert capsys.readouterr().err.count("WARNING step 20: the draft has collapsed from step 18 on") == 1
