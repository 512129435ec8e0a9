"""The mathematics of decoding: a cache of context keys and values, its extension, and a proposal read from it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int

from draft_jax.attention import block_attention
from draft_jax.batch import FrozenHead
from draft_jax.config import DraftConfig
from draft_jax.models.dspark import Params, bind
from draft_jax.models.heads import vocabulary_logits

#: Tokens of the vocabulary looked at together when a token is chosen.
_DRAW_BLOCK = 256


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ContextCache:
    """Rotated keys, and values, of each layer's context. How much of a row is filled is the caller's to know."""

    k: Float[Array, "layers B S G C"]
    v: Float[Array, "layers B S G C"]


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
        finite: whether the logits of each slot were numbers; False means bad weights or bad context.
    """

    tokens: Int[Array, "B K"]
    probs: Float32[Array, "B K V"]
    confidence_logits: Float32[Array, "B K"] | None
    hidden: Float[Array, "B K D"]
    finite: Bool[Array, "B K"]


def new_cache(config: DraftConfig, batch: int, max_context: int, dtype: DTypeLike) -> ContextCache:
    """An empty cache.

    Args:
        config: the draft.
        batch: `B`, sequences decoded side by side.
        max_context: `S`, the most committed tokens a sequence may have.
        dtype: the compute dtype.
    """
    shape = (config.num_hidden_layers, batch, max_context, config.num_key_value_heads, config.head_dim)
    return ContextCache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))


def extend(
    params: Params,
    config: DraftConfig,
    cache: ContextCache,
    context_hidden: Float[Array, "T MD"],
    rows: Int[Array, " T"],
    positions: Int[Array, " T"],
    dtype: DTypeLike,
) -> ContextCache:
    """Writes `T` tokens, of whatever rows, at their positions: context features depend on no other token.

    Args:
        params: the draft's parameters.
        config: the draft.
        cache: donate it, so that it is updated in place.
        context_hidden: target states of the tapped layers.
        rows: row of each token; `B` or more = not a token: it may hold anything, and is not written.
        positions: of each token in its row; what does not fit is not written (`Drafter.extend` refuses it).
        dtype: compute dtype, that of the cache.
    """
    draft = bind(config, params, dtype)
    B = cache.k.shape[1]
    context = draft.context(jnp.where((rows < B)[:, None], context_hidden, 0)[None])
    k, v = cache.k, cache.v
    for i, (keys, values) in enumerate(draft.context_keys_values(context, positions[None])):
        k = k.at[i, rows, positions].set(keys[0].astype(k.dtype), mode="drop")
        v = v.at[i, rows, positions].set(values[0].astype(v.dtype), mode="drop")
    return ContextCache(k=k, v=v)


def propose(
    params: Params,
    config: DraftConfig,
    frozen: FrozenHead,
    cache: ContextCache,
    lengths: Int[Array, " B"],
    anchor_token: Int[Array, " B"],
    uniforms: Float[Array, "B K"],
    temperature: Float[Array, ""],
    dtype: DTypeLike,
    sample_dtype: DTypeLike = jnp.float32,
) -> Proposal:
    """Drafts `K` tokens after the anchor, which stands at position `lengths` (dspark_spec 5.1, steps 2 and 3).

    Slots are sampled left to right, each with the Markov bias of the token sampled before it. Every
    probability is fp32, and the token is drawn from the very array returned.

    Args:
        params: the draft's parameters.
        config: the draft.
        frozen: the target's embedding and LM head.
        cache: context of the tokens before the anchor.
        lengths: how many those are; what a row holds beyond is not looked at.
        anchor_token: the last committed token.
        uniforms: one number in [0, 1) per slot; decides the token by inverse CDF.
        temperature: 0 for greedy. A traced scalar: greedy and sampled are one program.
        dtype: compute dtype.
        sample_dtype: bfloat16 draws from a softmax rounded to it while `probs` stay fp32, as DeepSpec's evaluator
            does (dspark_spec 8.2, defect 2): only to reproduce its numbers, it is not lossless.
    """
    draft = bind(config, params, dtype)
    hidden = _block_hidden(draft, config, frozen, cache, lengths, anchor_token)
    with jax.named_scope("lm_head"):
        logits = vocabulary_logits(hidden, frozen.lm_head, config.vocab_size)
    w2 = draft.markov.w2().astype(hidden.dtype) if draft.markov is not None else None
    start = draft.markov.initial_carry(anchor_token.shape) if draft.markov is not None else ()
    slots_first = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (hidden, logits, uniforms))

    def walk(choose: Callable[[Array, Array], tuple[Array, Array]]) -> tuple[Array, ...]:
        """(tokens, probs, finite), slots first, each slot's token and distribution as `choose` says."""

        def slot(carry: tuple[Any, Array], inputs: tuple[Array, Array, Array]) -> tuple[Any, Any]:
            state, prev = carry
            hidden, logits, uniform = inputs
            if draft.markov is not None and w2 is not None:
                state, z = draft.markov.step(state, hidden, prev)
                logits = logits + vocabulary_logits(z, w2, config.vocab_size)
            token, probs = choose(logits, uniform)
            return (state, token), (token, probs, jnp.isfinite(logits).all(axis=-1))

        return jax.lax.scan(slot, (start, anchor_token.astype(jnp.int32)), slots_first)[1]

    def sampled(logits: Array, uniform: Array) -> tuple[Array, Array]:
        probs = jax.nn.softmax(logits / temperature, axis=-1)
        drawn_from = probs
        if jnp.dtype(sample_dtype) != jnp.float32:
            rounded = jax.nn.softmax(logits.astype(sample_dtype) / temperature.astype(sample_dtype), axis=-1)
            drawn_from = rounded.astype(jnp.float32)
        return draw(drawn_from, uniform), probs

    def greedy(logits: Array, _: Array) -> tuple[Array, Array]:
        return largest(logits.astype(sample_dtype)), jax.nn.one_hot(largest(logits), logits.shape[-1])

    with jax.named_scope("sample"):
        # One choice for all slots: a program on a GPU waits for its host to choose.
        outputs = jax.lax.cond(temperature <= 0, lambda: walk(greedy), lambda: walk(sampled))
    tokens, probs, finite = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs)

    confidence = None
    if draft.confidence is not None:
        prev = jnp.concatenate([anchor_token[:, None].astype(jnp.int32), tokens[:, :-1]], axis=1)
        features = draft.markov.embed(prev) if draft.markov and draft.confidence.with_markov else None
        confidence = draft.confidence(hidden, features)
    return Proposal(tokens=tokens, probs=probs, confidence_logits=confidence, hidden=hidden, finite=finite)


