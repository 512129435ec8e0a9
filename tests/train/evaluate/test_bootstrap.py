"""Intervals by resampling prompts: they cover as often as they say, and respect the tasks' sizes."""

import numpy as np
import pytest

from train.evaluate.bootstrap import Interval, interval, prompt_weights, ratio, ratio_interval


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """400 evaluations of 50 prompts whose rounds resemble each other; a plain interval over rounds would fail."""
    random = np.random.default_rng(0)
    covered = 0
    for seed in range(400):
        ability = random.gamma(4, 0.5, 50)  # mean 2
        rounds = np.full(50, 20.0)
        committed = random.poisson(ability * 20).astype(float)
        found = ratio_interval(committed, rounds, prompt_weights(np.zeros(50), 300, seed))
        covered += found.low <= 2.0 <= found.high
    assert 0.90 <= covered / 400 <= 0.98


def test_prompts_are_drawn_within_their_task():
    weights = prompt_weights(np.array(["a"] * 3 + ["b"] * 7), 200)
    assert (weights[:, :3].sum(1) == 3).all()
    assert (weights[:, 3:].sum(1) == 7).all()
    assert np.array_equal(weights, prompt_weights(np.array(["a"] * 3 + ["b"] * 7), 200)), "same numbers again"


def test_ratio_is_of_sums_and_knows_no_zero_denominator():
    top, bottom = np.array([3.0, 1.0, 5.0]), np.array([1.0, 0.0, 4.0])
    assert ratio(top, bottom) == 9 / 5
    drawn = ratio(top, bottom, np.array([[2.0, 0, 1], [0, 3, 0]]))
    assert drawn[0] == 11 / 6
    assert np.isnan(drawn[1])


def test_too_few_prompts_have_no_interval():
    ones = np.ones(9)
    assert ratio_interval(ones, ones, prompt_weights(ones)) == Interval(1.0)
    assert ratio_interval(ones, 0 * ones, prompt_weights(ones)) == Interval(None)
    assert interval(1.0, np.array([np.nan]), 50) == Interval(1.0)
    assert Interval(1.0).excludes_zero is None
    assert Interval(1.0, 0.1, 2.0).excludes_zero
    assert Interval(-1.0, -2.0, -0.1).excludes_zero
    assert Interval(0.0, -1.0, 1.0).excludes_zero is False


def test_percentiles_of_the_draws():
    found = interval(0.0, np.arange(-1000.0, 1001.0), 100)
    assert (found.low, found.high) == pytest.approx((-950, 950))
