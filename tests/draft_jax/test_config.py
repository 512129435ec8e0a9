"""DraftConfig: validation names what is wrong, targets and drafts are read, exports satisfy checklist 3.7."""

import dataclasses
import json
import math

import pytest

from draft_jax.config import DraftConfig, spread_layer_ids
from draft_jax.rope import RopeScaling, inverse_frequencies

from .drafts import tiny_config

LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
TARGET = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "bos_token_id": 151643,
    "eos_token_id": [151645, 151643],
}


def of_target(target=TARGET, **changes) -> DraftConfig:
    options = {"num_hidden_layers": 5, "block_size": 7, "mask_token_id": 151669, **changes}
    return DraftConfig.from_target(target, **options)


# -- validation ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": (0, 2, 5)}, r"target_layer_ids contains 5, outside 0\.\.4"),
        ({"target_layer_ids": (-1, 2)}, "target_layer_ids contains -1"),
        ({"target_layer_ids": (0, 2, 2)}, "target_layer_ids contains 2 twice"),
        ({"target_layer_ids": (3, 0)}, r"0 follows 3.*write \[0, 3\]"),
        ({"target_layer_ids": ()}, "target_layer_ids is empty"),
        ({"target_layer_ids": (1.0,)}, r"target_layer_ids contains 1\.0"),
        ({"mask_token_id": 31}, "mask_token_id 31 is not below vocab_size 31"),
        ({"mask_token_id": -1}, "mask_token_id must be an integer >= 0, got -1"),
        ({"mask_token_id": None}, "mask_token_id must be an integer >= 0, got None"),
        ({"block_size": 0}, "block_size must be an integer >= 1, got 0"),
        ({"hidden_size": True}, "hidden_size must be an integer >= 1, got True"),
        ({"num_hidden_layers": 2.0}, r"num_hidden_layers must be an integer >= 1, got 2\.0"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple of num_key_value_heads 4"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"markov_head_type": "lstm"}, "markov_head_type 'lstm' is unknown.*vanilla, gated, rnn"),
        ({"markov_rank": -1}, "markov_rank must be an integer >= 0, got -1"),
        ({"markov_rank": 0}, "confidence_head_with_markov true needs a Markov head but markov_rank is 0"),
        ({"attention_bias": True}, "attention_bias true is not supported"),
        ({"rope_theta": 0.0}, r"rope_theta must be a positive number, got 0\.0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, got nan"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling must be a RopeScaling or None"),
    ],
)
def test_bad_values_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


def test_markov_and_confidence_combine_freely():
    assert tiny_config(markov_rank=0, enable_confidence_head=False).markov_rank == 0
    assert tiny_config(markov_rank=0, confidence_head_with_markov=False).confidence_features == 24
    assert tiny_config().confidence_features == 24 + 5


def test_config_is_hashable_and_takes_lists():
    config = tiny_config(target_layer_ids=[0, 2, 3], eos_token_id=[1, 2])
    assert config == tiny_config(eos_token_id=(1, 2))
    assert hash(config) == hash(tiny_config(eos_token_id=(1, 2)))


# -- from a target -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "taps", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (40, 5, (1, 10, 19, 28, 37)),
        (28, 1, (14,)),
        (30, 5, (1, 8, 14, 20, 27)),
    ],
)
def test_taps_spread_by_the_rule(layers, taps, expected):
    assert spread_layer_ids(layers, taps) == expected


def test_too_many_taps_for_a_small_target():
    with pytest.raises(ValueError, match=r"num_taps 5 .* target of 6 layers; give target_layer_ids"):
        spread_layer_ids(6, 5)


def test_from_target_takes_the_targets_shape():
    config = of_target()
    assert config.hidden_size == 2560
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, 128)
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert (config.num_hidden_layers, config.num_target_layers) == (5, 36)
    assert (config.rope_theta, config.rope_scaling, config.max_position_embeddings) == (1e6, None, 40960)
    assert (config.bos_token_id, config.eos_token_id) == (151643, (151645, 151643))
    assert of_target(rms_norm_eps=1e-5, markov_rank=0, confidence_head_with_markov=False).rms_norm_eps == 1e-5


def test_from_target_fills_in_head_sizes():
    bare = {k: v for k, v in TARGET.items() if k not in ("head_dim", "num_key_value_heads")}
    assert (of_target(bare).head_dim, of_target(bare).num_key_value_heads) == (80, 32)
    with pytest.raises(ValueError, match="hidden_size 2561 is not a multiple of 32 heads: give head_dim"):
        of_target({**bare, "hidden_size": 2561})


