"""The objective on a real draft: chunked against plain autodiff for every head; what must not change it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draft_jax.batch import FrozenHead
from draft_jax.objective.config import ObjectiveConfig
from draft_jax.objective.loss import micro_step_scale, training_loss_sums, window_scale
from draft_jax.objective.metrics import finalize, zero_sums

from .compare import assert_close
from .drafts import frozen_head, random_batch, random_params, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compilation")
KEY = jax.random.key(980406)
# Tests share objects and shapes so that they share compiled programs: a compilation costs more than its test.
OBJECTIVE = ObjectiveConfig(num_anchors=9, chunk_rows=11)
ONLY_CONFIDENCE = ObjectiveConfig(num_anchors=9, ce_alpha=0.0, l1_alpha=0.0)
DETACHED = dataclasses.replace(ONLY_CONFIDENCE, confidence_detach=True, normalization="micro_step")
KINDS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated", "confidence_head_with_markov": False},
    "rnn": {"markov_head_type": "rnn", "enable_confidence_head": False},
    "no Markov": {"markov_rank": 0, "confidence_head_with_markov": False},
}


def case(**changes):
    """Config, parameters, a padded and untied head, and three rows with unsupervised turns and padding."""
    config = tiny_config(num_hidden_layers=1, **changes)
    batch = random_batch(config, [[22], [19], [16]], 24)
    answers = jnp.asarray(np.random.default_rng(0).random((3, 24)) < 0.8, jnp.int32)
    batch = dataclasses.replace(batch, loss_mask=batch.loss_mask * answers)
    return config, random_params(config), frozen_head(config), batch


def gradients(
    config,
    params,
    head,
    batch,
    objective,
    implementation="chunked",
    dtype=jnp.float32,
    first_row=0,
):
    """((numerator, sums), gradients) of the function a training step differentiates."""
    return _gradients(params, head, batch, first_row, config, objective, implementation, dtype)


@functools.partial(
    jax.jit,
    static_argnums=(4, 5, 6, 7),
    compiler_options={"xla_backend_optimization_level": 0},  # half the time to compile
)
def _gradients(params, head, batch, first_row, config, objective, implementation, dtype):
    function = functools.partial(
        training_loss_sums,
        config=config,
        objective=objective,
        implementation=implementation,
        dtype=dtype,
        first_row=first_row,
    )
    return jax.value_and_grad(function, has_aux=True)(params, head, batch, KEY)


@pytest.mark.parametrize("kind", KINDS)
def test_chunked_equals_reference_for_every_head(kind):
    config, params, head, batch = case(**KINDS[kind])
    if kind == "rnn":  # a tied target
        head = FrozenHead(embedding=head.embedding, lm_head=head.embedding)
    ours = gradients(config, params, head, batch, OBJECTIVE)
    assert_close(ours, gradients(config, params, head, batch, OBJECTIVE, implementation="reference"))
    assert float(ours[0][1]["weight"]) > 0
    for path, gradient in jax.tree_util.tree_leaves_with_path(ours[1]):
        assert np.abs(gradient).max() > 0, path  # every parameter of every head takes part


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", ["chunked", "reference"])
def test_t09_all_zero_masks(kind, implementation):
    """Loss exactly 0, gradients exactly 0 and finite, in every term and every head."""
    config, params, head, batch = case(**KINDS[kind])
    batch = dataclasses.replace(batch, loss_mask=jnp.zeros_like(batch.loss_mask))
    (numerator, sums), grads = gradients(config, params, head, batch, OBJECTIVE, implementation)
    assert float(numerator) == 0.0
    assert float(window_scale(sums)) == 0.0
    for leaf in jax.tree.leaves(grads):
        assert (np.asarray(leaf) == 0.0).all()
    metrics = finalize(sums, OBJECTIVE)
    assert metrics["loss"] == 0.0
    assert all(np.isfinite(value) for value in metrics.values())


def test_t09_all_zero_masks_with_the_confidence_term_alone():
    config, params, head, batch = case()
    batch = dataclasses.replace(batch, loss_mask=jnp.zeros_like(batch.loss_mask))
    (numerator, _), grads = gradients(config, params, head, batch, ONLY_CONFIDENCE)
    assert float(numerator) == 0.0
    assert all((np.asarray(leaf) == 0.0).all() for leaf in jax.tree.leaves(grads))


def test_numerator_is_the_weighted_sum_of_the_terms():
    (numerator, sums), _ = gradients(*case(), OBJECTIVE)
    np.testing.assert_allclose(numerator, 0.1 * sums["ce"] + 0.9 * sums["l1"] + sums["confidence"], rtol=1e-6)
    metrics = finalize(sums, OBJECTIVE)
    parts = 0.1 * metrics["ce_loss"] + 0.9 * metrics["l1_loss"] + metrics["confidence_loss"]
    assert metrics["loss"] == pytest.approx(parts, rel=1e-6)


def test_confidence_loss_reaches_the_backbone_unless_detached():
    (_, sums), attached = gradients(*case(), ONLY_CONFIDENCE)
    detached = gradients(*case(), DETACHED)[1]
    for tree, reached in ((attached, True), (detached, False)):
        assert np.abs(tree["confidence"]["proj"]["kernel"]).max() > 0
        for name in ("fc", "norm", "layers", "markov"):
            assert (max(np.abs(x).max() for x in jax.tree.leaves(tree[name])) > 0) == reached, name
    assert_close(attached["confidence"], detached["confidence"])
    for name in ("ce", "l1", "tau_num"):
        assert float(sums[name]) > 0, name  # a term of weight 0 keeps its metric


def rows_of(batch, *rows):
    return jax.tree.map(lambda x: x[jnp.asarray(rows)], batch)


def accumulate(parts, objective):
    """What train/step.py does with micro-steps, as the docstring of loss.py says."""
    total, sums = None, zero_sums(4)
    for (_, part_sums), grads in parts:
        scale = micro_step_scale(part_sums, objective)
        scaled = jax.tree.map(lambda g, scale=scale: scale * g, grads)
        total = scaled if total is None else jax.tree.map(jnp.add, total, scaled)
        sums = jax.tree.map(jnp.add, sums, part_sums)
    scale = window_scale(sums)
    return jax.tree.map(lambda g: scale * g, total), sums


def test_window_normalization_does_not_see_the_split():
    config, params, head, batch = case()
    whole = accumulate([gradients(config, params, head, batch, OBJECTIVE)], OBJECTIVE)
    parts = [gradients(config, params, head, rows_of(batch, i), OBJECTIVE, first_row=i) for i in range(3)]
    assert_close(accumulate(parts, OBJECTIVE), whole)


def test_micro_step_normalization_is_the_mean_of_ratios():
    config, params, head, batch = case()
    other = dataclasses.replace(batch, loss_mask=batch.loss_mask.at[:, :9].set(0))
    empty = dataclasses.replace(batch, loss_mask=jnp.zeros_like(batch.loss_mask))
    parts = [gradients(config, params, head, b, DETACHED) for b in (batch, other, empty)]
    grads, sums = accumulate(parts, DETACHED)
    weights = [float(part[0][1]["weight"]) + 1e-6 for part in parts]
    assert weights[0] > weights[1] > weights[2] == 1e-6
    ratios = [float(part[0][0]) / weight for part, weight in zip(parts, weights)]
    assert ratios[2] == 0.0
    assert finalize(sums, DETACHED)["loss"] == pytest.approx(sum(ratios) / 3, rel=1e-6)
    expected = jax.tree.map(lambda *g: sum(x / w for x, w in zip(g, weights)) / 3, *(part[1] for part in parts))
    assert_close(grads, expected)


def test_padding_rows_and_padding_width_change_nothing():
    config, params, head, batch = case()
    (numerator, sums), grads = gradients(config, params, head, batch, OBJECTIVE)
    wide = jax.tree.map(lambda x: jnp.pad(x, ((0, 2), (0, 7)) + ((0, 0),) * (x.ndim - 2)), batch)
    (wide_numerator, wide_sums), wide_grads = gradients(config, params, head, wide, OBJECTIVE)
    assert_close((wide_numerator, wide_sums, wide_grads), (numerator, sums, grads))
    assert_close(finalize(wide_sums, OBJECTIVE), finalize(sums, OBJECTIVE))


def test_t18_packed_row_equals_its_documents():
    """Two documents in one row or in two: sums add up, gradients too."""
    config, params, head, _ = case()
    packed = random_batch(config, [[4, 6]], 24)
    # At most 9 candidates in the row, so that all of them are anchors either way.
    packed = dataclasses.replace(packed, loss_mask=packed.loss_mask.at[0, jnp.asarray([0, 4])].set(0))
    begin, width = 4, 24
    first = jax.tree.map(lambda x: x.at[:, begin:].set(0), packed)
    second = jax.tree.map(lambda x: jnp.roll(x, -begin, axis=1).at[:, width - begin :].set(0), packed)
    shifted = jnp.maximum(second.document_start - begin, 0)
    second = dataclasses.replace(second, document_start=shifted)
    np.testing.assert_array_equal(second.positions[0, :6], range(6))
    whole, *parts = (gradients(config, params, head, b, OBJECTIVE) for b in (packed, first, second))
    assert float(whole[0][1]["sampled_anchors"]) == 8
    for name in set(whole[0][1]) - {"rows", "anchor_slots", "loss_num", "loss_den"}:
        assert_close(sum(part[0][1][name] for part in parts), whole[0][1][name])
    assert_close(jax.tree.map(jnp.add, parts[0][1], parts[1][1]), whole[1])


def test_bf16_is_close_to_fp32():
    config, params, head, batch = case()
    (exact, exact_sums), exact_grads = gradients(config, params, head, batch, OBJECTIVE)
    head16 = jax.tree.map(lambda x: x.astype(jnp.bfloat16), head)
    states = {name: getattr(batch, name).astype(jnp.bfloat16) for name in ("context_hidden", "last_hidden")}
    (rough, sums), grads = gradients(
        config, params, head16, dataclasses.replace(batch, **states), OBJECTIVE, dtype=jnp.bfloat16
    )
    assert float(rough) == pytest.approx(float(exact), rel=0.02)
    assert float(sums["tau_num"]) == pytest.approx(float(exact_sums["tau_num"]), rel=0.02)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(exact_grads)):
        assert a.dtype == jnp.float32, path  # master gradients
        a, b = np.ravel(a).astype(np.float64), np.ravel(b).astype(np.float64)
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.98, path


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_shapes_of_the_sums_do_not_depend_on_the_head(kind):
    config, params, head, batch = case(**KINDS[kind])
    trace = functools.partial(training_loss_sums, config=config, objective=OBJECTIVE, dtype=jnp.float32)
    sums = jax.eval_shape(trace, params, head, batch, KEY)[1]
    expected = {name: (value.shape, value.dtype) for name, value in zero_sums(4).items()}
    assert {name: (value.shape, value.dtype) for name, value in sums.items()} == expected


def test_unknown_implementation_and_short_head_are_refused():
    config, params, head, batch = case()
    with pytest.raises(ValueError, match="'fused' is unknown"):
        gradients(config, params, head, batch, OBJECTIVE, implementation="fused")
    short = FrozenHead(embedding=head.embedding, lm_head=head.lm_head[:7])
    with pytest.raises(ValueError, match="LM head has 7 rows"):
        gradients(config, params, short, batch, OBJECTIVE)


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
