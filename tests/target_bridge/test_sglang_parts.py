"""The parts of the SGLang bridge that need no SGLang: batches, the account of memory, options, versions."""

import importlib.metadata
import itertools

import pytest

from target_bridge.sglang import versions
from target_bridge.sglang.adapter import round_up
from target_bridge.sglang.batches import plan_batches
from target_bridge.sglang.memory import Need, count_parameters, estimate_need, kv_bytes_per_token, plan_fraction
from target_bridge.sglang.options import EngineOptions
from target_bridge.target import TargetError

GIB = 2**30
QWEN3_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}


def test_batches_by_hand():
    def plan(lengths, **limits):
        return plan_batches(
            lengths, **{"max_tokens": 10, "pool_tokens": 32, "max_requests": 3, "page_size": 1, **limits}
        )

    assert plan([4, 4, 4, 2]) == [[0, 1], [2, 3]]
    assert plan([1, 1, 1, 1]) == [[0, 1, 2], [3]]  # rows
    assert plan([2, 25, 2, 2]) == [[0], [1], [2, 3]]  # longer than the budget: alone
    assert plan([4, 1, 1], page_size=16) == [[0, 1], [2]]  # a started page each, 32 slots
    assert plan([10]) == [[0]]
    assert plan([]) == []


def test_batches_keep_every_limit():
    for lengths in itertools.product((1, 3, 8, 16), repeat=5):
        for page_size, pool in ((1, 16), (4, 20), (16, 32)):
            batches = plan_batches(lengths, max_tokens=9, pool_tokens=pool, max_requests=2, page_size=page_size)
            assert [index for batch in batches for index in batch] == list(range(5))
            for batch in batches:
                assert len(batch) <= 2
                assert len(batch) == 1 or sum(lengths[i] for i in batch) <= 9
                assert sum(round_up(lengths[i], page_size) for i in batch) <= pool


def test_parameters_are_counted_without_memory(make_model):
    """Against the file: the tied head once."""
    from safetensors import safe_open

    for kind, changes in (("qwen3", {"tie_word_embeddings": False}), ("llama", {"tie_word_embeddings": True})):
        folder = make_model(kind, **changes)
        with safe_open(folder / "model.safetensors", "pt") as weights:
            held = sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118
        assert count_parameters(str(folder), None, False) == held


def test_kv_of_a_token():
    assert kv_bytes_per_token(QWEN3_8B, 2, 1) == 2 * 36 * 8 * 128 * 2
    assert kv_bytes_per_token(QWEN3_8B, 2, 4) == 2 * 36 * 2 * 128 * 2
    assert kv_bytes_per_token(QWEN3_8B, 2, 16) == 2 * 36 * 1 * 128 * 2  # a head on every rank
    assert kv_bytes_per_token(QWEN3_8B | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 2, 8) == 36 * 576 * 2


def need(**changes):
    sizes = {"parameters": 8_190_735_360, "itemsize": 2, "num_taps": 5, "pool_tokens": 16384, "forward_tokens": 16384}
    sizes |= {"step_tokens": 16384, "max_requests": 64, "tp_size": 1}
    return estimate_need(QWEN3_8B, **{**sizes, **changes})


def test_need_by_hand():
    found = need()
    assert found.weights == 16_381_470_720
    assert found.pool == 16384 * 147456
    # Captured twice (as captured, and in the staging slot): 5 taps and the final state of 4096 each, in two bytes.
    assert found.states == 2 * 16384 * 2 * 6 * 4096
    assert found.forward == 16384 * 2 * (3 * 12288 + 6 * 4096 + 11 * 4096) + 2 * 4 * 64 * 151936
    halved = need(tp_size=2)
    assert (halved.weights, halved.pool) == (found.weights // 2, found.pool // 2)


def test_the_share_is_computed():
    """What is to spare is divided evenly, so both sides have at least what they need."""
    what = Need(weights=16 * GIB, pool=3 * GIB, forward=2 * GIB, states=GIB)
    fraction = plan_fraction(what, free=60 * GIB, total=140 * GIB, asked=None)
    assert what.static < fraction * 60 * GIB
    assert what.working < (1 - fraction) * 60 * GIB
    assert fraction * 60 * GIB - what.static == pytest.approx((60 * GIB - what.static - what.working) / 2)
    assert plan_fraction(what, free=60 * GIB, total=140 * GIB, asked=0.5) == 0.5


@pytest.mark.parametrize(
    ("free", "asked", "message"),
    [
        (20, None, r"does not fit beside JAX: it needs 22\.5 GiB \(weights 16\.0 GiB, KV pool 3\.0 GiB.*but 20\.0 GiB"
                   r" of 140\.0 GiB are free \(120\.0 GiB are JAX's.*Lower train\.memory_fraction"),
        (60, 0.2, r"mem_fraction_static is 0\.2: that is 12\.0 GiB.*need 19\.5 GiB.*Raise it to at least 0\.325"),
        (60, 0.97, r"leaves 1\.8 GiB.*need 3\.0 GiB.*Lower it to at most 0\.950"),
    ],
)  # fmt: skip
def test_a_division_that_cannot_work_says_its_numbers(free, asked, message):
    what = Need(weights=16 * GIB, pool=3 * GIB, forward=2 * GIB, states=GIB)
    with pytest.raises(TargetError, match=message):
        plan_fraction(what, free=free * GIB, total=140 * GIB, asked=asked)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 0}, r"target\.sglang\.page_size is 0; give a positive integer"),
        ({"max_total_tokens": 0}, r"target\.sglang\.max_total_tokens is 0"),
        ({"mem_fraction_static": 1.0}, r"target\.sglang\.mem_fraction_static is 1\.0; give 0 < share < 1"),
        ({"load_format": "gguf"}, r"target\.sglang\.load_format is 'gguf'; give auto or dummy"),
        ({"tp_size": -1}, r"target\.sglang\.tp_size is -1"),
    ],
)
def test_options_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        EngineOptions(**change)


def test_without_sglang(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(
        TargetError, match=r"SGLang is not installed: install one of 0\.5\.23, 0\.5\.16.*target\.bridge: hf"
    ):
        versions.make_adapter()
