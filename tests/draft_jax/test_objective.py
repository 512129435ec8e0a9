"""The objective: chunked terms against plain autodiff, against fp64 finite differences, and its invariants."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draft_jax.anchors import make_blocks
from draft_jax.batch import DraftBatch, FrozenHead
from draft_jax.models.dspark import init_params
from draft_jax.objective.config import ObjectiveConfig
from draft_jax.objective.loss import loss_sums, micro_step_scale, training_loss_sums, window_scale
from draft_jax.objective.metrics import finalize, zero_sums
from draft_jax.objective.reference import reference_row_losses, vocab_terms_reference
from draft_jax.objective.terms import row_gradient, row_losses, vocab_terms

from .drafts import frozen_head, random_batch, tiny_config

# ------------------------------------------------------------------------------------------------- the vocabulary terms

VOCAB = 31


def term_inputs(seed=0, rows=2, slots=13, length=9, padded=40, targets="repeated", markov=True):
    """Arguments of `vocab_terms` in their order. `targets`: how rows share target positions."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    if targets == "one each":
        length = slots
        index = np.stack([rng.permutation(slots) for _ in range(rows)])
    elif targets == "one for all":
        index = np.full((rows, slots), 3)
    else:
        index = rng.integers(0, length, (rows, slots))
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


def value_and_gradients(terms, inputs, ce_alpha=0.1, l1_alpha=0.9, **options):
    """Numerator, ce, l1 and the gradients by hidden, z, w2 (those there are), all jitted together."""
    given = tuple(i for i in range(3) if inputs[i] is not None)

    @jax.jit
    def run(*arguments):
        def numerator(*arguments):
            out = terms(*arguments, vocab_size=VOCAB, ce_alpha=ce_alpha, l1_alpha=l1_alpha, **options)
            return out.numerator, out

        (_, out), gradients = jax.value_and_grad(numerator, argnums=given, has_aux=True)(*arguments)
        return out, gradients

    return run(*inputs)


