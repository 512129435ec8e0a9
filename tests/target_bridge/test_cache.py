"""Captured states in host memory: identical bits, an honest byte count, least recently used first out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from target_bridge.cache import CaptureCache
from target_bridge.hf import HFTarget, load_hf_target
from target_bridge.target import TargetError


@pytest.fixture
def target(llama_folder) -> HFTarget:
    return load_hf_target(str(llama_folder), [0, 3])


def entry_bytes(count: int) -> int:
    """Two taps and one state of 32 fp32 features, and int32 ids."""
    return count * (2 * 32 + 32) * 4 + count * 4


def test_bits_are_the_targets_own_and_do_not_depend_on_the_company(target, documents):
    cache = CaptureCache(target, 10**9)
    first = cache.capture(documents)
    second = cache.capture(documents[::-1])
    fresh = CaptureCache(target, 10**9).capture([documents[1], documents[4]])
    for index, ids in enumerate(documents):
        alone = target.capture([ids])
        mirror = len(documents) - 1 - index
        for name in ("context_hidden", "last_hidden"):
            expected = getattr(alone, name)[0]
            assert torch.equal(getattr(first, name)[index], expected)
            assert torch.equal(getattr(second, name)[mirror], expected)
    assert torch.equal(fresh.context_hidden[1], first.context_hidden[4])
    assert (cache.stats.hits, cache.stats.misses) == (len(documents), len(documents))


def test_a_document_asked_twice_at_once_runs_once(make_marker):
    model = make_marker(4)
    cache = CaptureCache(HFTarget(model, [0, 2], name="marker"), 10**6)
    before = model.model.calls
    capture = cache.capture([np.array([1, 2]), np.array([1, 2]), np.array([1, 2], np.int32)])
    assert model.model.calls == before + 1
    assert len(capture) == 3
    assert capture.last_hidden[0].tolist() == [[2222, 2222]] * 2
    assert (cache.stats.hits, cache.stats.misses) == (2, 1)


def test_bytes_are_counted_and_the_least_recently_used_goes_first(target):
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(0, 64, size=10) for _ in range(3))
    cache = CaptureCache(target, 2 * entry_bytes(10) + 5)
    cache.capture([a, b])
    assert cache.stats.bytes == 2 * entry_bytes(10)
    cache.capture([a])  # now b is the older one
    cache.capture([c])
    stats = cache.stats
    assert (stats.entries, stats.evictions, stats.bytes) == (2, 1, 2 * entry_bytes(10))
    cache.capture([a, c])
    assert cache.stats.misses == 3
    cache.capture([b])
    assert (cache.stats.hits, cache.stats.misses, cache.stats.evictions) == (3, 4, 2)
    cache.clear()
    assert (cache.stats.entries, cache.stats.bytes, cache.stats.misses) == (0, 0, 4)


def test_a_document_larger_than_the_cache_is_served_and_not_kept(target, documents):
    cache = CaptureCache(target, entry_bytes(10))
    small = cache.capture([documents[0]])
    big = cache.capture([documents[1]])
    assert torch.equal(big.last_hidden[0], target.capture([documents[1]]).last_hidden[0])
    assert (cache.stats.too_large, cache.stats.entries, cache.stats.evictions) == (1, 1, 0)
    assert torch.equal(cache.capture([documents[0]]).last_hidden[0], small.last_hidden[0])
    assert cache.stats.hits == 1


def test_entries_own_their_memory_and_cannot_be_written(target, documents):
    cache = CaptureCache(target, 10**9)
    capture = cache.capture(documents)
    for tensor in (*capture.context_hidden, *capture.last_hidden):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.device.type == "cpu"
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            tensor.zero_()


def test_other_taps_are_another_entry(llama_folder, documents):
    keys = set()
    for taps in ([0, 3], [1, 3]):
        cache = CaptureCache(load_hf_target(str(llama_folder), taps), 10**9)
        cache.capture(documents[:1])
        keys |= set(cache._entries)
    assert len(keys) == 2


def test_bad_requests_are_refused_whole_with_their_own_index(target):
    cache = CaptureCache(target, 10**9)
    with pytest.raises(TargetError, match="document 1 holds id 64"):
        cache.capture([np.array([1]), np.array([64])])
    with pytest.raises(TargetError, match="no documents"):
        cache.capture([])
    assert (cache.stats.hits, cache.stats.misses) == (0, 0)
    with pytest.raises(TargetError, match="max_bytes must be positive, got 0"):
        CaptureCache(target, 0)


def test_everything_else_is_the_targets(target):
    cache = CaptureCache(target, 1000)
    assert cache.info is target.info
    assert cache.frozen_head()[0] is target.frozen_head()[0]
    assert cache.open_session(4, 2).max_sequences == 2
    with pytest.raises(TargetError, match="has no tokenizer"):
        _ = cache.tokenizer
