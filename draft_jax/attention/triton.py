"""Block attention on NVIDIA GPUs: Pallas kernels compiled by Triton, one pass over the keys a block may see.

The context part (`context_kernels`) and the block part (`block_kernels`) are merged by their log-sum-exps. Kept for
the backward pass besides the inputs: the output and one log-sum-exp per query row.

JAX has deprecated this Pallas backend in favour of its Mosaic one, without a date; 0.10.2 to 0.12.0 have it. Should
it go, `choose_implementation` is where another kernel takes its place.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from draft_jax.attention.block_kernels import block_backward, block_forward
from draft_jax.attention.context_kernels import context_dkv, context_dq, context_forward
from draft_jax.attention.tiles import Tile, ceil_to


@dataclass(frozen=True)
class Tiling:
    """Tiles of the three context kernels; measured on an H200 (benchmarks/attention.py, benchmarks/NOTES.md)."""

    forward: Tile
    dq: Tile
    dkv: Tile


#: By head dim.
TILINGS = {
    64: Tiling(forward=Tile(128, 64, 4, 3), dq=Tile(128, 64, 4, 3), dkv=Tile(128, 64, 4, 2)),
    128: Tiling(forward=Tile(128, 64, 8, 3), dq=Tile(128, 64, 8, 3), dkv=Tile(64, 128, 8, 3)),
}
#: For the interpreter: small, so that small shapes have several tiles.
INTERPRETED = Tiling(forward=Tile(16, 8, 4, 1), dq=Tile(8, 16, 4, 1), dkv=Tile(16, 4, 4, 1, splits=2))


def block_attention(
    q: Float[Array, "B N K H C"],
    k_context: Float[Array, "B L G C"],
    v_context: Float[Array, "B L G C"],
    k_block: Float[Array, "B N K G C"],
    v_block: Float[Array, "B N K G C"],
    anchors: Int[Array, "B N"],
    starts: Int[Array, "B N"],
    keep: Bool[Array, "B N"],
    context_valid: Bool[Array, "B L"],
    *,
    tiling: Tiling | None = None,
    interpret: bool = False,
) -> Float[Array, "B N K H C"]:
    """See `draft_jax.attention.block_attention`.

    Memory: `q` and, in the backward pass, its gradient once more in another order; nothing of size rows x keys.
    Where the batch is split over devices, call it inside `jax.shard_map` (as the training step does): XLA cannot see
    into a kernel, and outside would gather the whole batch onto every device first.

    Args:
        q: see there, like the arguments not listed.
        k_context: see `q`.
        v_context: see `q`.
        k_block: see `q`.
        v_block: see `q`.
        anchors: see `q`.
        starts: see `q`.
        keep: see `q`.
        context_valid: see `q`.
        tiling: tiles instead of the measured ones.
        interpret: run with Pallas' interpreter: any device, dtype and head dim; slow.

    Raises:
        ValueError: dtype or head dim the kernels are not made for.
    """
    if interpret:
        tiling = tiling or INTERPRETED
    else:
        reason = unsupported(q.dtype, q.shape[-1])
        if reason is not None:
            raise ValueError(f"attention implementation 'triton' {reason}; use 'xla'")
        tiling = tiling or TILINGS[q.shape[-1]]
    B, N, K, H, C = q.shape
    G = k_block.shape[3]
    packed = q.reshape(B, N, K, G, H // G, C).transpose(0, 3, 1, 2, 4, 5).reshape(B, G, N, K * (H // G), C)
    high = jnp.where(keep, anchors, 0).astype(jnp.int32)
    low = jnp.where(keep, starts, 0).astype(jnp.int32)
    options = (tiling, interpret)
    out = _attention(packed, k_context, v_context, k_block, v_block, low, high, keep, context_valid, options)
    return out.reshape(B, N, K, H, C)


def unsupported(dtype: Any, head_dim: int) -> str | None:
    """Why the kernels cannot run on these inputs, or None when they can."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"computes in bfloat16 or float16, not {jnp.dtype(dtype).name}"
    if head_dim not in TILINGS:
        return f"is made for head dims {', '.join(map(str, sorted(TILINGS)))}, not {head_dim}"
    return None


_Options = tuple[Tiling, bool]