def assert_close(ours, theirs, tolerance=1e-5):
    """Equal within `tolerance` of the largest magnitude of each leaf (or of 1)."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs)):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, np.abs(b).max(initial=0)), err_msg=str(path))


# 26 rows: one by one, not dividing, dividing, one chunk, more than there are.
@pytest.mark.parametrize("chunk_rows", [1, 5, 13, 26, 100])
def test_every_chunk_size_equals_plain_autodiff(chunk_rows):
    inputs = term_inputs()
    assert_close(
        value_and_gradients(vocab_terms, inputs, chunk_rows=chunk_rows),
        value_and_gradients(vocab_terms_reference, inputs),
    )


@pytest.mark.parametrize("targets", ["one each", "repeated", "one for all"])
@pytest.mark.parametrize("shards", [1, 2])
def test_target_rows_are_shared_by_position(targets, shards):
    """Whether each row has a target position of its own, or many share one, the result is that of per-row logits."""
    inputs = term_inputs(seed=1, targets=targets)
    assert_close(
        value_and_gradients(vocab_terms, inputs, chunk_rows=6, shards=shards),
        value_and_gradients(vocab_terms_reference, inputs),
    )


@pytest.mark.parametrize("padded", [VOCAB, VOCAB + 9])
@pytest.mark.parametrize("markov", [True, False])
def test_padded_head_and_no_markov_head(padded, markov):
    inputs = term_inputs(seed=2, padded=padded, markov=markov)
    assert_close(
        value_and_gradients(vocab_terms, inputs, chunk_rows=7),
        value_and_gradients(vocab_terms_reference, inputs),
    )


@pytest.mark.parametrize(("ce_alpha", "l1_alpha"), [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)])
def test_terms_of_weight_zero_are_still_reported(ce_alpha, l1_alpha):
    inputs = term_inputs(seed=3)
    ours = value_and_gradients(vocab_terms, inputs, ce_alpha, l1_alpha, chunk_rows=7)
    assert_close(ours, value_and_gradients(vocab_terms_reference, inputs, ce_alpha, l1_alpha))
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
    """Central differences of an independent fp64 loss along random directions: a wrong formula cannot agree."""
    inputs = term_inputs(seed=4, rows=1, slots=9)
    _, gradients = value_and_gradients(vocab_terms, inputs, chunk_rows=4)
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
    plain = jax.jit(
        functools.partial(vocab_terms, vocab_size=VOCAB, ce_alpha=0.1, l1_alpha=0.9, chunk_rows=7)
    )(*inputs)
    assert_close(plain, value_and_gradients(vocab_terms, inputs, chunk_rows=7)[0])


def test_the_cotangent_scales_the_gradient():
    inputs = term_inputs(seed=6)
    terms = functools.partial(vocab_terms, vocab_size=VOCAB, ce_alpha=0.1, l1_alpha=0.9, chunk_rows=7)
    plain = jax.jit(jax.grad(lambda h: terms(h, *inputs[1:]).numerator))(inputs[0])
    scaled = jax.jit(jax.grad(lambda h: -3.0 * terms(h, *inputs[1:]).numerator))(inputs[0])
    np.testing.assert_allclose(scaled, -3.0 * plain, rtol=1e-6)


@pytest.mark.parametrize("terms", ["chunked", "reference"])
def test_rows_that_do_not_count_may_hold_anything(terms):
    """Invalid rows are sorted away, not multiplied by 0: NaN in them reaches neither values nor gradients."""
    inputs = list(term_inputs(seed=7))
    valid = np.asarray(inputs[8])
    function, options = (vocab_terms, {"chunk_rows": 7}) if terms == "chunked" else (vocab_terms_reference, {})
    clean = value_and_gradients(function, inputs, **options)
    inputs[0] = jnp.where(valid[..., None], inputs[0], jnp.nan)
    inputs[1] = jnp.where(valid[..., None], inputs[1], jnp.nan)
    used = {(b, int(i)) for b in range(2) for i in np.asarray(inputs[5])[b][valid[b]]}
    last = np.array(inputs[4])
    for b in range(2):
        for t in range(last.shape[1]):
            if (b, t) not in used:
                last[b, t] = np.nan
    inputs[4] = jnp.asarray(last)
    dirty = value_and_gradients(function, inputs, **options)
    assert_close(dirty, clean, 1e-7)
    for gradient in dirty[1][:2]:
        assert not np.asarray(gradient)[~valid].any()


@pytest.mark.parametrize("markov", [True, False])
@pytest.mark.parametrize("terms", ["chunked", "reference"])
def test_t09_nothing_to_learn_is_exactly_zero(terms, markov):
    inputs = list(term_inputs(seed=8, markov=markov))
    inputs[7], inputs[8] = jnp.zeros_like(inputs[7]), jnp.zeros_like(inputs[8])
    function, options = (vocab_terms, {"chunk_rows": 7}) if terms == "chunked" else (vocab_terms_reference, {})
    for leaf in jax.tree.leaves(value_and_gradients(function, inputs, **options)):
        assert (np.asarray(leaf) == 0.0).all()


def test_t09_impossible_token():
    """A draft logit of -inf where the target gives probability 0: losses and gradients stay finite."""
    logits = jnp.asarray([[0.3, -jnp.inf, 1.2, -0.4]])
    target_logits = jnp.asarray([[1.0, -jnp.inf, 0.1, 0.2]])
    labels, one = jnp.asarray([2]), jnp.ones(1)
    target = jax.nn.softmax(target_logits)
    ce, l1, p, mean_sign = row_losses(logits, target, labels)
    gradient = row_gradient(p, target, mean_sign, one, one) - jax.nn.one_hot(labels, 4)
    kept = jnp.asarray([0, 2, 3])  # the same without that token
    for ours, theirs in zip((ce, l1), reference_row_losses(logits[:, kept], target_logits[:, kept], jnp.asarray([1]))):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    reference = jax.grad(lambda x: sum(t.sum() for t in reference_row_losses(x, target_logits, labels)))(logits)
    assert np.isfinite(gradient).all()
    np.testing.assert_allclose(gradient, reference, atol=1e-6)
    assert float(gradient[0, 1]) == 0.0


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
    from draft_jax.objective.metrics import acceptance

    draft, target = (jnp.asarray([x], jnp.float32) for x in (draft, target))
    for l1 in (
        row_losses(draft, jax.nn.softmax(target), jnp.asarray([0]))[1],
        reference_row_losses(draft, target, jnp.asarray([0]))[1],
    ):
        assert float(acceptance(l1)[0]) == pytest.approx(accept, abs=1e-6)


def test_half_given_markov_head_and_uneven_shards_are_refused():
    inputs = list(term_inputs())
    options = {"vocab_size": VOCAB, "ce_alpha": 1.0, "l1_alpha": 0.0, "chunk_rows": 4}
    with pytest.raises(ValueError, match="2 batch rows cannot be split over 3 shards"):
        vocab_terms(*inputs, **options, shards=3)
    inputs[2] = None
    with pytest.raises(ValueError, match="z and w2 belong together"):
        vocab_terms(*inputs, **options)


def test_bf16_rounding_spares_the_label(terms=vocab_terms):
    """A row that is nearly sure of its label: rounding p before subtracting 1 would lose a fifth of the gradient."""
    rng = np.random.default_rng(9)
    head = rng.normal(size=(VOCAB, 16))
    hidden = 0.45 * head[:1] / 2 + 0.02 * rng.normal(size=(1, 16))
    one = jnp.ones((1, 1))

    def gradient(dtype):
        inputs = (jnp.asarray(hidden[None], dtype), None, None, jnp.asarray(head, dtype))
        rest = (jnp.zeros((1, 1, 16), dtype), jnp.zeros((1, 1), int), jnp.zeros((1, 1), int), one, one > 0)
        options = {"vocab_size": VOCAB, "ce_alpha": 1.0, "l1_alpha": 0.0, "chunk_rows": 1}
        function = lambda h: vocab_terms(h, *inputs[1:], *rest, **options).numerator  # noqa: E731
        return np.asarray(jax.jit(jax.grad(function))(inputs[0]), np.float64)

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


# ------------------------------------------------------------------------------------------------- the whole objective

KINDS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "no Markov": {"markov_rank": 0, "confidence_head_with_markov": False},
    "no confidence": {"enable_confidence_head": False},
}
KEY = jax.random.key(980406)


def conversation_batch(config, seed=0, rows=3, width=24):
    """Rows with prompt and answer turns, some padding, everything random."""
    lengths = [[width - 2 - 3 * row] for row in range(rows)]
    batch = random_batch(config, lengths, width, seed)
    turns = np.random.default_rng(seed).random((rows, width)) < 0.8
    return dataclasses.replace(batch, loss_mask=batch.loss_mask * jnp.asarray(turns, jnp.int32))


def case(seed=0, tied=False, **changes):
    config = tiny_config(**changes)
    head = frozen_head(config)
    if tied:
        head = FrozenHead(embedding=head.embedding, lm_head=head.embedding)
    return config, init_params(config, jax.random.key(seed)), head, conversation_batch(config, seed)


@functools.partial(jax.jit, static_argnames=("config", "objective", "implementation", "dtype", "batch_shards"))
def gradients(params, head, batch, config, objective, key=KEY, dtype=jnp.float32, first_row=0, **options):
    """((numerator, sums), gradients) of the function a training step differentiates."""
    function = functools.partial(
        training_loss_sums, config=config, objective=objective, dtype=dtype, first_row=first_row, **options
    )
    return jax.value_and_grad(function, has_aux=True)(params, head, batch, key)


@pytest.mark.parametrize("kind", KINDS)
def test_chunked_equals_reference_for_every_head(kind):
    config, params, head, batch = case(tied=kind == "rnn", **KINDS[kind])
    objective = ObjectiveConfig(num_anchors=9, chunk_rows=11)
    ours = gradients(params, head, batch, config, objective)
    assert_close(ours, gradients(params, head, batch, config, objective, implementation="reference"))
    assert float(ours[0][1]["weight"]) > 0
    for path, gradient in jax.tree_util.tree_leaves_with_path(ours[1]):
        assert np.abs(gradient).max() > 0, path  # every parameter of every head takes part


@pytest.mark.parametrize(
    "changes",
    [
        {"gamma": None},
        {"l1_alpha": 0.0, "confidence_alpha": 0.0, "ce_alpha": 1.0},
        {"ce_alpha": 0.0, "l1_alpha": 0.0},
        {"confidence_detach": True, "normalization": "micro_step"},
    ],
)
def test_chunked_equals_reference_for_every_option(changes):
    config, params, head, batch = case()
    objective = ObjectiveConfig(num_anchors=9, **changes)
    ours = gradients(params, head, batch, config, objective)
    assert_close(ours, gradients(params, head, batch, config, objective, implementation="reference"))
    sums = ours[0][1]
    for name in ("ce", "l1", "confidence", "tau_num"):
        assert float(sums[name]) > 0, name  # a term of weight 0 keeps its metric


def test_numerator_is_the_weighted_sum_of_the_terms():
    config, params, head, batch = case()
    objective = ObjectiveConfig(num_anchors=9, ce_alpha=0.3, l1_alpha=0.5, confidence_alpha=2.0)
    (numerator, sums), _ = gradients(params, head, batch, config, objective)
    expected = 0.3 * sums["ce"] + 0.5 * sums["l1"] + 2.0 * sums["confidence"]
    np.testing.assert_allclose(numerator, expected, rtol=1e-6)
    metrics = finalize(sums, objective)
    parts = 0.3 * metrics["ce_loss"] + 0.5 * metrics["l1_loss"] + 2.0 * metrics["confidence_loss"]
    assert metrics["loss"] == pytest.approx(parts, rel=1e-6)


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
@pytest.mark.parametrize("normalization", ["window", "micro_step"])
def test_t09_all_zero_masks(implementation, normalization):
    """Loss exactly 0, gradients exactly 0 and finite, in every term and every head."""
    for kind in ("vanilla", "rnn"):
        config, params, head, batch = case(**KINDS[kind])
        batch = dataclasses.replace(batch, loss_mask=jnp.zeros_like(batch.loss_mask))
        objective = ObjectiveConfig(num_anchors=9, normalization=normalization)
        (numerator, sums), grads = gradients(params, head, batch, config, objective, implementation=implementation)
        assert float(numerator) == 0.0
        for leaf in jax.tree.leaves(grads):
            assert (np.asarray(leaf) * float(window_scale(sums)) == 0.0).all()
            assert (np.asarray(leaf) == 0.0).all()
        metrics = finalize(sums, objective)
        assert metrics["loss"] == 0.0
        assert all(np.isfinite(value) for value in metrics.values())


def test_confidence_loss_reaches_the_backbone_unless_detached():
    config, params, head, batch = case()
    only_confidence = ObjectiveConfig(num_anchors=9, ce_alpha=0.0, l1_alpha=0.0)
    (_, sums), attached = gradients(params, head, batch, config, only_confidence)
    detached = gradients(params, head, batch, config, dataclasses.replace(only_confidence, confidence_detach=True))[1]
    for tree, reached in ((attached, True), (detached, False)):
        assert np.abs(tree["confidence"]["proj"]["kernel"]).max() > 0
        for name in ("fc", "norm", "layers"):
            assert (max(np.abs(x).max() for x in jax.tree.leaves(tree[name])) > 0) == reached
        assert (np.abs(tree["markov"]["markov_w1"]["embedding"]).max() > 0) == reached
    assert float(sums["confidence"]) > 0


def accumulate(parts, objective):
    """What train/step.py does with micro-steps, as the docstring of loss.py says."""
    total, sums = None, zero_sums(4)
    for (_, part_sums), grads in parts:
        scaled = jax.tree.map(lambda g, s=micro_step_scale(part_sums, objective): s * g, grads)
        total = scaled if total is None else jax.tree.map(jnp.add, total, scaled)
        sums = jax.tree.map(jnp.add, sums, part_sums)
    scale = window_scale(sums)
    return jax.tree.map(lambda g: scale * g, total), sums


def rows_of(batch, rows):
    return jax.tree.map(lambda x: x[rows], batch)


def test_window_normalization_does_not_see_the_split():
    config, params, head, batch = case()
    objective = ObjectiveConfig(num_anchors=9)
    whole = accumulate([gradients(params, head, batch, config, objective)], objective)
    parts = [
        gradients(params, head, rows_of(batch, slice(i, i + 1)), config, objective, first_row=i) for i in range(3)
    ]
    assert_close(accumulate(parts, objective), whole)


def test_micro_step_normalization_is_the_mean_of_ratios():
    config, params, head, batch = case()
    objective = ObjectiveConfig(num_anchors=9, normalization="micro_step")
    empty = dataclasses.replace(batch, loss_mask=jnp.zeros_like(batch.loss_mask))
    batches = [rows_of(batch, slice(0, 1)), rows_of(batch, slice(1, 2)), rows_of(empty, slice(0, 1))]
    parts = [gradients(params, head, b, config, objective) for b in batches]
    grads, sums = accumulate(parts, objective)
    ratios = [float(n) / (float(s["weight"]) + 1e-6) for (n, s), _ in parts]
    assert ratios[2] == 0.0
    assert finalize(sums, objective)["loss"] == pytest.approx(sum(ratios) / 3, rel=1e-6)
    expected = jax.tree.map(
        lambda *g: sum(x / (s["weight"] + 1e-6) for x, ((_, s), _) in zip(g, parts)) / 3, *(p[1] for p in parts)
    )
    assert_close(grads, expected)


def test_padding_rows_and_padding_width_change_nothing():
    config, params, head, batch = case()
    objective = ObjectiveConfig(num_anchors=9)
    (numerator, sums), grads = gradients(params, head, batch, config, objective)

    def pad(x):
        return jnp.pad(x, ((0, 2), (0, 7)) + ((0, 0),) * (x.ndim - 2))

    (wide_numerator, wide_sums), wide_grads = gradients(params, head, jax.tree.map(pad, batch), config, objective)
    assert_close((wide_numerator, wide_sums, wide_grads), (numerator, sums, grads))
    assert_close(finalize(wide_sums, objective), finalize(sums, objective))


def test_t18_packed_row_equals_its_documents():
    """Two documents in one row, in two rows, or one without the other: the sums add up, the gradients too."""
    config, params, head, _ = case()
    objective = ObjectiveConfig(num_anchors=20)  # more than candidates: all of them are anchors
    packed = random_batch(config, [[9, 11]], 20)
    mask = packed.loss_mask.at[0, jnp.asarray([0, 1, 9, 14])].set(0)
    packed = dataclasses.replace(packed, loss_mask=mask)
    first = jax.tree.map(lambda x: x[:, :9], packed)
    second = jax.tree.map(lambda x: x[:, 9:], packed)
    second = dataclasses.replace(second, document_start=second.document_start - 9)
    whole, *parts = (gradients(params, head, b, config, objective) for b in (packed, first, second))
    names = [n for n in whole[0][1] if n not in ("rows", "anchor_slots", "loss_num", "loss_den")]
    for name in names:
        assert_close(sum(p[0][1][name] for p in parts), whole[0][1][name])
    assert_close(jax.tree.map(jnp.add, parts[0][1], parts[1][1]), whole[1])


def test_shards_change_nothing():
    config, params, head, batch = case()
    batch = jax.tree.map(lambda x: jnp.concatenate([x, x[:1]]), batch)
    objective = ObjectiveConfig(num_anchors=9, chunk_rows=11)
    assert_close(
        gradients(params, head, batch, config, objective, batch_shards=2),
        gradients(params, head, batch, config, objective),
    )


def test_bf16_is_close_to_fp32():
    config, params, head, batch = case()
    objective = ObjectiveConfig(num_anchors=9, chunk_rows=11)
    (exact, exact_sums), exact_grads = gradients(params, head, batch, config, objective)
    head16 = jax.tree.map(lambda x: x.astype(jnp.bfloat16), head)
    batch16 = dataclasses.replace(
        batch,
        context_hidden=batch.context_hidden.astype(jnp.bfloat16),
        last_hidden=batch.last_hidden.astype(jnp.bfloat16),
    )
    (rough, sums), grads = gradients(params, head16, batch16, config, objective, dtype=jnp.bfloat16)
    assert float(rough) == pytest.approx(float(exact), rel=0.02)
    assert float(sums["tau_num"]) == pytest.approx(float(exact_sums["tau_num"]), rel=0.02)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(exact_grads)):
        assert a.dtype == jnp.float32, path
        a, b = np.ravel(a).astype(np.float64), np.ravel(b).astype(np.float64)
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.98, path


def test_masked_context_is_not_read():
    """`context_valid` hides a position from every block: its state can be anything."""
    config, params, head, batch = case()
    objective = ObjectiveConfig()
    anchors = jnp.asarray([[5, 9]] * 3, jnp.int32)
    blocks = make_blocks(batch, anchors, jnp.ones((3, 2), bool), 4, 4.0)
    valid = jnp.ones(batch.loss_mask.shape, bool).at[:, 3].set(False)

    @jax.jit
    def run(batch):
        return loss_sums(params, head, batch, blocks, config, objective, dtype=jnp.float32, context_valid=valid)

    other = dataclasses.replace(batch, context_hidden=batch.context_hidden.at[:, 3].set(7.0))
    assert_close(run(other), run(batch), 0.0)


def test_names_and_shapes_of_the_sums_do_not_depend_on_the_head():
    for kind in KINDS:
        config, params, head, batch = case(**KINDS[kind])
        sums = jax.eval_shape(
            functools.partial(
                training_loss_sums, config=config, objective=ObjectiveConfig(num_anchors=3), dtype=jnp.float32
            ),
            params,
            head,
            batch,
            KEY,
        )[1]
        expected = {name: (value.shape, value.dtype) for name, value in zero_sums(4).items()}
        assert {name: (value.shape, value.dtype) for name, value in sums.items()} == expected


def test_unknown_implementation_and_short_head_are_refused():
    config, params, head, batch = case()
    call = functools.partial(
        jax.eval_shape,
        lambda params, head, batch, implementation: training_loss_sums(
            params, head, batch, KEY, config, ObjectiveConfig(), dtype=jnp.float32, implementation=implementation
        ),
    )
    with pytest.raises(ValueError, match="'fused' is unknown"):
        training_loss_sums(
            params, head, batch, KEY, config, ObjectiveConfig(num_anchors=2), dtype=jnp.float32, implementation="fused"
        )
    del call
    short = FrozenHead(embedding=head.embedding, lm_head=head.lm_head[:7])
    with pytest.raises(ValueError, match="LM head has 7 rows"):
        training_loss_sums(params, short, batch, KEY, config, ObjectiveConfig(num_anchors=2), dtype=jnp.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_anchors": 0}, "num_anchors is 0"),
        ({"ce_alpha": -1.0}, "ce_alpha is -1.0"),
        ({"l1_alpha": float("nan")}, "l1_alpha is nan"),
        ({"gamma": float("inf")}, "gamma is inf"),
        ({"ce_alpha": 0.0, "l1_alpha": 0.0, "confidence_alpha": 0.0}, "all 0"),
        ({"normalization": "mean"}, "normalization is 'mean'"),
        ({"chunk_rows": 0}, "chunk_rows is 0"),
    ],
)
def test_bad_options_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig(**changes)


def test_batch_type_is_untouched():
    """`loss_sums` reads a batch and hands it on: no field of it is required to be more than it says."""
    assert {field.name for field in dataclasses.fields(DraftBatch)} == {
        "input_ids",
        "loss_mask",
        "positions",
        "document_start",
        "context_hidden",
        "last_hidden",
    }
