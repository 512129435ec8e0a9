"""Decoding with the KV cache: any extends and commits, in any company, equal one full forward of the committed ids."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from target_bridge import hf_attention, hf_session
from target_bridge.hf import HFTarget, load_hf_target
from target_bridge.hf_graphs import fixed_shape
from target_bridge.hf_session import HFSession
from target_bridge.target import TargetError

FAMILIES = {
    "llama": {},
    "qwen3": {},
    "gpt2": {"n_positions": 96, "n_embd": 32, "n_layer": 5, "n_head": 4},
    # A window shorter than what is taken back: a cache that lets old positions go would be wrong here.
    "mistral": {"sliding_window": 6},
    # Two kinds of layers, hence two masks.
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
}


@pytest.fixture(scope="module")
def targets(make_model):
    return {kind: load_hf_target(str(make_model(kind, **changes)), [0, 2, 3]) for kind, changes in FAMILIES.items()}


def full_forward(target: HFTarget, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [T, V], taps [T, M*D]) by transformers' own forward, without cache."""
    with torch.inference_mode():
        out = target._model(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    taps = torch.cat([out.hidden_states[i + 1][0] for i in target.info.layer_ids], dim=-1)
    return out.logits[0].float(), taps


def test_the_mixed_family_has_both_kinds_of_layers(targets):
    assert set(targets["qwen2"].text_config.layer_types) == {"full_attention", "sliding_attention"}


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize(
    ("seed", "slots", "few_shapes"), [(0, 1, False), (1, 1, True), (2, 3, False), (3, 5, False), (4, 5, True)]
)
def test_any_commits_in_any_company_equal_a_full_forward(targets, kind, seed, slots, few_shapes):
    """Ragged extends of random slots; some texts end and their slot takes another. Padded to few shapes (as on a GPU)
    or not."""
    target = targets[kind]
    rng = np.random.default_rng(seed)
    session = HFSession(target, 60, slots, few_shapes=few_shapes)
    texts: dict[int, list[int]] = {slot: [] for slot in range(slots)}
    longest = reused = 0
    for _ in range(14):
        named = [slot for slot in texts if rng.random() < 0.8] or [0]
        ids = {}
        for slot in named:
            count = int(rng.integers(1, 7)) if texts[slot] else int(rng.integers(5, 15))
            if len(texts[slot]) + count > 60:
                session.free(slot)
                texts[slot], reused = [], reused + 1
            ids[slot] = rng.integers(0, 64, size=count)
        steps = session.extend(ids)
        assert list(steps) == named
        kept = {}
        for slot, step in steps.items():
            before, count = len(texts[slot]), len(ids[slot])
            logits, taps = full_forward(target, [*texts[slot], *ids[slot].tolist()])
            assert step.logits.dtype == torch.float32
            assert step.context_hidden.shape == (count, 96)
            torch.testing.assert_close(step.logits, logits[before:], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(step.context_hidden, taps[before:], atol=1e-4, rtol=1e-4)
            kept[slot] = int(rng.integers(0, count + 1))
            texts[slot] += ids[slot][: kept[slot]].tolist()
            longest = max(longest, len(texts[slot]))
        session.commit(kept)
        assert [session.length(slot) for slot in texts] == [len(text) for text in texts.values()]
    assert longest > 20
    session.close()


def test_a_freed_slot_forgets_its_text_and_its_provisional_ids(targets):
    session = targets["llama"].open_session(40, 2)
    session.extend({0: range(30), 1: [4, 5]})
    session.commit({0: 30, 1: 2})
    session.extend({0: [7] * 9, 1: [6]})
    session.free(0)
    assert session.length(0) == 0
    session.commit({1: 1})
    steps = session.extend({0: [9, 8], 1: [1]})
    for slot, text in {0: [9, 8], 1: [4, 5, 6, 1]}.items():
        logits, _ = full_forward(targets["llama"], text)
        torch.testing.assert_close(steps[slot].logits[-1], logits[-1], atol=1e-4, rtol=1e-4)


def test_texts_decoded_together_share_forwards(targets, monkeypatch):
    """Eight texts with a prefix are one forward, not eight; new ones are another."""
    session = targets["llama"].open_session(40, 9)
    session.extend({slot: [slot, 2, 3] for slot in range(8)})
    session.commit(dict.fromkeys(range(8), 3))
    calls = []
    forward = session._forward
    monkeypatch.setattr(session, "_forward", lambda *a: calls.append(a[1]) or forward(*a))
    session.extend({8: [1] * 5, **{slot: [1, 2, 3, 4] for slot in range(8)}})
    assert calls == [[8], list(range(8))]


@pytest.mark.parametrize(
    ("count", "tokens", "needed", "shape"),
    [
        (64, 1, 80, (64, 1, 256)),  # plain decoding
        (17, 8, 257, (64, 8, 512)),  # a block of 7 and its anchor
        (16, 5, 257, (16, 8, 512)),  # a quarter of the rows does
        (1, 5, 600, (1, 8, 736)),  # no more than the cache holds
        (8, 70, 0, (16, 128, 0)),  # prompts
        (64, 70, 0, None),  # too many tokens for padding to pay
    ],
)
def test_forwards_are_padded_to_few_shapes(count, tokens, needed, shape):
    assert fixed_shape(count, tokens, needed, num_slots=64, most_read=736) == shape


def test_keys_are_not_copied_for_every_query_head(targets, monkeypatch):
    """4 query heads share 2 key heads: attention reads the 2."""
    heads = []
    attention = hf_attention.F.scaled_dot_product_attention

    def recorded(query, key, value, **options):
        heads.append((query.shape[1:3], key.shape[1]))
        return attention(query, key, value, **options)

    session = targets["llama"].open_session(40, 2)
    session.extend({0: [1, 2, 3], 1: [4]})
    session.commit({0: 3, 1: 1})
    monkeypatch.setattr(hf_attention.F, "scaled_dot_product_attention", recorded)
    session.extend({0: [5, 6, 7], 1: [8, 9, 10]})
    assert heads == [((2, 6), 2)] * 5
    assert targets["llama"].text_config._attn_implementation == "sdpa"


def test_last_logits_only(targets):
    session = targets["llama"].open_session(32, 2)
    steps = session.extend({0: range(10), 1: [3]}, last_logits=2)
    assert steps[0].logits.shape == (2, 64)
    assert steps[1].logits.shape == (1, 64)
    assert steps[0].context_hidden.shape == (10, 96)
    session.commit({0: 0, 1: 1})
    assert session.length(0) == 0
    again = session.extend({0: range(10)})[0]
    torch.testing.assert_close(again.logits[-2:], steps[0].logits, atol=1e-5, rtol=1e-5)
    session.commit({0: 10})
    assert session.extend({0: [1]}, last_logits=0)[0].logits.shape == (0, 64)


def test_greedy_decoding_equals_transformers_generate(targets):
    """Three prompts of different lengths side by side, each as generate has it alone."""
    target = targets["qwen3"]
    prompts = [[5, 9, 33, 2], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    expected = [
        target._model.generate(
            torch.tensor([prompt]), max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0
        )[0].tolist()
        for prompt in prompts
    ]
    session = target.open_session(32, 3)
    ids: dict[int, list[int]] = dict(enumerate(prompts))
    out = [list(prompt) for prompt in prompts]
    for _ in range(20):
        steps = session.extend(ids)
        session.commit({slot: len(ids[slot]) for slot in ids})
        ids = {slot: [int(step.logits[-1].argmax())] for slot, step in steps.items()}
        for slot, new in ids.items():
            out[slot] += new
    assert out == expected


def test_two_sessions_do_not_disturb_each_other(targets):
    first, second = targets["llama"].open_session(16), targets["llama"].open_session(16)
    first.extend({0: [1, 2, 3]})
    first.commit({0: 3})
    second.extend({0: [7]})
    second.commit({0: 1})
    step = first.extend({0: [4]})[0]
    logits, _ = full_forward(targets["llama"], [1, 2, 3, 4])
    torch.testing.assert_close(step.logits[0], logits[3], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({0: [1], 1: [64]}, "slot 1: extend holds id 64 at position 0, but the target's ids are 0..63"),
        ({1: [1, -2]}, "id -2 at position 1"),
        ({0: [1], 1: []}, "slot 1: extend is empty"),
        ({1: [[1]]}, "one-dimensional"),
        ({1: [1] * 7}, "slot 1 holds 2 tokens and 7 more would exceed the session's max_length 8"),
        ({2: [1]}, "slot 2 does not exist: the session has slots 0..1"),
        ({}, "no slot"),
    ],
)
def test_refused_ids_leave_the_session_as_it_was(targets, ids, message):
    session = targets["llama"].open_session(8, 2)
    session.extend({0: [5], 1: [1, 2]})
    session.commit({0: 1, 1: 2})
    with pytest.raises(TargetError) as error:
        session.extend(ids)
    assert message in str(error.value)
    step = session.extend({1: [3] * 6})[1]
    logits, _ = full_forward(targets["llama"], [1, 2] + [3] * 6)
    torch.testing.assert_close(step.logits, logits[2:], atol=1e-4, rtol=1e-4)


def test_order_of_calls_is_enforced(targets):
    session = targets["llama"].open_session(8, 2)
    with pytest.raises(TargetError, match=r"commit\(\{0: 1\}\): the last extend left 0 ids"):
        session.commit({0: 1})
    session.extend({0: [1, 2], 1: [4]})
    with pytest.raises(TargetError, match="slot 0: 2 ids of the last extend are neither kept nor dropped"):
        session.extend({0: [3]})
    for n in (-1, 3):
        with pytest.raises(TargetError, match=rf"commit\(\{{0: {n}\}}\): the last extend left 2 ids"):
            session.commit({0: n, 1: 1})
    with pytest.raises(TargetError, match=r"must name every slot with provisional ids; it leaves out \[1\]"):
        session.commit({0: 1})
    assert session.length(0) == 0
    session.commit({0: 1, 1: 0})
    assert [session.length(0), session.length(1)] == [1, 0]
    session.close()
    session.close()
    for call in (lambda: session.extend({0: [1]}), lambda: session.commit({}), lambda: session.free(0)):
        with pytest.raises(TargetError, match="closed"):
            call()


def test_a_closed_session_gives_its_memory_back_at_once(targets):
    """The next session may need it before Python's collector runs."""
    session = targets["llama"].open_session(16)
    session.extend({0: [1, 2]})
    keys = weakref.ref(session._cache.layers[0].keys)
    gc.disable()
    try:
        session.close()
        assert keys() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("length", [0, 97])
def test_session_length_must_suit_the_target(targets, length):
    with pytest.raises(TargetError, match=rf"session max_length {length} must be 1..96"):
        targets["llama"].open_session(length)
    with pytest.raises(TargetError, match="max_sequences 0 must be at least 1"):
        targets["llama"].open_session(8, 0)


def test_a_recurrent_model_is_captured_but_not_decoded(make_model, documents):
    folder = make_model("mamba2", num_heads=8, head_dim=8, state_size=8, n_groups=1, expand=2, chunk_size=8)
    target = load_hf_target(str(folder), [0, 3], max_length=64)
    assert target.capture(documents).last_hidden[0].shape == (5, 32)
    with pytest.raises(TargetError, match="recurrent state"):
        target.open_session(16)


def test_a_model_that_ignores_given_masks_is_refused(make_model, monkeypatch):
    """Instead of decoding wrongly: the first session compares cached with plain forwards."""
    target = load_hf_target(str(make_model("llama")), [0, 2])
    monkeypatch.setattr(hf_session.SlotMasks, "make", lambda *_: None)
    with pytest.raises(TargetError, match=r"cannot decode several texts with one cache \(.*\): it does not heed masks"):
        target.open_session(16)


def test_a_cache_that_does_not_fit_says_what_it_needs(targets, monkeypatch):
    session = targets["llama"].open_session(63, 2**15)

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.Tensor, "new_zeros", full)
    # 5 layers x (k, v) x 32768 slots x 2 heads x 64 positions x 8 x 4 bytes
    with pytest.raises(TargetError, match=r"32768 texts of 63 tokens needs 1\.2 GiB on cpu.*eval\.batch_size"):
        session.extend({0: [1, 2]})


def test_layers_of_an_unknown_kind_are_refused(make_model, monkeypatch):
    target = load_hf_target(str(make_model("llama")), [0, 2])
    monkeypatch.setattr(target.text_config, "layer_types", ["chunked_attention"] * 5, raising=False)
    with pytest.raises(TargetError, match="layers of kind 'chunked_attention'"):
        target.open_session(16)
