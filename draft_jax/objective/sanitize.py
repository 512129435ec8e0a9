"""Non-finite target states: taken out of attention and supervision, and counted, before they are read."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from draft_jax.batch import DraftBatch
from draft_jax.sequence import all_tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sanitized:
    """A batch whose hidden states are finite, and what had to be taken out for that.

    Attributes:
        batch: the same batch, every position with a non-finite value zeroed in the tensor concerned.
        context_valid: whether a position may be attended to: its tapped states were finite.
        last_valid: whether a position may teach: its last state was finite, and its tapped states too (a
            target that overflowed on the way is not believed at the end).
        nonfinite_context: positions with non-finite tapped states, among those that `used_positions` names;
            fp32.
        nonfinite_last: the same for last states.
    """

    batch: DraftBatch
    context_valid: Bool[Array, "B L"]
    last_valid: Bool[Array, "B L"]
    nonfinite_context: Float[Array, ""]
    nonfinite_last: Float[Array, ""]


def used_positions(loss_mask: Int[Array, "B L"]) -> Bool[Array, "B L"]:
    """Positions up to the row's last supervised token; what stands behind it, padding too, is never read."""
    return jax.lax.cummax((loss_mask > 0).astype(jnp.int32), axis=1, reverse=True) > 0


def finite_positions(states: Float[Array, "B L F"]) -> Bool[Array, "B L"]:
    """Whether all features of a position are finite."""
    return jnp.isfinite(states).all(axis=-1)


def sanitize(batch: DraftBatch, *, enabled: bool = True, sequence_axis: str | None = None) -> Sanitized:
    """Mask out positions whose target states are not finite (design 4).

    Zeroing comes first: masked attention still multiplies a masked value by 0, and 0 times NaN is NaN. What
    stands in padding is zeroed as well, but not counted.

    Args:
        batch: as captured.
        enabled: False leaves the batch as it is, everything valid; the counts are still made, so that the
            caller can refuse the batch (`nonfinite_rows` says which samples).
        sequence_axis: mesh axis over which the states are split (`draft_jax.sequence`); what is said of positions is
            said of whole rows all the same.

    Returns:
        `Sanitized`.
    """
    context_finite = finite_positions(batch.context_hidden)
    last_finite = finite_positions(batch.last_hidden)
    clean = dataclasses.replace(
        batch,
        context_hidden=jnp.where(context_finite[..., None], batch.context_hidden, 0),
        last_hidden=jnp.where(last_finite[..., None], batch.last_hidden, 0),
    )
    if sequence_axis is not None:
        context_finite, last_finite = (all_tokens(x, sequence_axis) for x in (context_finite, last_finite))
    used = used_positions(batch.loss_mask)
    nonfinite_context = (used & ~context_finite).sum(dtype=jnp.float32)
    nonfinite_last = (used & ~last_finite).sum(dtype=jnp.float32)
    if not enabled:
        everywhere = jnp.ones_like(used)
        return Sanitized(batch, everywhere, everywhere, nonfinite_context, nonfinite_last)
    return Sanitized(clean, context_finite, context_finite & last_finite, nonfinite_context, nonfinite_last)


def nonfinite_rows(batch: DraftBatch) -> Int[Array, " B"]:
    """Non-finite positions of each row, tapped or last states, to name the samples in an error."""
    broken = ~(finite_positions(batch.context_hidden) & finite_positions(batch.last_hidden))
    return (broken & used_positions(batch.loss_mask)).sum(axis=1, dtype=jnp.int32)
