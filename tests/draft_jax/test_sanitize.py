"""Non-finite target states: zeroed, masked, counted where they matter, harmless for loss and gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draft_jax.objective.config import ObjectiveConfig
from draft_jax.objective.loss import training_loss_sums
from draft_jax.objective.sanitize import nonfinite_rows, sanitize, used_positions

from .compare import assert_close
from .drafts import frozen_head, random_batch, random_params, tiny_config

CONFIG = tiny_config(num_hidden_layers=1)
OBJECTIVE = ObjectiveConfig(num_anchors=20)
POISON = (jnp.nan, jnp.inf, -jnp.inf)


def clean_batch():
    return random_batch(CONFIG, [[12], [16]], 20)


def poisoned(batch, field, row, position, value=jnp.nan, feature=1):
    states = getattr(batch, field)
    return dataclasses.replace(batch, **{field: states.at[row, position, feature].set(value)})


def test_used_positions_end_at_the_last_supervised_token():
    mask = jnp.asarray([[0, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 1]])
    expected = [[1, 1, 1, 1, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]]
    np.testing.assert_array_equal(used_positions(mask), expected)


@pytest.mark.parametrize("value", POISON)
def test_one_bad_feature_takes_out_its_position(value):
    batch = poisoned(poisoned(clean_batch(), "context_hidden", 0, 4, value), "last_hidden", 1, 7, value)
    clean = sanitize(batch)
    expected_context, expected_last = np.ones((2, 20), bool), np.ones((2, 20), bool)
    expected_context[0, 4] = expected_last[0, 4] = expected_last[1, 7] = False
    np.testing.assert_array_equal(clean.context_valid, expected_context)
    np.testing.assert_array_equal(clean.last_valid, expected_last)
    assert not np.asarray(clean.batch.context_hidden[0, 4]).any()
    assert not np.asarray(clean.batch.last_hidden[1, 7]).any()
    others = np.asarray(clean.context_valid)
    np.testing.assert_array_equal(
        np.asarray(clean.batch.context_hidden)[others], np.asarray(batch.context_hidden)[others]
    )
    assert (float(clean.nonfinite_context), float(clean.nonfinite_last)) == (1.0, 1.0)
    np.testing.assert_array_equal(nonfinite_rows(batch), [1, 1])


def test_padding_is_cleaned_but_not_counted():
    batch = poisoned(poisoned(clean_batch(), "context_hidden", 0, 15), "last_hidden", 0, 19)
    clean = sanitize(batch)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(clean))
    assert (float(clean.nonfinite_context), float(clean.nonfinite_last)) == (0.0, 0.0)
    np.testing.assert_array_equal(nonfinite_rows(batch), [0, 0])


def test_switched_off_it_only_counts():
    batch = poisoned(clean_batch(), "context_hidden", 1, 3)
    left = sanitize(batch, enabled=False)
    assert left.batch is batch
    assert np.asarray(left.context_valid).all()
    assert np.asarray(left.last_valid).all()
    assert (float(left.nonfinite_context), float(left.nonfinite_last)) == (1.0, 0.0)
    np.testing.assert_array_equal(nonfinite_rows(batch), [0, 1])


def gradients(batch, implementation="chunked"):
    """((numerator, sums), gradients) with all candidates as anchors."""
    return _gradients(batch, implementation)


@functools.partial(jax.jit, static_argnums=1, compiler_options={"xla_backend_optimization_level": 0})
def _gradients(batch, implementation):
    function = functools.partial(
        training_loss_sums,
        config=CONFIG,
        objective=OBJECTIVE,
        dtype=jnp.float32,
        implementation=implementation,
    )
    arguments = (random_params(CONFIG), frozen_head(CONFIG), batch, jax.random.key(0))
    return jax.value_and_grad(function, has_aux=True)(*arguments)


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
def test_loss_and_gradients_stay_finite(implementation):
    batch = clean_batch()
    for index, value in enumerate(POISON):
        batch = poisoned(batch, "context_hidden", index % 2, 3 + 4 * index, value)
        batch = poisoned(batch, "last_hidden", index % 2, 5 + 2 * index, value)
        batch = poisoned(batch, "context_hidden", 0, 17, value)
    (numerator, sums), grads = gradients(batch, implementation)
    assert float(numerator) > 0
    assert (float(sums["nonfinite_context"]), float(sums["nonfinite_last"])) == (3.0, 3.0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((numerator, sums, grads)))


def test_a_bad_last_state_only_costs_its_own_supervision():
    """The target's state at t supervises token t + 1: blocks stop there, and start again behind it."""
    batch, position = clean_batch(), 6
    (_, before), _ = gradients(batch)
    (_, after), _ = gradients(poisoned(batch, "last_hidden", 0, position))
    # Row 0 has anchors 0..10 with 4 slots (3, 2, 1 at the end). Anchors 3..6 lose the slots from t = 6 on,
    # and anchor 6 is no candidate any more: 1 + 2 + 3 + 4 slots.
    assert float(before["supervised_tokens"] - after["supervised_tokens"]) == 10
    assert float(before["sampled_anchors"] - after["sampled_anchors"]) == 1
    assert float(before["valid_anchors"] - after["valid_anchors"]) == 1


def test_what_a_broken_position_holds_beside_does_not_matter():
    batch = clean_batch()
    broken = poisoned(batch, "context_hidden", 1, 5)
    filled = dataclasses.replace(broken, context_hidden=broken.context_hidden.at[1, 5].set(jnp.nan))
    assert_close(gradients(broken), gradients(filled), 0.0)
