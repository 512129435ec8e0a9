"""Every loss term and every metric of draft_jax equals the torch reference; anchors are passed in."""

import dataclasses

import numpy as np
import pytest

from draft_jax.objective.config import ObjectiveConfig
from draft_jax.objective.metrics import finalize

from .cases import jax_batch
from .torch_objective import ReferenceObjective, metrics

CONFIG = ObjectiveConfig(num_anchors=4, chunk_rows=8)
#: Sums that are one number; the reference has them under the same names.
SCALARS = (
    "ce",
    "l1",
    "confidence",
    "weight",
    "tau_num",
    "tau_den",
    "confidence_abs_error",
    "confidence_bias",
    "confidence_cumprod_bias",
    "valid_anchors",
    "sampled_anchors",
    "supervised_tokens",
)


def number(value) -> float:
    return float(value.detach() if hasattr(value, "detach") else value)


def compare(numerator, sums, reference, objective=None):
    expected = number(reference.numerator(objective or ReferenceObjective()))
    np.testing.assert_allclose(numerator, expected, rtol=1e-5, atol=1e-5)
    for name in SCALARS:
        value = number(getattr(reference, name))
        np.testing.assert_allclose(sums[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(sums["accept@num"], reference.accept_num, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(sums["accept@den"], reference.accept_den)


@pytest.mark.parametrize(
    ("heads", "implementation"),
    [(heads, "chunked") for heads in ("vanilla", "gated", "rnn", "none", "vanilla_only")] + [("rnn", "reference")],
)
def test_terms_and_metrics(make_case, heads, implementation):
    case = make_case(heads)
    numerator, sums, _ = case.objective(CONFIG, implementation=implementation)
    reference = case.sums(ReferenceObjective())
    compare(numerator, sums, reference)
    final = finalize(sums, CONFIG)
    for name, value in metrics(reference, ReferenceObjective()).items():
        if case.spec.confidence or not name.startswith("confidence"):
            assert final[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("gamma", [None, 1.5])
def test_decay(make_case, gamma):
    case = make_case()
    numerator, sums, _ = case.objective(CONFIG, case.blocks(gamma))
    objective = ReferenceObjective(gamma=gamma)
    compare(numerator, sums, case.sums(objective), objective)


def test_invalid_target_states(make_case):
    """A block ends before the first slot whose target state is unusable."""
    case = make_case()
    last_valid = np.ones(case.arrays["input_ids"].shape, bool)
    last_valid[0, 7] = last_valid[1, 17] = False
    numerator, sums, _ = case.objective(CONFIG, case.blocks(4.0, last_valid))
    reference = case.sums(ReferenceObjective(), last_valid=last_valid)
    compare(numerator, sums, reference)
    assert reference.weight < case.sums(ReferenceObjective()).weight - 1


def test_packed_row_equals_its_documents(make_case):
    """The second row packs two documents: it counts what the two alone count."""
    case = make_case()
    numerator, sums, _ = case.objective(CONFIG)
    rows, anchors, keep = [case.rows[0]], [case.anchors[0]], [case.keep[0]]
    for first, end in ((0, 9), (9, 20)):
        row = case.rows[1]
        part = {name: value[first:end] for name, value in vars(row).items()}
        part["document_start"] = part["document_start"] - first
        inside = [p - first for p, k in zip(case.anchors[1], case.keep[1], strict=True) if k and first <= p < end]
        rows.append(type(row)(**part))
        anchors.append(inside)
        keep.append([True] * len(inside))
    compare(numerator, sums, case.with_rows(rows, anchors, keep).sums(ReferenceObjective()))


def test_dummies_and_empty_rows(make_case):
    """What stands in a row without supervision changes nothing; a batch of such rows gives exact zeros."""
    case = make_case()
    numerator, sums, grads = case.objective(CONFIG)
    arrays = {name: value.copy() for name, value in case.arrays.items()}
    arrays["input_ids"][2], arrays["context_hidden"][2], arrays["last_hidden"][2] = 7, -30.0, 50.0
    moved_numerator, moved_sums, moved_grads = case.objective(CONFIG, batch=jax_batch(arrays))
    assert moved_numerator == numerator
    for name, value in sums.items():
        np.testing.assert_array_equal(moved_sums[name], value, err_msg=name)
    for name, value in grads.items():
        np.testing.assert_array_equal(moved_grads[name], value, err_msg=name)

    empty = dataclasses.replace(case, keep=np.zeros_like(case.keep))
    numerator, sums, grads = case.objective(CONFIG, empty.blocks())
    assert numerator == 0.0
    for name in (
        "ce",
        "l1",
        "confidence",
        "weight",
        "tau_num",
        "tau_den",
        "sampled_anchors",
        "supervised_tokens",
    ):
        assert sums[name] == 0.0, name
    assert all((value == 0).all() for value in grads.values())
