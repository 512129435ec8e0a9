"""Attention over a `SlotCache`: the query heads that share a key head are handed over as its further queries.

Transformers copies keys and values once for every query head before it calls torch's masked attention, at every layer
of every forward. Those copies are what grows with the cache: a fifth of a forward of SmolLM2 on a CPU at 100 cached
tokens. The same product needs none when `H / G` heads of `T` queries are read as one head of `H / G * T` queries.
Letters: `R` rows, `T` tokens of a row, `S` cached positions, `H` heads, `G` kv heads, `C` head dim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_NAME = "draft_jax_slots"


def slot_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' "sdpa", without its copies where all heads share an additive mask.

    Args:
        module: the attention layer.
        query: [R, H, T, C].
        key: [R, G, S, C].
        value: [R, G, S, C'].
        attention_mask: [R, 1, T, S].
        kwargs: as Transformers gives them; `scaling` is used here.

    Returns:
        [R, T, H, C'] and no weights.
    """
    rows, heads, tokens, _ = query.shape
    group = heads // key.shape[1]
    plain = all(kwargs.get(name) is None for name in ("position_bias", "softcap", "s_aux")) and not kwargs.get(
        "dropout"
    )
    if group == 1 or attention_mask is None or attention_mask.shape[1] != 1 or not plain:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    folded = F.scaled_dot_product_attention(
        query.reshape(rows, key.shape[1], group * tokens, query.shape[3]),
        key,
        value,
        attn_mask=attention_mask if tokens == 1 else attention_mask.repeat(1, 1, group, 1),
        scale=kwargs.get("scaling"),
    )
    return folded.reshape(rows, heads, tokens, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, slot_attention)


@contextlib.contextmanager
def folded_heads(config: Any) -> Iterator[None]:
    """Forwards in this block use `slot_attention` where they would use "sdpa".

    A model with attention of another kind is left as it is. So is one that does not look its attention up by name:
    nothing reads the name then.

    Args:
        config: the language model's own, which its attention layers share.
    """
    if getattr(config, "_attn_implementation", None) != "sdpa":
        yield
        return
    config._attn_implementation = _NAME
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


def without_plans(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Torch's attention without cuDNN's kernels: those make a plan for every new shape.

    Shapes of documents and of texts being decoded are ever new. SmolLM2 on an H200, bf16, 16 documents of 60 to 512
    tokens, torch 2.11: a forward takes 60 to 130 ms when its shape is new to cuDNN, 18 ms when it is not, and 18 ms
    without cuDNN.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
