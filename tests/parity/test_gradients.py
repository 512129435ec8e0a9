"""Gradients of draft_jax, by safetensors name, equal those of the torch reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draft_jax import weights
from draft_jax.objective import loss as jax_loss
from draft_jax.objective.config import ObjectiveConfig

from .torch_objective import ReferenceObjective


def jax_gradients(case, objective: ObjectiveConfig, implementation="chunked") -> dict[str, np.ndarray]:
    """Gradient of numerator / sum of weights, in torch layout."""

    def loss(params):
        numerator, sums = jax_loss.loss_sums(
            params,
            case.frozen,
            case.batch,
            case.blocks(objective.gamma),
            case.config,
            objective,
            dtype=jnp.float32,
            implementation=implementation,
        )
        return numerator / sums["weight"]

    return weights.to_torch_layout(jax.jit(jax.grad(loss))(case.params), case.config, dtype=np.float32)


def compare(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == np.float32, name
        # 1e-5 of the tensor's own scale, and of each element's.
        scale = max(np.abs(value).max(), 1e-2)
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5 * scale, err_msg=name)


@pytest.mark.parametrize(
    ("heads", "implementation"),
    [(heads, "chunked") for heads in ("vanilla", "gated", "rnn", "none", "plain_confidence", "no_confidence")]
    + [("vanilla", "reference"), ("rnn", "reference")],
)
def test_gradients(make_case, gradients_of, heads, implementation):
    case = make_case(heads)
    alpha = 1.0 if case.spec.confidence else 0.0
    sums = case.sums(ReferenceObjective(confidence_alpha=alpha))
    expected = gradients_of(case, sums.numerator(ReferenceObjective(confidence_alpha=alpha)) / sums.weight)
    config = ObjectiveConfig(num_anchors=4, confidence_alpha=alpha, chunk_rows=8)
    compare(jax_gradients(case, config, implementation), expected)
    for name, value in expected.items():
        assert np.abs(value).max() > 1e-4, f"{name} has no gradient: this test would see nothing"


@pytest.mark.parametrize("detach", [False, True], ids=["attached", "detached"])
@pytest.mark.parametrize("term", ["ce", "l1", "confidence"])
def test_gradients_of_one_term(make_case, gradients_of, term, detach):
    if detach and term != "confidence":
        pytest.skip("detaching concerns the confidence term")
    case = make_case("gated")
    alphas = {f"{name}_alpha": float(name == term) for name in ("ce", "l1", "confidence")}
    objective = ReferenceObjective(**alphas, confidence_detach=detach)
    sums = case.sums(objective)
    expected = gradients_of(case, sums.numerator(objective) / sums.weight)
    config = ObjectiveConfig(num_anchors=4, **alphas, confidence_detach=detach, chunk_rows=8)
    compare(jax_gradients(case, config), expected)
    reaches_backbone = np.abs(expected["fc.weight"]).max() > 0
    assert reaches_backbone == (not detach)
