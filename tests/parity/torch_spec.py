"""What the reference is told: the sizes of a draft, and one row of a batch."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ReferenceSpec:
    """Sizes of a draft, in this reference's own words.

    Attributes:
        markov_kind: "vanilla", "gated", "rnn", or None for a draft without a Markov head.
        rope_scaling: None, or the config's own dict of rope type "linear" (factor) or "llama3" (factor,
            low_freq_factor, high_freq_factor, original_max_position_embeddings).
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_taps: int
    block_size: int
    mask_token_id: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    rope_scaling: Mapping | None = None
    markov_rank: int = 0
    markov_kind: str | None = None
    confidence: bool = True
    confidence_with_markov: bool = False

    @classmethod
    def from_deepspec(cls, config: Mapping) -> "ReferenceSpec":
        """Read a DeepSpec ``config.json`` (flat keys, dspark_spec 3.3)."""
        rope = config["rope_parameters"]
        rank = config["markov_rank"]
        return cls(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            vocab_size=config["vocab_size"],
            num_taps=len(config["target_layer_ids"]),
            block_size=config["block_size"],
            mask_token_id=config["mask_token_id"],
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=rope["rope_theta"],
            rope_scaling=None if rope["rope_type"] == "default" else rope,
            markov_rank=rank,
            markov_kind=config["markov_head_type"] if rank else None,
            confidence=config["enable_confidence_head"],
            confidence_with_markov=config.get("confidence_head_with_markov", False),
        )


@dataclass(frozen=True)
class ReferenceRow:
    """One row: ids int64 ``[L]``, tapped states ``[L, M*D]``, last states after the final norm ``[L, D]``."""

    input_ids: Tensor
    loss_mask: Tensor
    positions: Tensor
    document_start: Tensor
    context_hidden: Tensor
    last_hidden: Tensor

    @property
    def length(self) -> int:
        return self.input_ids.shape[0]
