"""Which rows a chunk of the vocabulary terms visits, and which target positions it needs."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class RowPlan(NamedTuple):
    """Order in which the vocabulary terms visit rows: `n` chunks of `c` places.

    Attributes:
        order: [rows] all rows, the valid ones first, by target position.
        row: [n*c] the row at each place; 0 past the valid ones.
        live: [n*c] whether the place holds a valid row.
        distinct: [n, c] a chunk's different target positions, ascending, in front of its `c` places.
        rank: [n*c] which of its chunk's positions a row has.
        positions: [n] how many different positions a chunk has.
        trips: how many chunks hold a valid row.
    """

    order: Array
    row: Array
    live: Array
    distinct: Array
    rank: Array
    positions: Array
    trips: Array


def plan_rows(target: Int[Array, " rows"], valid: Bool[Array, " rows"], chunk: int) -> RowPlan:
    """Sort rows by validity, then by target position, and cut them into chunks.

    Args:
        target: row of the target states that predicts each draft row's label.
        valid: rows to visit.
        chunk: `c`.
    """
    (rows,) = target.shape
    places = -(-rows // chunk) * chunk
    far = jnp.iinfo(jnp.int32).max
    order = jnp.argsort(jnp.where(valid, target, far), stable=True)
    count = valid.sum(dtype=jnp.int32)
    live = jnp.arange(places) < count
    row = jnp.where(live, jnp.pad(order, (0, places - rows)), 0)
    chunks = jnp.where(live, target[row], far).reshape(-1, chunk)
    before = jnp.pad(chunks[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    first = (chunks != before) & (chunks < far)
    distinct = jnp.sort(jnp.where(first, chunks, far), axis=-1)
    rank = jnp.maximum(jnp.cumsum(first, axis=-1, dtype=jnp.int32) - 1, 0)
    return RowPlan(
        order=order,
        row=row,
        live=live,
        distinct=jnp.where(distinct < far, distinct, 0),
        rank=rank.reshape(places),
        positions=first.sum(axis=-1, dtype=jnp.int32),
        trips=-(-count // chunk),
    )
