"""Gradients of draft_jax, by safetensors name, equal those of the torch reference."""

import jax
import numpy as np
import pytest

from draft_jax import weights
from draft_jax.objective import loss
from draft_jax.objective.config import ObjectiveConfig

from .torch_objective import ReferenceObjective, candidates


def compare(found, expected):
    """1e-5 of each element, or of the largest of its tensor."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == np.float32, name
        scale = max(np.abs(value).max(), 1e-2)
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize(
    ("heads", "implementation"),
    [(heads, "chunked") for heads in ("vanilla", "gated", "rnn", "none", "vanilla_only")] + [("rnn", "reference")],
)
def test_gradients(make_case, gradients_of, heads, implementation):
    """The whole objective; every tensor has a gradient to compare."""
    case = make_case(heads)
    expected = gradients_of(case, case.sums(ReferenceObjective()).numerator(ReferenceObjective()))
    _, _, found = case.objective(ObjectiveConfig(num_anchors=4, chunk_rows=8), implementation=implementation)
    compare(found, expected)
    for name, value in expected.items():
        assert np.abs(value).max() > 1e-2, f"{name} has hardly a gradient: this test would see nothing"


def test_states_that_are_not_finite(make_case, gradients_of):
    """NaN and inf through the function the training step differentiates: no key, no label, exact elsewhere.

    With more anchors than candidates it must take all candidates, so the reference is given those.
    """
    case = make_case()
    arrays = {name: value.copy() for name, value in case.arrays.items()}
    arrays["context_hidden"][0, 2, 5] = arrays["context_hidden"][1, 13, 0] = np.nan
    arrays["last_hidden"][0, 7, 3], arrays["last_hidden"][1, 4] = np.inf, np.nan
    arrays["context_hidden"][0, 17], arrays["last_hidden"][2] = np.inf, np.nan
    broken = case.with_arrays(arrays)
    context_valid = np.isfinite(arrays["context_hidden"]).all(-1)
    last_valid = np.isfinite(arrays["last_hidden"]).all(-1) & context_valid
    anchors = [candidates(row, False) or [0] for row in broken.rows]
    keep = [[bool(row.loss_mask.any())] * len(found) for row, found in zip(broken.rows, anchors, strict=True)]
    reference = broken.with_rows(broken.rows, anchors, keep)
    sums = reference.sums(ReferenceObjective(), context_valid=context_valid, last_valid=last_valid)
    expected = gradients_of(case, sums.numerator(ReferenceObjective()))

    def numerator(params, frozen, batch):
        config = ObjectiveConfig(num_anchors=16, chunk_rows=64)
        return loss.training_loss_sums(params, frozen, batch, jax.random.key(0), case.config, config, dtype=np.float32)

    program = jax.jit(jax.value_and_grad(numerator, has_aux=True))
    (value, found), grads = program(case.params, case.frozen, broken.batch)
    np.testing.assert_allclose(value, float(sums.numerator(ReferenceObjective()).detach()), rtol=1e-5)
    np.testing.assert_allclose(found["weight"], sums.weight, rtol=1e-6)
    np.testing.assert_allclose(found["tau_num"], sums.tau_num, rtol=1e-5)
    assert (found["nonfinite_context"], found["nonfinite_last"]) == (2, 2)
    compare(weights.to_torch_layout(grads, case.config, dtype=np.float32), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"ce_alpha": 1.0, "l1_alpha": 0.0, "confidence_alpha": 0.0},
        {"ce_alpha": 0.0, "l1_alpha": 1.0, "confidence_alpha": 0.0},
        {"ce_alpha": 0.0, "l1_alpha": 0.0, "confidence_alpha": 1.0, "confidence_detach": True},
    ],
    ids=["ce", "l1", "confidence_detached"],
)
def test_gradients_of_one_term(make_case, gradients_of, options):
    """One term at a time (attached confidence is the rest); chunks do not divide the rows."""
    case = make_case()
    objective = ReferenceObjective(**options)
    expected = gradients_of(case, case.sums(objective).numerator(objective))
    numerator, _, found = case.objective(ObjectiveConfig(num_anchors=4, chunk_rows=5, **options))
    compare(found, expected)
    np.testing.assert_allclose(numerator, float(case.sums(objective).numerator(objective).detach()), rtol=1e-5)
    assert bool(expected["fc.weight"].any()) == (not objective.confidence_detach)
    assert bool(expected["confidence_head.proj.bias"].any()) == (objective.confidence_alpha > 0)
