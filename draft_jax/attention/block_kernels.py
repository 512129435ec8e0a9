"""A block's attention over its own slots, merged with what its context gave: Pallas kernels for the Triton compiler.

One program owns one block and one key/value head: `K * R` query rows (`R = H / G`) against `K` keys, so no score
between two blocks exists. Row `m` of the block is slot `m // R`, query head `m % R` of the group. The kernels also
turn the model's layout `[B, N, K, G, R, C]` into the packed one `[B, G, N, K * R, C]` and back, which saves a pass.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float

from draft_jax.attention.context_kernels import LOG2E, dot

WARPS = 4


def _padded(size: int) -> int:
    """Triton's arrays are powers of two, and at least 16 in a product."""
    return max(16, pl.next_power_of_2(size))


class _Rows:
    """Addresses of one block's rows and keys, padded to what the compiler takes.

    Padded rows read the last row again (so that nothing is read out of bounds) and are never written; padded keys
    are masked.
    """

    def __init__(self, K: int, R: int, C: int) -> None:
        self.count, self.keys_count, self.R = K * R, K, R
        self.row = jnp.arange(_padded(K * R), dtype=jnp.int32)
        self.key = jnp.arange(_padded(K), dtype=jnp.int32)
        self.column = jnp.arange(C, dtype=jnp.int32)[None]

    def load(self, ref: Any) -> Array:
        """`[K * R, C]`."""
        return ref[jnp.minimum(self.row, self.count - 1)[:, None], self.column]

    def load_vector(self, ref: Any) -> Array:
        """`[K * R]`."""
        return ref[jnp.minimum(self.row, self.count - 1)]

    def load_slots(self, ref: Any) -> Array:
        """`[K, R, C]` as rows."""
        slot, head = self._slots(jnp.minimum(self.row, self.count - 1))
        return ref[slot, head, self.column]

    def load_keys(self, ref: Any) -> Array:
        """`[K, C]`."""
        return ref[jnp.minimum(self.key, self.keys_count - 1)[:, None], self.column]

    def store(self, ref: Any, value: Array) -> None:
        """See `load`."""
        self._store(ref.at[self.row[:, None], self.column], value, self.row[:, None] < self.count)

    def store_vector(self, ref: Any, value: Array) -> None:
        """See `load_vector`."""
        self._store(ref.at[self.row], value, self.row < self.count)

    def store_slots(self, ref: Any, value: Array) -> None:
        """See `load_slots`."""
        slot, head = self._slots(self.row)
        self._store(ref.at[slot, head, self.column], value, self.row[:, None] < self.count)

    def store_keys(self, ref: Any, value: Array) -> None:
        """See `load_keys`."""
        self._store(ref.at[self.key[:, None], self.column], value, self.key[:, None] < self.keys_count)

    def scores(self, q: Array, k: Array, scale: float) -> Array:
        """Scores of the block's rows with its keys, -inf at padded keys."""
        return jnp.where(self.key[None] < self.keys_count, dot(q, k.T) * scale, -jnp.inf)

    def _slots(self, row: Array) -> tuple[Array, Array]:
        return jax.lax.div(row, self.R)[:, None], jax.lax.rem(row, self.R)[:, None]

    @staticmethod
    def _store(where: Any, value: Array, mask: Array) -> None:
        plgpu.store(where, value.astype(where.dtype), mask=jnp.broadcast_to(mask, value.shape))


def _forward_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, keep_ref: Any, context_ref: Any, context_lse_ref: Any,
    out_ref: Any, lse_ref: Any, *, scale: float,
) -> None:  # fmt: skip
    K, R, C = out_ref.shape
    rows = _Rows(K, R, C)
    v = rows.load_keys(v_ref)
    scores = rows.scores(rows.load(q_ref), rows.load_keys(k_ref), scale)
    context_lse = rows.load_vector(context_lse_ref)  # -inf without context
    highest = jnp.maximum(scores.max(1), context_lse)  # finite: a block sees itself
    weights = jnp.exp2(scores - highest[:, None])
    context_weight = jnp.exp2(context_lse - highest)
    total = weights.sum(1) + context_weight
    output = dot(weights.astype(v.dtype), v) + rows.load(context_ref).astype(jnp.float32) * context_weight[:, None]
    rows.store_slots(out_ref, jnp.where(keep_ref[0] != 0, output / total[:, None], 0.0))
    rows.store_vector(lse_ref, highest + jnp.log2(total))


