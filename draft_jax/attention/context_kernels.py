"""Attention of query rows over their context, forward and backward, as Pallas kernels for the Triton compiler.

All rows that read one key/value head are packed together (`H / G` query heads times all slots of all blocks), so a
tile of keys is loaded once for all of them. Softmax runs online over the key tiles a tile of rows can see (`tiles`);
only log-sum-exp is kept for the backward pass, which recomputes the scores. Exponentials are powers of two: scores
carry the factor `log2(e)`, and so do all log-sum-exps here.

The backward kernels are given the log-sum-exp and output of *all* of a row's keys (context and its own block); what
they return are then the exact gradients of the context's share.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from draft_jax.attention.tiles import Tile, filling, key_ranges, row_ranges

LOG2E = math.log2(math.e)


def dot(a: Array, b: Array) -> Array:
    """Matrix product, accumulated in fp32."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=precision)


def _visible(keys: Array, valid: Array, low: Array, high: Array) -> Array:
    return (keys >= low) & (keys < high) & (valid != 0)


def _loop(ranges_ref: Any, body: Callable[[Array, Any, bool], Any], carry: Any, part: tuple[Any, int] = (0, 1)) -> Any:
    """Run `body(tile, carry, masked)` over `[first, last)`: the whole tiles first, then those that need a mask.

    Args:
        ranges_ref: (first, full_low, full_high, last).
        body: one step.
        carry: initial carry.
        part: (p, n): do the p-th of n interleaved shares of both loops.
    """
    first, full_low, full_high, last = (ranges_ref[i] for i in range(4))
    index, parts = part

    def share(count: Array) -> Array:
        return jax.lax.div(count - index + (parts - 1), parts) if parts > 1 else count

    def whole(i: Array, carry: Any) -> Any:
        return body(full_low + index + i * parts, carry, False)

    def edge(i: Array, carry: Any) -> Any:
        i = index + i * parts
        left = full_low - first
        return body(jnp.where(i < left, first + i, full_high + i - left), carry, True)

    carry = jax.lax.fori_loop(0, share(full_high - full_low), whole, carry)
    return jax.lax.fori_loop(0, share(full_low - first + last - full_high), edge, carry)


def _forward_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, low_ref: Any, high_ref: Any, valid_ref: Any, ranges_ref: Any,
    out_ref: Any, lse_ref: Any, *, tile: Tile, scale: float,
) -> None:  # fmt: skip
    q, low, high = q_ref[...], low_ref[...][:, None], high_ref[...][:, None]

    def body(j: Array, carry: tuple[Array, Array, Array], masked: bool) -> tuple[Array, Array, Array]:
        total, highest, output = carry
        here = pl.ds(j * tile.keys, tile.keys)
        scores = dot(q, k_ref[here, :].T)
        if masked:
            keys = j * tile.keys + jnp.arange(tile.keys, dtype=jnp.int32)
            scores = jnp.where(_visible(keys[None], valid_ref[here][None], low, high), scores, -jnp.inf)
        new = jnp.maximum(highest, scores.max(1) * scale)
        # A row that has seen no key yet has no maximum; any finite number serves, its weights are all 0.
        safe = jnp.where(new == -jnp.inf, 0.0, new) if masked else new
        weights = jnp.exp2(scores * scale - safe[:, None])
        correction = jnp.exp2(highest - safe)
        total = total * correction + weights.sum(1)
        v = v_ref[here, :]
        output = output * correction[:, None] + dot(weights.astype(v.dtype), v)
        return total, new, output

    carry = (
        jnp.zeros((tile.rows,), jnp.float32),
        jnp.full((tile.rows,), -jnp.inf, jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    total, highest, output = _loop(ranges_ref, body, carry)
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    out_ref[...] = (output / total[:, None]).astype(out_ref.dtype)
    lse_ref[...] = jnp.where(seen, highest + jnp.log2(total), -jnp.inf)


def _dq_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, low_ref: Any, high_ref: Any, valid_ref: Any, ranges_ref: Any,
    lse_ref: Any, do_ref: Any, delta_ref: Any, start_ref: Any, dq_ref: Any, *, tile: Tile, scale: float,
) -> None:  # fmt: skip
    q, do = q_ref[...], do_ref[...]
    low, high = low_ref[...][:, None], high_ref[...][:, None]
    lse, delta = lse_ref[...][:, None], delta_ref[...][:, None]

    def body(j: Array, dq: Array, masked: bool) -> Array:
        here = pl.ds(j * tile.keys, tile.keys)
        k, v = k_ref[here, :], v_ref[here, :]
        weights = jnp.exp2(dot(q, k.T) * scale - lse)
        if masked:
            keys = j * tile.keys + jnp.arange(tile.keys, dtype=jnp.int32)
            weights = jnp.where(_visible(keys[None], valid_ref[here][None], low, high), weights, 0.0)
        dscores = weights * (dot(do, v.T) - delta)
        return dq + dot(dscores.astype(k.dtype), k)

    dq = _loop(ranges_ref, body, jnp.zeros(q.shape, jnp.float32))
    dq_ref[...] = (dq * (scale / LOG2E) + start_ref[...].astype(jnp.float32)).astype(dq_ref.dtype)


def _dkv_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, low_ref: Any, high_ref: Any, valid_ref: Any, ranges_ref: Any,
    lse_ref: Any, do_ref: Any, delta_ref: Any, dk_ref: Any, dv_ref: Any, *, tile: Tile, scale: float,
) -> None:  # fmt: skip
    k, v = k_ref[...], v_ref[...]
    keys = jax.lax.div(pl.program_id(1), tile.splits) * tile.keys + jnp.arange(tile.keys, dtype=jnp.int32)
    valid = valid_ref[...]

    def body(i: Array, carry: tuple[Array, Array], masked: bool) -> tuple[Array, Array]:
        dk, dv = carry
        here = pl.ds(i * tile.rows, tile.rows)
        q, do = q_ref[here, :], do_ref[here, :]
        weights = jnp.exp2(dot(k, q.T) * scale - lse_ref[here][None])  # [keys, rows]
        if masked:
            seen = _visible(keys[:, None], valid[:, None], low_ref[here][None], high_ref[here][None])
            weights = jnp.where(seen, weights, 0.0)
        dv = dv + dot(weights.astype(do.dtype), do)
        dscores = weights * (dot(v, do.T) - delta_ref[here][None])
        return dk + dot(dscores.astype(q.dtype), q), dv

    zeros = jnp.zeros(k.shape, jnp.float32)
    dk, dv = _loop(ranges_ref, body, (zeros, zeros), (jax.lax.rem(pl.program_id(1), tile.splits), tile.splits))
    dk_ref[...] = (dk * (scale / LOG2E)).astype(dk_ref.dtype)
    dv_ref[...] = dv.astype(dv_ref.dtype)


