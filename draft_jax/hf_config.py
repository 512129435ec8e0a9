"""config.json <-> `DraftConfig` fields: reading a target, reading any known draft layout, writing ours.

Where serving looks for each key is field_survey 3.3 and 3.4; what must be written is its checklist 3.7.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from draft_jax.rope import RopeScaling

if TYPE_CHECKING:
    from draft_jax.config import DraftConfig

ARCHITECTURE = "Qwen3DSparkModel"
# One implementation in serving under both names; DFlash's own class counts blocks differently and is not
# read.
_READABLE_ARCHITECTURES = (ARCHITECTURE, "DSparkDraftModel")
_NESTED_SECTIONS = ("dspark_config", "dflash_config")
# What makes a checkpoint something other than the draft implemented here: key -> the values that mean "not
# used".
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "projector_type": ("dspark",),
    "attention_mode": ("gqa", "mha"),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "use_sliding_window": (False,),
    "is_causal": (False,),
    "sample_from_anchor": (True,),
    "partial_rotary_factor": (1, 1.0),
    "rope_is_neox_style": (True,),
    "use_gemma_norm": (False,),
    "final_logit_softcapping": (),
    "output_multiplier": (1, 1.0),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1, 1.0),
    "conv_kernel_size": (0,),
    "conv_group_size": (0,),
    "selector_rank": (0,),
    "selector_top_k": (0,),
}


def read_target(config: Mapping[str, Any], skip: Collection[str] = ()) -> dict[str, Any]:
    """The `DraftConfig` fields a draft takes over from its target.

    Args:
        config: the target's config.json; for a multimodal target its `text_config` is what counts.
        skip: fields the caller sets itself; they may then be absent or unsupported in `config`.

    Raises:
        ValueError: a size is missing, by name, or the rotary scaling is unsupported.
    """
    text = config.get("text_config") or config
    # The target calls its own depth num_hidden_layers; in DraftConfig that name is the draft's depth.
    source = {
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_attention_heads": "num_attention_heads",
        "vocab_size": "vocab_size",
        "num_target_layers": "num_hidden_layers",
    }
    fields: dict[str, Any] = {}
    for field, key in source.items():
        if field in skip:
            continue
        if text.get(key) is None:
            raise ValueError(f"target config has no {key}: pass {field}= to choose the draft's {field} yourself")
        fields[field] = text[key]
    for key in ("num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings"):
        if key not in skip and text.get(key) is not None:
            fields[key] = text[key]
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        # Multimodal configs keep the special ids beside text_config.
        value = text.get(key) if text.get(key) is not None else config.get(key)
        if key not in skip and value is not None:
            fields[key] = value
    theta, scaling = _rope(text)
    if "rope_theta" not in skip and theta is not None:
        fields["rope_theta"] = theta
    if "rope_scaling" not in skip:
        # Partial rotation is the target's business; a fresh draft rotates whole heads.
        scaling.pop("partial_rotary_factor", None)
        fields["rope_scaling"] = RopeScaling.from_hf(scaling)
    return fields


def read_draft(config: Mapping[str, Any]) -> dict[str, Any]:
    """`DraftConfig` fields of a draft's config.json, whichever of the known layouts it uses.

    Raises:
        ValueError: see `DraftConfig.from_hf`.
    """
    _check_architecture(config)
    for key, neutral in _NEUTRAL_VALUES.items():
        value = _lookup(config, key)
        if value is not None and value not in neutral:
            wanted = " or ".join(repr(item) for item in neutral) or "null"
            raise ValueError(f"draft config has {key} {value!r}, which this draft does not implement (only {wanted})")
    layer_types = config.get("layer_types") or []
    for index, layer_type in enumerate(layer_types):
        if layer_type != "full_attention":
            raise ValueError(f"layer_types[{index}] is {layer_type!r}: only full_attention layers are implemented")
    required = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
        "num_target_layers", "target_layer_ids", "block_size", "mask_token_id",
    )  # fmt: skip
    fields = {key: _require(config, key) for key in required}
    if layer_types and len(layer_types) != fields["num_hidden_layers"]:
        raise ValueError(
            f"layer_types has {len(layer_types)} entries but num_hidden_layers is {fields['num_hidden_layers']}"
        )
    fields["target_layer_ids"] = tuple(fields["target_layer_ids"])
    fields["num_key_value_heads"] = _lookup(config, "num_key_value_heads")
    fields["head_dim"] = _lookup(config, "head_dim")
    complete_heads(fields)
    fields["markov_rank"] = _require(config, "markov_rank")
    if fields["markov_rank"] == 0:
        # DeepSpec writes neither key for a draft without a Markov head.
        fields["confidence_head_with_markov"] = False
    for key in (
        "rms_norm_eps", "max_position_embeddings", "initializer_range", "num_anchors", "markov_head_type",
        "enable_confidence_head", "confidence_head_with_markov", "bos_token_id", "pad_token_id",
    ):  # fmt: skip
        value = _lookup(config, key)
        if value is not None:
            fields[key] = value
    eos = config.get("eos_token_id")
    fields["eos_token_id"] = tuple(eos) if isinstance(eos, (list, tuple)) else eos
    fields["target_name"] = config.get("target_model_name_or_path")
    theta, scaling = _rope(config)
    if theta is None:
        raise ValueError("draft config has neither rope_theta nor rope_parameters.rope_theta: add the rotary base")
    fields["rope_theta"] = theta
    fields["rope_scaling"] = RopeScaling.from_hf(scaling)
    return fields


def write_draft(config: DraftConfig) -> dict[str, Any]:
    """The config.json of `config`, ready for `json.dump` (checklist 3.7)."""
    scaling = config.rope_scaling.to_hf() if config.rope_scaling else None
    eos = list(config.eos_token_id) if isinstance(config.eos_token_id, tuple) else config.eos_token_id
    # Serving's parser reads these from dflash_config, its head builder only from the top level (3.3).
    both_places = {
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
    }
    grouped = config.num_key_value_heads < config.num_attention_heads
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "max_position_embeddings": config.max_position_embeddings,
        # Old and new readers look in different places for the rotary base, so it stands in both.
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": config.num_hidden_layers,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos,
        "pad_token_id": config.pad_token_id,
        "num_target_layers": config.num_target_layers,
        "target_model_name_or_path": config.target_name,
        "num_anchors": config.num_anchors,
        "block_size": config.block_size,
        "sample_from_anchor": True,
        **both_places,
        "dflash_config": {
            "projector_type": "dspark",
            "attention_mode": "gqa" if grouped else "mha",
            **both_places,
        },
    }


def _check_architecture(config: Mapping[str, Any]) -> None:
    names = config.get("architectures")
    readable = ", ".join(_READABLE_ARCHITECTURES)
    if not names:
        raise ValueError(f"config has no architectures: not a draft this can read ({readable})")
    for name in names:
        if name not in _READABLE_ARCHITECTURES:
            raise ValueError(f"architecture {name!r} is not a draft this can read ({readable})")
    if config.get("model_type") != "qwen3":
        raise ValueError(f"model_type {config.get('model_type')!r} is not supported: only 'qwen3' drafts are")


def _lookup(config: Mapping[str, Any], key: str) -> Any:
    """Value of `key` wherever it stands; `None` if nowhere.

    Serving resolves a contradiction by precedence that differs between its own two readers, so a config that
    contradicts itself is refused here.
    """
    found: dict[str, Any] = {}
    for section in _NESTED_SECTIONS:
        nested = config.get(section) or {}
        if nested.get(key) is not None:
            found[f"{section}.{key}"] = nested[key]
    if config.get(key) is not None:
        found[key] = config[key]
    values = list(found.values())
    if any(value != values[0] for value in values):
        said = ", ".join(f"{place} = {value!r}" for place, value in found.items())
        raise ValueError(f"draft config contradicts itself: {said}; make them equal")
    return values[0] if values else None


def _require(config: Mapping[str, Any], key: str) -> Any:
    value = _lookup(config, key)
    if value is None:
        places = ", ".join(f"{section}.{key}" for section in _NESTED_SECTIONS)
        raise ValueError(f"draft config has no {key} (looked at {places} and the top level): add it")
    return value


def _rope(config: Mapping[str, Any]) -> tuple[float | None, dict[str, Any]]:
    """`(theta, scaling dict)` from `rope_parameters` (new) or `rope_theta` + `rope_scaling` (old)."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if any(isinstance(value, Mapping) for value in new.values()):
        # Targets that mix attention kinds keep one set per kind; draft layers are all full attention.
        if "full_attention" not in new:
            raise ValueError(f"rope_parameters has sets for {', '.join(new)} but none for full_attention")
        new = new["full_attention"]
    theta = config.get("rope_theta")
    if theta is None:
        theta = new.get("rope_theta", old.get("rope_theta"))
    elif new.get("rope_theta", theta) != theta:
        raise ValueError(
            f"config contradicts itself: rope_theta = {theta}, rope_parameters.rope_theta = {new['rope_theta']}"
        )
    if new and old and _plain(new) != _plain(old):
        raise ValueError(f"config contradicts itself: rope_scaling = {dict(old)}, rope_parameters = {dict(new)}")
    return theta, dict(new or old)


def _plain(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """A scaling dict under the newer key names, without the base."""
    entries = {"rope_type" if key == "type" else key: value for key, value in scaling.items()}
    entries.pop("rope_theta", None)
    return entries


def complete_heads(fields: dict[str, Any]) -> None:
    """Fills in, when absent, `num_key_value_heads` and `head_dim` (`hidden_size / heads`).

    Raises:
        ValueError: `hidden_size` does not divide.
    """
    heads, hidden_size = fields["num_attention_heads"], fields["hidden_size"]
    if fields.get("num_key_value_heads") is None:
        fields["num_key_value_heads"] = heads
    if fields.get("head_dim") is None:
        if hidden_size % heads:
            raise ValueError(
                f"there is no head_dim, and hidden_size {hidden_size} is not a multiple of {heads} heads: give head_dim"
            )
        fields["head_dim"] = hidden_size // heads
