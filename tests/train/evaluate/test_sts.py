"""Sequential temperature scaling: known temperatures are found, errors fall on unseen text, the file reads back."""

import json

import numpy as np
import pytest

from train.evaluate.confidence import ConfidenceData, ConfidenceError, sigmoid, survival
from train.evaluate.sts import StsCalibration, fit, fit_temperatures, read_sts, sweep

TEMPERATURES = [2.0, 0.5, 1.5]


def synthetic(count, temperatures=TEMPERATURES, seed=0, per_prompt=20):
    """Rounds of a head whose logits are the true ones times `temperatures`."""
    random = np.random.default_rng(seed)
    true = random.normal(1.5, 1.5, (count, len(temperatures)))
    accepted = np.cumprod(random.random(true.shape) < sigmoid(true), axis=1).astype(bool)
    prompts = np.arange(count) // per_prompt
    return ConfidenceData(true * temperatures, accepted, np.ones(count, bool), prompts)


@pytest.mark.parametrize("objective", ["nll", "ece"])
def test_known_temperatures_are_found_within_5_percent(objective):
    found = fit_temperatures(synthetic(100_000, seed=1), objective)
    np.testing.assert_allclose(found, TEMPERATURES, rtol=0.05)


def test_the_error_falls_on_prompts_that_were_not_fitted():
    data = synthetic(20_000)
    made = fit(data, "synthetic", draft_digest="abc")
    before, after = (np.array(e) for e in (made.calibration.ece_before, made.calibration.ece_after))
    assert (before > 0.025).all(), "the head is wrong to begin with"
    assert (after < 0.5 * before).all()
    assert made.calibration.num_samples == 20_000
    assert made.gain.low > 0
    # A fold is predicted without its own rounds: outcomes of a fold do not reach its predictions.
    fold = (data.prompts % 5) == 2
    accepted = data.accepted.copy()
    accepted[fold] = ~accepted[fold]
    turned = fit(ConfidenceData(data.logits, accepted, data.bonus, data.prompts), "turned")
    np.testing.assert_array_equal(turned.scaled[fold], made.scaled[fold])
    assert not np.array_equal(turned.scaled[~fold], made.scaled[~fold])


def test_a_head_that_is_right_gains_nothing():
    found = fit(synthetic(4_000, [1.0, 1.0, 1.0]), "calibrated already")
    assert found.gain.low < 0 < found.gain.high or found.gain.value < 0
    np.testing.assert_allclose(found.calibration.temperatures, 1.0, rtol=0.2)


def test_slots_are_fitted_left_to_right():
    """What is said of later slots does not reach the temperatures of earlier ones."""
    data = synthetic(2_000)
    logits = data.logits.copy()
    logits[:, 2] *= 7
    other = fit_temperatures(ConfidenceData(logits, data.accepted, data.bonus, data.prompts))
    own = fit_temperatures(data)
    assert own[:2] == other[:2]
    assert other[2] == pytest.approx(7 * own[2], rel=0.01)


def test_a_slot_with_too_little_data_keeps_1():
    data = synthetic(500)
    data.accepted[:, 2] &= np.arange(500) < 60  # 29 or fewer accepted
    assert 0 < data.accepted[:, 2].sum() < 30
    first, second, third = fit_temperatures(data)
    assert third == 1.0
    assert 1.0 not in (first, second)
    data.logits[:, 2] = np.nan
    assert fit_temperatures(data)[2] == 1.0
    with pytest.raises(ConfidenceError, match="at least two prompts"):
        fit(synthetic(20), "one prompt")


def test_file_is_what_sglang_reads(tmp_path):
    made = fit(synthetic(3_000), "held-out prompts").calibration
    made.write(tmp_path / "deep" / "sts.json")
    raw = json.loads((tmp_path / "deep" / "sts.json").read_text())
    assert set(raw) >= {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}
    assert read_sts(tmp_path / "deep" / "sts.json", 3) == made
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["sts.json"]
    with pytest.raises(ValueError, match="has 3 temperatures, the draft's block has 7 slots"):
        read_sts(tmp_path / "deep" / "sts.json", 7)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no calibration"),
        ("[1]", "is no calibration"),
        ('{"dataset": "x"}', "is no calibration"),
        ('{"temperatures": []}', "it has none"),
        ('{"temperatures": [1.0, 0.0, 1.0]}', r"positive numbers, got 0\.0"),
    ],
)
def test_what_is_no_calibration_is_refused(tmp_path, content, message):
    (tmp_path / "sts.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_sts(tmp_path / "sts.json", 3)
    with pytest.raises(ValueError, match="got inf"):
        StsCalibration([float("inf")])


def test_sweep_against_cutting_the_rounds_by_hand():
    data = synthetic(300, seed=5)
    data.logits[7, 2] = np.nan  # proposed two only
    data.accepted[7] = [True, True, False]
    data.bonus[7] = False  # and ended on an accepted stop token
    confidence = sigmoid(data.logits)
    for threshold in (0.0, 0.4, 0.9, 1.0):
        committed = verified = 0
        for row in range(300):
            length = accepted = 0
            for slot in range(3):
                if np.isnan(data.logits[row, slot]) or confidence[row, slot] < threshold:
                    break
                length += 1
                accepted += bool(data.accepted[row, slot])
            ended = row == 7 and length == 2
            committed += accepted + (not ended)
            verified += length + 1
        (point,) = sweep(data, confidence, [threshold])
        assert point.accept_length == pytest.approx(committed / 300)
        assert point.verified == pytest.approx(verified / 300)
        assert point.verify_rate == pytest.approx(committed / verified)


def test_a_higher_threshold_verifies_less_and_wastes_less():
    data = synthetic(5_000, [1.0, 1.0, 1.0])
    points = sweep(data, survival(data.logits), [0.0, 0.2, 0.4, 0.6, 0.8])
    assert [p.verified for p in points] == sorted((p.verified for p in points), reverse=True)
    assert [p.verify_rate for p in points] == sorted(p.verify_rate for p in points)