def _backward_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, keep_ref: Any, lse_ref: Any, out_ref: Any, do_ref: Any,
    packed_ref: Any, delta_ref: Any, dq_ref: Any, dk_ref: Any, dv_ref: Any, *, scale: float,
) -> None:  # fmt: skip
    K, R, C = do_ref.shape
    rows = _Rows(K, R, C)
    q, k, v = rows.load(q_ref), rows.load_keys(k_ref), rows.load_keys(v_ref)
    # Padded rows repeat the last one; without a gradient they add nothing to the keys' sums.
    used = (rows.row < rows.count) & (keep_ref[0] != 0)
    do = rows.load_slots(do_ref)
    do = jnp.where(used[:, None], do, jnp.zeros_like(do))
    delta = (do.astype(jnp.float32) * rows.load_slots(out_ref).astype(jnp.float32)).sum(1)
    weights = jnp.exp2(rows.scores(q, k, scale) - rows.load_vector(lse_ref)[:, None])
    dscores = (weights * (dot(do, v.T) - delta[:, None])).astype(q.dtype)
    rows.store(packed_ref, do)
    rows.store_vector(delta_ref, delta)
    rows.store(dq_ref, dot(dscores, k) * (scale / LOG2E))
    rows.store_keys(dk_ref, dot(dscores.T, q) * (scale / LOG2E))
    rows.store_keys(dv_ref, dot(weights.astype(do.dtype).T, do))


def _specs(K: int, R: int, C: int) -> dict[str, Any]:
    return {
        "packed": pl.BlockSpec((None, None, None, K * R, C), lambda g, n, b: (b, g, n, 0, 0)),
        "vector": pl.BlockSpec((None, None, None, K * R), lambda g, n, b: (b, g, n, 0)),
        "keys": pl.BlockSpec((None, None, K, None, C), lambda g, n, b: (b, n, 0, g, 0)),
        "slots": pl.BlockSpec((None, None, K, None, R, C), lambda g, n, b: (b, n, 0, g, 0, 0)),
        "keep": pl.BlockSpec((None, 1), lambda g, n, b: (b, n)),
    }


def block_forward(
    q: Float[Array, "B G N KR C"],
    k: Float[Array, "B N K G C"],
    v: Float[Array, "B N K G C"],
    keep: Bool[Array, "B N"],
    context: Float[Array, "B G N KR C"],
    context_lse: Float[Array, "B G N KR"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "B N K G R C"], Float[Array, "B G N KR"]]:
    """Attention over context and own block from that over the context.

    Args:
        q: packed queries.
        k: the blocks' keys.
        v: the blocks' values.
        keep: False for dummy blocks, whose output is 0.
        context: `context_forward`'s output.
        context_lse: its log-sum-exp, in units of log 2.
        interpret: run with Pallas' interpreter, on any device.

    Returns:
        Output in the dtype of `v`; fp32 log-sum-exp over both key sets in units of log 2, finite.
    """
    B, G, N, rows, C = q.shape
    K = k.shape[2]
    R = rows // K
    spec = _specs(K, R, C)
    return pl.pallas_call(
        functools.partial(_forward_kernel, scale=C**-0.5 * LOG2E),
        grid=(G, N, B),
        in_specs=[spec[s] for s in ("packed", "keys", "keys", "keep", "packed", "vector")],
        out_specs=[spec["slots"], spec["vector"]],
        out_shape=[
            jax.ShapeDtypeStruct((B, N, K, G, R, C), v.dtype),
            jax.ShapeDtypeStruct(context_lse.shape, jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="block_attention",
    )(q, k, v, keep.astype(jnp.int32), context, context_lse)


def block_backward(
    q: Float[Array, "B G N KR C"],
    k: Float[Array, "B N K G C"],
    v: Float[Array, "B N K G C"],
    keep: Bool[Array, "B N"],
    lse: Float[Array, "B G N KR"],
    out: Float[Array, "B N K G R C"],
    do: Float[Array, "B N K G R C"],
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array, Array, Array]:
    """Gradients within the block, and what the context's backward kernels need.

    Args:
        q: packed queries, like the arguments not listed as in `block_forward`.
        k: see `q`.
        v: see `q`.
        keep: see `q`.
        lse: log-sum-exp over both key sets.
        out: output over both key sets.
        do: its gradient.
        interpret: see `q`.

    Returns:
        `do` packed (0 for dummy blocks); `delta` fp32 [B, G, N, KR]; the block's share of the gradient of `q`,
        packed; gradients of `k` and `v`.
    """
    B, G, N, rows, C = q.shape
    K = k.shape[2]
    spec = _specs(K, rows // K, C)
    shapes = [
        jax.ShapeDtypeStruct(q.shape, do.dtype),
        jax.ShapeDtypeStruct(lse.shape, jnp.float32),
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        jax.ShapeDtypeStruct(k.shape, k.dtype),
        jax.ShapeDtypeStruct(v.shape, v.dtype),
    ]
    return pl.pallas_call(
        functools.partial(_backward_kernel, scale=C**-0.5 * LOG2E),
        grid=(G, N, B),
        in_specs=[spec[s] for s in ("packed", "keys", "keys", "keep", "vector", "slots", "slots")],
        out_specs=[spec[s] for s in ("packed", "vector", "packed", "keys", "keys")],
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="block_attention_backward",
    )(q, k, v, keep.astype(jnp.int32), lse, out, do)
