"""Cached decoding equals the stateless path: every committed text run whole by Transformers, and by `capture`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from target_bridge.sglang.target import SGLangTarget
from target_bridge.target import TargetError
from tests.sglang.models import TAPS, running
from tests.sglang.texts import Texts, Truth, random_rounds, require_settled


@pytest.fixture(scope="module")
def folder(make_model) -> Path:
    return make_model("qwen3")


@pytest.fixture(scope="module")
def truth(folder) -> Truth:
    return Truth(folder)


@pytest.fixture(scope="module", params=[1, 16], ids=["page 1", "page 16"])
def target(request, folder) -> Iterator[SGLangTarget]:
    with running(folder, page_size=request.param, max_total_tokens=512, max_running_requests=8) as made:
        yield made


@pytest.mark.parametrize("seed", range(3))
def test_any_commits_equal_the_stateless_path(target, truth, seed):
    session = target.open_session(60, 4)
    forwards = target.engine.forwards
    random_rounds(Texts(session, truth), seed, 12, 60)
    assert target.engine.forwards - forwards <= 12  # all slots of a round in one forward
    require_settled(target, session)
    session.close()
    require_settled(target)


def test_states_equal_those_of_capture(target):
    """The same engine without a cache: what training sees of a text is what evaluation sees of it."""
    rng = np.random.default_rng(5)
    text = rng.integers(0, 70, size=50)
    session = target.open_session(60)
    states, place = [], 0
    for count in (9, 16, 1, 7, 17):
        step = session.extend({0: text[place : place + count]})[0]
        states.append(step.context_hidden)
        session.commit({0: count})
        place += count
    session.close()
    captured = target.capture([text])
    torch.testing.assert_close(torch.cat(states), captured.context_hidden[0], atol=1e-5, rtol=1e-4)


def test_the_prefix_is_kept_and_only_committed_tokens_are(target, computed):
    """Each round computes its own tokens and no others; what is not kept is free again, whole pages at a time."""
    page = target.engine.facts.page_size
    rng = np.random.default_rng(1)
    session = target.open_session(90)
    before = target.engine.free_tokens + target.engine.evictable_tokens
    committed = 0
    for count, kept in ((37, 37), (6, 3), (6, 6), (6, 0), (20, 9), (1, 1)):
        session.extend({0: rng.integers(0, 70, size=count)})
        assert computed[-1] == (committed, committed + count)
        session.commit({0: kept})
        committed += kept
        held = -(-committed // page) * page
        assert target.engine.free_tokens + target.engine.evictable_tokens == before - held
        require_settled(target, session)
    session.close()
    require_settled(target)


def test_what_is_given_back_goes_into_the_tree_without_the_rejected(target, computed):
    """Given back between rounds, a text finds its committed tokens, in whole pages, and computes the rest again."""
    page = target.engine.facts.page_size
    session = target.open_session(90)
    text = np.arange(60) % 70
    place = 0
    for count, kept in ((37, 37), (6, 3), (6, 6), (11, 2)):
        session.extend({0: text[place : place + count]})
        assert computed[-1] == (place // page * page, place + count)
        session.commit({0: kept})
        place += kept
        before = target.engine.evictable_tokens
        session._give_back(target.engine, session._texts[0])
        require_settled(target)
        assert target.engine.evictable_tokens <= before + place // page * page
    assert place == 48
    # The eleven ids were computed and nine of them rejected: they are not in the tree.
    session.extend({0: text[48:59]})
    assert computed[-1] == (48, 59)
    session.close()
    require_settled(target)


def test_equal_texts_in_two_slots(target, truth):
    """Both need the states of all their tokens, whatever the other has left in the tree."""
    texts = Texts(target.open_session(60, 3), truth)
    same = np.arange(20)
    texts.round({0: same, 1: same}, {0: 20, 1: 20})
    texts.round({2: same}, {2: 18})
    texts.round({0: same, 1: same, 2: same}, {0: 5, 1: 17, 2: 20})
    require_settled(target, texts.session)
    texts.session.close()
    require_settled(target)


def test_end_of_text_inside_a_block(target, truth):
    """A block whose third token ends the text: two are kept, the slot is freed and taken by another text."""
    texts = Texts(target.open_session(60, 2), truth)
    prompt, block = np.arange(1, 18), np.array([5, 6, 69, 8, 9])
    texts.round({0: prompt, 1: prompt[:3]}, {0: 17, 1: 3})
    texts.round({0: block, 1: block}, {0: 3, 1: 5})
    texts.free(0)
    require_settled(target, texts.session)
    texts.round({0: prompt[::-1].copy(), 1: block}, {0: 17, 1: 0})
    texts.round({0: block}, {0: 5})
    # Freed between extend and commit: nothing of it stays.
    texts.session.extend({0: block, 1: block})
    texts.free(0)
    texts.session.commit({1: 0})
    require_settled(target, texts.session)
    texts.session.close()
    require_settled(target)


@pytest.mark.parametrize("moment", ["between rounds", "before commit"])
def test_a_reset_of_the_engine_costs_time_only(target, truth, moment):
    """Captures reset pools; a session goes on, its prefixes are computed again."""
    texts = Texts(target.open_session(60, 2), truth)
    texts.round({0: np.arange(30), 1: np.arange(5)}, {0: 30, 1: 5})
    if moment == "between rounds":
        target.engine.reset()
    else:
        texts.session.extend({0: np.arange(4), 1: np.arange(4)})
        target.engine.reset()
        texts.session.commit({0: 2, 1: 4})
        texts.texts[0] += [0, 1]
        texts.texts[1] += [0, 1, 2, 3]
    texts.round({0: np.arange(3), 1: np.arange(6)}, {0: 3, 1: 1})
    require_settled(target, texts.session)
    texts.session.close()
    require_settled(target)


def test_captures_and_other_sessions_in_between(target, truth, documents):
    first, second = (Texts(target.open_session(60, 2), truth) for _ in range(2))
    expected = target.capture(documents)
    first.round({0: np.arange(30), 1: np.arange(5)}, {0: 30, 1: 5})
    second.round({0: np.arange(30), 1: np.arange(7)}, {0: 12, 1: 7})
    first.session.extend({0: np.arange(4)})
    again = target.capture(documents[:3])
    for a, b in zip(again.last_hidden, expected.last_hidden):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
    second.round({0: np.arange(3)}, {0: 3})
    first.session.commit({0: 4})
    first.texts[0] += [0, 1, 2, 3]
    first.round({0: np.arange(2), 1: np.arange(2)}, {0: 1, 1: 2})
    first.session.close()
    second.round({1: np.arange(9)}, {1: 9})
    second.session.close()
    require_settled(target)


def test_last_logits_only(target):
    session = target.open_session(60, 2)
    all_rows = session.extend({0: range(20), 1: range(3)})
    session.commit({0: 0, 1: 0})
    steps = session.extend({0: range(20), 1: range(3)}, last_logits=4)
    assert [step.logits.shape for step in steps.values()] == [(4, 70), (3, 70)]
    assert [step.context_hidden.shape for step in steps.values()] == [(20, 96), (3, 96)]
    for slot in (0, 1):
        torch.testing.assert_close(steps[slot].logits, all_rows[slot].logits[-4:], atol=1e-5, rtol=0)
    session.commit({0: 20, 1: 3})
    assert session.extend({1: [7]}, last_logits=0)[1].logits.shape == (0, 70)
    session.close()


def test_refusals_leave_the_session_as_it_was(target, truth):
    texts = Texts(target.open_session(24, 3), truth)
    session = texts.session
    texts.round({0: np.arange(10), 1: np.arange(3)}, {0: 10, 1: 3})
    for ids, said in (
        ({}, "extend was given no slot"),
        ({3: [1]}, r"slot 3 does not exist: the session has slots 0\.\.2"),
        ({-1: [1]}, "slot -1 does not exist"),
        ({0: [1, 70]}, "slot 0: extend holds id 70 at position 1"),
        ({1: [1], 0: []}, "slot 0: extend is empty"),
        ({1: [1], 0: np.arange(15)}, "slot 0 holds 10 tokens and 15 more would exceed the session's max_length 24"),
    ):
        with pytest.raises(TargetError, match=said):
            session.extend(ids)
    with pytest.raises(TargetError, match="last_logits must not be negative"):
        session.extend({0: [1]}, last_logits=-1)
    with pytest.raises(TargetError, match=r"commit\(\{0: 1\}\): the last extend left 0 ids"):
        session.commit({0: 1})
    require_settled(target, session)
    texts.round({0: np.arange(2), 1: np.arange(3)}, {0: 2, 1: 3})
    session.extend({0: [1, 2], 1: [3]})
    with pytest.raises(TargetError, match="slot 1: 1 ids of the last extend are neither kept nor dropped"):
        session.extend({1: [1]})
    with pytest.raises(TargetError, match=r"commit must name every slot with provisional ids; it leaves out \[1\]"):
        session.commit({0: 1})
    with pytest.raises(TargetError, match=r"commit\(\{1: 2\}\): the last extend left 1 ids"):
        session.commit({0: 1, 1: 2})
    session.commit({0: 1, 1: 0})
    texts.texts[0].append(1)
    texts.round({0: np.arange(2), 1: np.arange(3)}, {0: 2, 1: 3})
    session.close()
    session.close()
    with pytest.raises(TargetError, match="this session is closed"):
        session.extend({0: [1]})
    require_settled(target)


def test_an_error_in_the_engine_leaves_the_session_as_it_was(target, truth, monkeypatch):
    texts = Texts(target.open_session(60, 2), truth)
    texts.round({0: np.arange(30), 1: np.arange(5)}, {0: 30, 1: 5})
    with monkeypatch.context() as patch:

        def broken(*args):
            raise RuntimeError("out of memory")

        patch.setattr(target.engine._adapter, "forward", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            texts.session.extend({0: [1, 2], 1: [3]})
    assert [texts.session.length(slot) for slot in (0, 1)] == [30, 5]
    texts.round({0: np.arange(3), 1: np.arange(6)}, {0: 3, 1: 1})
    require_settled(target, texts.session)
    texts.session.close()
    require_settled(target)


def test_equal_to_the_transformers_session(target, folder):
    """The same calls on both: the same tokens by argmax, states within rounding."""
    from target_bridge.hf import load_hf_target

    other = load_hf_target(str(folder), TAPS).open_session(60, 3)
    session = target.open_session(60, 3)
    rng = np.random.default_rng(9)
    for _ in range(8):
        ids = {slot: rng.integers(0, 70, size=int(rng.integers(1, 7))) for slot in range(3) if rng.random() < 0.8}
        if not ids:
            continue
        ours, theirs = session.extend(ids), other.extend(ids)
        for slot in ids:
            torch.testing.assert_close(ours[slot].logits, theirs[slot].logits, atol=1e-4, rtol=1e-4)
            assert torch.equal(ours[slot].logits.argmax(-1), theirs[slot].logits.argmax(-1))
            torch.testing.assert_close(ours[slot].context_hidden, theirs[slot].context_hidden, atol=1e-4, rtol=1e-4)
        kept = {slot: int(rng.integers(0, len(ids[slot]) + 1)) for slot in ids}
        session.commit(kept)
        other.commit(kept)
    session.close()
