"""Decoding when the pools are short: what was evicted or given back early is computed again, never wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from target_bridge.target import TargetError
from tests.sglang.models import running
from tests.sglang.texts import Texts, Truth, random_rounds, require_settled


@pytest.fixture(scope="module")
def folder(make_model) -> Path:
    return make_model("qwen3")


@pytest.fixture(scope="module")
def truth(folder) -> Truth:
    return Truth(folder)


@pytest.mark.parametrize("page_size", [1, 16])
def test_eviction_under_pool_pressure(folder, truth, computed, page_size):
    """Five texts of up to 70 tokens over 128 KV slots: computed are evicted in between and computed again."""
    with running(folder, page_size=page_size, max_total_tokens=128, max_running_requests=8) as target:
        session = target.open_session(70, 5)
        texts = Texts(session, truth)
        rng = np.random.default_rng(2)
        texts.round({slot: rng.integers(0, 70, size=15) for slot in range(5)}, dict.fromkeys(range(5), 15))
        del computed[:]
        lost = 0
        for _ in range(6):
            committed = [session.length(slot) for slot in range(5)]
            texts.round({slot: rng.integers(0, 70, size=10) for slot in range(5)}, dict.fromkeys(range(5), 9))
            lost += sum(prefix < total - 10 for prefix, total in computed)
            assert [session.length(slot) for slot in range(5)] == [count + 9 for count in committed]
            del computed[:]
            require_settled(target, session)
        assert sum(session.length(slot) for slot in range(5)) > 2 * 128
        assert lost > 10  # the pool was too small indeed
        session.close()
        require_settled(target)


def test_more_texts_than_the_engine_has_requests(folder, truth):
    with running(folder, max_total_tokens=512, max_running_requests=2) as target:
        texts = Texts(target.open_session(60, 5), truth)
        random_rounds(texts, 4, 10, 60)
        require_settled(target, texts.session)
        texts.session.close()
        require_settled(target)


def test_long_rounds_are_split_by_tokens(folder, truth):
    with running(folder, max_total_tokens=512, max_tokens_per_forward=32) as target:
        texts = Texts(target.open_session(60, 4), truth)
        before = target.engine.forwards
        rng = np.random.default_rng(0)
        texts.round({slot: rng.integers(0, 70, size=14) for slot in range(4)}, dict.fromkeys(range(4), 14))
        assert target.engine.forwards - before == 2  # 14+14, 14+14
        texts.round({0: rng.integers(0, 70, size=40), 1: rng.integers(0, 70, size=1)}, {0: 40, 1: 1})
        assert target.engine.forwards - before == 4  # longer than the budget: alone
        texts.session.close()


def test_too_little_room_left_by_others(folder, truth):
    """Another session holds the pool between its extend and its commit: refused in words, nothing lost.

    After its commit it can do without, and gives way: to sessions and to captures.
    """
    with running(folder, max_total_tokens=64, max_running_requests=8) as target:
        holder = target.open_session(60)
        holder.extend({0: np.arange(50)})
        texts = Texts(target.open_session(60), truth)
        with pytest.raises(TargetError, match=r"need 20 KV slots .* but 14 of 64 are free"):
            texts.session.extend({0: np.arange(20)})
        texts.round({0: np.arange(10)}, {0: 10})
        holder.commit({0: 50})
        texts.round({0: np.arange(20)}, {0: 20})
        assert len(target.capture([np.arange(60)])) == 1
        assert holder.length(0) == 50
        holder.extend({0: [1, 2, 3]})
        with pytest.raises(TargetError, match="need 60 KV slots"):
            target.capture([np.arange(60)])
        holder.close()
        texts.session.close()
        require_settled(target)


def test_what_cannot_be_opened(folder):
    with running(folder, max_total_tokens=64) as target:
        for arguments, said in (
            ((0,), r"session max_length 0 must be 1\.\.64"),
            ((65,), r"session max_length 65 must be 1\.\.64"),
            ((10, 0), "session max_sequences 0 must be at least 1"),
        ):
            with pytest.raises(TargetError, match=said):
                target.open_session(*arguments)
        kind = type(target.engine._adapter.runner.token_to_kv_pool_allocator)
        kind.__name__, name = "SWATokenToKVPoolAllocator", kind.__name__
        try:
            with pytest.raises(TargetError, match="keeps a sliding window or a recurrent state"):
                target.open_session(10)
        finally:
            kind.__name__ = name


@pytest.mark.parametrize("page_size", [1, 4])
def test_given_back_between_extend_and_commit(folder, truth, computed, page_size):
    """With room for one request the first text's KV goes while its tokens are provisional: they must not stay known."""
    with running(folder, page_size=page_size, max_total_tokens=256, max_running_requests=1) as target:
        texts = Texts(target.open_session(60, 2), truth)
        prompt, block = np.arange(16), np.arange(20, 28)
        texts.round({0: prompt, 1: prompt}, {0: 16, 1: 16})
        texts.round({0: block, 1: block}, {0: 0, 1: 2})
        del computed[:]
        texts.round({0: block, 1: block}, {0: 8, 1: 8})
        assert computed == [(16, 24), (16 if page_size == 4 else 18, 26)]
        texts.session.close()
        require_settled(target)
