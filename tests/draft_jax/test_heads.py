"""Markov and confidence heads against NumPy, slot by slot; the step of decoding equals the states of
training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draft_jax.models.dspark import bind
from draft_jax.models.heads import vocabulary_logits

from .drafts import random_params, tiny_config

KINDS = ["vanilla", "gated", "rnn"]
BLOCKS, K, D, R = 3, 4, 24, 5


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def inputs(seed=0):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(BLOCKS, K, D)).astype(np.float32)
    return jnp.asarray(hidden), jnp.asarray(rng.integers(0, 31, (BLOCKS, K)).astype(np.int32))


def states_by_hand(kind, params, hidden, prev):
    """dspark_spec 1.4, one block and slot at a time, fp64."""
    w1 = np.asarray(params["markov_w1"]["embedding"], np.float64)
    z = np.zeros((*prev.shape, R))
    for block in range(prev.shape[0]):
        s = np.zeros(R)
        for k in range(prev.shape[1]):
            e, h = w1[prev[block, k]], hidden[block, k]
            if kind == "vanilla":
                z[block, k] = e
            elif kind == "gated":
                kernel, bias = (np.asarray(params["gate_proj"][n], np.float64) for n in ("kernel", "bias"))
                z[block, k] = sigmoid(np.concatenate([h, e]) @ kernel + bias) * e
            else:
                kernel, bias = (np.asarray(params["joint_proj"][n], np.float64) for n in ("kernel", "bias"))
                g, c, o = np.split(np.concatenate([s, e, h]) @ kernel + bias, 3)
                z[block, k] = np.tanh(o)
                s = sigmoid(g) * s + (1 - sigmoid(g)) * np.tanh(c)
    return z


@pytest.fixture(params=KINDS)
def head(request):
    config = tiny_config(markov_head_type=request.param, initializer_range=0.7)
    params = random_params(config)
    return request.param, params["markov"], bind(config, params, jnp.float32)


def test_states_and_step(head):
    kind, params, draft = head
    hidden, prev = inputs()
    expected = states_by_hand(kind, params, np.asarray(hidden), np.asarray(prev))
    z = np.asarray(jax.jit(draft.markov.states)(hidden, prev))
    np.testing.assert_allclose(z, expected, atol=1e-5)
    assert draft.markov.w2().shape == (31, R)
    np.testing.assert_array_equal(draft.markov.w2(), params["markov_w2"]["embedding"])
    np.testing.assert_array_equal(draft.markov.embed(prev), np.asarray(params["markov_w1"]["embedding"])[prev])

    carry = draft.markov.initial_carry((BLOCKS,))
    step = jax.jit(draft.markov.step)
    for k in range(K):
        carry, one = step(carry, hidden[:, k], prev[:, k])
        np.testing.assert_allclose(one, expected[:, k], atol=1e-5)


def test_only_rnn_remembers(head):
    """Changing the first previous token reaches later slots through the recurrent state only."""
    kind, _, draft = head
    hidden, prev = inputs()
    states = jax.jit(draft.markov.states)
    other = prev.at[:, 0].set((prev[:, 0] + 1) % 31)
    difference = np.abs(states(hidden, other) - states(hidden, prev)).max(axis=(0, 2))
    assert difference[0] > 1e-2
    assert (difference[1:] > 1e-4).all() == (kind == "rnn")
    assert (difference[1:] == 0).all() == (kind != "rnn")


def test_no_markov_head():
    config = tiny_config(markov_rank=0, confidence_head_with_markov=False)
    assert bind(config, random_params(config), jnp.float32).markov is None


@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_is_fp32_whatever_the_draft_computes_in(with_markov):
    config = tiny_config(confidence_head_with_markov=with_markov)
    params = random_params(config)
    draft = bind(config, params, jnp.bfloat16)
    hidden, prev = inputs()
    hidden = hidden.astype(jnp.bfloat16)
    embedding = draft.markov.embed(prev) if with_markov else None
    logits = draft.confidence(hidden, embedding)
    assert logits.dtype == jnp.float32
    assert logits.shape == (BLOCKS, K)
    features = np.asarray(hidden, np.float64)
    if with_markov:
        features = np.concatenate([features, np.asarray(embedding, np.float64)], -1)
    kernel, bias = (np.asarray(params["confidence"]["proj"][name], np.float64) for name in ("kernel", "bias"))
    np.testing.assert_allclose(logits, (features @ kernel + bias)[..., 0], rtol=1e-5, atol=1e-5)


def test_confidence_refuses_the_wrong_features():
    hidden, prev = inputs()
    config = tiny_config()
    draft = bind(config, random_params(config), jnp.float32)
    with pytest.raises(ValueError, match="with Markov features: pass prev_embedding"):
        draft.confidence(hidden)
    config = tiny_config(confidence_head_with_markov=False)
    draft = bind(config, random_params(config), jnp.float32)
    with pytest.raises(ValueError, match="without Markov features"):
        draft.confidence(hidden, draft.markov.embed(prev))


def test_no_confidence_head():
    config = tiny_config(enable_confidence_head=False)
    params = random_params(config)
    assert "confidence" not in params
    assert bind(config, params, jnp.float32).confidence is None


def test_gradient_of_the_tables_is_fp32_in_bf16():
    """Many slots with the same previous token: their gradients are summed in fp32."""
    config = tiny_config()
    params = random_params(config)
    hidden = jnp.zeros((250, 4, D), jnp.bfloat16)
    prev = jnp.zeros((250, 4), jnp.int32)

    @jax.jit
    def gradient(params):
        def total(params):
            z = bind(config, params, jnp.bfloat16).markov.states(hidden, prev)
            return z.astype(jnp.float32).sum()

        return jax.grad(total)(params)["markov"]["markov_w1"]["embedding"]

    table = np.asarray(gradient(params))
    assert table.dtype == np.float32
    np.testing.assert_array_equal(table[0], 1000)
    assert not table[1:].any()


def test_vocabulary_logits_are_fp32_and_cut_to_the_vocabulary():
    rng = np.random.default_rng(0)
    hidden, head = jnp.asarray(rng.normal(size=(3, D)), jnp.bfloat16), rng.normal(size=(34, D))
    logits = vocabulary_logits(hidden, jnp.asarray(head, jnp.bfloat16), 31)
    assert (logits.shape, logits.dtype) == ((3, 31), jnp.float32)
    exact = np.asarray(hidden, np.float64) @ np.asarray(jnp.asarray(head, jnp.bfloat16), np.float64).T
    # Products of bf16 numbers are exact in fp32, so only summation rounds: far below one bf16 step.
    np.testing.assert_allclose(logits, exact[:, :31], atol=1e-5)
