"""Calibration metrics against direct enumeration, and what of a round they may count."""

import numpy as np
import pytest

from train.evaluate.accounting import Round, accept_statistics
from train.evaluate.confidence import (
    ConfidenceData,
    ConfidenceError,
    auroc,
    calibration,
    chance_error,
    collect,
    expected_calibration_error,
    judge,
    reliability_bins,
    sigmoid,
    survival,
)
from train.evaluate.result import EvalResult
from train.evaluate.sample_result import SampleResult, Seconds


@pytest.fixture
def make_result():
    def make(*samples, K=3, threshold=0.0):
        made = [SampleResult(f"p{i}", 4, 1, list(rounds), "eos", Seconds()) for i, rounds in enumerate(samples)]
        statistics = accept_statistics([r for rounds in samples for r in rounds], K)
        settings = {"block_size": K, "confidence_threshold": threshold}
        return EvalResult(statistics, made, [], [], settings).to_json()

    return make


def a_round(proposed, accepted, logits, bonus=True, **more):
    return Round(
        (5,) * (accepted + bonus), proposed, accepted, drafts=(5,) * proposed, confidence_logits=logits, **more
    )


@pytest.fixture(scope="module")
def noisy():
    """Predictions with many ties, and outcomes that follow them loosely."""
    random = np.random.default_rng(3)
    predictions = np.round(random.random(400), 2)
    return predictions, random.random(400) < predictions**1.5


def test_what_a_round_tells(make_result):
    result = make_result(
        [a_round(3, 1, (2.0, -1.0, 0.5)), a_round(2, 2, (3.0, 4.0), bonus=False)], [a_round(3, 0, (0.1, 0.2, 0.3))]
    )
    data = collect([result])
    np.testing.assert_array_equal(data.logits, [[2.0, -1.0, 0.5], [3.0, 4.0, np.nan], [0.1, 0.2, 0.3]])
    np.testing.assert_array_equal(data.accepted, [[True, False, False], [True, True, False], [False, False, False]])
    np.testing.assert_array_equal(data.observed, [[True] * 3, [True, True, False], [True] * 3])
    assert data.bonus.tolist() == [True, False, True]
    assert data.prompts.tolist() == [0, 0, 1]


def test_prompts_of_several_results_stay_apart(make_result):
    results = [make_result([a_round(3, 1, (0.0, 0.0, 0.0))]), make_result([a_round(3, 1, (0.0, 0.0, 0.0))])]
    assert collect(results).prompts.tolist() == [0, 1]


def test_what_cannot_be_calibrated_is_refused(make_result):
    fine = make_result([a_round(3, 1, (0.0, 0.0, 0.0))])
    with pytest.raises(ConfidenceError, match="1 of 1 rounds have no confidence logits"):
        collect([make_result([a_round(3, 1, None)])])
    with pytest.raises(ConfidenceError, match=r"confidence_threshold 0\.4"):
        collect([make_result([a_round(3, 1, (0.0, 0.0, 0.0))], threshold=0.4)])
    with pytest.raises(ConfidenceError, match=r"different block sizes: \[2, 3\]"):
        collect([fine, make_result([a_round(2, 1, (0.0, 0.0))], K=2)])
    with pytest.raises(ConfidenceError, match="hold no rounds"):
        collect([make_result([])])


def test_survival_is_the_product_of_scaled_sigmoids():
    logits = np.array([[0.3, -2.0, 5.0], [1000.0, -1000.0, np.nan]])
    temperatures = [2.0, 0.5, 1.0]
    got = survival(logits, temperatures)
    product = 1.0
    for slot in range(3):
        product *= 1 / (1 + np.exp(-logits[0, slot] / temperatures[slot]))
        assert got[0, slot] == pytest.approx(product, rel=1e-12)
    assert got[1, :2].tolist() == [1.0, 0.0]
    assert np.isnan(got[1, 2])


def test_auroc_counts_pairs(noisy):
    predictions, outcomes = noisy
    pairs = [
        1.0 if high > low else 0.5 if high == low else 0.0
        for high in predictions[outcomes]
        for low in predictions[~outcomes]
    ]
    assert auroc(predictions, outcomes) == pytest.approx(sum(pairs) / len(pairs), rel=1e-12)
    assert auroc(predictions, np.ones(400, bool)) is None
    assert auroc(np.array([0.1, 0.9]), np.array([False, True])) == 1.0


def test_calibration_error_by_sorting_into_bins_one_by_one(noisy):
    predictions, outcomes = noisy
    predictions = np.clip(predictions + 0.003, 0.0, 1.0)  # off the edges, where binary fractions round either way
    predictions[:2] = 0.0, 1.0  # the ends of the scale belong to the first and the last bin
    bins: list[list[int]] = [[] for _ in range(20)]
    for index, value in enumerate(predictions):
        bins[next(b for b in range(20) if value < (b + 1) / 20 or b == 19)].append(index)
    error = sum(len(m) / 400 * abs(predictions[m].mean() - outcomes[m].mean()) for m in bins)
    assert expected_calibration_error(predictions, outcomes) == pytest.approx(error, rel=1e-12)
    diagram = reliability_bins(predictions, outcomes)
    assert diagram.counts == tuple(map(len, bins))
    np.testing.assert_allclose(diagram.predicted, [predictions[m].mean() for m in bins], rtol=1e-12)
    np.testing.assert_allclose(diagram.observed, [outcomes[m].mean() for m in bins], rtol=1e-12)


def test_hand_numbers():
    judged = judge(np.array([0.9, 0.9, 0.2, 0.2]), np.array([True, False, False, False]))
    assert judged.ece == pytest.approx(0.5 * 0.4 + 0.5 * 0.2)
    assert judged.brier == pytest.approx((0.01 + 0.81 + 0.04 + 0.04) / 4)
    assert judged.auroc == pytest.approx((1 * 2 + 0.5) / 3)
    assert (judged.count, judged.predicted, judged.observed) == (4, pytest.approx(0.55), 0.25)


def test_slots_are_judged_on_what_was_observed(make_result):
    data = collect([make_result([a_round(3, 3, (9.0, 9.0, 9.0)), a_round(1, 0, (-9.0,))])])
    slots = calibration(data, survival(data.logits))
    assert [slot.count for slot in slots] == [2, 1, 1]
    assert slots[0].ece == pytest.approx(0, abs=1e-3)
    assert slots[1].auroc is None
    empty = judge(np.array([]), np.array([], bool))
    assert (empty.count, empty.ece, empty.brier) == (0, None, None)


def test_what_a_perfect_head_shows_by_chance():
    """Drawn anew, a perfect head stays below it about 19 times in 20; a head twice too sure does not."""
    random = np.random.default_rng(0)
    logits = random.normal(0.5, 1.0, (300, 2))
    below, bound = 0, None
    for _ in range(200):
        accepted = np.cumprod(random.random(logits.shape) < sigmoid(logits), axis=1).astype(bool)
        data = ConfidenceData(logits, accepted, np.ones(300, bool), np.arange(300))
        bound = bound or chance_error(data, 400)
        below += np.mean([slot.ece for slot in calibration(data, survival(logits))]) <= bound
    assert 0.88 <= below / 200 <= 0.99
    sure = ConfidenceData(3 * logits, accepted, data.bonus, data.prompts)
    assert np.mean([slot.ece for slot in calibration(sure, survival(3 * logits))]) > chance_error(sure)
