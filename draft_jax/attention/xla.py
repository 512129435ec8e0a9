"""Block attention in plain XLA operations: the reference, and what runs on a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


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
) -> Float[Array, "B N K H C"]:
    """See `draft_jax.attention.block_attention`. Memory: fp32 scores `[B, H, N * K, L]`."""
    B, N, K, H, C = q.shape
    L, G = k_context.shape[1:3]
    # The heads that share a key/value head become rows of one product, so K and V are never repeated.
    q = q.reshape(B, N, K, G, H // G, C)
    q = q.transpose(0, 3, 1, 2, 4, 5)  # [B, G, N, K, H/G, C]

    def product(equation: str, left: Array, right: Array) -> Array:
        return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)

    scale = C**-0.5  # applied to fp32 scores: C ** -0.5 is not exact in bf16
    context_scores = product("bgnkrc,blgc->bgnkrl", q, k_context) * scale
    block_scores = product("bgnkrc,bnjgc->bgnkrj", q, k_block) * scale  # diagonal blocks only

    index = jnp.arange(L)
    visible = (index >= starts[..., None]) & (index < anchors[..., None]) & context_valid[:, None, :]  # [B, N, L]
    context_scores = jnp.where(visible[:, None, :, None, None, :], context_scores, -jnp.inf)

    # One softmax over both key sets. Its own block is always visible, so the maximum is finite.
    highest = jnp.maximum(context_scores.max(-1, initial=-jnp.inf), block_scores.max(-1))
    highest = jax.lax.stop_gradient(highest)[..., None]
    context_weights = jnp.exp(context_scores - highest)
    block_weights = jnp.exp(block_scores - highest)
    total = context_weights.sum(-1) + block_weights.sum(-1)

    output = product("bgnkrl,blgc->bgnkrc", context_weights.astype(v_context.dtype), v_context)
    output += product("bgnkrj,bnjgc->bgnkrc", block_weights.astype(v_block.dtype), v_block)
    output = output / total[..., None]
    output = jnp.where(keep[:, None, :, None, None, None], output, 0)
    return output.transpose(0, 2, 3, 1, 4, 5).reshape(B, N, K, H, C).astype(v_block.dtype)