def _params(tile: Tile) -> Any:
    return plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages)


def _scale(C: int) -> float:
    return C**-0.5 * LOG2E


def _by_rows(B: int, G: int, M: int, L: int, C: int, tile: Tile) -> tuple[tuple[int, int, int], dict[str, Any]]:
    """Grid and block shapes of a kernel whose programs own a tile of rows; the longest loops start first."""
    T = M // tile.rows

    def rows(g: Any, t: Any, b: Any) -> tuple[Any, ...]:
        return b, g, T - 1 - t

    specs = {
        "rows_c": pl.BlockSpec((None, None, tile.rows, C), lambda g, t, b: (*rows(g, t, b), 0)),
        "rows": pl.BlockSpec((None, None, tile.rows), rows),
        "bounds": pl.BlockSpec((None, tile.rows), lambda g, t, b: (b, T - 1 - t)),
        "keys_c": pl.BlockSpec((None, L, None, C), lambda g, t, b: (b, 0, g, 0)),
        "keys": pl.BlockSpec((None, L), lambda g, t, b: (b, 0)),
        "ranges": pl.BlockSpec((None, None, 4), lambda g, t, b: (b, T - 1 - t, 0)),
    }
    return (G, T, B), specs


def context_forward(
    q: Float[Array, "B G M C"],
    k: Float[Array, "B L G C"],
    v: Float[Array, "B L G C"],
    low: Int[Array, "B M"],
    high: Int[Array, "B M"],
    valid: Bool[Array, "B L"],
    *,
    tile: Tile,
    interpret: bool = False,
) -> tuple[Float[Array, "B G M C"], Float[Array, "B G M"]]:
    """Softmax attention of each row over its keys `[low, high)` that are valid.

    Args:
        q: packed query rows; `M` a multiple of `tile.rows`.
        k: keys; `L` a multiple of `tile.keys`.
        v: values.
        low: first key of each row.
        high: one past its last key.
        valid: False hides a key.
        tile: see `Tile`.
        interpret: run with Pallas' interpreter, on any device.

    Returns:
        Output in the dtype of `q`, 0 for a row without keys; fp32 log-sum-exp in units of log 2, -inf for such a row.
    """
    B, G, M, C = q.shape
    L = k.shape[1]
    grid, spec = _by_rows(B, G, M, L, C, tile)
    return pl.pallas_call(
        functools.partial(_forward_kernel, tile=tile, scale=_scale(C)),
        grid=grid,
        in_specs=[spec[s] for s in ("rows_c", "keys_c", "keys_c", "bounds", "bounds", "keys", "ranges")],
        out_specs=[spec["rows_c"], spec["rows"]],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((B, G, M), jnp.float32)],
        compiler_params=_params(tile),
        interpret=interpret,
        name="context_attention",
    )(q, k, v, low, high, valid.astype(jnp.int32), key_ranges(low, high, valid, tile))


