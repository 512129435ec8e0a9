"""Gradients of draft_jax, by safetensors name, equal those of the torch reference."""

import numpy as np
import pytest

from draft_jax.objective.config import ObjectiveConfig

from .torch_objective import ReferenceObjective


def compare(found, expected):
    """1e-5 of each element, or of the largest of its tensor."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == np.float32, name
        scale = max(np.abs(value).max(), 1e-2)
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize(
    ("heads", "implementation"),
    [(heads, "chunked") for heads in ("vanilla", "gated", "rnn", "none", "vanilla_only")]
    + [("rnn", "reference")],
)
def test_gradients(make_case, gradients_of, heads, implementation):
    """The whole objective; every tensor has a gradient to compare."""
    case = make_case(heads)
    expected = gradients_of(case, case.sums(ReferenceObjective()).numerator(ReferenceObjective()))
    _, _, found = case.objective(ObjectiveConfig(num_anchors=4, chunk_rows=8), implementation=implementation)
    compare(found, expected)
    for name, value in expected.items():
        assert np.abs(value).max() > 1e-2, f"{name} has hardly a gradient: this test would see nothing"


@pytest.mark.parametrize(
    "options",
    [
        {"ce_alpha": 1.0, "l1_alpha": 0.0, "confidence_alpha": 0.0},
        {"ce_alpha": 0.0, "l1_alpha": 1.0, "confidence_alpha": 0.0},
        {"ce_alpha": 0.0, "l1_alpha": 0.0, "confidence_alpha": 1.0},
        {"ce_alpha": 0.0, "l1_alpha": 0.0, "confidence_alpha": 1.0, "confidence_detach": True},
    ],
    ids=["ce", "l1", "confidence", "confidence_detached"],
)
def test_gradients_of_one_term(make_case, gradients_of, options):
    """One term at a time, with a chunk that does not divide the rows."""
    case = make_case()
    objective = ReferenceObjective(**options)
    expected = gradients_of(case, case.sums(objective).numerator(objective))
    numerator, _, found = case.objective(ObjectiveConfig(num_anchors=4, chunk_rows=5, **options))
    compare(found, expected)
    np.testing.assert_allclose(
        numerator, float(case.sums(objective).numerator(objective).detach()), rtol=1e-5
    )
    assert bool(expected["fc.weight"].any()) == (not objective.confidence_detach)
    assert bool(expected["confidence_head.proj.bias"].any()) == (objective.confidence_alpha > 0)
