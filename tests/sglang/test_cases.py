"""Cases T13 (which layer was captured) and T25 (what crosses to JAX, and when memory is used again) over the engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from target_bridge.handoff import to_jax
from target_bridge.staging import StagingRing
from tests.sglang.models import SIZES, running


def marker_folder(folder):
    """Embedding 0, block i adds 10^i to every feature (its attention's output bias), final norm 1, 3, 1, 3, ..."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, tie_word_embeddings=False))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.zero_()
        model.lm_head.weight.normal_()
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.bias.fill_(10.0**index)
        model.model.norm.weight[1::2] = 3.0
    model.save_pretrained(folder)
    return folder, model.lm_head.weight.detach()


def test_t13_which_layer_was_captured(tmp_path):
    folder, head = marker_folder(tmp_path)
    width = SIZES["hidden_size"]
    with running(folder, (0, 2, 3)) as target:
        captured = target.capture([[4, 9], [1]])
        (own,) = target.own_logits([[4, 9]])
    expected = torch.tensor([1.0] * width + [111.0] * width + [1111.0] * width)
    for states in captured.context_hidden:
        torch.testing.assert_close(states, expected.expand_as(states), rtol=1e-6, atol=0)
    # 11111 in all features, normalised exactly once; twice would give 1/sqrt(5) and 9/sqrt(5), never 11111.
    once = torch.tensor([1.0, 3.0] * (width // 2))
    torch.testing.assert_close(captured.last_hidden[0], once.expand(2, -1), rtol=1e-5, atol=0)
    torch.testing.assert_close(own, head @ captured.last_hidden[0][-1], rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def bf16_target(make_model):
    with running(make_model("qwen3"), dtype="bfloat16", page_size=16) as target:
        yield target


def test_t25_bits_of_captured_states(bf16_target, documents):
    """Documents are row slices of a forward's tensor, most at addresses JAX cannot view: bits equal all the same."""
    captured = bf16_target.capture(documents)
    for states in (*captured.context_hidden, *captured.last_hidden):
        array = to_jax(states)
        assert array.dtype == jnp.bfloat16
        assert np.array_equal(np.asarray(array).view(np.int16), states.view(torch.int16).numpy())


def test_t25_arrays_outlive_the_engines_memory(bf16_target, documents):
    captured = bf16_target.capture(documents)
    arrays = [to_jax(states) for states in captured.context_hidden]
    truth = [states.view(torch.int16).numpy().copy() for states in captured.context_hidden]
    del captured
    for _ in range(5):
        bf16_target.capture(documents[::-1])
        bf16_target.engine.reset()
    for array, bits in zip(arrays, truth):
        assert np.array_equal(np.asarray(array).view(np.int16), bits)


@jax.jit
def slow_sum(context):
    """Reads its argument again and again, for long enough that an early overwrite would show."""

    def body(_, carry):
        total, states = carry
        return total + jnp.sum(states.astype(jnp.float32) ** 2), states

    return jax.lax.fori_loop(0, 200, body, (jnp.zeros(()), context))[0]


def test_t25_the_slot_is_filled_again_only_after_the_fence(bf16_target, documents):
    """Engine and JAX take turns over one slot, ten times: each result is that of its own batch."""
    ring = StagingRing(1, len(documents), 40, 96, 32, torch.bfloat16)
    for turn in range(10):
        batch = [np.roll(ids, turn) for ids in documents]
        captured = bf16_target.capture(batch)
        expected = 200 * sum(float((states.double() ** 2).sum()) for states in captured.context_hidden)
        with ring.lease() as slot:
            for row, (context, last) in enumerate(zip(captured.context_hidden, captured.last_hidden)):
                slot.fill(row, 0, context, last)
            view, _ = slot.hand_over(lambda context, last: (to_jax(context), to_jax(last)))
            result = slow_sum(view)
            bf16_target.capture(batch[::-1])  # the engine works on while JAX reads: its pools are not the slot
            bf16_target.engine.reset()
            slot.fence(result)
        assert float(result) == pytest.approx(expected, rel=1e-4)