def test_from_target_reads_nested_text_config_and_new_rope_keys():
    text = {k: v for k, v in TARGET.items() if not k.startswith(("rope", "eos"))}
    text["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    config = of_target({"model_type": "some_vl", "text_config": text, "eos_token_id": 7})
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling("linear", 2.0)
    assert config.eos_token_id == 7


def test_from_target_drops_what_only_images_or_the_target_need():
    rope = {
        "rope_type": "mrope",
        "mrope_section": [8, 12, 12],
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
    }
    target = {**TARGET, "rope_parameters": rope}
    del target["rope_scaling"]
    assert of_target(target).rope_scaling is None


def test_from_target_refuses_by_name():
    with pytest.raises(ValueError, match="rope_scaling type 'yarn' is not supported"):
        of_target({**TARGET, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    yarn = {**TARGET, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    assert of_target(yarn, rope_scaling=None).rope_scaling is None
    without = {k: v for k, v in TARGET.items() if k != "intermediate_size"}
    with pytest.raises(ValueError, match="target config has no intermediate_size"):
        of_target(without)
    assert of_target(without, intermediate_size=11).intermediate_size == 11
    with pytest.raises(ValueError, match=r"unknown DraftConfig field.* blok_size"):
        of_target(blok_size=7)


# -- reading drafts ------------------------------------------------------------------------------------------


def deepspec_layout(config: DraftConfig) -> dict:
    """dspark_spec 3.3: flat keys, rope under `rope_parameters`."""
    hf = config.to_hf()
    for key in (
        "dflash_config",
        "rope_theta",
        "rope_scaling",
        "sample_from_anchor",
        "target_model_name_or_path",
    ):
        del hf[key]
    return hf


def specforge_layout(config: DraftConfig) -> dict:
    """field_survey 1.4: nested keys, another architecture name, `auto_map`."""
    hf = config.to_hf()
    for key in hf["dflash_config"]:
        hf.pop(key, None)
    for key in ("rope_parameters", "sample_from_anchor", "target_model_name_or_path", "num_anchors"):
        del hf[key]
    hf["dflash_config"] |= {"confidence_head_alpha": 1.0}
    return {**hf, "architectures": ["DSparkDraftModel"], "auto_map": {"AutoModel": "dspark.DSparkDraftModel"}}


@pytest.mark.parametrize("layout", [DraftConfig.to_hf, deepspec_layout, specforge_layout])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": LLAMA3, "eos_token_id": (1, 2), "bos_token_id": 0, "pad_token_id": 2},
        {"rope_scaling": RopeScaling("linear", 4.0), "markov_head_type": "rnn", "eos_token_id": 3},
        {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
        {"markov_head_type": "gated", "confidence_head_with_markov": False, "num_key_value_heads": 6},
    ],
)
def test_every_layout_reads_back(layout, changes):
    config = tiny_config(**changes)
    hf = json.loads(json.dumps(layout(config)))
    assert DraftConfig.from_hf(hf) == config


def test_our_export_keeps_every_field():
    config = tiny_config(target_name="some/target", num_anchors=77, initializer_range=0.01, rope_scaling=LLAMA3)
    changed = {
        field.name
        for field in dataclasses.fields(config)
        if getattr(DraftConfig.from_hf(config.to_hf()), field.name) != getattr(config, field.name)
    }
    assert not changed


@pytest.mark.parametrize(
    "key",
    ["target_layer_ids", "mask_token_id", "block_size", "markov_rank", "num_target_layers", "vocab_size"],
)
def test_a_missing_key_is_named(key):
    hf = tiny_config().to_hf()
    hf.pop(key)
    hf["dflash_config"].pop(key, None)
    with pytest.raises(ValueError, match=f"draft config has no {key}"):
        DraftConfig.from_hf(hf)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DFlashDraftModel"]}, "architecture 'DFlashDraftModel'"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "architecture 'LlamaForCausalLMEagle3'"),
        ({"architectures": None}, "config has no architectures"),
        ({"model_type": "gemma4_unified_text"}, "model_type 'gemma4_unified_text'"),
        ({"mask_token_id": 31, "dflash_config": {}}, "mask_token_id 31 is not below vocab_size 31"),
        ({"markov_rank": 6}, r"contradicts itself: dflash_config\.markov_rank = 5, markov_rank = 6"),
        ({"rope_theta": 1.0}, r"contradicts itself: rope_theta = 1\.0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "contradicts itself: rope_scaling"),
        ({"rope_theta": None, "rope_parameters": {}}, "neither rope_theta nor"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types\[1\] is 'sliding_attention'",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries but num_hidden_layers is 2"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"sample_from_anchor": False}, "sample_from_anchor False"),
        ({"partial_rotary_factor": 0.25}, r"partial_rotary_factor 0\.25"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping 30\.0"),
        ({"dflash_config": {"projector_type": "domino"}}, "projector_type 'domino'"),
    ],
)
def test_what_is_not_this_draft_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        DraftConfig.from_hf({**tiny_config().to_hf(), **changes})


# -- export checklist (field_survey 3.7) ---------------------------------------------------------------------


def test_export_satisfies_the_checklist():
    config = of_target(target_name="Qwen/Qwen3-4B", pad_token_id=151643)
    hf = config.to_hf()
    assert hf["architectures"] == ["Qwen3DSparkModel"]
    assert hf["model_type"] == "qwen3"
    assert "auto_map" not in hf
    assert hf["dtype"] == "bfloat16"
    assert hf["tie_word_embeddings"] is False
    assert (hf["hidden_size"], hf["vocab_size"], hf["head_dim"]) == (2560, 151936, 128)
    assert (hf["num_hidden_layers"], hf["num_target_layers"]) == (5, 36)
    assert hf["layer_types"] == ["full_attention"] * 5
    assert hf["block_size"] == 7
    assert hf["sample_from_anchor"] is True
    assert hf["max_position_embeddings"] == 40960
    assert (hf["bos_token_id"], hf["eos_token_id"], hf["pad_token_id"]) == (151643, [151645, 151643], 151643)
    assert (hf["rope_theta"], hf["rope_scaling"]) == (1e6, None)
    assert hf["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}
    heads = {
        "target_layer_ids": [1, 9, 17, 25, 33],
        "mask_token_id": 151669,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    for key, value in heads.items():
        assert hf[key] == value, key
        assert hf["dflash_config"][key] == value, key
    assert hf["dflash_config"]["projector_type"] == "dspark"
    assert json.loads(json.dumps(hf)) == hf


def test_export_writes_scaled_rope_for_old_and_new_readers():
    hf = tiny_config(rope_scaling=LLAMA3).to_hf()
    assert hf["rope_parameters"] == {"rope_theta": 1e4, **hf["rope_scaling"]}
    assert hf["rope_scaling"]["rope_type"] == "llama3"


def test_public_parameter_count_of_the_4b_draft():
    """dspark_spec 1.7: 615.2M trainable parameters for the Qwen3-4B draft, 537.4M without the heads."""

    def millions(config):
        shapes = config.parameter_shapes().values()
        return sum(math.prod(shape) for shape in shapes) / 1e6

    assert millions(of_target()) == pytest.approx(615.2, abs=0.1)
    plain = of_target(markov_rank=0, enable_confidence_head=False)
    assert millions(plain) == pytest.approx(537.4, abs=0.1)


# -- rotary frequencies --------------------------------------------------------------------------------------


def test_rope_scaling_is_checked():
    with pytest.raises(ValueError, match="type 'llama3' lacks low_freq_factor"):
        RopeScaling("llama3", 8.0)
    with pytest.raises(ValueError, match="'dynamic' is not supported"):
        RopeScaling("dynamic", 2.0)
    with pytest.raises(ValueError, match="type 'linear' lacks factor"):
        RopeScaling.from_hf({"type": "linear"})
    with pytest.raises(ValueError, match=r"unknown key\(s\) beta_fast"):
        RopeScaling.from_hf({"type": "linear", "factor": 2.0, "beta_fast": 32})
    with pytest.raises(ValueError, match=r"factor must be >= 1, got 0\.5"):
        RopeScaling("linear", 0.5)


def test_inverse_frequencies():
    """Values of Llama-3.1's rule (theta 5e5, factor 8, limits 1 and 4, context 8192), worked out by hand."""
    plain = inverse_frequencies(128, 5e5, None)
    assert plain.dtype == "float32"
    assert plain[0] == 1.0
    assert plain[32] == pytest.approx(5e5**-0.5, rel=1e-6)
    assert inverse_frequencies(128, 5e5, RopeScaling("linear", 4.0))[32] == pytest.approx(plain[32] / 4)
    scaled = inverse_frequencies(128, 5e5, LLAMA3)
    assert scaled[0] == plain[0]  # wavelength 6.28, far below 8192 / 4: kept
    assert scaled[63] == pytest.approx(plain[63] / 8, rel=1e-6)  # wavelength 2.6 million: stretched
    turns = 8192 * float(plain[32]) / (2 * 3.141592653589793)  # 1.8437, between the limits
    blend = (turns - 1) / 3
    assert 0 < blend < 1
    assert scaled[32] == pytest.approx(blend * plain[32] + (1 - blend) * plain[32] / 8, rel=1e-6)
