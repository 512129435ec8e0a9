"""Losses and gradient of rows of logits, from the logits and two numbers a row: no probabilities are stored."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


class Softmax(NamedTuple):
    """Softmax of rows of logits, kept as the two numbers from which any entry can be made.

    Attributes:
        top: largest logit of the row, fp32 [*rows, 1].
        total: `sum exp(logit - top)`, fp32 [*rows, 1].
    """

    top: Array
    total: Array

    def of(self, logits: Array) -> Array:
        """Probabilities of entries of the same rows; a logit of -inf has probability 0."""
        return jnp.exp(logits - self.top) * (1.0 / self.total)

    def log(self, logits: Array) -> Array:
        """Their logarithms."""
        return logits - (self.top + jnp.log(self.total))


def softmax_of(logits: Float[Array, "*rows V"]) -> Softmax:
    """Normaliser of each row of fp32 logits."""
    return Softmax(*lax.platform_dependent(logits, cpu=two_pass_softmax, default=one_pass_softmax))


def two_pass_softmax(logits: Array) -> tuple[Array, Array]:
    """`top` and `total` of a `Softmax`: fast where arithmetic is dear."""
    top = logits.max(axis=-1, keepdims=True)
    return top, jnp.exp(logits - top).sum(axis=-1, keepdims=True)


def one_pass_softmax(logits: Array) -> tuple[Array, Array]:
    """The same, reading the logits once: fast where memory is slow."""

    def merge(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        (a_top, a_total), (b_top, b_total) = a, b
        smaller = jnp.exp(-jnp.abs(a_top - b_top))  # what the one with the smaller top counts for
        total = jnp.where(a_top >= b_top, a_total + b_total * smaller, b_total + a_total * smaller)
        return jnp.maximum(a_top, b_top), total

    lowest = jnp.asarray(jnp.finfo(jnp.float32).min)  # finite: -inf - -inf is NaN
    top, total = lax.reduce(
        (logits, jnp.ones_like(logits)), (lowest, jnp.zeros((), jnp.float32)), merge, (logits.ndim - 1,)
    )
    return top[..., None], total[..., None]


def _sign(log_p: Array, log_q: Array) -> Array:
    """`sign(p - q)`, also where both are 0: a difference of logarithms would be NaN there."""
    return (log_p > log_q).astype(jnp.float32) - (log_p < log_q).astype(jnp.float32)


def row_distances(
    logits: Float[Array, "*rows V"], draft: Softmax, target_logits: Float[Array, "*rows V"], target: Softmax
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """L1 distance of the two distributions of each row, and `<sign(p - q), p>` for `row_gradient`.

    A logit of -inf costs nothing where the target's is -inf too: no product of 0 and inf is ever formed.
    """
    # One reduction with two results, and no exponential used twice: a GPU compiler would store what two
    # reductions, or two expressions, share, and a [rows, V] array stored is dearer than one made again.
    log_p, log_q = draft.log(logits), target.log(target_logits)
    zero = jnp.zeros((), jnp.float32)
    return tuple(
        lax.reduce(
            (jnp.abs(draft.of(logits) - target.of(target_logits)), _sign(log_p, log_q) * jnp.exp(log_p)),
            (zero, zero),
            lambda a, b: (a[0] + b[0], a[1] + b[1]),
            (logits.ndim - 1,),
        )
    )


def row_gradient(
    logits: Float[Array, "*rows V"],
    draft: Softmax,
    target_logits: Float[Array, "*rows V"],
    target: Softmax,
    mean_sign: Float[Array, "*rows"],
    ce_weight: Float[Array, "*rows"],
    l1_weight: Float[Array, "*rows"],
) -> Float[Array, "*rows V"]:
    """Gradient of `ce_weight * CE + l1_weight * L1` by the logits, except for `-ce_weight` at the label.

    That one entry per row is the caller's: made here it would be another pass over [rows, V].
    """
    sign = _sign(draft.log(logits), target.log(target_logits))
    return draft.of(logits) * (ce_weight[..., None] + l1_weight[..., None] * (sign - mean_sign[..., None]))
