"""What the draft assumes of any target, as checks on numbers; `hf_check` and `sglang.check` bring them.

The draft computes the target's distribution itself, as softmax(head @ last_hidden), and reads raw embedding
rows. A model that does anything else (soft-capped or scaled logits, a head bias, scaled embeddings,
attention to later tokens) would train a draft towards the wrong distribution without any sign of it. So it
is refused, in words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from target_bridge.target import TargetError

_PROBE_TOKENS = 12
#: Relative to the largest value. bf16 leaves room for kernels that differ between shapes.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}

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


def check_matrices(embedding: torch.Tensor, head: torch.Tensor, name: str, vocab_size: int, hidden_size: int) -> None:
    """Refuse an embedding or LM head that cannot be shared with the draft.

    Args:
        embedding: [V', D].
        head: [V', D].
        name: of the target.
        vocab_size: V, logical; V' >= V.
        hidden_size: D.
    """
    for what, matrix in (("input embedding", embedding), ("LM head", head)):
        if matrix.shape[0] < vocab_size or matrix.shape[1] != hidden_size:
            raise TargetError(
                f"target {name}: its {what} is {tuple(matrix.shape)}, expected at least {vocab_size} rows of "
                f"{hidden_size} (vocab_size and hidden_size of its config)"
            )
        if matrix.dtype not in TOLERANCE:
            raise TargetError(
                f"target {name}: its {what} is {matrix.dtype}; only float32 and bfloat16 can be "
                "shared with the draft. Load it with dtype bfloat16"
            )
        finite = torch.isfinite(matrix).all(dim=1)
        if not bool(finite.all()):
            row = int((~finite).nonzero()[0])
            raise TargetError(f"target {name}: row {row} of its {what} is not finite; the weights are damaged")


def probe_ids(vocab_size: int, max_length: int) -> np.ndarray:
    """A few ordinary ids, int64 [T], T <= max_length; the same ones always."""
    return np.random.default_rng(0).integers(0, vocab_size, size=min(_PROBE_TOKENS, max_length))


def refuse(reasons: list[str], config: Any, name: str, kind: str) -> None:
    """Raise if there is a reason against the model, or a config key that changes logits or embeddings.

    Args:
        reasons: found by the probes.
        config: the model's text config: attributes or a dict.
        name: of the target.
        kind: class of the model.
    """
    read = config.get if isinstance(config, dict) else functools.partial(getattr, config)
    values = {key: read(key, neutral) for key, neutral in _NEUTRAL.items()}
    keys = [f"{key}={value!r}" for key, value in values.items() if value not in (_NEUTRAL[key], None)]
    if keys and not reasons:
        reasons = ["its config changes the logits or the embeddings"]
    if reasons:
        raise TargetError(
            f"target {name} ({kind}) cannot be used: "
            + "; ".join(reasons)
            + (f" (config: {', '.join(keys)})" if keys else "")
            + ". The draft and the servers that run it read the target's distribution as softmax(head @ "
            "last_hidden) and its embedding rows as they are; choose a target without these, e.g. of the "
            "Llama or Qwen families"
        )


def _fit(actual: torch.Tensor, base: torch.Tensor) -> tuple[float, float]:
    """(c, residual): the c that makes c * base closest to actual, and the relative distance left."""
    actual, base = actual.double().flatten(), base.double().flatten()
    scale = float(actual @ base / (base @ base).clamp_min(1e-300))
    return scale, float((actual - scale * base).norm() / actual.norm().clamp_min(1e-300))


def embedding_reasons(first_input: torch.Tensor | None, rows: torch.Tensor) -> list[str]:
    """Reasons in what enters the first layer, compared with the embedding's rows of the same ids."""
    # Added position embeddings or an embedding norm leave the rows usable; only a plain multiple means that
    # a server, which feeds the draft through the target's own embedding, may or may not scale. Nobody could
    # tell which.
    if first_input is None or first_input.shape != rows.shape or not bool(rows.any()):
        return []
    scale, residual = _fit(first_input, rows)
    if residual < 0.05 and abs(scale - 1.0) > 0.02:
        return [f"it multiplies its embeddings by {scale:.4g}"]
    return []


def logit_reasons(full: torch.Tensor, own: torch.Tensor, dtype: torch.dtype, head_bias: bool) -> list[str]:
    """Reasons in the model's logits `full`, compared with head @ last_hidden, `own`: fp32 [..., V]."""
    if not bool(torch.isfinite(full).all()):
        return ["its logits on a probe of ordinary ids are not finite"]
    error = float((full - own).abs().max())
    largest = max(float(full.abs().max()), float(own.abs().max()))
    if error <= TOLERANCE[dtype] * largest:
        return []
    if head_bias:
        return [f"its LM head adds a bias (logits differ from head @ last_hidden by up to {error:.3g})"]
    scale, residual = _fit(full, own)
    if residual < 1e-3:
        return [f"its logits are {scale:.4g} times head @ last_hidden"]
    return [
        f"its logits are not head @ last_hidden (they differ by up to {error:.3g} of {largest:.3g}): "
        "it soft-caps or otherwise transforms them"
    ]


def causality_reasons(
    forward: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    ids: torch.Tensor,
    taps: torch.Tensor,
    last: torch.Tensor,
    vocab_size: int,
) -> list[str]:
    """Reasons in the states of earlier tokens when later ids [R, T] change."""
    keep = ids.shape[1] - ids.shape[1] // 3
    changed = ids.clone()
    changed[:, keep:] = (changed[:, keep:] + 1) % vocab_size
    other_taps, other_last = forward(changed)
    for a, b in ((taps, other_taps), (last, other_last)):
        a, b = a[:, :keep].float(), b[:, :keep].float()
        # bf16 mixtures of experts may group tokens otherwise when later ids change: allow for rounding, not
        # for a leak.
        if float((a - b).norm()) > 5 * TOLERANCE[taps.dtype] * float(a.norm()):
            return ["its states of earlier tokens change with later tokens: it is not a causal decoder"]
    return []
