"""Export: complete, audited, reloaded bit for bit, there whole or not at all (case T23, checklist 3.7)."""

import dataclasses
import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from safetensors import safe_open

from draft_jax import weights
from draft_jax.models.dspark import abstract_params
from draft_jax.weights import load_folder
from train.export import ExportError, TargetFacts, check_export, export, main, verify_export, with_targets_ids
from train.export_check import read_header

ROOT = Path(__file__).resolve().parents[2]


def random_params(config, seed=0):
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape), jnp.float32), abstract_params(config))


@pytest.fixture(scope="module")
def config(tiny_draft):
    return dataclasses.replace(tiny_draft, eos_token_id=(2, 3), bos_token_id=1, target_name="some/target")


@pytest.fixture(scope="module")
def params(config):
    return random_params(config)


@pytest.fixture(scope="module")
def facts(config):
    return TargetFacts.from_config("some/target", {
        "hidden_size": config.hidden_size, "num_hidden_layers": 6, "vocab_size": config.vocab_size,
        "max_position_embeddings": 128, "eos_token_id": [2, 3], "bos_token_id": 1, "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
    })  # fmt: skip


@pytest.fixture(scope="module")
def exported(config, params, facts, tmp_path_factory):
    report = export(params, config, tmp_path_factory.mktemp("export") / "draft", target_info=facts)
    return report


@pytest.fixture
def copy(exported, tmp_path):
    """A folder that a test may spoil, with an editor for its config."""
    folder = tmp_path / "copy"
    shutil.copytree(exported.path, folder)

    def edit(change) -> Path:
        raw = json.loads((folder / "config.json").read_text())
        change(raw)
        (folder / "config.json").write_text(json.dumps(raw))
        return folder

    return edit


def failed(checks):
    return {check.name for check in checks if check.status == "FAIL"}


def test_every_check_passes_and_is_named_once(exported):
    assert failed(exported.checks) == set()
    assert [check.name for check in exported.checks if check.status == "warn"] == []
    names = [check.name for check in exported.checks]
    assert len(names) == len(set(names))
    assert {"tensors", "rope, both forms", "mask row exists", "nested = top level", "reload"} <= set(names)
    assert all(str(check).startswith("  ok  ") for check in exported.checks)


def test_folder_holds_these_files_and_no_more(exported):
    assert sorted(path.name for path in exported.path.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    assert [path.name for path in exported.path.parent.iterdir()] == ["draft"]
    assert (exported.path / "model.safetensors").stat().st_mode & 0o777 == 0o644
    assert exported.path.stat().st_mode & 0o777 == 0o755


def test_tensor_bits_against_the_parameters(exported, params):
    """Written out by hand for one tensor of each kind: a transposed kernel, an embedding, a norm, the fp32
    head.
    """
    bf16 = lambda array: np.asarray(array).astype(ml_dtypes.bfloat16)  # noqa: E731
    with safe_open(exported.path / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
        read = file.get_tensor
        attention = params["layers"]["1"]["self_attn"]
        expected = {
            "layers.1.self_attn.q_proj.weight": bf16(attention["q_proj"]["kernel"]).T,
            "markov_head.markov_w1.weight": bf16(params["markov"]["markov_w1"]["embedding"]),
            "norm.weight": bf16(params["norm"]["scale"]),
            "confidence_head.proj.weight": np.asarray(params["confidence"]["proj"]["kernel"]).T,
        }
        for name, array in expected.items():
            assert read(name).dtype == array.dtype, name
            assert read(name).tobytes() == np.ascontiguousarray(array).tobytes(), name


def test_torch_reads_the_same_bits(exported):
    """An independent reader: names, dtypes and values as SGLang's loader would see them."""
    import safetensors.torch
    import torch

    tensors = safetensors.torch.load_file(exported.path / "model.safetensors")
    assert {t.dtype for n, t in tensors.items() if n.startswith("confidence_head.")} == {torch.float32}
    assert {t.dtype for n, t in tensors.items() if not n.startswith("confidence_head.")} == {torch.bfloat16}
    assert not [n for n in tensors if n.startswith("model.") or "embed_tokens" in n or "lm_head" in n]
    with safe_open(exported.path / "model.safetensors", "np") as file:
        for name, tensor in tensors.items():
            assert np.array_equal(tensor.float().numpy(), file.get_tensor(name).astype(np.float32))


def test_transformers_resolves_the_config(exported):
    from transformers import AutoConfig

    resolved = AutoConfig.from_pretrained(exported.path)
    assert resolved.model_type == "qwen3"
    assert (resolved.markov_rank, resolved.block_size, resolved.mask_token_id) == (4, 4, 5)
    assert resolved.dflash_config["projector_type"] == "dspark"


def test_reload_gives_the_rounded_parameters(exported, config, params):
    loaded_config, loaded, _ = load_folder(exported.path)
    assert loaded_config == config

    def rounded(path, leaf):
        keep = path[0].key == "confidence"
        return leaf if keep else leaf.astype(jnp.bfloat16).astype(jnp.float32)

    expected = jax.tree_util.tree_map_with_path(rounded, params)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), expected, loaded)
    assert all(jax.tree.leaves(same))


