"""`draft-jax calibrate`: from results to sts.json."""

import json

import numpy as np
import pytest

from tests.train.evaluate.made_results import made_result, written
from train.evaluate.bootstrap import Interval
from train.evaluate.calibrate import advice, main, verdict
from train.evaluate.confidence import ConfidenceError
from train.evaluate.result_file import ResultError
from train.evaluate.sts import StsCalibration, StsFit, SweepPoint, read_sts


def test_a_run_gets_its_calibration(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "draft_config.json").write_text("{}")
    result = made_result(prompts=300, rounds=40, scale=3.0)
    path = written(run / "eval" / "step-9_t1.json", result)
    assert main([path]) == 0
    printed = capsys.readouterr().out
    assert "more than noise (log likelihood" in printed
    assert f"wrote {run / 'sts.json'}" in printed
    made = read_sts(run / "sts.json", 3)
    assert made.temperatures[0] == pytest.approx(3.0, rel=0.05)  # the head was made three times too sure
    assert made.draft_digest == "d1"
    assert made.num_samples == 300 * 40
    assert made.dataset == "made at temperature 1"


def test_results_of_one_draft_are_pooled(tmp_path):
    paths = [written(tmp_path / f"{i}.json", made_result(seed=i)) for i in range(2)]
    assert main([*paths, "--output", str(tmp_path / "sts.json"), "--objective", "ece"]) == 0
    assert json.loads((tmp_path / "sts.json").read_text())["num_samples"] == 2 * 40 * 12
    other = written(tmp_path / "other.json", made_result(draft_digest="d2", draft="another"))
    with pytest.raises(ResultError, match="different drafts: 0 of made up, other of another"):
        main([paths[0], other, "--output", str(tmp_path / "sts.json")])


def test_what_cannot_be_is_said(tmp_path):
    path = written(tmp_path / "r.json", made_result())
    with pytest.raises(ResultError, match="say where to write with --output"):
        main([path])
    cut = written(tmp_path / "cut.json", made_result(confidence_threshold=0.3))
    with pytest.raises(ConfidenceError, match=r"confidence_threshold 0\.3"):
        main([cut, "--output", str(tmp_path / "sts.json")])
    assert not (tmp_path / "sts.json").exists()


def test_sentences_follow_the_numbers():
    made = StsCalibration([1.0, 1.0], ece_before=[0.03, 0.05], ece_after=[0.02, 0.02])
    nothing = np.zeros((0, 2))
    said = {
        gain: verdict(StsFit(made, nothing, nothing, gain))
        for gain in (Interval(0.01, 0.005, 0.02), Interval(0.01, -0.1, 0.2), Interval(-0.2, -0.3, -0.1), Interval(0.1))
    }
    assert all(
        text.startswith("On held-out prompts the mean calibration error goes from 4.0% to 2.0%")
        for text in said.values()
    )
    more, noise, worse, few = said.values()
    assert "more than noise (log likelihood +0.0100 nats a prediction" in more
    assert "no more than noise" in noise
    assert "make it worse" in worse
    assert "too few prompts" in few
    points = [SweepPoint(0.0, 3.0, 8.0, 0.375), SweepPoint(0.2, 2.9, 6.0, 0.48), SweepPoint(0.5, 2.0, 3.0, 0.67)]
    assert advice(points).startswith("Threshold 0.2 keeps 97% of the accept length and verifies 25% fewer tokens")
    assert "No threshold tried keeps" in advice([points[0], points[2]])
