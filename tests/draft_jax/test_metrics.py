"""Sums and scalars of dspark_spec 2.4, against loops over blocks and slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draft_jax.anchors import Blocks
from draft_jax.objective.config import ObjectiveConfig
from draft_jax.objective.metrics import (
    acceptance,
    acceptance_sums,
    bce_with_logits,
    confidence_sums,
    finalize,
    zero_sums,
)

B, N, K = 2, 5, 4


def random_blocks(seed=0):
    """Prefix-valid blocks with weights, acceptance and confidence logits; only what metrics read is real."""
    rng = np.random.default_rng(seed)
    valid = np.arange(K) < rng.integers(0, K + 1, (B, N, 1))
    nothing = jnp.zeros((B, N), jnp.int32)
    slots = jnp.zeros((B, N, K), jnp.int32)
    blocks = Blocks(
        anchors=nothing,
        keep=nothing > -1,
        start=nothing,
        tokens=nothing,
        labels=slots,
        prev=slots,
        valid=jnp.asarray(valid),
        weight=jnp.asarray(np.where(valid, np.exp(-np.arange(K) / 4), 0), jnp.float32),
        target_index=slots,
    )
    return blocks, rng.random((B, N, K)).astype(np.float32), rng.normal(size=(B, N, K)).astype(np.float32)


def test_acceptance_is_clamped():
    np.testing.assert_allclose(acceptance(jnp.asarray([0.0, 0.6, 2.0, 2.0000002])), [1.0, 0.7, 0.0, 0.0], atol=1e-6)


def test_tau_and_acceptance_per_slot():
    blocks, accept, _ = random_blocks()
    sums = acceptance_sums(jnp.asarray(accept), blocks.valid)
    num, den, tau, count = np.zeros(K), np.zeros(K), 0.0, 0
    for b in range(B):
        for n in range(N):
            survival, expected = 1.0, 1.0
            for k in range(K):
                if not blocks.valid[b, n, k]:
                    break
                num[k] += accept[b, n, k]
                den[k] += 1
                survival *= accept[b, n, k]
                expected += survival
            if blocks.valid[b, n, 0]:
                tau, count = tau + expected, count + 1
    np.testing.assert_allclose(sums["accept@num"], num, rtol=1e-6)
    np.testing.assert_array_equal(sums["accept@den"], den)
    assert float(sums["tau_num"]) == pytest.approx(tau, rel=1e-6)
    assert float(sums["tau_den"]) == count


def test_t21_two_token_chain():
    """Acceptance .7 then .5/.7 in expectation: both accepted with .5, and 2.2 tokens a round."""
    valid = jnp.ones((1, 1, 2), bool)
    sums = acceptance_sums(jnp.asarray([[[0.7, 0.5 / 0.7]]]), valid)
    assert float(sums["tau_num"] / sums["tau_den"]) == pytest.approx(2.2, abs=1e-6)


def test_confidence_against_loops():
    blocks, accept, logits = random_blocks(1)
    sums = confidence_sums(jnp.asarray(logits), jnp.asarray(accept), blocks)
    expected = dict.fromkeys(sums, 0.0)
    for b in range(B):
        for n in range(N):
            chance = survival = 1.0
            for k in range(K):
                if not blocks.valid[b, n, k]:
                    break
                w, a = float(blocks.weight[b, n, k]), float(accept[b, n, k])
                c = 1 / (1 + np.exp(-float(logits[b, n, k])))
                chance, survival = chance * c, survival * a
                expected["confidence"] += w * (-a * np.log(c) - (1 - a) * np.log(1 - c))
                expected["confidence_weight"] += w
                expected["confidence_abs_error"] += w * abs(c - a)
                expected["confidence_bias"] += w * (c - a)
                expected["confidence_cumprod_bias"] += w * (chance - survival)
    for name, value in expected.items():
        assert float(sums[name]) == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_confidence_target_carries_no_gradient():
    blocks, accept, logits = random_blocks(2)

    def loss(accept, logits):
        return confidence_sums(logits, accept, blocks)["confidence"]

    by_accept, by_logits = jax.jit(jax.grad(loss, argnums=(0, 1)))(jnp.asarray(accept), jnp.asarray(logits))
    assert not np.asarray(by_accept).any()
    valid = np.asarray(blocks.valid)
    expected = np.where(valid, np.asarray(blocks.weight) * (1 / (1 + np.exp(-logits)) - accept), 0)
    np.testing.assert_allclose(by_logits, expected, atol=1e-6)


def test_what_stands_in_invalid_slots_does_not_matter():
    blocks, accept, logits = random_blocks(3)
    valid = np.asarray(blocks.valid)

    def run(accept, logits):
        accept, logits = jnp.asarray(accept), jnp.asarray(logits)
        return acceptance_sums(accept, blocks.valid) | confidence_sums(logits, accept, blocks)

    clean = run(accept, logits)
    dirty = run(np.where(valid, accept, np.nan), np.where(valid, logits, np.inf))
    for name, value in clean.items():
        np.testing.assert_array_equal(dirty[name], value, err_msg=name)


def test_bce_is_finite_for_extreme_logits():
    logits, target = jnp.asarray([1e4, -1e4, 80.0, 0.0]), jnp.asarray([0.0, 1.0, 1.0, 0.5])
    np.testing.assert_allclose(bce_with_logits(logits, target), [1e4, 1e4, 0.0, np.log(2)], rtol=1e-6, atol=1e-30)
    gradient = jax.grad(lambda x: bce_with_logits(x, target).sum())(logits)
    np.testing.assert_allclose(gradient, [1.0, -1.0, 0.0, 0.0], atol=1e-6)


def example_sums(scale=1.0):
    """Sums of 2 rows of 10 and 30 tokens with 8 anchors asked for each."""
    values = {
        "loss_num": 12.0, "loss_den": 8.0, "weight": 8.0, "ce": 16.0, "l1": 4.0, "confidence": 6.0,
        "confidence_weight": 8.0, "confidence_abs_error": 2.0, "confidence_bias": -1.0,
        "confidence_cumprod_bias": 0.5, "tau_num": 15.0, "tau_den": 10.0, "valid_anchors": 20.0,
        "sampled_anchors": 12.0, "anchor_slots": 16.0, "supervised_tokens": 24.0, "rows": 2.0, "tokens": 40.0,
        "nonfinite_context": 3.0, "nonfinite_last": 1.0,
    }  # fmt: skip
    sums = {name: np.float32(scale * value) for name, value in values.items()}
    sums["accept@num"] = np.asarray([5.0, 3.0, 1.0, 0.0], np.float32) * scale
    sums["accept@den"] = np.asarray([10.0, 8.0, 6.0, 0.0], np.float32) * scale
    return sums


def test_finalize_divides_once():
    metrics = finalize(example_sums(), ObjectiveConfig())
    assert metrics == {
        "loss": 1.5,
        "ce_loss": 2.0,
        "l1_loss": 0.5,
        "tau_probabilistic": 1.5,
        "accept_rate@0": 0.5,
        "accept_rate@1": 0.375,
        "accept_rate@2": pytest.approx(1 / 6),
        "accept_rate@3": 0.0,  # nothing counted
        "confidence_loss": 0.75,
        "confidence_abs_error": 0.25,
        "confidence_bias": -0.125,
        "confidence_cumprod_bias": 0.0625,
        "valid_anchors_abs": 10.0,
        "valid_anchors_ratio": 0.5,
        "sampled_anchors_abs": 6.0,
        "sampled_anchors_ratio": 0.75,
        "anchors_per_1k_tokens": 300.0,
        "block_supervised_tokens_abs": 2.0,
        "block_supervised_tokens_ratio": 0.5,
        "nonfinite_context": 3.0,
        "nonfinite_last": 1.0,
    }
    assert all(type(value) is float for value in metrics.values())


def test_ratios_do_not_depend_on_how_often_sums_were_added():
    once, thrice = (finalize(example_sums(scale), ObjectiveConfig()) for scale in (1.0, 3.0))
    counts = {"nonfinite_context", "nonfinite_last"}
    assert {n: v for n, v in once.items() if n not in counts} == pytest.approx(
        {n: v for n, v in thrice.items() if n not in counts}
    )


def test_nothing_at_all_is_zero_and_without_confidence():
    metrics = finalize(zero_sums(K), ObjectiveConfig())
    assert all(value == 0.0 for value in metrics.values())
    assert not any(name.startswith("confidence") for name in metrics)
    assert set(zero_sums(K)) == set(example_sums())