def test_exporting_an_export_changes_no_bit(exported, tmp_path):
    loaded_config, loaded, _ = load_folder(exported.path)
    again = export(loaded, loaded_config, tmp_path / "again")
    first, second = (path / "model.safetensors" for path in (exported.path, again.path))
    assert first.read_bytes() == second.read_bytes()


def test_readme_has_the_flags(exported):
    text = (exported.path / "README.md").read_text()
    for flag in ("--speculative-algorithm DSPARK", "--speculative-dspark-block-size 4",
                 "--speculative-num-draft-tokens 5", "--model-path some/target",
                 "layers 0, 2, 4"):  # fmt: skip
        assert flag in text


# -- what the checks catch -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (lambda raw: raw.update(auto_map={"AutoModel": "x.Y"}), "no auto_map"),
        (lambda raw: raw.update(model_type="llama"), "model_type"),
        (lambda raw: raw.update(architectures=["DFlashDraftModel"]), "architectures"),
        (lambda raw: raw["dflash_config"].pop("projector_type"), "projector_type"),
        (lambda raw: raw["dflash_config"].update(markov_rank=8), "nested = top level"),
        (lambda raw: raw.pop("markov_rank"), "nested = top level"),
        (lambda raw: raw["dflash_config"].pop("target_layer_ids"), "nested = top level"),
        (lambda raw: (raw.pop("target_layer_ids"), raw["dflash_config"].pop("target_layer_ids")), "config"),
        (lambda raw: raw.pop("head_dim"), "explicit sizes"),
        (lambda raw: raw.pop("sample_from_anchor"), "sample_from_anchor"),
        (lambda raw: raw.pop("rope_theta"), "rope, both forms"),
        (lambda raw: raw.pop("rope_parameters"), "rope, both forms"),
        (lambda raw: raw["rope_parameters"].update(rope_theta=5e6), "rope, both forms"),
        (lambda raw: raw.update(rope_scaling={"rope_type": "linear", "factor": 2.0}), "rope, both forms"),
        (lambda raw: raw.update(layer_types=["full_attention"]), "layer_types"),
        (lambda raw: (raw.update(mask_token_id=61), raw["dflash_config"].update(mask_token_id=61)), "config"),
        (lambda raw: raw.update(block_size="4"), "explicit sizes"),
        (lambda raw: raw.update(dtype="float16"), "dtype"),
        (lambda raw: raw.update(tie_word_embeddings=True), "untied"),
        (lambda raw: raw.update(hidden_size=32), "tensors"),
        (lambda raw: raw.update(num_hidden_layers=3, layer_types=["full_attention"] * 3), "tensors"),
    ],
)
def test_a_wrong_config_fails_its_check(copy, change, check):
    assert check in failed(check_export(copy(change)))


