"""Sentences follow the numbers: each conclusion for each kind of data."""

import dataclasses

import pytest

from tests.train.evaluate.made_results import made_result
from train.evaluate.bootstrap import Interval
from train.evaluate.confidence import Reliability, SlotCalibration
from train.evaluate.result_file import NamedResult
from train.report import speed, training, trust
from train.report.acceptance import (
    Figures,
    conclude_conditional,
    conclude_survival,
    conclude_tasks,
    figures,
    headline,
)


def some(tasks=None, conditional=(), survival=()):
    return Figures("d", Interval(2.0), tasks or {}, survival, conditional, True)


def test_figures_are_those_of_the_accounting():
    result = made_result(seed=4)
    found = figures(NamedResult("d", result))
    assert found.accept_length.value == pytest.approx(result["accept_length"])
    assert [v.value for v in found.survival] == pytest.approx(result["survival"])
    assert [v.value for v in found.conditional] == pytest.approx(result["conditional"])
    for name, task in result["tasks"].items():
        assert found.tasks[name].value == pytest.approx(task["accept_length"])
        assert found.tasks[name].low < task["accept_length"] < found.tasks[name].high


def test_headline_names_what_is_possible():
    text = headline(NamedResult("d", made_result(seed=4)), figures(NamedResult("d", made_result(seed=4))))
    assert "on 40 prompts at temperature 1" in text
    assert "a block of 3 can have 4" in text


def test_tasks():
    apart = {"math": Interval(3.0, 2.8, 3.2), "chat": Interval(2.0, 1.9, 2.1)}
    assert "most on math (3.00), least on chat (2.00): their intervals do not touch" in conclude_tasks(some(apart))
    near = {"math": Interval(3.0, 2.0, 4.0), "chat": Interval(2.9, 1.9, 3.9)}
    assert "cannot be ranked" in conclude_tasks(some(near))
    few = {"math": Interval(3.0), "chat": Interval(2.9)}
    assert "too few prompts" in conclude_tasks(some(few))


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        (Interval(0.8, 0.75, 0.85), Interval(0.5, 0.4, 0.6), "it falls along the block"),
        (Interval(0.5, 0.45, 0.55), Interval(0.8, 0.7, 0.9), "it rises along the block"),
        (Interval(0.8, 0.7, 0.9), Interval(0.78, 0.6, 0.9), "level within noise"),
        (Interval(0.8), Interval(0.78), "too few prompts get that far to tell"),
    ],
)
def test_conditional_acceptance(first, last, said):
    survival = (Interval(0.5), Interval(0.25), Interval(0.0))
    text = conclude_conditional(some(conditional=(first, last, Interval(None)), survival=survival))
    assert said in text
    assert f"one more slot would bring about {0.25 * last.value:.3f} tokens per round" in text
    assert f"{first.value:.0%} at slot 0, {last.value:.0%} at slot 1" in text


def test_survival():
    text = conclude_survival(some(survival=tuple(map(Interval, (0.8, 0.4, 0.2, 0.2)))))
    assert text == "d: 20% of blocks are accepted whole; slots 2 to 3 bring 25% of the accepted drafts."


def test_training_curves():
    wobble = [0.01 * (-1) ** i for i in range(50)]
    falling = [(i, 5 - 0.1 * i + w) for i, w in enumerate(wobble)]
    assert "still improving at the end (-1.000 over the last fifth)" in training.conclude(falling, False)
    assert "getting worse at the end" in training.conclude(falling, True)
    level = [(i, 2 + w) for i, w in enumerate(wobble)]
    assert "level at the end" in training.conclude(level, True, "run")
    assert training.conclude(level, True, "run").startswith("run: from 2.000")
    few = [(10, 1.5), (20, 2.5), (30, 2.0)]
    assert training.conclude(few, True) == "From 1.500 to 2.000; the best value, 2.500, at step 20."
    rows = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": float("inf")}, {"loss": 3.0}, {"step": 4, "loss": "x"}]
    assert training.curve(rows, "loss") == [(1, 1.0)]


def test_confidence():
    slot = SlotCalibration(100, 0.7, 0.5, 0.2, 0.8, 0.2, Reliability((), (), ()))
    text = trust.conclude("d", [slot, slot], 0.01)
    assert "20.0% too sure, mean calibration error 20.0%" in text
    assert "AUROC of 0.80" in text
    assert "draft-jax calibrate" in text
    assert "on average right, mean" in trust.conclude("d", [dataclasses.replace(slot, predicted=0.5)], 0.01)
    fine = dataclasses.replace(slot, predicted=0.49, ece=0.01, auroc=None)
    text = trust.conclude("d", [fine], 0.005)
    assert "1.0% too cautious" in text
    assert "AUROC" not in text
    assert "good enough" in text
    assert "no more than a perfect head may show of so few rounds (25.0%)" in trust.conclude("d", [slot], 0.25)


def test_speed():
    item = NamedResult("d", {
        "settings": {}, "speedup": 1.5, "accept_length": 2.5,
        "seconds": {"prefill": 1.0, "draft": 2.0, "target": 6.0, "other": 1.0, "total": 10.0},
    })  # fmt: skip
    assert speed.conclude(item) == (
        "d: 1.50 times faster than plain decoding (the accept length, 2.50, is the most it could be with a free "
        "draft); target verifies takes 60% of the time."
    )
    slow = NamedResult("d", {**item.result, "speedup": 0.5})
    assert "2.00 times slower than plain decoding" in speed.conclude(slow)
    alone = NamedResult("d", {**item.result, "speedup": None})
    assert "plain decoding was not measured" in speed.conclude(alone)
