"""What is proved about a Transformers model when it is loaded, on a probe of a few tokens.

The draft computes the target's distribution itself, as softmax(head @ last_hidden), and reads raw embedding
rows. A model that does anything else (soft-capped or scaled logits, a head bias, scaled embeddings,
attention to later tokens) would train a draft towards the wrong distribution without any sign of it. So it
is refused here, in words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from target_bridge.hf_parts import Parts
from target_bridge.target import TargetError

_PROBE_TOKENS = 12
# Relative to the largest value. bf16 leaves room for kernels that differ between shapes.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}

# Config keys that change logits or embeddings, with the value that changes nothing. A soft cap on small
# logits is nearly linear and could slip through the numeric probe; the key cannot.
_NEUTRAL = {
    "final_logit_softcapping": None,
    "final_logits_soft_cap": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
    "embedding_multiplier": 1.0,
}


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
    _check_matrices(parts, name, vocab_size, hidden_size)
    ids = _probe(vocab_size, max_length, parts.embedding.device)
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
        reasons = _embedding_reasons(first_input, parts.embedding[ids])
        reasons += _logit_reasons(model, parts, ids, last, vocab_size)
        reasons += _causality_reasons(forward, ids, taps, last, vocab_size)
    keys = [
        f"{key}={getattr(config, key)!r}"
        for key, neutral in _NEUTRAL.items()
        if getattr(config, key, neutral) not in (neutral, None)
    ]
    if keys and not reasons:
        reasons = ["its config changes the logits or the embeddings"]
    if reasons:
        raise TargetError(
            f"target {name} ({type(model).__name__}) cannot be used: "
            + "; ".join(reasons)
            + (f" (config: {', '.join(keys)})" if keys else "")
            + ". The draft and the servers that run it read the target's distribution as softmax(head @ "
            "last_hidden) and its embedding rows as they are; choose a target without these, e.g. of the "
            "Llama or Qwen families"
        )


def _check_matrices(parts: Parts, name: str, vocab_size: int, hidden_size: int) -> None:
    for what, matrix in (("input embedding", parts.embedding), ("LM head", parts.head)):
        if matrix.shape[0] < vocab_size or matrix.shape[1] != hidden_size:
            raise TargetError(
                f"target {name}: its {what} is {tuple(matrix.shape)}, expected at least {vocab_size} rows of "
                f"{hidden_size} (vocab_size and hidden_size of its config)"
            )
        if matrix.dtype not in _TOLERANCE:
            raise TargetError(
                f"target {name}: its {what} is {matrix.dtype}; only float32 and bfloat16 can be "
                "shared with the draft. Load it with dtype bfloat16"
            )
        finite = torch.isfinite(matrix).all(dim=1)
        if not bool(finite.all()):
            row = int((~finite).nonzero()[0])
            raise TargetError(f"target {name}: row {row} of its {what} is not finite; the weights are damaged")


def _probe(vocab_size: int, max_length: int, device: torch.device) -> torch.Tensor:
    count = min(_PROBE_TOKENS, max_length)
    ids = np.random.default_rng(0).integers(0, vocab_size, size=(1, count))
    return torch.as_tensor(ids, dtype=torch.int64, device=device)


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


def _fit(actual: torch.Tensor, base: torch.Tensor) -> tuple[float, float]:
    """(c, residual): the c that makes c * base closest to actual, and the relative distance left."""
    actual, base = actual.double().flatten(), base.double().flatten()
    scale = float(actual @ base / (base @ base).clamp_min(1e-300))
    return scale, float((actual - scale * base).norm() / actual.norm().clamp_min(1e-300))


def _embedding_reasons(first_input: torch.Tensor | None, rows: torch.Tensor) -> list[str]:
    # Added position embeddings or an embedding norm leave the rows usable; only a plain multiple means that
    # a server, which feeds the draft through the target's own embedding, may or may not scale. Nobody could
    # tell which.
    if first_input is None or first_input.shape != rows.shape or not bool(rows.any()):
        return []
    scale, residual = _fit(first_input, rows)
    if residual < 0.05 and abs(scale - 1.0) > 0.02:
        return [f"it multiplies its embeddings by {scale:.4g}"]
    return []


def _logit_reasons(model: nn.Module, parts: Parts, ids: torch.Tensor, last: torch.Tensor, vocab_size: int) -> list[str]:
    full = model(input_ids=ids, use_cache=False).logits[..., :vocab_size].float()
    own = F.linear(last, parts.head)[..., :vocab_size].float()
    if not bool(torch.isfinite(full).all()):
        return ["its logits on a probe of ordinary ids are not finite"]
    error = float((full - own).abs().max())
    largest = max(float(full.abs().max()), float(own.abs().max()))
    if error <= _TOLERANCE[parts.head.dtype] * largest:
        return []
    if parts.head_bias:
        return [f"its LM head adds a bias (logits differ from head @ last_hidden by up to {error:.3g})"]
    scale, residual = _fit(full, own)
    if residual < 1e-3:
        return [f"its logits are {scale:.4g} times head @ last_hidden"]
    return [
        f"its logits are not head @ last_hidden (they differ by up to {error:.3g} of {largest:.3g}): "
        "it soft-caps or otherwise transforms them"
    ]


def _causality_reasons(
    forward: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    ids: torch.Tensor,
    taps: torch.Tensor,
    last: torch.Tensor,
    vocab_size: int,
) -> list[str]:
    # Documents are padded on the right without a mask, so later ids must not change earlier states.
    keep = ids.shape[1] - ids.shape[1] // 3
    changed = ids.clone()
    changed[:, keep:] = (changed[:, keep:] + 1) % vocab_size
    other_taps, other_last = forward(changed)
    for a, b in ((taps, other_taps), (last, other_last)):
        a, b = a[:, :keep].float(), b[:, :keep].float()
        # bf16 mixtures of experts may group tokens otherwise when later ids change: allow for rounding, not
        # for a leak.
        if float((a - b).norm()) > 5 * _TOLERANCE[taps.dtype] * float(a.norm()):
            return ["its states of earlier tokens change with later tokens: it is not a causal decoder"]
    return []