@pytest.mark.parametrize(
    ("spoil", "check", "detail"),
    [
        (lambda t: t.pop("layers.1.mlp.up_proj.weight"), "tensors", "missing layers.1.mlp.up_proj.weight"),
        (lambda t: t.update({"extra.weight": t["norm.weight"]}), "tensors", "unknown extra.weight"),
        (lambda t: t.update({"fc.weight": np.ascontiguousarray(t["fc.weight"].T)}), "fc.weight", "[48, 16]"),
        (lambda t: t.update({"lm_head.weight": t["norm.weight"]}), "no embedding or head", "lm_head.weight"),
        (lambda t: t.update({"model.norm.weight": t.pop("norm.weight")}), "tensors", "unknown model.norm"),
        (lambda t: t.update({"norm.weight": t["norm.weight"].astype("f2")}), "tensor dtypes", "is F16"),
        (lambda t: t["norm.weight"].__setitem__(3, np.nan), "finite", "norm.weight"),
    ],
)  # fmt: skip
def test_wrong_tensors_fail_their_check(copy, spoil, check, detail):
    folder = copy(lambda raw: None)
    tensors = {
        name: np.array(tensor) for name, tensor in safetensors.numpy.load_file(folder / "model.safetensors").items()
    }
    spoil(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    found = {item.name: item for item in check_export(folder)}
    assert found[check].status == "FAIL"
    assert detail in found[check].detail


def test_file_without_torch_format_fails(copy):
    folder = copy(lambda raw: None)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    assert failed(check_export(folder)) == {"format"}


@pytest.mark.parametrize("size", [4, 100, -1])
def test_a_truncated_file_fails(copy, size):
    path = copy(lambda raw: None) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert failed(check_export(path.parent)) == {"files"}


def test_a_folder_that_is_no_export_fails(tmp_path):
    (check,) = check_export(tmp_path)
    assert check.name == "files"
    assert "config.json" in check.detail


@pytest.mark.parametrize(
    ("change", "check", "status"),
    [
        ({"hidden_size": 32}, "hidden_size = target's", "FAIL"),
        ({"vocab_size": 64}, "vocab_size = target's", "FAIL"),
        ({"vocab_size": 5}, "mask row exists", "FAIL"),
        ({"num_layers": 8}, "num_target_layers = target's", "FAIL"),
        ({"max_length": 4096}, "max_position_embeddings", "warn"),
    ],
)
def test_a_draft_of_another_target_fails(exported, facts, change, check, status):
    found = {c.name: c for c in check_export(exported.path, dataclasses.replace(facts, **change))}
    assert found[check].status == status


def test_target_configs_are_compared(exported, facts):
    other = dataclasses.replace(
        facts, config={**facts.config, "eos_token_id": 7, "architectures": ["Qwen2ForCausalLM"]}
    )
    found = {c.name: c for c in check_export(exported.path, other)}
    assert found["special ids = target's"].status == "FAIL"
    assert found["target has a capture hook"].status == "warn"
    assert "Qwen2ForCausalLM has no" in found["target has a capture hook"].detail


def test_the_class_of_a_nested_text_config_is_the_outer_one():
    text = {"hidden_size": 8, "num_hidden_layers": 6, "vocab_size": 9, "max_position_embeddings": 16}
    nested = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": text}
    assert TargetFacts.from_config("some/target", nested).config["architectures"] == nested["architectures"]


def test_without_a_target_that_is_said(exported):
    (last,) = [c for c in check_export(exported.path) if c.status == "warn"]
    assert last.name == "target"
    assert "not compared" in last.detail


# -- whole or not at all -------------------------------------------------------------------------------------


def left_behind(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_draft_without_markov_head_cannot_be_served_and_is_refused(config, tmp_path):
    bare = dataclasses.replace(config, markov_rank=0, markov_head_type="vanilla", confidence_head_with_markov=False)
    with pytest.raises(ExportError, match="markov_rank is 0"):
        export(random_params(bare), bare, tmp_path / "draft")
    assert left_behind(tmp_path) == []


def test_a_draft_without_confidence_head_is_exported_loudly(config, tmp_path):
    bare = dataclasses.replace(config, enable_confidence_head=False)
    report = export(random_params(bare), bare, tmp_path / "draft")
    (check,) = [c for c in report.checks if c.name == "confidence head"]
    assert check.status == "warn"
    assert "never serve" in check.detail
    assert "do not serve" in (report.path / "README.md").read_text()


def test_broken_weights_are_refused(config, params, tmp_path):
    broken = {**params, "norm": {"scale": params["norm"]["scale"].at[0].set(jnp.nan)}}
    with pytest.raises(ExportError, match=r"finite: norm\.weight"):
        export(broken, config, tmp_path / "draft")
    assert left_behind(tmp_path) == []


def test_another_target_is_refused(config, params, facts, tmp_path):
    with pytest.raises(ExportError, match=r"hidden_size = target's: draft 16, target 32"):
        export(params, config, tmp_path / "draft", target_info=dataclasses.replace(facts, hidden_size=32))
    assert left_behind(tmp_path) == []


def test_a_used_folder_is_refused_and_replaced_by_force(config, params, tmp_path):
    output = tmp_path / "draft"
    output.mkdir()
    (output / "precious").write_text("x")
    with pytest.raises(ExportError, match=r"is not empty; .* --force"):
        export(params, config, output)
    assert left_behind(output) == ["precious"]
    export(params, config, output, force=True)
    assert left_behind(output) == ["README.md", "config.json", "model.safetensors"]
    assert left_behind(tmp_path) == ["draft"]


def test_an_empty_folder_is_filled_and_a_file_refused(config, params, tmp_path):
    (tmp_path / "empty").mkdir()
    export(params, config, tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ExportError, match="is a file"):
        export(params, config, tmp_path / "file")
    with pytest.raises(ExportError, match="cannot create"):
        export(params, config, tmp_path / "file" / "below")


def test_a_reload_that_differs_in_one_bit_is_refused(config, params, tmp_path, monkeypatch):
    def flipped(folder):
        loaded_config, loaded, report = load_folder(folder)
        scale = loaded["norm"]["scale"]
        return (
            loaded_config,
            {**loaded, "norm": {"scale": scale.at[0].set(jnp.nextafter(scale[0], 9.0))}},
            report,
        )

    def renamed(folder):
        loaded_config, loaded, report = load_folder(folder)
        return dataclasses.replace(loaded_config, mask_token_id=6), loaded, report

    for wrong, message in ((flipped, r"norm\.weight does not read back bit for bit"),
                           (renamed, r"mask_token_id 5 came back as 6")):  # fmt: skip
        monkeypatch.setattr(weights, "load_folder", wrong)
        with pytest.raises(ExportError, match=message):
            export(params, config, tmp_path / "draft")
        assert left_behind(tmp_path) == []


def test_a_full_disk_is_told_in_words(config, params, tmp_path, monkeypatch):
    def fail(error):
        def save(*args, **kwargs):
            Path(args[1]).write_bytes(b"half a file")
            raise error

        return save

    full = OSError(errno.ENOSPC, "No space left on device")
    rust = type("SafetensorError", (Exception,), {})("I/O error: No space left on device (os error 28)")
    for error in (full, rust):
        monkeypatch.setattr(safetensors.numpy, "save_file", fail(error))
        with pytest.raises(ExportError, match=r"disk of .* is full: the export needs 0\.0 MiB"):
            export(params, config, tmp_path / "draft")
        assert left_behind(tmp_path) == []
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ExportError, match="no space left for the export: it needs"):
        export(params, config, tmp_path / "draft")


def test_a_write_that_fails_for_real_leaves_nothing_and_keeps_the_old_export(exported, config, tmp_path):
    """The kernel refuses bytes past a limit in the middle of the file, as a full disk does."""
    output = tmp_path / "draft"
    shutil.copytree(exported.path, output)
    before = (output / "model.safetensors").read_bytes()
    code = f"""
import resource, sys
from draft_jax.weights import load_folder
from train.export import export
config, params, _ = load_folder({str(exported.path)!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    export(params, config, {str(output)!r}, force=True)
except Exception as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ExportError: writing the export" in done.stderr
    assert "is as it was" in done.stderr
    assert left_behind(tmp_path) == ["draft"]
    assert (output / "model.safetensors").read_bytes() == before


# -- the command ---------------------------------------------------------------------------------------------


def test_command_exports_a_folder_and_checks_it(exported, tmp_path, capsys):
    output = tmp_path / "again"
    assert main(["--draft", str(exported.path), "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "  ok  reload" in printed
    assert str(output) in printed
    assert main(["--check", str(output)]) == 0
    (output / "config.json").write_text("{}")
    assert main(["--check", str(output)]) == 1
    assert "FAIL  model_type" in capsys.readouterr().out


def test_special_ids_a_draft_does_not_say_come_from_the_target(config, facts):
    bare = dataclasses.replace(config, bos_token_id=None, eos_token_id=None, target_name=None)
    filled = with_targets_ids(bare, facts)
    assert (filled.bos_token_id, filled.eos_token_id, filled.target_name) == (1, (2, 3), "some/target")
    assert with_targets_ids(config, dataclasses.replace(facts, config={"bos_token_id": 9})) == config


def test_command_refuses_what_is_no_draft(tmp_path):
    with pytest.raises(ValueError, match="neither a run directory"):
        main(["--run", str(tmp_path), "--output", str(tmp_path / "out")])
    with pytest.raises(ValueError, match="no such folder"):
        main(["--draft", str(tmp_path / "absent"), "--output", str(tmp_path / "out")])


def test_loading_is_checked_too(exported):
    assert verify_export(exported.path)[-1].name == "loads"
    header, metadata = read_header(exported.path / "model.safetensors")
    assert metadata == {"format": "pt"}
    assert len(header) == len(safetensors.numpy.load_file(exported.path / "model.safetensors"))