@functools.partial(jax.custom_vjp, nondiff_argnums=(9,))
def _attention(q: Array, k: Array, v: Array, kb: Array, vb: Array, low: Array, high: Array, keep: Array,
               valid: Array, options: _Options) -> Array:  # fmt: skip
    return _forward(options, q, k, v, kb, vb, low, high, keep, valid)[0]


def _attention_fwd(q: Array, k: Array, v: Array, kb: Array, vb: Array, low: Array, high: Array, keep: Array,
                   valid: Array, options: _Options) -> tuple[Array, tuple[Array, ...]]:  # fmt: skip
    out, lse = _forward(options, q, k, v, kb, vb, low, high, keep, valid)
    return out, (q, k, v, kb, vb, low, high, keep, valid, out, lse)


def _attention_bwd(options: _Options, residuals: Any, do: Array) -> tuple[Array | None, ...]:
    gradients = _backward(options, *residuals, do)  # type: ignore[call-arg]
    return (*gradients, None, None, None, None)


_attention.defvjp(_attention_fwd, _attention_bwd)


class _Context:
    """Keys, values and query rows padded to whole tiles."""

    def __init__(self, tile: Tile, k: Array, v: Array, low: Array, high: Array, valid: Array, rows: int) -> None:
        L, self.M = k.shape[1], low.shape[1] * rows
        keys = ((0, 0), (0, ceil_to(L, tile.keys) - L))
        self.more = ceil_to(self.M, tile.rows) - self.M
        self.k, self.v = (jnp.pad(x, (*keys, (0, 0), (0, 0))) for x in (k, v))
        self.valid = jnp.pad(valid, keys)
        # Padded rows see what the last row sees, so that they cost no tile its mask-free loop.
        self.low, self.high = (
            jnp.pad(jnp.repeat(x, rows, axis=1), ((0, 0), (0, self.more)), mode="edge") for x in (low, high)
        )

    def rows(self, x: Array) -> Array:
        """`[B, G, N, KR, ..]` to `[B, G, M, ..]`, padded with zeros."""
        x = x.reshape(*x.shape[:2], self.M, *x.shape[4:])
        return jnp.pad(x, ((0, 0), (0, 0), (0, self.more), *((0, 0),) * (x.ndim - 3)))

    def blocks(self, x: Array, like: Array) -> Array:
        """The inverse of `rows`."""
        return x[:, :, : self.M].reshape(*like.shape[:4], *x.shape[3:])


def _forward(options: _Options, q: Array, k: Array, v: Array, kb: Array, vb: Array, low: Array, high: Array,
                 keep: Array, valid: Array) -> tuple[Array, Array]:  # fmt: skip
    tiling, interpret = options
    tile = tiling.forward
    context = _Context(tile, k, v, low, high, valid, q.shape[3])
    out, lse = context_forward(
        context.rows(q), context.k, context.v, context.low, context.high, context.valid,
        tile=tile, interpret=interpret,
    )  # fmt: skip
    return block_forward(q, kb, vb, keep, context.blocks(out, q), context.blocks(lse, q), interpret=interpret)


def _backward(options: _Options, q: Array, k: Array, v: Array, kb: Array, vb: Array, low: Array, high: Array,
                  keep: Array, valid: Array, out: Array, lse: Array, do: Array) -> tuple[Array, ...]:  # fmt: skip
    tiling, interpret = options
    do, delta, dq, dkb, dvb = block_backward(q, kb, vb, keep, lse, out, do, interpret=interpret)

    context = _Context(tiling.dkv, k, v, low, high, valid, q.shape[3])
    dk, dv = context_dkv(
        context.rows(q), context.k, context.v, context.low, context.high, context.valid,
        context.rows(lse), context.rows(do), context.rows(delta), tile=tiling.dkv, interpret=interpret,
    )  # fmt: skip
    dk, dv = dk[:, : k.shape[1]], dv[:, : k.shape[1]]

    context = _Context(tiling.dq, k, v, low, high, valid, q.shape[3])
    dq = context_dq(
        context.rows(q), context.k, context.v, context.low, context.high, context.valid,
        context.rows(lse), context.rows(do), context.rows(delta), context.rows(dq), tile=tiling.dq, interpret=interpret,
    )  # fmt: skip
    return context.blocks(dq, q), dk, dv, dkb, dvb
