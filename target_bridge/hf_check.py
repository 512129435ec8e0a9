"""What is proved about a Transformers model when it is loaded, on a probe of a few tokens; see `model_check`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from target_bridge.hf_parts import Parts
from target_bridge.model_check import (
    causality_reasons,
    check_matrices,
    embedding_reasons,
    logit_reasons,
    probe_ids,
    refuse,
)
from target_bridge.target import TargetError


def check_model(
    model: nn.Module,
    parts: Parts,
    config: Any,
    forward: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    *,
    name: str,
    vocab_size: int,
    hidden_size: int,
    num_taps: int,
    max_length: int,
) -> None:
    """Refuse a model whose states, head or embedding do not mean what the draft assumes.

    Args:
        model: The causal LM with its head.
        parts: Its pieces.
        config: Its text config.
        forward: ids [R, T] -> (taps [R, T, M*D], last_hidden [R, T, D]), the capture path itself.
        name: For messages.
        vocab_size: V, logical.
        hidden_size: D.
        num_taps: M.
        max_length: The probe is not longer than this.

    Raises:
        TargetError: with every reason found and what can be done.
    """
    check_matrices(parts.embedding, parts.head, name, vocab_size, hidden_size)
    ids = torch.as_tensor(probe_ids(vocab_size, max_length), device=parts.embedding.device)[None]
    with torch.inference_mode():
        first_input, (taps, last) = _with_first_input(parts, lambda: forward(ids))
        expected = {
            "taps": (1, ids.shape[1], num_taps * hidden_size),
            "last_hidden": (1, ids.shape[1], hidden_size),
        }
        for what, tensor in (("taps", taps), ("last_hidden", last)):
            if tuple(tensor.shape) != expected[what]:
                raise TargetError(
                    f"target {name}: captured {what} have shape {tuple(tensor.shape)}, expected {expected[what]}"
                )
        reasons = embedding_reasons(first_input, parts.embedding[ids])
        full = model(input_ids=ids, use_cache=False).logits[..., :vocab_size].float()
        own = F.linear(last, parts.head)[..., :vocab_size].float()
        reasons += logit_reasons(full, own, parts.head.dtype, parts.head_bias)
        # Documents are padded on the right without a mask, so later ids must not change earlier states.
        reasons += causality_reasons(forward, ids, taps, last, vocab_size)
    refuse(reasons, config, name, type(model).__name__)


def _with_first_input(parts: Parts, run: Callable[[], Any]) -> tuple[torch.Tensor | None, Any]:
    """Run, and also return what entered the first decoder layer."""
    seen: list[torch.Tensor] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, torch.Tensor):
            seen.append(hidden.clone())

    handle = parts.layers[0].register_forward_pre_hook(record, with_kwargs=True)
    try:
        result = run()
    finally:
        handle.remove()
    return (seen[0] if seen else None), result
