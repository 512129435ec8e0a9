"""Our sts.json in the real SGLang: it is read, its head applies it as we do, and both fitters measure the same."""

import numpy as np
import pytest
import torch

from tests.train.evaluate.test_sts import synthetic
from train.evaluate.confidence import expected_calibration_error, survival
from train.evaluate.sts import STS_FILE, fit, fit_temperatures


@pytest.fixture(scope="module")
def data():
    return synthetic(20_000)


@pytest.fixture(scope="module")
def fitted(data):
    return fit(data, "held-out prompts", draft_digest="abc").calibration


def test_the_file_is_read_and_applied_as_we_apply_it(data, fitted, tmp_path):
    from sglang.srt.models.dspark import DSparkConfidenceHead
    from sglang.srt.speculative.dspark_components.dspark_sts import load_sts_calibration_from_path

    fitted.write(tmp_path / STS_FILE)
    loaded = load_sts_calibration_from_path(str(tmp_path / STS_FILE))
    assert loaded.temperatures == fitted.temperatures
    assert (loaded.dataset, loaded.num_samples) == ("held-out prompts", 20_000)
    assert (loaded.ece_before, loaded.ece_after) == (fitted.ece_before, fitted.ece_after)
    head = DSparkConfidenceHead(hidden_size=4, markov_rank=2)
    head.sts_temperatures = torch.tensor(loaded.temperatures)
    theirs = head.apply_sts(torch.from_numpy(data.logits[:500])).cumprod(1)
    np.testing.assert_allclose(theirs, survival(data.logits[:500], fitted.temperatures), rtol=1e-5)


def test_their_fitter_measures_the_same_error_and_finds_no_better_temperatures(data):
    from sglang.benchmark.dspark_sts_fit import default_temperature_grid, fit_sts_temperatures

    theirs = fit_sts_temperatures(
        logits=torch.from_numpy(data.logits),
        prefix_mask=torch.from_numpy(data.accepted).double(),
        grid=default_temperature_grid(),
        num_bins=15,
    )
    raw = survival(data.logits)
    ours = [expected_calibration_error(raw[:, slot], data.accepted[:, slot], 15) for slot in range(3)]
    assert theirs["ece_before"] == pytest.approx(ours, rel=1e-9)
    error = {
        name: np.abs(np.array(found) / [2.0, 0.5, 1.5] - 1).max()
        for name, found in (("theirs", theirs["temperatures"]), ("ours", fit_temperatures(data)))
    }
    assert error["ours"] < 0.05
    assert error["ours"] <= error["theirs"], "their grid has steps of 12 %, and their objective is noisier"
