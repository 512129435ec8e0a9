"""Prepare, look, train: the commands on a real tiny target, and a run that is fed from mapped files."""

import re
import warnings

import numpy as np
import pytest

from train.checkpoint import load_trained
from train.config_file import build
from train.data.prepare import prepare
from train.loop import run


def test_the_commands(target_folder, tokens_file, cli, tmp_path):
    """On ids, from a file and from a prepared folder: page written, numbers told."""
    common = [f"--target.path={target_folder}", "--data.min_loss_tokens=2", "--data.format=tokens"]
    data = f"--data.path={tokens_file}"
    done = cli("prepare", *common, data, f"--output={tmp_path / 'made'}", "--workers=1")
    assert done.code == 0, done.err
    assert re.search(r"kept +12 100\.0 %", done.out)
    assert str(tmp_path / "made") in done.out
    done = cli("inspect", *common, f"--data.path={tmp_path / 'made'}", f"--output={tmp_path / 'a.html'}", "--rows=5")
    assert done.code == 0, done.err
    assert "5 records" in done.out
    assert (tmp_path / "a.html").read_text().count("<h2") == 5
    done = cli("inspect", *common, data, "--place=rows.jsonl:99")
    assert done.code == 1
    assert "holds no record rows.jsonl:99" in done.err


@pytest.mark.usefixtures("quick_compilation")
def test_training_on_prepared_data_is_training_on_the_files(tree, change, tmp_path):
    """The same parameters, bit for bit, packed, and nothing complains of arrays that cannot be written."""
    tree = change(tree, data__packing="first_fit", data__row_length=48, data__format="tokens", train__steps=2)
    plain = build(change(tree, run_dir=str(tmp_path / "plain"), data__prepared=str(tmp_path / "none")))
    run(plain)
    prepared = build(change(tree, run_dir=str(tmp_path / "mapped"), data__prepared=str(tmp_path / "prepared")))
    prepare(prepared.data, None, 61, workers=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not writable.*")
        run(prepared)
    ours, theirs = (load_trained(tmp_path / name)[1] for name in ("mapped", "plain"))
    np.testing.assert_array_equal(ours["fc"]["kernel"], theirs["fc"]["kernel"])
