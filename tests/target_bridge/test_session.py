"""Decoding with the KV cache: any extends and commits equal one full forward of the committed ids."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from target_bridge.hf import HFTarget, load_hf_target
from target_bridge.target import TargetError

FAMILIES = {
    "llama": {},
    "qwen3": {},
    "gpt2": {"n_positions": 96, "n_embd": 32, "n_layer": 5, "n_head": 4},
    # A window shorter than what is taken back: a cache that lets old positions go would be wrong here.
    "mistral": {"sliding_window": 6},
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


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("seed", range(4))
def test_any_commits_equal_a_full_forward(targets, kind, seed):
    target = targets[kind]
    rng = np.random.default_rng(seed)
    session = target.open_session(80)
    committed: list[int] = []
    for round_ in range(12):
        count = int(rng.integers(5, 15)) if round_ == 0 else int(rng.integers(1, 7))
        ids = rng.integers(0, 64, size=count)
        if len(committed) + count > 80:
            break
        step = session.extend(ids)
        logits, taps = full_forward(target, [*committed, *ids.tolist()])
        assert step.logits.dtype == torch.float32
        torch.testing.assert_close(step.logits, logits[len(committed) :], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(step.context_hidden, taps[len(committed) :], atol=1e-4, rtol=1e-4)
        keep = int(rng.integers(0, count + 1))
        session.commit(keep)
        committed += ids[:keep].tolist()
        assert session.length == len(committed)
    assert len(committed) > 6
    session.close()


def test_last_logits_only(targets):
    session = targets["llama"].open_session(32)
    step = session.extend(range(10), last_logits=2)
    assert step.logits.shape == (2, 64)
    assert step.context_hidden.shape == (10, 96)
    session.commit(0)
    assert session.length == 0
    again = session.extend(range(10))
    torch.testing.assert_close(again.logits[-2:], step.logits, atol=1e-5, rtol=1e-5)
    session.commit(10)
    assert session.extend([1], last_logits=0).logits.shape == (0, 64)


def test_greedy_decoding_equals_transformers_generate(targets):
    target = targets["qwen3"]
    prompt = [5, 9, 33, 2]
    expected = target._model.generate(
        torch.tensor([prompt]), max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0
    )[0].tolist()
    session = target.open_session(24)
    ids, out = prompt, list(prompt)
    while len(out) < 24:
        step = session.extend(ids)
        session.commit(len(ids))
        ids = [int(step.logits[-1].argmax())]
        out += ids
    assert out == expected


def test_two_sessions_do_not_disturb_each_other(targets):
    first, second = targets["llama"].open_session(16), targets["llama"].open_session(16)
    first.extend([1, 2, 3])
    first.commit(3)
    second.extend([7])
    second.commit(1)
    step = first.extend([4])
    logits, _ = full_forward(targets["llama"], [1, 2, 3, 4])
    torch.testing.assert_close(step.logits[0], logits[3], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([64], "extend holds id 64 at position 0, but the target's ids are 0..63"),
        ([1, -2], "id -2 at position 1"),
        ([], "empty"),
        ([[1]], "one-dimensional"),
        ([1] * 7, "session holds 2 tokens and 7 more would exceed its max_length 8"),
    ],
)
def test_refused_ids_leave_the_session_as_it_was(targets, ids, message):
    session = targets["llama"].open_session(8)
    session.extend([1, 2])
    session.commit(2)
    with pytest.raises(TargetError) as error:
        session.extend(ids)
    assert message in str(error.value)
    step = session.extend([3] * 6)
    logits, _ = full_forward(targets["llama"], [1, 2] + [3] * 6)
    torch.testing.assert_close(step.logits, logits[2:], atol=1e-4, rtol=1e-4)


def test_order_of_calls_is_enforced(targets):
    session = targets["llama"].open_session(8)
    with pytest.raises(TargetError, match=r"commit\(1\): the last extend left 0 ids"):
        session.commit(1)
    session.extend([1, 2])
    with pytest.raises(TargetError, match="2 ids of the last extend are neither kept nor dropped"):
        session.extend([3])
    for n in (-1, 3):
        with pytest.raises(TargetError, match=rf"commit\({n}\): the last extend left 2 ids"):
            session.commit(n)
    session.commit(1)
    session.close()
    session.close()
    for call in (lambda: session.extend([1]), lambda: session.commit(0)):
        with pytest.raises(TargetError, match="closed"):
            call()


@pytest.mark.parametrize("length", [0, 97])
def test_session_length_must_suit_the_target(targets, length):
    with pytest.raises(TargetError, match=rf"session max_length {length} must be 1..96"):
        targets["llama"].open_session(length)


def test_a_recurrent_model_is_captured_but_not_decoded(make_model, documents):
    folder = make_model("mamba2", num_heads=8, head_dim=8, state_size=8, n_groups=1, expand=2, chunk_size=8)
    target = load_hf_target(str(folder), [0, 3], max_length=64)
    assert target.capture(documents).last_hidden[0].shape == (5, 32)
    with pytest.raises(TargetError, match="recurrent state"):
        target.open_session(16)
