"""The vocabulary terms: chunked against plain autodiff, fp64 finite differences, and hostile inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draft_jax.objective.metrics import acceptance
from draft_jax.objective.reference import reference_row_losses, vocab_terms_reference
from draft_jax.objective.row_terms import (
    one_pass_softmax,
    row_distances,
    row_gradient,
    softmax_of,
    two_pass_softmax,
)
from draft_jax.objective.terms import vocab_terms

from .compare import assert_close

VOCAB = 31


def term_inputs(seed=0, rows=2, slots=13, length=13, padded=40, targets="repeated", markov=True):
    """Arguments of `vocab_terms` in their order. `targets`: how rows share target positions."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    if targets == "one each":
        index = np.stack([rng.permutation(slots) for _ in range(rows)])
    elif targets == "one for all":
        index = np.full((rows, slots), 3)
    else:
        index = rng.integers(0, 7, (rows, slots))
    valid = rng.random((rows, slots)) < 0.7
    weights = np.where(valid, rng.random((rows, slots)), 0.0)
    return (
        normal(rows, slots, 8),
        normal(rows, slots, 4) if markov else None,
        0.5 * normal(VOCAB, 4) if markov else None,
        0.5 * normal(padded, 8),
        normal(rows, length, 8),
        jnp.asarray(index, jnp.int32),
        jnp.asarray(rng.integers(0, VOCAB, (rows, slots)), jnp.int32),
        jnp.asarray(weights, jnp.float32),
        jnp.asarray(valid),
    )


@functools.partial(jax.jit, static_argnames=("terms", "ce_alpha", "l1_alpha", "chunk_rows", "target_sizes"))
def value_and_gradients(terms, inputs, ce_alpha=0.1, l1_alpha=0.9, scale=1.0, **options):
    """The terms, and the gradients of `scale * numerator` by hidden, z and w2 (those there are)."""
    given = tuple(i for i in range(3) if inputs[i] is not None)

    def numerator(*arguments):
        out = terms(*arguments, vocab_size=VOCAB, ce_alpha=ce_alpha, l1_alpha=l1_alpha, **options)
        return scale * out.numerator, out

    (_, out), gradients = jax.value_and_grad(numerator, argnums=given, has_aux=True)(*inputs)
    return out, gradients


CHUNKED, PLAIN = {"terms": vocab_terms, "chunk_rows": 5}, {"terms": vocab_terms_reference}


# 26 rows: one by one, not dividing, dividing, one chunk, more than there are.
@pytest.mark.parametrize("chunk_rows", [1, 5, 13, 26, 100])
def test_every_chunk_size_equals_plain_autodiff(chunk_rows):
    inputs = term_inputs()
    assert_close(
        value_and_gradients(vocab_terms, inputs, chunk_rows=chunk_rows),
        value_and_gradients(inputs=inputs, **PLAIN),
    )


@pytest.mark.parametrize("targets", ["one each", "repeated", "one for all"])
@pytest.mark.parametrize("sizes", [None, (1, 2, 4, 5)])
def test_target_rows_are_shared_by_position(targets, sizes):
    """However many rows share a target position, the result is that of target logits made per row."""
    inputs = term_inputs(seed=1, targets=targets)
    assert_close(
        value_and_gradients(inputs=inputs, target_sizes=sizes, **CHUNKED),
        value_and_gradients(inputs=inputs, **PLAIN),
    )


@pytest.mark.parametrize(("padded", "markov"), [(VOCAB, True), (VOCAB + 9, False)])
def test_padded_head_and_no_markov_head(padded, markov):
    inputs = term_inputs(seed=2, padded=padded, markov=markov)
    assert_close(
        value_and_gradients(inputs=inputs, **CHUNKED),
        value_and_gradients(inputs=inputs, **PLAIN),
    )


@pytest.mark.parametrize(("ce_alpha", "l1_alpha"), [(1.0, 0.0), (0.0, 0.0)])
def test_terms_of_weight_zero_are_still_reported(ce_alpha, l1_alpha):
    inputs = term_inputs(seed=3)
    alphas = {"ce_alpha": ce_alpha, "l1_alpha": l1_alpha}
    ours = value_and_gradients(inputs=inputs, **alphas, **CHUNKED)
    assert_close(ours, value_and_gradients(inputs=inputs, **alphas, **PLAIN))
    assert float(ours[0].ce.sum()) > 0
    assert float(ours[0].l1.sum()) > 0


