"""`draft-jax probe`: from options to verdicts and exit code."""

import json
import shutil

import pytest

from tests.target_bridge.conftest import save_model
from train import probe
from train.cli import main
from train.config import ConfigError


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return save_model("qwen3", tmp_path_factory.mktemp("qwen3"), tie_word_embeddings=False, num_hidden_layers=6)


def test_probe_by_hand(qwen3, capsys):
    assert main(["probe", "--target", str(qwen3), "--layer-ids", "0,2,3", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "over bridge hf in float32" in text
    for name in ("layer 0", "layer 2", "layer 3", "final"):
        assert f"\n{name} " in text
    assert "PASS  equal to Transformers: 4 of 4 streams" in text
    assert text.rstrip().endswith("PROBE PASS")


def test_taps_of_a_configuration_and_of_a_draft(qwen3, tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(
        f"target: {{path: {qwen3}, device: cpu}}\ndata: {{path: none}}\nrun_dir: none\n"
        "draft: {target_layer_ids: [1, 4]}"
    )
    assert main(["probe", "--config", str(config)]) == 0
    assert "layer 4 " in capsys.readouterr().out
    assert main(["probe", "--config", str(config), "--draft.target_layer_ids=[0,3]", "--target.dtype=bfloat16"]) == 0
    text = capsys.readouterr().out
    assert "layer 3 " in text
    assert "in bfloat16" in text
    assert main(["probe", "--target", str(qwen3)]) == 0  # spread as a new draft's would be: 1 to L - 3
    text = capsys.readouterr().out
    assert "\nlayer 1 " in text
    assert "\nlayer 3 " in text


def test_a_target_no_draft_can_be_served_for_fails(qwen3, tmp_path, capsys):
    folder = save_model("qwen2", tmp_path / "qwen2", num_hidden_layers=6)
    assert main(["probe", "--target", str(folder), "--device", "cpu"]) == 1
    text = capsys.readouterr().out
    assert "FAIL  SGLang serves DSpark: no: Qwen2ForCausalLM" in text
    assert text.rstrip().endswith("PROBE FAIL: 2 of 10 points")


def test_wrong_use(qwen3, tmp_path, capsys):
    for arguments in ([], ["--target", "x", "--config", "y"]):
        with pytest.raises(ConfigError, match="either --config FILE or --target FOLDER"):
            probe.main(arguments)
    with pytest.raises(ConfigError, match=r"unknown key target\.bridg"):
        probe.main(["--target", str(qwen3), "--target.bridg=hf"])
    with pytest.raises(ConfigError, match="is not a draft's folder"):
        probe.main(["--target", str(qwen3), "--draft", str(tmp_path)])
    assert main(["probe", "--target", str(tmp_path / "nothing")]) == 2


def test_damaged_weights_fail_before_a_run(qwen3, tmp_path):
    """`require` is what assembly calls: a verdict that is not in order stops the run."""
    from safetensors.torch import load_file, save_file

    from target_bridge.hf import load_hf_target
    from train.config_file import build

    broken = tmp_path / "broken"
    shutil.copytree(qwen3, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.3.mlp.down_proj.weight"].fill_(float("nan"))
    target = load_hf_target(str(qwen3), [0, 3, 4])
    target.model.load_state_dict(tensors, strict=False)
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    config = build({"target": {"path": str(broken)}, "data": {"path": "none"}, "run_dir": "none"})
    target_config = json.loads((broken / "config.json").read_text())
    with pytest.raises(probe.ProbeError, match=r"finite: layer 3 has 0\.00% finite numbers.*target\.probe: false"):
        probe.require(target, config, target_config)
