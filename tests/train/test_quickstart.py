"""The quickstart on a tiny target: what it leaves behind, its exit code, what it will not delete."""

import json
import re
from dataclasses import replace

import pytest

from draft_jax.objective.config import ObjectiveConfig
from train import loop, quickstart
from train.config import DraftSpec
from train.data.pipeline import load_dataset
from train.data.summary import DataError
from train.export import verify_export


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"w{i + 6} w{i + 9}"]}) + "\n" for i in range(3)))
    return path


@pytest.fixture
def arguments(tmp_path, target_folder, tokens_file, prompts, monkeypatch):
    preset = quickstart.PRESETS["cpu"]
    tiny = replace(
        preset,
        draft=DraftSpec(layers=1, num_taps=1, block_size=3, markov_rank=4, intermediate_size=20),
        objective=ObjectiveConfig(num_anchors=4),
        data={"max_length": 24, "min_loss_tokens": 2},
        eval_tokens=6,
        baseline_limit=2,
    )
    monkeypatch.setitem(quickstart.PRESETS, "cpu", tiny)
    options = {
        "--run-dir": tmp_path / "quick",
        "--target": target_folder,
        "--mask-token-id": 5,
        "--data": tokens_file,
        "--prompts": prompts,
        "--steps": 3,
    }
    return [str(word) for pair in options.items() for word in pair]


def test_leaves_a_checked_export_and_reports(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments[arguments.index("--run-dir") + 1] = "quick"  # relative, as the default is
    run_dir = tmp_path / "quick"
    code = quickstart.main(arguments)
    out, err = capsys.readouterr()
    report = json.loads((run_dir / "report.json").read_text())
    better = report["accept_length_trained"] > report["accept_length_untrained"]
    assert code == (0 if better else 1), "three steps on random rows may teach nothing, and then it must say so"
    assert ("FAILED" in err) == (not better)
    assert report["prompts"] == 3
    assert report["prompts_untrained"] == 2
    assert report["steps"] == 3
    assert report["identical_to_plain"] == 3, "fp32 greedy output equals plain decoding whatever the draft is worth"
    assert report["seconds"] > report["train_seconds"] > 0
    trained = json.loads((run_dir / "eval" / "trained.json").read_text())
    assert trained["accept_length"] == report["accept_length_trained"] >= 1
    assert all(check.ok for check in verify_export(run_dir / "export"))
    page = (run_dir / "report.html").read_text()
    assert "<svg" in page
    assert not re.search(r"""(src|href|url\()\s*=?\s*["']?(https?:)?//""", page), "the page must need no network"
    assert f"{report['accept_length_trained']:.3f}" in out

    # A finished quickstart is replaced only if that is wanted.
    with pytest.raises(quickstart.QuickstartError, match="holds a finished quickstart"):
        quickstart.main([*arguments, "--keep"])
    assert (run_dir / "report.json").is_file()


def test_own_data_of_which_much_is_lost_is_trained_on_when_asked_to(
    arguments, tmp_path, tokens_file, capsys, monkeypatch
):
    rows = tokens_file.read_text().splitlines()
    own = tmp_path / "own.jsonl"
    own.write_text("\n".join([*rows, *['{"input_ids": [7, 8, 9], "loss_mask": [0, 0, 1]}'] * len(rows)]))
    arguments[arguments.index("--data") + 1] = str(own)
    with pytest.raises(DataError, match=r"(?s)50.0 % of the rows .* less than data.min_retention .*--min-retention"):
        quickstart.main(arguments)

    def learn(config, target):  # what comes behind the data is another test's
        raise StopIteration(load_dataset(config.data, None, 61))

    monkeypatch.setattr(loop, "run", learn)
    with pytest.raises(StopIteration) as stopped:
        quickstart.main([*arguments, "--min-retention", "0.5"])
    assert stopped.value.value.summary.kept == len(rows)
    with pytest.raises(SystemExit):
        quickstart.parse(["--min-retention", "1.5"])
    assert "1.5 is no share from 0 to 1" in capsys.readouterr().err


def test_a_folder_of_somebody_else_is_left_alone(arguments, tmp_path):
    (tmp_path / "quick").mkdir()
    (tmp_path / "quick" / "thesis.txt").write_text("years of work")
    with pytest.raises(quickstart.QuickstartError, match="not empty and not a quickstart's"):
        quickstart.main(arguments)
    assert (tmp_path / "quick" / "thesis.txt").read_text() == "years of work"


def test_presets_are_configurations_of_the_shipped_data(tmp_path):
    """Each preset builds a run with the shipped conversations, whatever the machine."""
    for name, preset in quickstart.PRESETS.items():
        args = quickstart.parse(["--run-dir", str(tmp_path / name)])
        config = quickstart.make_config(args, preset, tmp_path, "cpu")
        assert config.data.path.endswith("conversations.jsonl.gz")
        assert config.draft.mask_token_id == 4
        assert config.eval.limit == preset.eval_limit >= preset.baseline_limit
