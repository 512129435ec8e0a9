"""The mathematics of decoding: a cache of context keys and values, its extension, and a proposal read from it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from draft_jax.attention import block_attention
from draft_jax.batch import FrozenHead
from draft_jax.config import DraftConfig
from draft_jax.models.dspark import Params, bind
from draft_jax.models.heads import vocabulary_logits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ContextCache:
    """Rotated keys, and values, of each layer's context; positions `0..length-1` of every row are filled."""

    k: Float[Array, "layers B S G C"]
    v: Float[Array, "layers B S G C"]
    length: Int[Array, " B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Proposal:
    """A drafted block.

    Attributes:
        tokens: the `K` tokens after the anchor.
        probs: the distribution each token was drawn from, given the tokens before it: what verification must
            use.
        confidence_logits: `None` without a confidence head.
        hidden: backbone output, after the final norm.
    """

    tokens: Int[Array, "B K"]
    probs: Float32[Array, "B K V"]
    confidence_logits: Float32[Array, "B K"] | None
    hidden: Float[Array, "B K D"]


def new_cache(config: DraftConfig, batch: int, max_context: int, dtype: DTypeLike) -> ContextCache:
    """An empty cache.

    Args:
        config: the draft.
        batch: `B`, sequences decoded side by side.
        max_context: `S`, the most committed tokens a sequence may have.
        dtype: the compute dtype.
    """
    shape = (config.num_hidden_layers, batch, max_context, config.num_key_value_heads, config.head_dim)
    return ContextCache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype), length=jnp.zeros((batch,), jnp.int32))


def extend(
    params: Params,
    config: DraftConfig,
    cache: ContextCache,
    context_hidden: Float[Array, "B T MD"],
    count: Int[Array, " B"],
    dtype: DTypeLike,
) -> ContextCache:
    """Appends the first `count` of `T` tokens to each row, at positions `length .. length + count - 1`.

    Rows past `count` may hold anything. The caller keeps `length + count <= S`; what does not fit is not
    written (`Drafter.extend` refuses it).

    Args:
        params: the draft's parameters.
        config: the draft.
        cache: donate it, so that it is updated in place.
        context_hidden: target states of the tapped layers.
        count: valid tokens per row, `0..T`.
        dtype: compute dtype, that of the cache.
    """
    draft = bind(config, params, dtype)
    B, T, _ = context_hidden.shape
    S = cache.k.shape[2]
    offset = jnp.arange(T, dtype=jnp.int32)
    positions = cache.length[:, None] + offset
    used = offset < count[:, None]
    context = draft.context(jnp.where(used[..., None], context_hidden, 0))
    # Rows beyond the count are sent out of bounds, where the scatter drops them.
    target = jnp.where(used, positions, S)
    row = jnp.arange(B)[:, None]
    k, v = cache.k, cache.v
    for i, (keys, values) in enumerate(draft.context_keys_values(context, positions)):
        k = k.at[i, row, target].set(keys.astype(k.dtype), mode="drop")
        v = v.at[i, row, target].set(values.astype(v.dtype), mode="drop")
    return ContextCache(k=k, v=v, length=cache.length + count.astype(jnp.int32))


