"""Metrics of the objective as unreduced sums, and the scalars they become (dspark_spec 2.4).

Every entry of `Sums` is a numerator or a denominator: adding the sums of chunks, micro-steps or devices gives the
sums of all of them, and only `finalize` divides.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from numpy.typing import ArrayLike

from draft_jax.anchors import Blocks
from draft_jax.objective.config import ObjectiveConfig

#: Name -> fp32 scalar, or fp32 [K] for the two `accept@` entries. The names do not depend on the options.
Sums = dict[str, Array]


def zero_sums(block_size: int) -> Sums:
    """Sums of nothing, to start an accumulation from: every name of `loss_sums` with its shape."""
    scalars = (
        "loss_num",
        "loss_den",
        "weight",
        "ce",
        "l1",
        "confidence",
        "confidence_weight",
        "confidence_abs_error",
        "confidence_bias",
        "confidence_cumprod_bias",
        "tau_num",
        "tau_den",
        "valid_anchors",
        "sampled_anchors",
        "anchor_slots",
        "supervised_tokens",
        "rows",
        "tokens",
        "nonfinite_context",
        "nonfinite_last",
    )
    sums: Sums = {name: jnp.zeros((), jnp.float32) for name in scalars}
    return sums | {name: jnp.zeros((block_size,), jnp.float32) for name in ("accept@num", "accept@den")}


def acceptance(l1: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Chance that exact rejection sampling accepts a draft token: `1 - L1/2`, clamped to [0, 1] (2.3)."""
    return jnp.clip(1.0 - 0.5 * l1, 0.0, 1.0)


def acceptance_sums(accept: Float[Array, "B N K"], valid: Bool[Array, "B N K"]) -> Sums:
    """Acceptance per slot, and the expected number of tokens a block commits (2.4).

    Args:
        accept: acceptance probability of each slot, given that all slots before it were accepted.
        valid: supervised slots.

    Returns:
        `accept@num`, `accept@den` [K]; `tau_num`, the sum of `1 + sum_k prod_{i<=k} a_i` over the blocks with
        a supervised slot, and `tau_den`, their number.
    """
    counted = jnp.where(valid, accept, 0.0)
    blocks = valid.any(axis=-1)
    expected = 1.0 + jnp.cumprod(counted, axis=-1).sum(axis=-1)
    return {
        "accept@num": counted.sum(axis=(0, 1)),
        "accept@den": valid.sum(axis=(0, 1), dtype=jnp.float32),
        "tau_num": jnp.where(blocks, expected, 0.0).sum(),
        "tau_den": blocks.sum(dtype=jnp.float32),
    }


def bce_with_logits(logits: Float[Array, "*rows"], target: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """Binary cross entropy `-a log s(x) - (1-a) log s(-x)`, finite for every finite logit."""
    return target * jax.nn.softplus(-logits) + (1.0 - target) * jax.nn.softplus(logits)


def confidence_sums(logits: Float[Array, "B N K"] | None, accept: Float[Array, "B N K"], blocks: Blocks) -> Sums:
    """BCE of the confidence head against the acceptance, and how well calibrated it is (2.3, 2.4).

    Args:
        logits: fp32 confidence logits; None without a head, and all entries are 0.
        accept: acceptance probabilities; they are a target, no gradient flows into them.
        blocks: give weights and validity.

    Returns:
        `confidence` (differentiable), `confidence_weight`, `confidence_abs_error`, `confidence_bias` and
        `confidence_cumprod_bias` (bias of the product over the slots so far).
    """
    names = (
        "confidence",
        "confidence_weight",
        "confidence_abs_error",
        "confidence_bias",
        "confidence_cumprod_bias",
    )
    if logits is None:
        return dict.fromkeys(names, jnp.zeros((), jnp.float32))
    accept = jax.lax.stop_gradient(jnp.where(blocks.valid, accept, 0.0))
    logits = jnp.where(blocks.valid, logits.astype(jnp.float32), 0.0)

    def weighted(values: Array) -> Array:
        return (blocks.weight * values).sum()

    predicted = jax.nn.sigmoid(jax.lax.stop_gradient(logits))
    bias = predicted - accept
    # Slots are supervised as a prefix, so a product over valid slots never meets the placeholders.
    survival_bias = jnp.cumprod(predicted, axis=-1) - jnp.cumprod(accept, axis=-1)
    values = (
        weighted(bce_with_logits(logits, accept)),
        blocks.weight.sum(),
        weighted(jnp.abs(bias)),
        weighted(bias),
        weighted(survival_bias),
    )
    return dict(zip(names, values, strict=True))


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> float:
    """`numerator / denominator`, and 0.0 where nothing was counted."""
    return float(numerator) / float(denominator) if denominator else 0.0


def finalize(sums: Mapping[str, ArrayLike], objective: ObjectiveConfig) -> dict[str, float]:
    """Scalars of dspark_spec 2.4 from accumulated sums.

    `accept_rate@j` counts slots from 0, as the specification does, and is conditional on the true prefix. A
    ratio of which nothing was counted is 0.0. Without a confidence head its metrics are absent.

    Args:
        sums: what `loss_sums` returned, or the sum of many of them; host or device arrays.
        objective: the options they were made with.

    Returns:
        Python floats: `loss` (mean over the window as `objective.normalization` says), `ce_loss`, `l1_loss`,
        `confidence_loss`, `tau_probabilistic`, `accept_rate@j`, confidence calibration, counts and ratios.
    """
    totals = {name: np.asarray(value, dtype=np.float64) for name, value in sums.items()}
    rows, weight = totals["rows"], totals["weight"]
    block_size = len(totals["accept@num"])
    tokens_per_block = _ratio(totals["supervised_tokens"], totals["sampled_anchors"])
    out = {
        "loss": _ratio(totals["loss_num"], totals["loss_den"]),
        "ce_loss": _ratio(totals["ce"], weight),
        "l1_loss": _ratio(totals["l1"], weight),
        "tau_probabilistic": _ratio(totals["tau_num"], totals["tau_den"]),
    }
    for slot in range(block_size):
        out[f"accept_rate@{slot}"] = _ratio(totals["accept@num"][slot], totals["accept@den"][slot])
    if totals["confidence_weight"] > 0:
        out["confidence_loss"] = _ratio(totals["confidence"], totals["confidence_weight"])
        for name in ("confidence_abs_error", "confidence_bias", "confidence_cumprod_bias"):
            out[name] = _ratio(totals[name], totals["confidence_weight"])
    out |= {
        "valid_anchors_abs": _ratio(totals["valid_anchors"], rows),
        "valid_anchors_ratio": _ratio(totals["valid_anchors"], totals["tokens"]),
        "sampled_anchors_abs": _ratio(totals["sampled_anchors"], rows),
        "sampled_anchors_ratio": _ratio(totals["sampled_anchors"], totals["anchor_slots"]),
        "anchors_per_1k_tokens": 1000.0 * _ratio(totals["sampled_anchors"], totals["tokens"]),
        "block_supervised_tokens_abs": tokens_per_block,
        "block_supervised_tokens_ratio": tokens_per_block / block_size,
        "nonfinite_context": float(totals["nonfinite_context"]),
        "nonfinite_last": float(totals["nonfinite_last"]),
    }
    return out