def fp64_numerator(hidden, z, w2, lm_head, last_hidden, index, labels, weights, ce_alpha, l1_alpha):
    """The definition in numpy fp64, row by row."""
    total = 0.0
    for b, row in enumerate(labels):
        for s, label in enumerate(row):
            logits = lm_head[:VOCAB] @ hidden[b, s] + w2 @ z[b, s]
            target = lm_head[:VOCAB] @ last_hidden[b, index[b, s]]
            p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (logits, target))
            total += weights[b, s] * (-ce_alpha * np.log(p[label]) + l1_alpha * np.abs(p - q).sum())
    return total


@pytest.mark.parametrize("which", [0, 1, 2])
def test_gradient_against_fp64_finite_differences(which):
    """Central differences of an independent fp64 loss, in random directions: a wrong formula cannot agree."""
    inputs = term_inputs(seed=4)
    _, gradients = value_and_gradients(inputs=inputs, **CHUNKED)
    exact = [np.asarray(x, np.float64) for x in inputs[:8]]
    exact[5:7] = [x.astype(int) for x in exact[5:7]]
    rng = np.random.default_rng(5)
    for _ in range(4):
        direction = rng.normal(size=exact[which].shape)
        step = 1e-6

        def at(sign, direction=direction, step=step):
            moved = list(exact)
            moved[which] = exact[which] + sign * step * direction
            return fp64_numerator(*moved, 0.1, 0.9)

        slope = (at(1) - at(-1)) / (2 * step)
        ours = (np.asarray(gradients[which], np.float64) * direction).sum()
        assert ours == pytest.approx(slope, rel=2e-5, abs=2e-5)


def test_value_without_gradient_is_the_same():
    inputs = term_inputs(seed=6)
    plain = jax.jit(functools.partial(vocab_terms, vocab_size=VOCAB, ce_alpha=0.1, l1_alpha=0.9, chunk_rows=5))(*inputs)
    assert_close(plain, value_and_gradients(inputs=inputs, **CHUNKED)[0])


def test_the_cotangent_scales_the_gradient():
    inputs = term_inputs(seed=6)
    plain = value_and_gradients(inputs=inputs, **CHUNKED)[1]
    assert_close(value_and_gradients(inputs=inputs, scale=-3.0, **CHUNKED)[1], jax.tree.map(lambda g: -3.0 * g, plain))


@pytest.mark.parametrize("terms", [CHUNKED, PLAIN], ids=["chunked", "plain"])
def test_rows_that_do_not_count_may_hold_anything(terms):
    """Invalid rows are sorted away, not multiplied by 0: NaN in them reaches neither values nor gradients."""
    inputs = list(term_inputs(seed=7))
    inputs[8] = inputs[8].at[0, :2].set(False)  # row 0 is what fills up the last chunk
    valid = np.asarray(inputs[8])
    assert valid.sum() % CHUNKED["chunk_rows"]
    clean = value_and_gradients(inputs=inputs, **terms)
    inputs[0] = jnp.where(valid[..., None], inputs[0], jnp.nan)
    inputs[1] = jnp.where(valid[..., None], inputs[1], jnp.nan)
    used = {(b, int(i)) for b in range(2) for i in np.asarray(inputs[5])[b][valid[b]]}
    last = np.array(inputs[4])
    for b in range(2):
        for t in range(last.shape[1]):
            if (b, t) not in used:
                last[b, t] = np.nan
    inputs[4] = jnp.asarray(last)
    dirty = value_and_gradients(inputs=inputs, **terms)
    assert_close(dirty, clean, 1e-7)
    for gradient in dirty[1][:2]:
        assert not np.asarray(gradient)[~valid].any()


@pytest.mark.parametrize("markov", [True, False])
@pytest.mark.parametrize("terms", [CHUNKED, PLAIN], ids=["chunked", "plain"])
def test_t09_nothing_to_learn_is_exactly_zero(terms, markov):
    inputs = list(term_inputs(seed=8, markov=markov))
    inputs[7], inputs[8] = jnp.zeros_like(inputs[7]), jnp.zeros_like(inputs[8])
    for leaf in jax.tree.leaves(value_and_gradients(inputs=inputs, **terms)):
        assert (np.asarray(leaf) == 0.0).all()


def test_t09_impossible_token():
    """A draft logit of -inf where the target gives probability 0: losses and gradients stay finite."""
    labels, kept = jnp.asarray([2]), jnp.asarray([0, 2, 3])

    @jax.jit
    def run(logits, target_logits):
        draft, target = softmax_of(logits), softmax_of(target_logits)
        l1, mean_sign = row_distances(logits, draft, target_logits, target)
        p, one = draft.of(logits), jnp.ones(1)
        gradient = row_gradient(logits, draft, target_logits, target, mean_sign, one, one) - jax.nn.one_hot(labels, 4)
        plain = jax.grad(lambda x: sum(t.sum() for t in reference_row_losses(x, target_logits, labels)))(logits)
        without = reference_row_losses(logits[:, kept], target_logits[:, kept], jnp.asarray([1]))
        return (-jnp.log(p[:, 2]), l1), without, gradient, plain

    losses, without_the_token, gradient, plain = run(
        jnp.asarray([[0.3, -jnp.inf, 1.2, -0.4]]), jnp.asarray([[1.0, -jnp.inf, 0.1, 0.2]])
    )
    assert_close(losses, without_the_token)
    assert np.isfinite(gradient).all()
    assert float(gradient[0, 1]) == 0.0
    assert_close(gradient, plain)


