"""Layers against NumPy in fp64, and the dtypes promised: fp32 statistics, fp32 rotary angles, unrounded
tables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from draft_jax.layers import Embedding, Linear, RMSNorm, SwiGLU, rotary_angles, rotate
from draft_jax.rope import inverse_frequencies

RNGS = nnx.Rngs(0)


def test_linear_kernel_is_in_out_and_initialised_as_specified():
    layer = Linear(300, 200, use_bias=True, init_std=0.02, dtype=jnp.float32, rngs=RNGS)
    kernel = np.asarray(layer.kernel[...])
    assert kernel.shape == (300, 200)
    assert kernel.std() == pytest.approx(0.02, rel=0.02)
    assert abs(kernel.mean()) < 3 * 0.02 / np.sqrt(kernel.size)
    assert not np.asarray(layer.bias[...]).any()
    x = np.random.default_rng(0).normal(size=(7, 300)).astype(np.float32)
    np.testing.assert_allclose(layer(jnp.asarray(x)), x @ kernel, rtol=1e-4, atol=1e-5)


def test_rms_norm_statistics_are_fp32():
    norm = RMSNorm(64, eps=1e-6, dtype=jnp.bfloat16)
    scale = np.linspace(0.5, 2, 64).astype(np.float32)
    norm.scale[...] = jnp.asarray(scale)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 64)) * 300, jnp.bfloat16)
    out = norm(x)
    assert out.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float64)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + 1e-6) * scale
    # One rounding to bf16 of the exact value: half a unit in the last place.
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=2.0**-8)


def test_swiglu():
    mlp = SwiGLU(6, 10, init_std=0.5, dtype=jnp.float32, rngs=RNGS)
    x = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    gate, up, down = (np.asarray(p.kernel[...], np.float64) for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    z = x @ gate
    np.testing.assert_allclose(mlp(jnp.asarray(x)), (z / (1 + np.exp(-z)) * (x @ up)) @ down, rtol=1e-5, atol=1e-6)


def test_embedding_gradient_is_not_rounded_to_the_compute_dtype():
    """256 equal small contributions to one row: a bf16 sum would stall at 2^-8 relative; fp32 is exact."""
    table = Embedding(4, 2, init_std=1.0, dtype=jnp.bfloat16, rngs=RNGS)
    graph, state = nnx.split(table)
    ids = jnp.zeros((1000,), jnp.int32)

    def total(state):
        out = nnx.merge(graph, state)(ids)
        assert out.dtype == jnp.bfloat16
        return out.astype(jnp.float32).sum()

    gradient = jax.grad(total)(state)["embedding"][...]
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, [[1000, 1000], [0, 0], [0, 0], [0, 0]])


def test_rotary_angles_are_fp32_far_into_the_context():
    """At position 4000 fp32 angles are right to 1e-3; bf16-rounded frequencies would be off by whole
    radians."""
    frequencies = inverse_frequencies(64, 1e6, None)
    cos, sin = rotary_angles(jnp.asarray([[4000, 4001]]), frequencies)
    assert cos.dtype == sin.dtype == jnp.float32
    exact = 4000 / 1e6 ** (np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(cos[0, 0], np.cos(exact), atol=1e-3)
    np.testing.assert_allclose(sin[0, 0], np.sin(exact), atol=1e-3)
    rounded = np.asarray(jnp.asarray(frequencies, jnp.bfloat16), np.float64)
    assert np.abs(np.cos(4000 * rounded) - np.cos(exact)).max() > 0.5  # what the test protects from


def test_rotation_turns_pairs_half_a_head_apart():
    heads = jnp.asarray(np.eye(4)[None], jnp.bfloat16)  # one row, four heads of size 4
    cos, sin = rotary_angles(jnp.asarray([3]), np.asarray([0.5, 0.25], np.float32))
    out = np.asarray(rotate(heads, cos, sin))
    assert out.dtype == np.float32
    a, b = 1.5, 0.75
    expected = [
        [np.cos(a), 0, np.sin(a), 0],
        [0, np.cos(b), 0, np.sin(b)],
        [-np.sin(a), 0, np.cos(a), 0],
        [0, -np.sin(b), 0, np.cos(b)],
    ]
    np.testing.assert_allclose(out[0], expected, atol=1e-6)


def test_rotated_scores_depend_on_distance_only():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 16)), jnp.float32) for _ in range(2))
    frequencies = inverse_frequencies(16, 1e4, None)

    def score(i, j):
        turned_q = rotate(q, *rotary_angles(jnp.asarray([i]), frequencies))
        return float((turned_q * rotate(k, *rotary_angles(jnp.asarray([j]), frequencies))).sum())

    assert score(50, 43) == pytest.approx(score(7, 0), abs=1e-4)
    assert score(50, 43) != pytest.approx(score(43, 50), abs=1e-2)
