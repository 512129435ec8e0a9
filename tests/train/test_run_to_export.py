"""A trained run, evaluated and exported through the commands: the three agree on what was trained."""

import json

import numpy as np
import pytest

from train.checkpoint import load_trained
from train.config_file import build
from train.evaluate import command
from train.export import main as export_main
from train.loop import run


@pytest.fixture(scope="module")
def finished(tmp_path_factory, target_folder, tokens_file):
    folder = tmp_path_factory.mktemp("run")
    tree = {
        "target": {"path": str(target_folder), "device": "cpu"},
        "data": {"path": str(tokens_file), "max_length": 24, "min_loss_tokens": 2, "seed": 3},
        "run_dir": str(folder / "run"),
        "draft": {
            "layers": 1, "target_layer_ids": [0, 2], "block_size": 3, "mask_token_id": 5, "markov_rank": 4,
            "intermediate_size": 20,
        },
        "objective": {"num_anchors": 4},
        "train": {"steps": 2, "batch_rows": 2, "seed": 7},
        "checkpoint": {"every": 1, "keep": 2},
        "logging": {"progress": False},
        "eval": {"max_new_tokens": 6},
    }  # fmt: skip
    assert run(build(tree)).exit_code == 0
    return folder / "run"


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"w{i + 6} w{i + 9}"]}) + "\n" for i in range(2)))
    return str(path)


def test_run_and_its_export_evaluate_alike(finished, prompts, tmp_path, capsys):
    assert command.main(["--draft", str(finished), "--prompts", prompts, "--device", "cpu"]) == 0
    assert "run" in capsys.readouterr().out
    own = json.loads((finished / "eval" / "step-2_t0.json").read_text())
    assert own["identical_to_plain"] == own["prompts"] == 2
    assert own["settings"]["max_new_tokens"] == 6, "the run's own eval section holds"

    assert export_main(["--run", str(finished)]) == 0
    printed = capsys.readouterr().out
    assert "ok  special ids = target's" in printed
    assert "FAIL" not in printed
    exported = str(finished / "export")
    output = tmp_path / "eval.json"
    arguments = ["--draft", exported, "--prompts", prompts, "--max-new-tokens", "6", "--output", str(output)]
    assert command.main([*arguments, "--device", "cpu"]) == 0
    outputs = [[s["output_tokens"] for s in record["samples"]] for record in (own, json.loads(output.read_text()))]
    assert outputs[0] == outputs[1]


def test_an_earlier_step_is_exported_on_request(finished, tmp_path):
    for step in ("1", "2"):
        assert export_main(["--run", str(finished), "--step", step, "--output", str(tmp_path / step)]) == 0
    first, second = ((tmp_path / step / "model.safetensors").read_bytes() for step in ("1", "2"))
    assert first != second
    _, params = load_trained(finished, 1)
    assert np.isfinite(np.asarray(params["fc"]["kernel"])).all()
    with pytest.raises(ValueError, match="neither latest, best nor a number"):
        export_main(["--run", str(finished), "--step", "last", "--output", str(tmp_path / "x")])
