"""An export carries the calibration of its own draft, and no other's."""

import shutil

import pytest

from tests.train.test_export import random_params
from train.evaluate.draft import load_draft
from train.evaluate.identity import draft_digest
from train.evaluate.sts import STS_FILE, StsCalibration, read_sts
from train.export import export, main


@pytest.fixture(scope="module")
def draft(tiny_draft, tmp_path_factory):
    return export(random_params(tiny_draft), tiny_draft, tmp_path_factory.mktemp("draft") / "plain").path


@pytest.fixture
def folder(draft, tmp_path):
    return shutil.copytree(draft, tmp_path / "draft")


def calibration(folder, **changes):
    loaded = load_draft(folder)
    temperatures = [1.0 + slot / 8 for slot in range(loaded.config.block_size)]
    values = {"dataset": "held out", "draft_digest": draft_digest(loaded.config, loaded.params)} | changes
    return StsCalibration(temperatures, **values)


def test_the_drafts_own_calibration_goes_with_it(folder, tmp_path, capsys):
    made = calibration(folder)
    made.write(folder / STS_FILE)
    assert main(["--draft", str(folder), "--output", str(tmp_path / "out")]) == 0
    assert "fitted on held out, included" in capsys.readouterr().out
    assert read_sts(tmp_path / "out" / STS_FILE, len(made.temperatures)) == made
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "--speculative-dspark-confidence-sts-path out/sts.json" in readme
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "README.md", "config.json", "model.safetensors", "sts.json",
    ]  # fmt: skip


@pytest.mark.parametrize(("digest", "said"), [("abc", "another draft or step"), ("", "a draft it does not name")])
def test_anothers_is_left_out_and_that_is_said(folder, tmp_path, capsys, digest, said):
    calibration(folder, draft_digest=digest).write(folder / STS_FILE)
    assert main(["--draft", str(folder), "--output", str(tmp_path / "out")]) == 0
    assert f"was fitted for {said}: left out" in capsys.readouterr().out
    assert not (tmp_path / "out" / STS_FILE).exists()
    assert "sts-path" not in (tmp_path / "out" / "README.md").read_text()


def test_a_broken_one_stops_the_export(folder, tmp_path):
    (folder / STS_FILE).write_text("{}")
    with pytest.raises(ValueError, match="is no calibration"):
        main(["--draft", str(folder), "--output", str(tmp_path / "out")])
    StsCalibration([1.0]).write(folder / STS_FILE)
    with pytest.raises(ValueError, match="has 1 temperatures, the draft's block has"):
        main(["--draft", str(folder), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
