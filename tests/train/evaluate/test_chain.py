"""From an evaluation to its calibration, comparison, export and report: each reads what the one before wrote."""

import json

import pytest

from draft_jax.config import DraftConfig
from train.cli import main
from train.evaluate.sts import read_sts
from train.export import export


@pytest.fixture(scope="module")
def draft_folder(target_folder, make_params, tmp_path_factory):
    raw = json.loads((target_folder / "config.json").read_text())
    config = DraftConfig.from_target(
        raw, num_hidden_layers=1, target_layer_ids=(0, 2), block_size=3, mask_token_id=5, markov_rank=4,
        initializer_range=0.3, target_name=str(target_folder), enable_confidence_head=True,
    )  # fmt: skip
    return export(make_params(config), config, tmp_path_factory.mktemp("draft") / "export").path


def test_every_program_reads_what_the_one_before_wrote(draft_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"task": ("a", "b")[i % 2], "turns": [f"w{i + 6} w{i + 9} w{i + 20}"]} for i in range(12)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ask = [
        "eval",
        "--draft",
        str(draft_folder),
        "--prompts",
        "asked.jsonl",
        "--max-new-tokens",
        "12",
        "--device",
        "cpu",
    ]
    ask += ["--temperature", "1", "--no-plain"]
    assert main([*ask, "--output", "one.json", "--report", "one.html"]) == 0
    assert main([*ask, "--seed", "7", "--output", "two.json"]) == 0
    result = json.loads((tmp_path / "one.json").read_text())
    assert {name: task["prompts"] for name, task in result["tasks"].items()} == {"a": 6, "b": 6}
    assert all(sample["text"] for sample in result["samples"])
    for heading in ("Acceptance", "Confidence", "Where drafts fail", "Sample outputs"):
        assert f"<h2>{heading}</h2>" in (tmp_path / "one.html").read_text()

    assert main(["compare", "one.json", "two.json"]) == 0
    assert "seed differs (980406 and 7)" in capsys.readouterr().out
    assert main(["calibrate", "one.json", "two.json", "--output", str(draft_folder / "sts.json")]) == 0
    assert main(["export", "--draft", str(draft_folder), "--output", "served"]) == 0
    capsys.readouterr()
    calibrated = read_sts(tmp_path / "served" / "sts.json", 3)
    rounds = sum(
        len(s["rounds"])
        for name in ("one", "two")
        for s in json.loads((tmp_path / f"{name}.json").read_text())["samples"]
    )
    assert calibrated.num_samples == rounds
    assert main(["report", "first=one.json", "second=two.json", "--output", "both.html"]) == 0
    assert "second and first differ by" in (tmp_path / "both.html").read_text()