def context_dq(
    q: Float[Array, "B G M C"],
    k: Float[Array, "B L G C"],
    v: Float[Array, "B L G C"],
    low: Int[Array, "B M"],
    high: Int[Array, "B M"],
    valid: Bool[Array, "B L"],
    lse: Float[Array, "B G M"],
    do: Float[Array, "B G M C"],
    delta: Float[Array, "B G M"],
    start: Float[Array, "B G M C"],
    *,
    tile: Tile,
    interpret: bool = False,
) -> Float[Array, "B G M C"]:
    """Gradient of the queries; arguments as in `context_forward` and `context_dkv`, `start` is added to it."""
    B, G, M, C = q.shape
    grid, spec = _by_rows(B, G, M, k.shape[1], C, tile)
    sides = ("rows_c", "keys_c", "keys_c", "bounds", "bounds", "keys", "ranges", "rows", "rows_c", "rows", "rows_c")
    return pl.pallas_call(
        functools.partial(_dq_kernel, tile=tile, scale=_scale(C)),
        grid=grid,
        in_specs=[spec[s] for s in sides],
        out_specs=spec["rows_c"],
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=_params(tile),
        interpret=interpret,
        name="context_attention_dq",
    )(q, k, v, low, high, valid.astype(jnp.int32), key_ranges(low, high, valid, tile), lse, do, delta, start)


def context_dkv(
    q: Float[Array, "B G M C"],
    k: Float[Array, "B L G C"],
    v: Float[Array, "B L G C"],
    low: Int[Array, "B M"],
    high: Int[Array, "B M"],
    valid: Bool[Array, "B L"],
    lse: Float[Array, "B G M"],
    do: Float[Array, "B G M C"],
    delta: Float[Array, "B G M"],
    *,
    tile: Tile,
    interpret: bool = False,
) -> tuple[Float[Array, "B L G C"], Float[Array, "B L G C"]]:
    """Gradients of keys and values.

    Args:
        q: as in `context_forward`, like the arguments not listed here.
        k: see `q`.
        v: see `q`.
        low: see `q`.
        high: see `q`.
        valid: see `q`.
        lse: log-sum-exp of each row over all its keys, context and block, in units of log 2; finite.
        do: gradient of the rows' outputs.
        delta: `sum(do * output)` over C, with the output over all keys.
        tile: see `Tile`.
        interpret: see `q`.
    """
    B, G, M, C = q.shape
    J = k.shape[1] // tile.keys
    tile = filling(tile, B * G * J)
    S = tile.splits
    ranges = row_ranges(key_ranges(low, high, valid, tile), J)
    # A split computes its share into a slice of its own; one split writes the result itself.
    dtype = k.dtype if S == 1 else jnp.float32
    rows_c = pl.BlockSpec((None, None, M, C), lambda g, j, b: (b, g, 0, 0))
    rows = pl.BlockSpec((None, None, M), lambda g, j, b: (b, g, 0))
    bounds = pl.BlockSpec((None, M), lambda g, j, b: (b, 0))
    keys_c = pl.BlockSpec((None, tile.keys, None, C), lambda g, j, b: (b, j // S, g, 0))
    keys = pl.BlockSpec((None, tile.keys), lambda g, j, b: (b, j // S))
    ranges_spec = pl.BlockSpec((None, None, 4), lambda g, j, b: (b, j // S, 0))
    shares = pl.BlockSpec((None, None, tile.keys, None, C), lambda g, j, b: (j % S, b, j // S, g, 0))
    shape = jax.ShapeDtypeStruct((S, *k.shape), dtype)
    dk, dv = pl.pallas_call(
        functools.partial(_dkv_kernel, tile=tile, scale=_scale(C)),
        grid=(G, J * S, B),
        in_specs=[rows_c, keys_c, keys_c, bounds, bounds, keys, ranges_spec, rows, rows_c, rows],
        out_specs=[shares, shares],
        out_shape=[shape, shape],
        compiler_params=_params(tile),
        interpret=interpret,
        name="context_attention_dkv",
    )(q, k, v, low, high, valid.astype(jnp.int32), ranges, lse, do, delta)
    return dk.sum(0).astype(k.dtype), dv.sum(0).astype(v.dtype)
