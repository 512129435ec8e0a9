"""What the engine captures, held against Transformers run on each document alone."""

import weakref

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from target_bridge.handoff import frozen_to_jax
from tests.sglang.models import KINDS, TAPS, require_full, running, transformers_states


def largest_gap(ours: torch.Tensor, truth: torch.Tensor) -> float:
    assert ours.shape == truth.shape
    return float((ours.float() - truth).abs().max())


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_capture_equals_transformers(make_model, documents, kind, page_size):
    """Ragged documents over several forwards: by tokens, by rows, and one that exceeds the budget alone."""
    folder = make_model(kind)
    options = {"page_size": page_size, "max_tokens_per_forward": 39, "max_running_requests": 2}
    with running(folder, **options) as target:
        before = target.engine.forwards
        captured = target.capture(documents)
        assert target.engine.forwards - before == 4  # 5 | 40 | 1+23 | 32+7: in order, at most 39 or alone
        logits = target.own_logits(documents)
        require_full(target)
        _, head = target.frozen_head()
        for index, ids in enumerate(documents):
            context, last, truth = transformers_states(folder, ids)
            assert largest_gap(captured.context_hidden[index], context) < 1e-4
            assert largest_gap(captured.last_hidden[index], last) < 1e-4
            assert largest_gap(logits[index], truth[-1]) < 1e-4
            # The final norm once, the head's rows in the order of the ids.
            assert largest_gap(F.linear(captured.last_hidden[index], head), truth) < 1e-4


def test_capture_in_bfloat16(make_model, documents):
    folder = make_model("qwen3")
    with running(folder, dtype="bfloat16") as target:
        captured = target.capture(documents)
    for index, ids in enumerate(documents):
        context, last, _ = transformers_states(folder, ids)
        for ours, truth in ((captured.context_hidden[index], context), (captured.last_hidden[index], last)):
            assert ours.dtype == torch.bfloat16
            assert float((ours.float() - truth).norm() / truth.norm()) < 0.03


def test_a_document_does_not_see_the_others(make_model, documents):
    with running(make_model("llama"), page_size=16) as target:
        together = target.capture(documents)
        for index, ids in enumerate(documents):
            alone = target.capture([ids])
            torch.testing.assert_close(together.context_hidden[index], alone.context_hidden[0], rtol=0, atol=1e-5)
            torch.testing.assert_close(together.last_hidden[index], alone.last_hidden[0], rtol=0, atol=1e-5)


def test_training_never_reuses_a_prefix(make_model, documents):
    """The same document again, and one that continues it, even after decoding left that prefix in the tree."""
    ids = documents[1]
    with running(make_model("qwen3")) as target:
        first = target.capture([ids])
        request = target.engine.begin(ids, reuse=True)
        target.engine.forward([request])
        target.engine.finish(request, keep=len(ids))
        assert target.engine.evictable_tokens == len(ids)
        again = target.capture([ids, np.concatenate([ids, ids[:3]]), ids])
        assert [len(states) for states in again.last_hidden] == [40, 43, 40]
        for index in (0, 2):
            assert torch.equal(again.context_hidden[index], first.context_hidden[0])
        assert target.engine.evictable_tokens == len(ids)  # nothing added, nothing taken away


def test_capture_beside_a_text_that_holds_kv(make_model, documents):
    """The pool has room for 64 tokens, a request under way holds 20 of them: what is left is divided otherwise."""
    folder = make_model("llama")
    with running(folder, max_total_tokens=64, max_running_requests=3) as target:
        expected = target.capture(documents)
        request = target.engine.begin(np.arange(20), reuse=False)
        target.engine.forward([request])
        for states, truth in zip(target.capture(documents).last_hidden, expected.last_hidden):
            torch.testing.assert_close(states, truth, rtol=0, atol=1e-5)
        target.engine.finish(request)
        require_full(target)


@pytest.mark.parametrize("page_size", [1, 16])
def test_fifty_cycles_leave_the_pools_full(make_model, documents, page_size):
    """Capture with and without reset between, through a pool that holds two documents at most."""
    options = {"page_size": page_size, "max_total_tokens": 96, "max_running_requests": 3}
    with running(make_model("llama"), **options) as target:
        expected = target.capture(documents)
        kept = [states.clone() for states in expected.context_hidden]
        for cycle in range(50):
            captured = target.capture(documents)
            require_full(target)
            if cycle % 2:
                target.engine.reset()
                require_full(target)
            for states, truth in zip(captured.context_hidden, kept):
                assert torch.equal(states, truth)
        # What was handed out belongs to whoever has it: later forwards and resets did not touch it.
        for states, truth in zip(expected.context_hidden, kept):
            assert torch.equal(states, truth)


def test_states_outlive_the_engine(make_model, documents):
    with running(make_model("qwen3")) as target:
        captured = target.capture(documents)
        embedding, head = target.frozen_head()
        runner = target.engine._adapter.runner
        gone = [weakref.ref(thing) for thing in (runner.model, runner.token_to_kv_pool, runner.req_to_token_pool)]
        del runner
        kept = [tensor.clone() for tensor in (*captured.context_hidden, *captured.last_hidden, embedding, head)]
    assert [thing() for thing in gone] == [None, None, None], "a closed engine holds on to its memory"
    with running(make_model("llama")) as other:
        other.capture(documents)
        for tensor, truth in zip((*captured.context_hidden, *captured.last_hidden, embedding, head), kept):
            assert torch.equal(tensor, truth)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_frozen_head_is_the_engines_own_memory(make_model, kind):
    """Separate and tied; 70 ids in 128 rows."""
    from transformers import AutoModelForCausalLM

    folder = make_model(kind)
    truth = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with running(folder) as target:
        embedding, head = target.frozen_head()
        model = target.engine.model
        assert model.model.embed_tokens.weight.shape == (128, 32)
        assert embedding.shape == head.shape == (70, 32)
        assert embedding.is_contiguous()
        assert head.is_contiguous()
        assert embedding.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        assert head.data_ptr() == model.lm_head.weight.data_ptr()
        assert (head is embedding) == (kind == "llama")
        assert torch.equal(embedding, truth.get_input_embeddings().weight)
        assert torch.equal(head, truth.get_output_embeddings().weight)
        frozen = frozen_to_jax(embedding, head)
        assert (frozen.lm_head is frozen.embedding) == (kind == "llama")
        assert np.array_equal(np.asarray(frozen.lm_head), head.numpy())


def test_info_and_eos(make_model, tmp_path):
    folder = make_model("qwen3", eos_token_id=[9, 4])
    with running(folder) as target:
        info = target.info
        assert (info.hidden_size, info.num_layers, info.vocab_size, info.max_length) == (32, 5, 70, 96)
        assert (info.layer_ids, info.dtype, info.eos_token_ids) == (TAPS, "float32", (9, 4))
        assert info.config["model_type"] == "qwen3"
    with running(folder, max_total_tokens=50) as target:
        assert target.info.max_length == 50
