"""The vocabulary terms of the loss, chunk by chunk, with the gradient made in the forward pass.

For a draft row with logits `d = h.head^T + z.w2^T`, target distribution `q`, label `y` and `p = softmax(d)`:

    CE = logsumexp(d) - d[y]                dCE/dd = p - onehot(y)
    L1 = sum |p - q|                        dL1/dd = p * (s - <s, p>),  s = sign(p - q)

so everything the backward pass needs from the vocabulary is known once `p` and `q` are. A chunk of rows makes
its logits, its losses and its gradient with respect to `h`, `z` and `w2`, and then forgets all [rows, V]
arrays; the backward pass only multiplies by the cotangent. `reference.py` is the same in plain autodiff.

Two further savings, both exact. Rows without weight are sorted to the end and never visited. Target logits
depend on the position alone, so rows are sorted by it and a chunk computes each position once (dspark_spec
8.5, 1 and 2).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from draft_jax.objective.row_plan import plan_rows

#: A chunk's target probabilities are made in this many pieces; those past its last position are skipped.
TARGET_PIECES = 4


class VocabTerms(NamedTuple):
    """Result of the vocabulary terms.

    Attributes:
        numerator: `sum w * (ce_alpha * CE + l1_alpha * L1)`, fp32; the only differentiable output.
        ce: cross entropy of each row, fp32, unweighted; 0 where not valid.
        l1: L1 distance of each row, in [0, 2], fp32, unweighted; 0 where not valid.
    """

    numerator: Float[Array, ""]
    ce: Float[Array, "B S"]
    l1: Float[Array, "B S"]


@dataclass(frozen=True)
class _Spec:
    """Static part of the computation."""

    vocab_size: int
    ce_alpha: float
    l1_alpha: float
    chunk_rows: int
    shards: int


class _Rows(NamedTuple):
    """Traced inputs; custom_vjp wants one pytree. Shapes as in `vocab_terms`."""

    hidden: Array
    z: Array | None
    w2: Array | None
    lm_head: Array
    last_hidden: Array
    target_index: Array
    labels: Array
    weights: Array
    valid: Array


def _head_logits(states: Array, lm_head: Array, vocab_size: int) -> Float[Array, "d c V"]:
    """fp32 logits of the first `vocab_size` rows of a padded head; cutting the head itself would copy it."""
    logits = jnp.einsum("dcm,vm->dcv", states, lm_head, preferred_element_type=jnp.float32)
    return logits[..., :vocab_size]


def row_losses(
    logits: Float[Array, "*rows V"], target: Float[Array, "*rows V"], labels: Int[Array, "*rows"]
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"], Float[Array, "*rows V"], Float[Array, "*rows"]]:
    """Losses of rows of fp32 logits against target probabilities.

    A logit of -inf has probability 0 and costs nothing where the target's is 0 too: no product of 0 and inf
    is ever formed.

    Returns:
        CE and L1 of each row, the draft's probabilities `p`, and `<sign(p - q), p>` for `row_gradient`.
    """
    top = logits.max(axis=-1, keepdims=True)
    shifted = jnp.exp(logits - top)
    total = shifted.sum(axis=-1, keepdims=True)
    p = shifted / total
    at_label = jnp.take_along_axis(logits, labels[..., None], axis=-1)
    ce = (jnp.log(total) + (top - at_label))[..., 0]
    difference = p - target
    l1 = jnp.abs(difference).sum(axis=-1)
    mean_sign = (jnp.sign(difference) * p).sum(axis=-1)
    return ce, l1, p, mean_sign


def row_gradient(
    p: Float[Array, "*rows V"],
    target: Float[Array, "*rows V"],
    mean_sign: Float[Array, "*rows"],
    ce_weight: Float[Array, "*rows"],
    l1_weight: Float[Array, "*rows"],
) -> Float[Array, "*rows V"]:
    """Gradient of `ce_weight * CE + l1_weight * L1` by the logits, except for `-ce_weight` at the label.

    That one entry per row is the caller's: made here it would be another pass over [rows, V].
    """
    return p * (ce_weight[..., None] + l1_weight[..., None] * (jnp.sign(p - target) - mean_sign[..., None]))


def _sweep(spec: _Spec, rows: _Rows, with_gradient: bool) -> tuple[VocabTerms, tuple | None]:
    """Visit all chunks; the gradient of the numerator is fp32 and in the rows' own order."""
    batch, slots = rows.labels.shape
    length = rows.last_hidden.shape[1]
    d, c, v = spec.shards, spec.chunk_rows, spec.vocab_size
    local = batch // d * slots

    def by_shard(values: Array) -> Array:
        """[B, n, ...] -> [d, B/d*n, ...]; rows stay on their device if `d` devices hold the batch."""
        return values.reshape(d, -1, *values.shape[2:])

    dtype = rows.hidden.dtype
    hidden, last_hidden = by_shard(rows.hidden), by_shard(rows.last_hidden).astype(dtype)
    z = None if rows.z is None else by_shard(rows.z).astype(dtype)
    w2 = None if rows.w2 is None else rows.w2.astype(dtype)
    lm_head = rows.lm_head.astype(dtype)
    labels, weights = by_shard(rows.labels), by_shard(rows.weights).astype(jnp.float32)
    row_in_shard = jnp.arange(batch, dtype=jnp.int32) % (batch // d)
    flat_target = by_shard(rows.target_index + row_in_shard[:, None] * length)
    plan = plan_rows(flat_target, by_shard(rows.valid), c)

    places = plan.row.shape[1]
    piece = -(-c // TARGET_PIECES)
    pieces = -(-c // piece) * piece
    # The last piece may read past the last chunk.
    distinct = jnp.pad(plan.distinct, ((0, 0), (0, pieces - c)))

    def take(values: Array, index: Array) -> Array:
        index = index.reshape(*index.shape, *(1,) * (values.ndim - 2))
        return jnp.take_along_axis(values, index, axis=1, mode="promise_in_bounds")

    def cut(values: Array, start: Array, size: int = c) -> Array:
        return lax.dynamic_slice_in_dim(values, start, size, axis=1)

    def put(into: Array, values: Array, start: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(into, values, start, axis=1)

    def target_probabilities(i: Array, buffer: Array) -> Array:
        """Fill the front of [d, pieces, V] with the distributions of the chunk's different positions."""

        def fill(j: Array, buffer: Array) -> Array:
            states = take(last_hidden, cut(distinct, i * c + j * piece, piece))
            return put(buffer, jax.nn.softmax(_head_logits(states, lm_head, v), axis=-1), j * piece)

        return lax.fori_loop(0, -(-plan.positions[i] // piece), fill, buffer)

    def visit(i: Array, carry: dict) -> dict:
        carry, start = dict(carry), i * c
        row, live = cut(plan.row, start), cut(plan.live, start)
        label, weight = take(labels, row), jnp.where(live, take(weights, row), 0.0)
        carry["buffer"] = target_probabilities(i, carry["buffer"])
        target = take(carry["buffer"], cut(plan.rank, start))  # [d, c, V]
        # Rows past the valid ones repeat row 0 of the shard, which may be anything; zeros are safe.
        h = jnp.where(live[..., None], take(hidden, row), 0)
        logits = _head_logits(h, lm_head, v)
        if z is not None:
            zc = jnp.where(live[..., None], take(z, row), 0)
            logits += jnp.einsum("dcr,vr->dcv", zc, w2, preferred_element_type=jnp.float32)
        ce, l1, p, mean_sign = row_losses(logits, target, label)
        ce, l1 = jnp.where(live, ce, 0.0), jnp.where(live, l1, 0.0)
        carry["ce"], carry["l1"] = put(carry["ce"], ce, start), put(carry["l1"], l1, start)
        carry["numerator"] += (weight * (spec.ce_alpha * ce + spec.l1_alpha * l1)).sum(axis=1)
        if "hidden" not in carry:
            return carry
        term_weights = mean_sign, spec.ce_alpha * weight, spec.l1_alpha * weight
        g = row_gradient(p, target, *term_weights).astype(dtype)
        pull = -spec.ce_alpha * weight
        if dtype != jnp.float32:
            # The label's entry is p - 1: if p is rounded first, little of it is left. So the products below
            # also get what the rounding of that entry took away.
            q_label = jax.vmap(lambda q, k, y: q[k, y])(carry["buffer"], cut(plan.rank, start), label)
            entry = row_gradient(jnp.exp(-ce)[..., None], q_label[..., None], *term_weights)[..., 0]
            pull += entry - entry.astype(dtype).astype(jnp.float32)
        carry["pull"] = put(carry["pull"], pull, start)
        g_head = jnp.pad(g, ((0, 0), (0, 0), (0, lm_head.shape[0] - v)))
        dh = jnp.einsum("dcv,vm->dcm", g_head, lm_head, preferred_element_type=jnp.float32)
        carry["hidden"] = put(carry["hidden"], dh, start)
        if z is not None:
            dz = jnp.einsum("dcv,vr->dcr", g, w2, preferred_element_type=jnp.float32)
            carry["z"] = put(carry["z"], dz, start)
            carry["w2"] += jnp.einsum("dcv,dcr->dvr", g, zc, preferred_element_type=jnp.float32)
        return carry

    carry = {
        "buffer": jnp.zeros((d, pieces, v), jnp.float32),
        "ce": jnp.zeros((d, places), jnp.float32),
        "l1": jnp.zeros((d, places), jnp.float32),
        "numerator": jnp.zeros((d,), jnp.float32),
    }
    if with_gradient and (spec.ce_alpha or spec.l1_alpha):
        carry["pull"] = jnp.zeros((d, places), jnp.float32)
        carry["hidden"] = jnp.zeros((d, places, hidden.shape[-1]), jnp.float32)
        if z is not None and w2 is not None:
            carry["z"] = jnp.zeros((d, places, z.shape[-1]), jnp.float32)
            carry["w2"] = jnp.zeros((d, *w2.shape), jnp.float32)  # per shard: summed once, after the loop
    carry = lax.fori_loop(0, plan.trips, visit, carry)

    place_of_row = jnp.argsort(plan.order, axis=1)

    def restore(values: Array) -> Array:
        """[d, places, ...] -> [B, slots, ...] in the rows' own order."""
        return take(values[:, :local], place_of_row).reshape(batch, slots, *values.shape[2:])

    terms = VocabTerms(carry["numerator"].sum(), restore(carry["ce"]), restore(carry["l1"]))
    if "hidden" not in carry:
        return terms, None
    pull = restore(carry["pull"])[..., None]
    dh = restore(carry["hidden"]) + pull * lm_head[rows.labels].astype(jnp.float32)
    if z is None or w2 is None or rows.z is None:
        return terms, (dh, None, None)
    dz = restore(carry["z"]) + pull * w2[rows.labels].astype(jnp.float32)
    push = by_shard(jnp.where(rows.valid[..., None], pull * rows.z.astype(jnp.float32), 0.0))
    dw2 = jax.vmap(lambda total, label, x: total.at[label].add(x))(carry["w2"], labels, push)
    return terms, (dh, dz, dw2.sum(axis=0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _vocab_terms(spec: _Spec, rows: _Rows) -> VocabTerms:
    return _sweep(spec, rows, with_gradient=False)[0]


def _forward(spec: _Spec, rows: _Rows) -> tuple[VocabTerms, tuple]:
    terms, gradient = _sweep(spec, rows, with_gradient=True)
    empty = [None if x is None else jnp.zeros((0,), x.dtype) for x in (rows.hidden, rows.z, rows.w2)]
    return terms, (gradient, empty)  # the empty arrays only carry the dtypes


def _backward(spec: _Spec, residual: tuple, cotangent: VocabTerms) -> tuple[_Rows]:
    gradient, dtypes = residual
    cotangents: dict[str, Any] = dict.fromkeys(_Rows._fields)  # None: no gradient; head and targets are frozen
    if gradient is not None:
        for name, g, like in zip(("hidden", "z", "w2"), gradient, dtypes, strict=True):
            cotangents[name] = None if g is None else (g * cotangent.numerator).astype(like.dtype)
    return (_Rows(**cotangents),)


_vocab_terms.defvjp(_forward, _backward)


def vocab_terms(
    hidden: Float[Array, "B S D"],
    z: Float[Array, "B S R"] | None,
    w2: Float[Array, "V R"] | None,
    lm_head: Float[Array, "P D"],
    last_hidden: Float[Array, "B L D"],
    target_index: Int[Array, "B S"],
    labels: Int[Array, "B S"],
    weights: Float[Array, "B S"],
    valid: Bool[Array, "B S"],
    *,
    vocab_size: int,
    ce_alpha: float,
    l1_alpha: float,
    chunk_rows: int,
    shards: int = 1,
) -> VocabTerms:
    """Weighted CE + L1 of all draft rows, with at most `chunk_rows` rows of logits at a time (dspark_spec 2).

    Matrix products run in `hidden.dtype` and accumulate in fp32; everything between them is fp32. The
    gradient of `w2` accumulates in fp32 over the chunks and is returned in `w2.dtype`, so pass `w2` as the
    fp32 master.

    Args:
        hidden: draft states after the final norm, `S = N*K` rows of each batch row.
        z: Markov features, or None; the bias on the logits is `z @ w2.T`.
        w2: Markov output matrix; None together with `z`.
        lm_head: frozen; `P >= vocab_size` rows, the rest is padding.
        last_hidden: target states after its final norm, one per position; not differentiated.
        target_index: position whose state predicts the row's label.
        labels: token ids below `vocab_size`.
        weights: fp32 weight of each row; only rows with `valid` are read.
        valid: rows to compute; the others have losses 0 and gradients 0 whatever they contain.
        vocab_size: `V`.
        ce_alpha: weight of CE; 0 still reports it.
        l1_alpha: weight of L1; 0 still reports it. Both 0: no gradient is computed at all.
        chunk_rows: rows per chunk and shard.
        shards: over how many devices the batch axis is split; sorting and chunking then stay on each of them.

    Returns:
        `VocabTerms`; differentiate its `numerator` only, the other two carry no gradient.

    Raises:
        ValueError: `shards` does not divide `B`, or only one of `z` and `w2` is given.
    """
    if labels.shape[0] % shards:
        raise ValueError(f"{labels.shape[0]} batch rows cannot be split over {shards} shards evenly")
    if (z is None) != (w2 is None):
        raise ValueError("z and w2 belong together: give both (Markov head) or neither")
    local_rows = labels.shape[0] // shards * labels.shape[1]
    spec = _Spec(vocab_size, float(ce_alpha), float(l1_alpha), min(chunk_rows, local_rows), shards)
    rows = _Rows(hidden, z, w2, lm_head, last_hidden, target_index, labels, weights, valid)
    terms = _vocab_terms(spec, rows)
    return terms._replace(ce=lax.stop_gradient(terms.ce), l1=lax.stop_gradient(terms.l1))