def largest(logits: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """Index of the largest logit, the first of equals. By blocks: XLA's argmax on a CPU takes 8 times as long."""
    blocks = _blocks(logits, -jnp.inf)
    tops = blocks.max(axis=-1)
    block = jnp.argmax(tops, axis=-1)[..., None]
    inside = jnp.take_along_axis(blocks, block[..., None], axis=-2)[..., 0, :]
    return (block[..., 0] * _DRAW_BLOCK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def draw(probs: Float32[Array, "*rows V"], uniform: Float[Array, "*rows"]) -> Int[Array, "*rows"]:
    """The token at which the cumulated distribution passes `uniform`. A token of probability 0 is never drawn.

    The threshold is scaled by the total as summed, which is 1 only up to rounding. Sums are taken by blocks of the
    vocabulary first: a prefix sum over all of it costs a pass per binary digit of its size, and rounds more.
    """
    blocks = _blocks(probs, 0)
    masses = blocks.sum(axis=-1)
    upto = jnp.cumsum(masses, axis=-1)
    threshold = uniform.astype(jnp.float32)[..., None] * upto[..., -1:]
    block = _first((upto > threshold) & (masses > 0), otherwise=jnp.argmax(masses, axis=-1))[..., None]
    inside = jnp.take_along_axis(blocks, block[..., None], axis=-2)[..., 0, :]
    before = jnp.take_along_axis(upto - masses, block, axis=-1)
    # Rounding can leave the threshold above the last sum inside the block: its last token then.
    last = _DRAW_BLOCK - 1 - jnp.argmax((inside > 0)[..., ::-1], axis=-1)
    place = _first((before + jnp.cumsum(inside, axis=-1) > threshold) & (inside > 0), otherwise=last)
    return (block[..., 0] * _DRAW_BLOCK + place).astype(jnp.int32)


def _blocks(rows: Float[Array, "*rows V"], padding: float) -> Float[Array, "*rows blocks W"]:
    """The vocabulary in blocks, the last one padded."""
    pads = [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % _DRAW_BLOCK)]
    return jnp.pad(rows, pads, constant_values=padding).reshape(*rows.shape[:-1], -1, _DRAW_BLOCK)


def _first(passed: Bool[Array, "*rows n"], otherwise: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
    """Index of the first True: a parallel prefix sum need not be monotone to the last bit."""
    return jnp.where(passed.any(axis=-1), jnp.argmax(passed, axis=-1), otherwise)


def _block_hidden(
    draft: Any, config: DraftConfig, frozen: FrozenHead, cache: ContextCache, lengths: Array, anchor_token: Array
) -> Float[Array, "B K D"]:
    """The backbone over one block per row, with the cache as its context."""
    B, S = cache.k.shape[1:3]
    anchors = lengths[:, None]
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
