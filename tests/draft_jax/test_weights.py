"""Weights: one table both ways, foreign folders read, everything that does not fit refused by its name."""

import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from draft_jax import weights
from draft_jax.batch import FrozenHead
from draft_jax.config import DraftConfig
from draft_jax.models.dspark import abstract_params, bind, path_name
from tests.places import public_draft

from .drafts import blocks_at, frozen_head, random_batch, random_params, tiny_config
from .test_config import deepspec_layout, specforge_layout

BF16 = np.dtype(ml_dtypes.bfloat16)
KINDS = {
    "vanilla": tiny_config(),
    "gated": tiny_config(markov_head_type="gated", num_hidden_layers=1),
    "rnn": tiny_config(markov_head_type="rnn", confidence_head_with_markov=False, num_key_value_heads=6),
    "bare": tiny_config(markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False),
}
CONFIG = KINDS["vanilla"]


def tensors_of(config=CONFIG) -> dict[str, np.ndarray]:
    return weights.to_torch_layout(random_params(config), config)


def bits(array) -> np.ndarray:
    array = np.asarray(array)
    return array.view(np.uint16 if array.dtype.itemsize == 2 else np.uint32)


def write(folder, tensors, config=CONFIG, layout=DraftConfig.to_hf, prefix="", shards=1):
    """A draft's folder; more than one shard makes a sharded one with an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(layout(config)))
    named = {prefix + name: tensor for name, tensor in tensors.items()}
    if shards == 1:
        save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(named.items())[i::shards])
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


# -- the table -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_table_config_and_module_agree(kind):
    """Three descriptions of a draft: names and shapes of the config, the table, and the module's own
    parameters."""
    config = KINDS[kind]
    rules = weights.table(config)
    expected = config.parameter_shapes()
    assert sorted(rule.name for rule in rules) == sorted(expected)
    module = {
        path_name(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params(config))
    }
    assert sorted("/".join(rule.path) for rule in rules) == sorted(module)
    for rule in rules:
        shape = module["/".join(rule.path)]
        assert expected[rule.name] == (shape[::-1] if rule.transpose else shape), rule.name


def test_golden_names():
    """field_survey 1.6, written out: exactly these, and no wrapper prefix."""
    layer = """
        input_layernorm post_attention_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj
        self_attn.o_proj self_attn.q_norm self_attn.k_norm mlp.gate_proj mlp.up_proj mlp.down_proj
    """
    modules = [
        "fc",
        "hidden_norm",
        "norm",
        "markov_head.markov_w1",
        "markov_head.markov_w2",
        "confidence_head.proj",
    ]
    modules += [f"layers.{i}.{part}" for i in (0, 1) for part in layer.split()]
    golden = [f"{module}.weight" for module in modules] + ["confidence_head.proj.bias"]
    assert sorted(tensors_of()) == sorted(golden)
    extra = {"gated": "gate_proj", "rnn": "joint_proj"}
    for kind, layer in extra.items():
        added = {f"markov_head.{layer}.weight", f"markov_head.{layer}.bias"}
        assert added <= set(tensors_of(KINDS[kind])), kind


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_is_bit_equal(kind):
    """T23: every kernel is the transpose, in its dtype, contiguous; back again every bit is the same."""
    config = KINDS[kind]
    params = random_params(config)
    for dtype in (np.dtype(np.float32), BF16):
        tensors = weights.to_torch_layout(params, config, dtype)
        for rule in weights.table(config):
            tensor, leaf = tensors[rule.name], params
            for key in rule.path:
                leaf = leaf[key]
            leaf = np.asarray(leaf).astype(dtype)
            assert tensor.dtype == dtype
            assert tensor.flags.c_contiguous
            np.testing.assert_array_equal(bits(tensor), bits(np.ascontiguousarray(leaf.T if rule.transpose else leaf)))
        again = weights.to_torch_layout(weights.from_torch_layout(tensors, config), config, dtype)
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(bits(again[name]), bits(tensor), err_msg=name)


def test_reloaded_draft_computes_the_same_bits(tmp_path):
    """T23: write, reload, run: logits equal bit for bit on a fixed input."""
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), random_params(CONFIG))
    folder = write(tmp_path / "draft", weights.to_torch_layout(rounded, CONFIG))
    config, loaded, _ = weights.load_folder(folder)
    assert config == CONFIG
    batch, frozen = random_batch(CONFIG, [[12]], 12), frozen_head(CONFIG)
    blocks = blocks_at(batch, [[3, 7]], CONFIG)

    @jax.jit
    def logits(params):
        draft = bind(CONFIG, params, jnp.float32)
        hidden = draft(batch, blocks, frozen, jnp.ones((1, 12), bool))
        bias = draft.markov.states(hidden, blocks.prev) @ draft.markov.w2().T
        return hidden @ frozen.lm_head[:31].T + bias, draft.confidence(hidden, draft.markov.embed(blocks.prev))

    for got, want in zip(logits(loaded), logits(rounded), strict=True):
        np.testing.assert_array_equal(bits(got), bits(want))


def test_parameters_of_another_draft_are_refused_by_name():
    params = random_params(CONFIG)
    with pytest.raises(weights.WeightsError, match=r"lack markov/gate_proj/kernel \(tensor markov_head\.gate_proj"):
        weights.to_torch_layout(params, KINDS["gated"])
    with pytest.raises(weights.WeightsError, match=r"parameters hold .*layers/1/"):
        weights.to_torch_layout(params, tiny_config(num_hidden_layers=1))
    with pytest.raises(weights.WeightsError, match=r"wrong shape: fc\.weight \[24, 72\], expected \[24, 48\]"):
        weights.to_torch_layout(params, tiny_config(target_layer_ids=(0, 2)))


# -- folders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "model.", "draft_model.", "module.draft_model."])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("layout", [DraftConfig.to_hf, deepspec_layout, specforge_layout])
def test_every_layout_loads(tmp_path, layout, shards, prefix):
    tensors = tensors_of()
    frozen = np.zeros((31, 24), BF16)
    extras = {"embed_tokens.weight": frozen, "lm_head.weight": frozen} if layout is deepspec_layout else {}
    folder = write(tmp_path / "draft", tensors | extras, layout=layout, prefix=prefix, shards=shards)
    config, params, report = weights.load_folder(folder)
    assert config == CONFIG
    for name, tensor in weights.to_torch_layout(params, config).items():
        np.testing.assert_array_equal(bits(tensor), bits(tensors[name]), err_msg=name)
    assert report.loaded == len(tensors)
    assert len(report.files) == shards
    assert report.ignored == {prefix + name: (31, 24) for name in extras}
    assert "".join(sorted(report.stripped)) == "".join(sorted(p + "." for p in prefix.split(".") if p))
    for name in extras:
        assert name in report.format()


def test_fp16_and_fp32_files_load(tmp_path):
    tensors = weights.to_torch_layout(random_params(CONFIG), CONFIG, np.float32)
    tensors["fc.weight"] = tensors["fc.weight"].astype(np.float16)
    _, params, _ = weights.load_folder(write(tmp_path / "draft", tensors))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    np.testing.assert_array_equal(params["fc"]["kernel"], tensors["fc.weight"].T.astype(np.float32))


@pytest.mark.parametrize("name", ["fc.weight", "layers.1.mlp.up_proj.weight", "confidence_head.proj.bias"])
def test_a_missing_tensor_is_named(tmp_path, name):
    tensors = tensors_of()
    del tensors[name]
    with pytest.raises(weights.WeightsError, match=f"missing: {name}"):
        weights.load_folder(write(tmp_path / "draft", tensors))


def test_unknown_tensors_are_named(tmp_path):
    tensors = tensors_of() | {
        "layers.2.mlp.up_proj.weight": np.zeros((40, 24), BF16),
        "d2t": np.zeros(3, np.int64),
    }
    with pytest.raises(weights.WeightsError, match=r"unknown: d2t, layers\.2\.mlp\.up_proj\.weight"):
        weights.load_folder(write(tmp_path / "draft", tensors))


def test_a_wrong_shape_is_named(tmp_path):
    tensors = tensors_of()
    # The transpose: the mistake of an exporter that writes kernels as they are in memory.
    tensors["fc.weight"] = np.ascontiguousarray(tensors["fc.weight"].T)
    with pytest.raises(weights.WeightsError, match=r"wrong shape: fc\.weight \[72, 24\], expected \[24, 72\]"):
        weights.load_folder(write(tmp_path / "draft", tensors))


@pytest.mark.parametrize("dtype", [np.int64, bool, np.float64, ml_dtypes.float8_e4m3fn])
def test_a_wrong_dtype_is_named(dtype):
    tensors = tensors_of()
    tensors["norm.weight"] = tensors["norm.weight"].astype(dtype)
    with pytest.raises(weights.WeightsError, match=rf"norm\.weight has dtype {np.dtype(dtype).name}; expected one of"):
        weights.from_torch_layout(tensors, CONFIG)


def test_two_names_for_one_tensor_are_refused():
    tensors = tensors_of()
    tensors["model.norm.weight"] = tensors["norm.weight"]
    with pytest.raises(weights.WeightsError, match=r"norm\.weight and model\.norm\.weight are both norm\.weight"):
        weights.from_torch_layout(tensors, CONFIG)


def test_case_t23_config_faults_name_the_key(tmp_path):
    """Taps removed, mask id = vocabulary size: the load fails with that name."""
    folder = write(tmp_path / "draft", tensors_of())
    good = json.loads((folder / "config.json").read_text())

    def load_with(**changes):
        config = {**good, **changes, "dflash_config": {**good["dflash_config"], **changes}}
        config["dflash_config"] = {k: v for k, v in config["dflash_config"].items() if v is not None}
        (folder / "config.json").write_text(json.dumps(config))
        return weights.load_folder(folder)

    with pytest.raises(ValueError, match=r"config\.json: draft config has no target_layer_ids"):
        load_with(target_layer_ids=None)
    with pytest.raises(ValueError, match="mask_token_id 31 is not below vocab_size 31"):
        load_with(mask_token_id=31)
    with pytest.raises(ValueError, match=r"wrong shape: fc\.weight \[24, 72\], expected \[24, 48\]"):
        load_with(target_layer_ids=[0, 2])


def test_broken_folders_are_refused_in_words(tmp_path):
    with pytest.raises(weights.WeightsError, match=r"not a draft's folder: it has no config\.json"):
        weights.load_folder(tmp_path / "nowhere")
    folder = write(tmp_path / "draft", tensors_of(), shards=3)
    lost = folder / "model-00002-of-00003.safetensors"
    content = lost.read_bytes()
    lost.unlink()
    with pytest.raises(weights.WeightsError, match=r"shard model-00002-of-00003\.safetensors .* is missing"):
        weights.load_folder(folder)
    lost.write_bytes(content[: len(content) // 2])
    with pytest.raises(weights.WeightsError, match=r"model-00002-of-00003\.safetensors cannot be read"):
        weights.load_folder(folder)
    lost.write_bytes(content)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(weights.WeightsError, match="remove the one that is stale"):
        weights.load_folder(folder)
    for file in folder.glob("model*"):
        file.unlink()
    with pytest.raises(weights.WeightsError, match=r"neither model\.safetensors nor"):
        weights.load_folder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(weights.WeightsError, match=r"config\.json is not JSON"):
        weights.load_folder(folder)


def test_case_t23_stored_head_is_compared_with_the_targets(tmp_path):
    """Absent, bit-equal (tied and padded targets too), or an error with the name: never another head."""
    rng = np.random.default_rng(0)
    embedding, head = rng.normal(size=(2, 34, 24)).astype(BF16)
    target = FrozenHead(embedding=jnp.asarray(embedding), lm_head=jnp.asarray(head))
    stored = {"embed_tokens.weight": embedding[:31], "lm_head.weight": head[:31]}
    assert weights.check_frozen(write(tmp_path / "none", tensors_of()), target) == ()
    folder = write(tmp_path / "same", tensors_of() | stored)
    assert sorted(weights.check_frozen(folder, target)) == ["embed_tokens.weight", "lm_head.weight"]
    in_fp32 = jax.tree.map(lambda x: x.astype(jnp.float32), target)
    assert len(weights.check_frozen(folder, in_fp32)) == 2
    tied = FrozenHead(embedding=target.embedding, lm_head=target.embedding)
    with pytest.raises(weights.WeightsError, match=r"lm_head\.weight differs from the target's"):
        weights.check_frozen(folder, tied)
    both = {"model.embed_tokens.weight": embedding, "model.lm_head.weight": embedding}
    assert len(weights.check_frozen(write(tmp_path / "tied", tensors_of() | both), tied)) == 2
    narrow = {"embed_tokens.weight": embedding[:, :8].copy()}
    with pytest.raises(weights.WeightsError, match=r"embed_tokens\.weight has shape \[34, 8\]"):
        weights.check_frozen(write(tmp_path / "narrow", tensors_of() | narrow), target)


def test_the_public_draft_loads(shared_draft):
    """A draft made by DeepSpec's own trainer: 40 tensors, all of them, and the same bits on the way back."""
    config, params, report = weights.load_folder(shared_draft)
    assert report.loaded == 40
    assert not report.ignored
    assert config.target_layer_ids == (1, 7, 14, 21, 27)
    total = sum(math.prod(shape) for shape in config.parameter_shapes().values())
    assert total == sum(leaf.size for leaf in jax.tree.leaves(params)) == 24_864_321


@pytest.fixture
def shared_draft():
    return public_draft()