@pytest.mark.parametrize("softmax", [one_pass_softmax, two_pass_softmax])
def test_normalisers_of_one_and_two_passes(softmax):
    """Against numpy in fp64; -inf anywhere, very large and very small logits."""
    rng = np.random.default_rng(10)
    logits = rng.normal(size=(6, 1000)) * 5
    logits[1, ::2] = -np.inf
    logits[2, :999] = -np.inf
    logits[3] += 1e4
    logits[4] -= 1e4
    logits[5, 500] = 300.0
    logits = logits.astype(np.float32)
    top, total = jax.jit(softmax)(jnp.asarray(logits))
    exact = logits.astype(np.float64)
    np.testing.assert_array_equal(top[:, 0], exact.max(axis=1))
    np.testing.assert_allclose(total[:, 0], np.exp(exact - exact.max(axis=1, keepdims=True)).sum(axis=1), rtol=1e-5)


@pytest.mark.parametrize(
    ("draft", "target", "accept"),
    [
        (np.log([0.2, 0.5, 0.3]), np.log([0.5, 0.3, 0.2]), 0.7),
        ([1.0, 2.0, 0.0], [2.0, 1.0, 0.0], 0.579488),
        ([0.3, 0.1, 0.2], [0.3, 0.1, 0.2], 1.0),
        ([60.0, 0.0, 0.0], [0.0, 60.0, 0.0], 0.0),
    ],
)
def test_t16_t21_acceptance(draft, target, accept):
    """`1 - L1/2` is the chance of exact rejection sampling, `sum min(p, q)`."""
    draft, target = (jnp.asarray([x], jnp.float32) for x in (draft, target))
    for l1 in (
        row_distances(draft, softmax_of(draft), target, softmax_of(target))[0],
        reference_row_losses(draft, target, jnp.asarray([0]))[1],
    ):
        assert float(acceptance(l1)[0]) == pytest.approx(accept, abs=1e-6)


def test_half_given_markov_head_and_bad_target_sizes_are_refused():
    inputs = list(term_inputs())
    options = {"vocab_size": VOCAB, "ce_alpha": 1.0, "l1_alpha": 0.0, "chunk_rows": 4}
    for sizes in ((2, 3), (3, 2, 4), (2, 8)):
        with pytest.raises(ValueError, match="must ascend and end at the chunk's 4 rows"):
            vocab_terms(*inputs, **options, target_sizes=sizes)
    inputs[2] = None
    with pytest.raises(ValueError, match="z and w2 belong together"):
        vocab_terms(*inputs, **options)


def test_bf16_rounding_spares_the_label():
    """A row nearly sure of its label: rounding p before subtracting 1 would spoil the gradient."""
    rng = np.random.default_rng(9)
    head = rng.normal(size=(VOCAB, 16))
    hidden = 0.5 * head[:1] + 0.02 * rng.normal(size=(1, 16))
    one = jnp.ones((1, 1))

    def gradient(dtype):
        inputs = (jnp.asarray(hidden[None], dtype), None, None, jnp.asarray(head, dtype))
        rest = (jnp.zeros((1, 1, 16), dtype), jnp.zeros((1, 1), int), jnp.zeros((1, 1), int), one, one > 0)
        options = {"vocab_size": VOCAB, "ce_alpha": 1.0, "l1_alpha": 0.0, "chunk_rows": 1}
        by_hidden = jax.grad(lambda h: vocab_terms(h, *inputs[1:], *rest, **options).numerator)
        return np.asarray(jax.jit(by_hidden)(inputs[0]), np.float64)

    # Both see the same bf16-rounded inputs; only the arithmetic differs.
    exact = np.asarray(jnp.asarray(hidden, jnp.bfloat16), np.float64)
    rounded_head = np.asarray(jnp.asarray(head, jnp.bfloat16), np.float64)
    logits = rounded_head @ exact[0]
    p = np.exp(logits - logits.max())
    p /= p.sum()
    assert 0.9 < p[0] < 0.999
    p[0] -= 1
    expected = p @ rounded_head
    assert np.abs(gradient(jnp.bfloat16) - expected).max() < 0.01 * np.abs(expected).max()
