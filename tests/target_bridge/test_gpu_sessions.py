"""Sessions on a GPU: recorded forwards give what the model gives kernel by kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from target_bridge.hf import load_hf_target
from target_bridge.hf_session import HFSession

pytestmark = pytest.mark.gpu

FAMILIES = {
    "llama": {},
    "qwen3": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},  # two masks
}


def decode(session: HFSession, rounds: int, seed: int, only: list[int] | None = None) -> list[torch.Tensor]:
    """Ragged prompts, then blocks of 1 to 5 tokens of changing companies; logits and states of every step."""
    rng = np.random.default_rng(seed)
    slots = only or list(range(session.max_sequences))
    ids = {slot: rng.integers(0, 64, size=int(rng.integers(3, 9))) for slot in slots}
    seen = []
    for number in range(rounds):
        for step in session.extend(ids).values():
            seen += [step.logits, step.context_hidden]
        kept = {slot: int(rng.integers(1, len(new) + 1)) for slot, new in ids.items()}
        session.commit(kept)
        company = slots if number % 3 else slots[: 1 + len(slots) // 4]
        ids = {slot: rng.integers(0, 64, size=int(rng.integers(1, 6))) for slot in company}
    return seen


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("slots", [1, 9])
def test_replayed_forwards_equal_a_cpu_session_in_float32(make_model, kind, slots):
    folder = str(make_model(kind, **FAMILIES[kind]))
    on_cpu = load_hf_target(folder, [0, 2, 3], dtype="float32", device="cpu").open_session(90, slots)
    on_gpu = load_hf_target(folder, [0, 2, 3], dtype="float32", device="cuda").open_session(90, slots)
    for ours, theirs in zip(decode(on_gpu, 14, seed=1), decode(on_cpu, 14, seed=1), strict=True):
        assert ours.device.type == "cuda"
        torch.testing.assert_close(ours.cpu(), theirs, atol=2e-4, rtol=2e-4)
    assert on_gpu._graphs is not None
    assert on_gpu._graphs.recorded >= 2


def test_a_step_is_the_callers_to_keep(make_model):
    """The next replay writes over the recording's own memory, not over what was handed out."""
    session = load_hf_target(str(make_model("llama")), [0, 2], dtype="bfloat16", device="cuda").open_session(64, 2)
    session.extend({0: [1, 2], 1: [3]})
    session.commit({0: 2, 1: 1})
    for round_ in range(6):
        first = session.extend({0: [5 + round_], 1: [9]})
        held = {slot: (step.logits.clone(), step.context_hidden.clone()) for slot, step in first.items()}
        session.commit({0: 1, 1: 1})
        session.extend({0: [50], 1: [51]})
        session.commit({0: 0, 1: 0})
        for slot, (logits, context) in held.items():
            assert torch.equal(first[slot].logits, logits)
            assert torch.equal(first[slot].context_hidden, context)
    assert session._graphs.recorded == 1


def test_a_model_that_cannot_be_recorded_is_decoded_kernel_by_kernel(make_model, monkeypatch):
    """A forward that waits for its host (as experts chosen in Python do) breaks the recording, and nothing else."""
    target = load_hf_target(str(make_model("llama")), [0, 2], dtype="float32", device="cuda")
    layer = target.parts.layers[1]
    layer.register_forward_hook(lambda module, args, output: float(args[0].sum()) and None)
    session, plain = target.open_session(64, 3), HFSession(target, 64, 3, few_shapes=False)
    with pytest.warns(UserWarning, match="cannot be recorded as CUDA graphs"):
        recorded = decode(session, 10, seed=2)
    assert session._graphs.recorded == 0
    for ours, theirs in zip(recorded, decode(plain, 10, seed=2), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


def test_experts_are_decoded_recorded_or_not(make_model):
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    folder = str(make_model("qwen3_moe", **moe))
    sessions = [load_hf_target(folder, [0, 2], dtype="float32", device=d).open_session(64, 3) for d in ("cuda", "cpu")]
    ours, theirs = (decode(session, 10, seed=3) for session in sessions)
    for on_gpu, on_cpu in zip(ours, theirs, strict=True):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, atol=5e-4, rtol=5e-4)
