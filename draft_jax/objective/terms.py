"""The vocabulary terms of the loss, chunk by chunk, with the gradient made in the forward pass.

For a draft row with logits `d = h.head^T + z.w2^T`, target distribution `q`, label `y` and `p = softmax(d)`:

    CE = logsumexp(d) - d[y]                dCE/dd = p - onehot(y)
    L1 = sum |p - q|                        dL1/dd = p * (s - <s, p>),  s = sign(p - q)

so everything the backward pass needs from the vocabulary is known once `p` and `q` are. A chunk of rows makes
its logits, its losses and its gradient with respect to `h`, `z` and `w2`, and then forgets all [rows, V]
arrays; the backward pass only multiplies by the cotangent. `reference.py` is the same in plain autodiff.

Memory traffic is what a chunk costs besides its products, so neither `p` nor `q` is ever stored: each pass over
the vocabulary makes them anew from the logits and two numbers a row. The passes are: both normalisers; L1 and
`<s, p>`; the gradient, rounded to the compute dtype as it is written.

Two further savings, both exact. Rows without weight are sorted to the end and never visited. Target logits
depend on the position alone, so rows are sorted by it and a chunk computes each position once (dspark_spec
8.5, 1 and 2), in a product of the smallest of a few sizes that holds them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from draft_jax.objective.config import target_sizes_for
from draft_jax.objective.row_plan import plan_rows
from draft_jax.objective.row_terms import Softmax, row_distances, row_gradient, softmax_of
from draft_jax.residuals import DtypeOf


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
    target_sizes: tuple[int, ...]


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


def _logits(states: Array, matrix: Array) -> Float[Array, "c P"]:
    return jnp.einsum("cm,vm->cv", states, matrix, preferred_element_type=jnp.float32)


def _take(values: Array, index: Array) -> Array:
    """Rows of an array, without the checks of indices that would be passes of their own."""
    return values.at[index].get(mode="promise_in_bounds")


def _apart(*arrays: Any) -> Any:
    """The same arrays, but the compiler may not share or merge work between what makes them and what reads them.

    It would otherwise store a [chunk, V] array of probabilities for the next pass, which costs more than to
    make them again.
    """
    return lax.optimization_barrier(arrays)


def _sweep(spec: _Spec, rows: _Rows, with_gradient: bool) -> tuple[VocabTerms, tuple | None]:
    """Visit all chunks; the gradient of the numerator is fp32 and in the rows' own order."""
    batch, slots = rows.labels.shape
    length = rows.last_hidden.shape[1]
    c, padded = spec.chunk_rows, rows.lm_head.shape[0]

    def flat(values: Array) -> Array:
        return values.reshape(-1, *values.shape[2:])

    dtype = rows.hidden.dtype
    hidden, last_hidden = flat(rows.hidden), flat(rows.last_hidden).astype(dtype)
    z = None if rows.z is None else flat(rows.z).astype(dtype)
    lm_head = rows.lm_head.astype(dtype)
    # Padding the small matrix once spares every chunk from cutting and padding [chunk, V] arrays.
    w2 = None if rows.w2 is None else jnp.pad(rows.w2.astype(dtype), ((0, padded - spec.vocab_size), (0, 0)))
    labels, weights = flat(rows.labels), flat(rows.weights).astype(jnp.float32)
    first_position = jnp.arange(batch, dtype=jnp.int32)[:, None] * length
    plan = plan_rows(flat(rows.target_index + first_position), flat(rows.valid), c)
    places = plan.row.shape[0]

    def cut(values: Array, start: Array) -> Array:
        return lax.dynamic_slice_in_dim(values, start, c)

    def put(into: Array, values: Array, start: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(into, values, start, 0)

    def vocabulary(logits: Array) -> Array:
        """Padding of the head can not be drawn."""
        if padded == spec.vocab_size:
            return logits
        return jnp.where(jnp.arange(padded) < spec.vocab_size, logits, -jnp.inf)

    def against_target(size: int, logits: Array, distinct: Array, rank: Array, label: Array, weight: Array) -> tuple:
        """Losses of a chunk with at most `size` different target positions, and the gradient by its logits."""
        targets = vocabulary(_logits(_take(last_hidden, distinct[:size]), lm_head))  # [size, P], by position
        draft, target = softmax_of(logits), Softmax(*(_take(x, rank) for x in softmax_of(targets)))
        at_label = jnp.take_along_axis(logits, label[:, None], axis=1)
        ce = -draft.log(at_label)[:, 0]
        logits, targets, draft, target = _apart(logits, targets, draft, target)
        l1, mean_sign = row_distances(logits, draft, _take(targets, rank), target)
        if not with_gradient:
            return ce, l1
        term_weights = mean_sign, spec.ce_alpha * weight, spec.l1_alpha * weight
        logits, targets, draft, target, term_weights = _apart(logits, targets, draft, target, term_weights)
        g = row_gradient(logits, draft, _take(targets, rank), target, *term_weights).astype(dtype)
        pull = -spec.ce_alpha * weight
        if dtype != jnp.float32:
            # The label's entry is p - 1: if p is rounded first, little of it is left. So the products with g
            # also get what the rounding of that entry took away.
            entry = row_gradient(at_label, draft, targets[rank, label][:, None], target, *term_weights)[:, 0]
            pull += entry - entry.astype(dtype).astype(jnp.float32)
        return ce, l1, g, pull

    def visit(i: Array, carry: dict) -> dict:
        carry, start = dict(carry), i * c
        row, live = cut(plan.row, start), cut(plan.live, start)
        label, weight = _take(labels, row), jnp.where(live, _take(weights, row), 0.0)
        # Rows past the valid ones repeat row 0, which may be anything; zeros are safe.
        h = jnp.where(live[:, None], _take(hidden, row), 0)
        logits = _logits(h, lm_head)
        if z is not None and w2 is not None:
            zc = jnp.where(live[:, None], _take(z, row), 0)
            # Kept apart, the small product is where the large one starts to accumulate, not one pass more.
            (bias,) = _apart(_logits(zc, w2))
            logits += bias
        branches = [functools.partial(against_target, size) for size in spec.target_sizes]
        branch = sum((plan.positions[i] > size).astype(jnp.int32) for size in spec.target_sizes[:-1])
        ce, l1, *rest = lax.switch(
            branch, branches, vocabulary(logits), plan.distinct[i], cut(plan.rank, start), label, weight
        )
        ce, l1 = jnp.where(live, ce, 0.0), jnp.where(live, l1, 0.0)
        carry["ce"], carry["l1"] = put(carry["ce"], ce, start), put(carry["l1"], l1, start)
        carry["numerator"] += (weight * (spec.ce_alpha * ce + spec.l1_alpha * l1)).sum()
        if not with_gradient:
            return carry
        g, pull = rest
        carry["pull"] = put(carry["pull"], pull, start)
        dh = jnp.einsum("cv,vm->cm", g, lm_head, preferred_element_type=jnp.float32)
        carry["hidden"] = put(carry["hidden"], dh, start)
        if z is not None:
            dz = jnp.einsum("cv,vr->cr", g, w2, preferred_element_type=jnp.float32)
            carry["z"] = put(carry["z"], dz, start)
            carry["w2"] += jnp.einsum("cv,cr->vr", g, zc, preferred_element_type=jnp.float32)
        return carry

    carry = {name: jnp.zeros((places,), jnp.float32) for name in ("ce", "l1")}
    carry["numerator"] = jnp.zeros((), jnp.float32)
    if with_gradient:
        carry["pull"] = jnp.zeros((places,), jnp.float32)
        carry["hidden"] = jnp.zeros((places, hidden.shape[-1]), jnp.float32)
        if z is not None and w2 is not None:
            carry["z"] = jnp.zeros((places, z.shape[-1]), jnp.float32)
            carry["w2"] = jnp.zeros(w2.shape, jnp.float32)
    carry = lax.fori_loop(0, plan.trips, visit, carry)

    place_of_row = jnp.argsort(plan.order)

    def restore(values: Array) -> Array:
        """[places, ...] -> [B, slots, ...] in the rows' own order."""
        return _take(values, place_of_row).reshape(batch, slots, *values.shape[1:])

    terms = VocabTerms(carry["numerator"], restore(carry["ce"]), restore(carry["l1"]))
    if not with_gradient:
        return terms, None
    pull = restore(carry["pull"])[..., None]
    dh = restore(carry["hidden"]) + pull * lm_head[rows.labels].astype(jnp.float32)
    if z is None or w2 is None or rows.z is None:
        return terms, (dh, None, None)
    dz = restore(carry["z"]) + pull * w2[rows.labels].astype(jnp.float32)
    push = jnp.where(rows.valid[..., None], pull * rows.z.astype(jnp.float32), 0.0)
    dw2 = carry["w2"][: spec.vocab_size].at[labels].add(flat(push))
    return terms, (dh, dz, dw2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _vocab_terms(spec: _Spec, rows: _Rows) -> VocabTerms:
    return _sweep(spec, rows, with_gradient=False)[0]


def _forward(spec: _Spec, rows: _Rows) -> tuple[VocabTerms, tuple]:
    terms, gradient = _sweep(spec, rows, with_gradient=bool(spec.ce_alpha or spec.l1_alpha))
    return terms, (gradient, [None if x is None else DtypeOf(x.dtype) for x in (rows.hidden, rows.z, rows.w2)])


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
    target_sizes: tuple[int, ...] | None = None,
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
        chunk_rows: rows per chunk.
        target_sizes: sizes a chunk's product for target logits may have, ascending up to `chunk_rows`; None lets
            `target_sizes_for` choose.

    Returns:
        `VocabTerms`; differentiate its `numerator` only, the other two carry no gradient.

    Raises:
        ValueError: only one of `z` and `w2` is given, or `target_sizes` does not end at `chunk_rows`.
    """
    if (z is None) != (w2 is None):
        raise ValueError("z and w2 belong together: give both (Markov head) or neither")
    chunk_rows = min(chunk_rows, labels.size)
    sizes = target_sizes_for(chunk_rows) if target_sizes is None else target_sizes
    if list(sizes) != sorted(set(sizes)) or sizes[-1] != chunk_rows:
        raise ValueError(f"target_sizes {sizes} must ascend and end at the chunk's {chunk_rows} rows")
    spec = _Spec(vocab_size, float(ce_alpha), float(l1_alpha), chunk_rows, tuple(sizes))
    rows = _Rows(hidden, z, w2, lm_head, last_hidden, target_index, labels, weights, valid)
    terms = _vocab_terms(spec, rows)
    return terms._replace(ce=lax.stop_gradient(terms.ce), l1=lax.stop_gradient(terms.l1))
