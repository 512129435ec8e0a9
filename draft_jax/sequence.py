"""Rows too long for one device: the captured states of a row are split over devices, part by part of its tokens.

Everything here runs inside `jax.shard_map`, along a mesh axis whose `s` devices share the same rows. Device r holds the
states of tokens `r*L/s .. (r+1)*L/s - 1` and the integers of whole rows. What is dear stays where it is: the states
(M*D numbers a token) and their projection. What is cheap travels: each layer's context keys and values (2*G*C numbers
a token), and the few target states that anchors are taught by. Anchors are drawn for the whole row from the same key on
all devices, so they are those of a row that is not split, and then dealt out. A device to which only dummies fall adds
zero, but takes part in every exchange.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from draft_jax.anchors import Blocks
from draft_jax.batch import DraftBatch


def own_tokens(values: Array, axis: str) -> Array:
    """This device's part of per-token values [B, L, ...] of whole rows: [B, L/s, ...]."""
    length = values.shape[1] // lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(values, lax.axis_index(axis) * length, length, axis=1)


def all_tokens(values: Array, axis: str) -> Array:
    """Per-token values of whole rows [B, L, ...] from every device's part [B, L/s, ...].

    Its transpose adds up, for each part, what the gradients of all devices' anchors say of it.
    """
    return lax.all_gather(values, axis, axis=1, tiled=True)


def deal(batch: DraftBatch, blocks: Blocks, axis: str) -> tuple[DraftBatch, Blocks]:
    """This device's blocks, and the batch with the target states that teach them.

    Blocks are dealt in turn, so that all devices have as many real ones, early and late ones, but for one.

    Args:
        batch: `last_hidden` is this device's part [B, L/s, D], integers are of whole rows.
        blocks: all N of every row, the same on all devices.
        axis: mesh axis that splits the rows.

    Returns:
        The batch with `last_hidden` [B, U, D] the states of all positions that teach anything, ascending, U = N*K (the
        rest is zero); and ceil(N/s) blocks whose `target_index` points there.
    """
    positions = _positions(blocks.target_index, batch.loss_mask.shape[1])
    index = jax.vmap(jnp.searchsorted)(positions, blocks.target_index.reshape(positions.shape[0], -1))
    blocks = dataclasses.replace(
        blocks, target_index=index.reshape(blocks.target_index.shape).astype(blocks.target_index.dtype)
    )
    return dataclasses.replace(batch, last_hidden=_fetch(batch.last_hidden, positions, axis)), _own_blocks(blocks, axis)


def _positions(target_index: Array, length: int) -> Array:
    """The different positions in [B, N, K], ascending, [B, N*K]; behind them `length`."""
    flat = jnp.sort(target_index.reshape(target_index.shape[0], -1), axis=1)
    again = jnp.pad(flat[:, 1:] == flat[:, :-1], ((0, 0), (1, 0)))
    return jnp.sort(jnp.where(again, length, flat), axis=1)


def _fetch(states: Array, positions: Array, axis: str) -> Array:
    """States at positions of the whole row, [B, U, D]: exactly one device holds each, the others add zero."""
    length = states.shape[1]
    local = positions - lax.axis_index(axis) * length
    held = (local >= 0) & (local < length)
    found = jnp.take_along_axis(states, jnp.where(held, local, 0)[..., None], axis=1)
    return lax.psum(jnp.where(held[..., None], found, 0), axis)


def _own_blocks(blocks: Blocks, axis: str) -> Blocks:
    parts, rank = lax.axis_size(axis), lax.axis_index(axis)

    def own(values: Array) -> Array:
        missing = -values.shape[1] % parts
        values = jnp.pad(values, ((0, 0), (0, missing), *((0, 0),) * (values.ndim - 2)))  # dummies: keep is False
        turns = values.reshape(values.shape[0], -1, parts, *values.shape[2:])
        return lax.dynamic_index_in_dim(turns, rank, axis=2, keepdims=False)

    return jax.tree.map(own, blocks)
