"""Every loss term and every metric of draft_jax equals the torch reference; anchors are passed in."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from draft_jax.objective import loss as jax_loss
from draft_jax.objective.config import ObjectiveConfig

from .torch_objective import ReferenceObjective, metrics

#: name in the reference -> name of the JAX sum
SCALARS = {
    "ce": "ce",
    "l1": "l1",
    "confidence": "confidence",
    "weight": "weight",
    "tau_num": "tau_num",
    "tau_den": "tau_den",
    "confidence_abs_error": "confidence_abs_error",
    "confidence_bias": "confidence_bias",
    "confidence_cumprod_bias": "confidence_cumprod_bias",
    "valid_anchors": "valid_anchors",
    "sampled_anchors": "sampled_anchors",
    "supervised_tokens": "supervised_tokens",
}


def jax_sums(case, objective: ObjectiveConfig, last_valid=None, **options):
    return jax_loss.loss_sums(
        case.params,
        case.frozen,
        case.batch,
        case.blocks(objective.gamma, last_valid),
        case.config,
        objective,
        dtype=jnp.float32,
        **options,
    )


def compare(numerator, sums, reference, objective):
    np.testing.assert_allclose(
        numerator, float(reference.numerator(objective).detach()), rtol=1e-5, atol=1e-5
    )
    for ours, theirs in SCALARS.items():
        value = getattr(reference, ours)
        value = float(value.detach()) if hasattr(value, "detach") else float(value)
        np.testing.assert_allclose(sums[theirs], value, rtol=1e-5, atol=1e-5, err_msg=theirs)
    np.testing.assert_allclose(sums["accept@num"], reference.accept_num, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sums["accept@den"], reference.accept_den)


@pytest.mark.parametrize("implementation", ["chunked", "reference"])
@pytest.mark.parametrize("heads", ["vanilla", "gated", "rnn", "none", "plain_confidence", "no_confidence"])
def test_terms_and_metrics(make_case, heads, implementation):
    case = make_case(heads)
    alpha = 1.0 if case.spec.confidence else 0.0
    config = ObjectiveConfig(num_anchors=4, confidence_alpha=alpha, chunk_rows=8)
    numerator, sums = jax_sums(case, config, implementation=implementation)
    objective = ReferenceObjective(confidence_alpha=alpha)
    reference = case.sums(objective)
    compare(numerator, sums, reference, objective)

    final = jax_loss.finalize({name: np.asarray(value) for name, value in sums.items()}, config)
    expected = metrics(reference, objective)
    for name, value in expected.items():
        if name.startswith("confidence") and not case.spec.confidence:
            continue
        assert final[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize(
    "options",
    [
        {"ce_alpha": 1.0, "l1_alpha": 0.0, "confidence_alpha": 0.0},
        {"ce_alpha": 0.0, "l1_alpha": 1.0, "confidence_alpha": 0.0},
        {"ce_alpha": 0.0, "l1_alpha": 0.0, "confidence_alpha": 1.0},
        {"gamma": None},
        {"gamma": 1.5, "ce_alpha": 0.7},
    ],
    ids=str,
)
def test_options(make_case, options):
    """Loss weights and decay; the chunk does not divide the rows."""
    case = make_case()
    numerator, sums = jax_sums(case, ObjectiveConfig(num_anchors=4, chunk_rows=5, **options))
    objective = ReferenceObjective(**options)
    reference = case.sums(objective)
    np.testing.assert_allclose(
        numerator, float(reference.numerator(objective).detach()), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_allclose(sums["weight"], reference.weight, rtol=1e-6)


def test_invalid_target_states(make_case):
    """A block ends before the first slot whose target state is unusable."""
    case = make_case()
    last_valid = np.ones(case.arrays["input_ids"].shape, bool)
    last_valid[0, 7] = last_valid[1, 17] = False
    config, objective = ObjectiveConfig(num_anchors=4), ReferenceObjective()
    numerator, sums = jax_sums(case, config, last_valid)
    reference = case.sums(objective, last_valid=last_valid)
    compare(numerator, sums, reference, objective)
    assert reference.weight < case.sums(objective).weight - 1


def test_dummies_and_empty_rows(make_case):
    """Dropping the empty row changes no sum; the empty row alone gives exact zeros."""
    case = make_case()
    config = ObjectiveConfig(num_anchors=4)
    _, everything = jax_sums(case, config)

    def only(rows):
        arrays = {name: value[rows] for name, value in case.arrays.items()}
        return dataclasses.replace(case, arrays=arrays, anchors=case.anchors[rows], keep=case.keep[rows])

    _, filled = jax_sums(only([0, 1]), config)
    for name in SCALARS.values():
        np.testing.assert_allclose(filled[name], everything[name], rtol=1e-6, atol=1e-6, err_msg=name)
    numerator, empty = jax_sums(only([2]), config)
    assert float(numerator) == 0.0
    for name in ("ce", "l1", "confidence", "weight", "tau_num", "tau_den"):
        assert float(empty[name]) == 0.0, name
