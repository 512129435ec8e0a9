"""`DraftConfig`: the one source for the module, the checks and the export."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draft_jax import hf_config
from draft_jax.rope import RopeScaling

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DraftConfig:
    """Everything that defines a DSpark draft (dspark_spec 1); hashable, so it can be a static argument.

    The embedding and the LM head are not part of the draft: they belong to the target and are passed as a
    `FrozenHead`. `hidden_size` and `vocab_size` are therefore the target's.

    Attributes:
        hidden_size: `D`; the target's hidden size.
        intermediate_size: width of the SwiGLU MLP.
        num_hidden_layers: draft layers (not the target's).
        num_attention_heads: query heads `H`.
        num_key_value_heads: key/value heads `G`; divides `H`.
        head_dim: `C`, even.
        vocab_size: `V`; the target's unpadded vocabulary.
        num_target_layers: decoder layers of the target.
        target_layer_ids: tapped target layers, ascending; id `i` is the output of decoder layer `i`
            (0-based).
        block_size: `K`; number of draft tokens (the serving window is `K + 1`).
        mask_token_id: id whose embedding row fills the slots after the anchor; must exist in the target's
            embedding.
        rms_norm_eps: epsilon of every RMSNorm.
        rope_theta: rotary base.
        rope_scaling: `None` for unscaled rotary frequencies.
        max_position_embeddings: longest position the draft may be served at.
        attention_bias: only `False` is supported.
        markov_rank: `R`; 0 means no Markov head.
        markov_head_type: "vanilla", "gated" or "rnn".
        enable_confidence_head: whether the confidence head exists.
        confidence_head_with_markov: whether its input includes the Markov embedding of the previous token.
        initializer_range: standard deviation of weights at initialisation.
        num_anchors: anchors per row used in training; recorded only.
        bos_token_id: as in the target; recorded only.
        eos_token_id: as in the target (one id, or several as a tuple); recorded only.
        pad_token_id: as in the target; recorded only.
        target_name: name or path of the target; recorded only.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    rope_scaling: RopeScaling | None = None
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    initializer_range: float = 0.02
    num_anchors: int = 512
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    target_name: str | None = None

    def __post_init__(self) -> None:
        # Lists arrive from YAML and JSON; tuples keep the config hashable.
        if isinstance(self.target_layer_ids, list):
            object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        if isinstance(self.eos_token_id, list):
            object.__setattr__(self, "eos_token_id", tuple(self.eos_token_id))
        self._check_sizes()
        self._check_target_layer_ids()
        self._check_heads()

    # -- checks --------------------------------------------------------------------------------------------

    def _check_sizes(self) -> None:
        for name in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "vocab_size", "num_target_layers", "block_size",
            "max_position_embeddings", "num_anchors",
        ):  # fmt: skip
            _require_int(name, getattr(self, name), minimum=1)
        _require_int("markov_rank", self.markov_rank, minimum=0)
        _require_int("mask_token_id", self.mask_token_id, minimum=0)
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is not below vocab_size {self.vocab_size}: choose an id "
                "the target's embedding has a row for (an unused special token)"
            )
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, RopeScaling):
            raise ValueError(
                f"rope_scaling must be a RopeScaling or None, got {self.rope_scaling!r}; "
                "build one with RopeScaling.from_hf(dict)"
            )
        if self.attention_bias:
            raise ValueError(
                "attention_bias true is not supported: draft attention layers have no bias; set it to false"
            )

    def _check_target_layer_ids(self) -> None:
        ids, limit = self.target_layer_ids, self.num_target_layers - 2
        if not ids:
            raise ValueError("target_layer_ids is empty: name at least one target layer to tap")
        for layer in ids:
            if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer <= limit:
                raise ValueError(
                    f"target_layer_ids contains {layer!r}, outside 0..{limit} for a target of "
                    f"{self.num_target_layers} layers (id i is the output of layer i; the last one cannot "
                    "be tapped)"
                )
        for before, after in itertools.pairwise(ids):
            if after == before:
                raise ValueError(f"target_layer_ids contains {after} twice: {list(ids)}")
            if after < before:
                raise ValueError(
                    f"target_layer_ids must ascend, but {after} follows {before}: {list(ids)}; "
                    f"write {sorted(ids)} (the order is the order of the features fc reads)"
                )

    def _check_heads(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary embedding needs an even head_dim")
        if self.markov_head_type not in MARKOV_HEAD_TYPES:
            raise ValueError(
                f"markov_head_type {self.markov_head_type!r} is unknown; use one of {', '.join(MARKOV_HEAD_TYPES)}"
            )
        if self.enable_confidence_head and self.confidence_head_with_markov and self.markov_rank == 0:
            raise ValueError(
                "confidence_head_with_markov true needs a Markov head but markov_rank is 0: "
                "set confidence_head_with_markov false or markov_rank > 0"
            )

    # -- construction --------------------------------------------------------------------------------------

    @classmethod
    def from_target(
        cls,
        target_config: Mapping[str, Any],
        *,
        num_hidden_layers: int,
        block_size: int,
        mask_token_id: int,
        target_layer_ids: tuple[int, ...] | list[int] | None = None,
        num_taps: int = 5,
        **overrides: Any,
    ) -> DraftConfig:
        """A draft shaped like its target.

        Args:
            target_config: the target's HF config.json as a plain dict; a nested `text_config` is used if
                present.
            num_hidden_layers: draft layers.
            block_size: draft tokens per block.
            mask_token_id: id that fills the masked slots.
            target_layer_ids: layers to tap; `None` spreads `num_taps` of them by `spread_layer_ids`.
            num_taps: number of taps when `target_layer_ids` is `None`.
            **overrides: any other field of `DraftConfig`; takes precedence over what the target says.

        Raises:
            ValueError: a size is missing in the target's config, or the result is not a valid draft.
        """
        unknown = set(overrides) - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(f"unknown DraftConfig field(s) {', '.join(sorted(unknown))}")
        fields = hf_config.read_target(target_config, skip=set(overrides))
        if target_layer_ids is None:
            depth = overrides.get("num_target_layers") or fields["num_target_layers"]
            target_layer_ids = spread_layer_ids(depth, num_taps)
        fields.update(
            num_hidden_layers=num_hidden_layers,
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=tuple(target_layer_ids),
        )
        fields.update(overrides)
        hf_config.complete_heads(fields)
        return cls(**fields)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> DraftConfig:
        """Reads a draft's config.json: DeepSpec's flat layout, SpecForge's nested one, or ours (both).

        Raises:
            ValueError: another architecture, a feature this draft does not have, a missing key, or a key
                whose nested and top-level values disagree; the message names it.
        """
        return cls(**hf_config.read_draft(config))

    def to_hf(self) -> dict[str, Any]:
        """The config.json stock SGLang serves (field_survey 3.3, 3.7); `from_hf` reads it back to an equal
        config."""
        return hf_config.write_draft(self)

    # -- derived -------------------------------------------------------------------------------------------

    @property
    def num_taps(self) -> int:
        """`M`, the number of tapped target layers."""
        return len(self.target_layer_ids)

    @property
    def confidence_features(self) -> int:
        """Input width of the confidence head: `D`, plus `R` when it sees the Markov embedding."""
        return self.hidden_size + (self.markov_rank if self.confidence_head_with_markov else 0)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Safetensors name -> shape in torch layout, of every trained tensor (field_survey 1.6).

        The embedding and the LM head are the target's and are not in the set. This is what an exported or
        imported file is audited against.
        """
        d, c, i, r = self.hidden_size, self.head_dim, self.intermediate_size, self.markov_rank
        query, kv = self.num_attention_heads * c, self.num_key_value_heads * c
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (d, self.num_taps * d),
            "hidden_norm.weight": (d,),
            "norm.weight": (d,),
        }
        for layer in range(self.num_hidden_layers):
            shapes |= {
                f"layers.{layer}.input_layernorm.weight": (d,),
                f"layers.{layer}.post_attention_layernorm.weight": (d,),
                f"layers.{layer}.self_attn.q_proj.weight": (query, d),
                f"layers.{layer}.self_attn.k_proj.weight": (kv, d),
                f"layers.{layer}.self_attn.v_proj.weight": (kv, d),
                f"layers.{layer}.self_attn.o_proj.weight": (d, query),
                f"layers.{layer}.self_attn.q_norm.weight": (c,),
                f"layers.{layer}.self_attn.k_norm.weight": (c,),
                f"layers.{layer}.mlp.gate_proj.weight": (i, d),
                f"layers.{layer}.mlp.up_proj.weight": (i, d),
                f"layers.{layer}.mlp.down_proj.weight": (d, i),
            }
        if r:
            shapes["markov_head.markov_w1.weight"] = (self.vocab_size, r)
            shapes["markov_head.markov_w2.weight"] = (self.vocab_size, r)
            if self.markov_head_type == "gated":
                shapes["markov_head.gate_proj.weight"] = (r, d + r)
                shapes["markov_head.gate_proj.bias"] = (r,)
            if self.markov_head_type == "rnn":
                shapes["markov_head.joint_proj.weight"] = (3 * r, 2 * r + d)
                shapes["markov_head.joint_proj.bias"] = (3 * r,)
        if self.enable_confidence_head:
            shapes["confidence_head.proj.weight"] = (1, self.confidence_features)
            shapes["confidence_head.proj.bias"] = (1,)
        return shapes


def spread_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """`num_taps` layers spread evenly from 1 to `num_target_layers - 3` (z-lab's rule, dspark_spec 1.8).

    Raises:
        ValueError: the target has too few layers for that many distinct taps.
    """
    _require_int("num_taps", num_taps, minimum=1)
    if num_taps == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    ids = tuple(round(1 + i * span / (num_taps - 1)) for i in range(num_taps))
    if span < 1 or len(set(ids)) < num_taps:
        raise ValueError(
            f"num_taps {num_taps} is too many to spread over a target of {num_target_layers} layers; "
            f"give target_layer_ids explicitly, within 0..{num_target_layers - 2}"
        )
    return ids


def _require_int(name: str, value: Any, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name} must be an integer >= {minimum}, got {value!r}")
