"""Tiny random models as folders, what Transformers makes of them, and targets over the real engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from target_bridge.sglang.load import load_sglang_target
from target_bridge.sglang.options import EngineOptions
from target_bridge.sglang.target import SGLangTarget

#: 70 ids: SGLang pads the embedding to 128 rows.
SIZES = {
    "vocab_size": 70,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "initializer_range": 0.2,  # large enough that states differ visibly from layer to layer
}
#: kind -> (Transformers' family, changes).
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
    "llama": ("llama", {"tie_word_embeddings": True}),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "tie_word_embeddings": False,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
        },
    ),
}
TAPS = (0, 2, 3)


def save_model(kind: str, folder: Path, **changes: Any) -> Path:
    """A random model of one of `KINDS`, or of a Transformers family, saved with its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, own = KINDS.get(kind, (kind, {}))
    torch.manual_seed(7)
    config = AutoConfig.for_model(family, **{**SIZES, **own, **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def transformers_states(folder: Path, ids: np.ndarray, taps: Sequence[int] = TAPS) -> tuple[torch.Tensor, ...]:
    """(context [T, M*D], last [T, D], logits [T, V]) in fp32, one document alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        output = model.model(torch.as_tensor(ids)[None].long(), output_hidden_states=True)
        context = torch.cat([output.hidden_states[tap + 1][0] for tap in taps], dim=-1)
        return context, output.last_hidden_state[0], model.lm_head(output.last_hidden_state[0])


@contextmanager
def running(
    folder: Path, taps: Sequence[int] = TAPS, *, dtype: str = "float32", **options: Any
) -> Iterator[SGLangTarget]:
    """A target over the engine, taken down at the end."""
    target = load_sglang_target(str(folder), taps, options=EngineOptions(**options), dtype=dtype, device="cpu")
    try:
        yield target
    finally:
        target.close()


def require_full(target: SGLangTarget) -> None:
    """All pools are as after the start."""
    engine = target.engine
    assert engine.free_tokens == engine.facts.pool_tokens
    assert engine.free_requests == engine.facts.max_requests
    assert engine.evictable_tokens == engine.protected_tokens == 0