def propose(
    params: Params,
    config: DraftConfig,
    frozen: FrozenHead,
    cache: ContextCache,
    anchor_token: Int[Array, " B"],
    uniforms: Float[Array, "B K"],
    temperature: Float[Array, ""],
    dtype: DTypeLike,
) -> Proposal:
    """Drafts `K` tokens after the anchor, which stands at position `cache.length` (dspark_spec 5.1, steps 2
    and 3).

    Slots are sampled left to right, each with the Markov bias of the token sampled before it. Every
    probability is fp32, and the token is drawn from the very array returned.

    Args:
        params: the draft's parameters.
        config: the draft.
        frozen: the target's embedding and LM head.
        cache: context of the tokens before the anchor.
        anchor_token: the last committed token.
        uniforms: one number in [0, 1) per slot; decides the token by inverse CDF.
        temperature: 0 for greedy. A traced scalar: greedy and sampled are one program.
        dtype: compute dtype.
    """
    draft = bind(config, params, dtype)
    hidden = _block_hidden(draft, config, frozen, cache, anchor_token)
    with jax.named_scope("lm_head"):
        logits = vocabulary_logits(hidden, frozen.lm_head, config.vocab_size)
    w2 = draft.markov.w2().astype(hidden.dtype) if draft.markov is not None else None

    def slot(carry: tuple[Any, Array], inputs: tuple[Array, Array, Array]) -> tuple[Any, tuple[Array, Array]]:
        state, prev = carry
        hidden, logits, uniform = inputs
        if draft.markov is not None and w2 is not None:
            state, z = draft.markov.step(state, hidden, prev)
            logits = logits + vocabulary_logits(z, w2, config.vocab_size)
        probs = token_distribution(logits, temperature)
        token = draw(probs, uniform)
        return (state, token), (token, probs)

    start = draft.markov.initial_carry(anchor_token.shape) if draft.markov is not None else ()
    slots_first = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (hidden, logits, uniforms))
    with jax.named_scope("sample"):
        _, outputs = jax.lax.scan(slot, (start, anchor_token.astype(jnp.int32)), slots_first)
    tokens, probs = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs)

    confidence = None
    if draft.confidence is not None:
        prev = jnp.concatenate([anchor_token[:, None].astype(jnp.int32), tokens[:, :-1]], axis=1)
        features = draft.markov.embed(prev) if draft.markov and draft.confidence.with_markov else None
        confidence = draft.confidence(hidden, features)
    return Proposal(tokens=tokens, probs=probs, confidence_logits=confidence, hidden=hidden)


def token_distribution(logits: Float32[Array, "*rows V"], temperature: Float[Array, ""]) -> Float32[Array, "*rows V"]:
    """`softmax(logits / temperature)` in fp32; one-hot at the largest logit when the temperature is 0."""
    greedy = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    cold = temperature <= 0
    sampled = jax.nn.softmax(logits / jnp.where(cold, 1.0, temperature), axis=-1)
    return jnp.where(cold, greedy, sampled)


def draw(probs: Float32[Array, "*rows V"], uniform: Float[Array, "*rows"]) -> Int[Array, "*rows"]:
    """The token at which the cumulated distribution passes `uniform`. A token of probability 0 is never
    drawn.

    The threshold is scaled by the total as summed, which is 1 only up to rounding.
    """
    cumulated = jnp.cumsum(probs, axis=-1)
    threshold = uniform.astype(jnp.float32)[..., None] * cumulated[..., -1:]
    # A parallel prefix sum need not be monotone to the last bit, hence the second condition; and the
    # threshold can round up to the total, hence the fallback.
    passed = (cumulated > threshold) & (probs > 0)
    first, fallback = jnp.argmax(passed, axis=-1), jnp.argmax(probs, axis=-1)
    return jnp.where(passed.any(axis=-1), first, fallback).astype(jnp.int32)


def _block_hidden(
    draft: Any, config: DraftConfig, frozen: FrozenHead, cache: ContextCache, anchor_token: Array
) -> Float[Array, "B K D"]:
    """The backbone over one block per row, with the cache as its context."""
    B, S = cache.k.shape[1:3]
    anchors = cache.length[:, None]
    keep = jnp.ones((B, 1), bool)
    everything = jnp.ones((B, S), bool)

    def attend(layer: int, q: Array, k_block: Array, v_block: Array) -> Array:
        return block_attention(
            q,
            cache.k[layer],
            cache.v[layer],
            k_block,
            v_block,
            anchors,
            jnp.zeros_like(anchors),
            keep,
            everything,
        )

    attends = [functools.partial(attend, layer) for layer in range(config.num_hidden_layers)]
    return draft.run_blocks(anchor_token[:, None], keep, anchors, frozen.embedding, attends)[:, 0]
