"""What the slots of a session should hold and give, kept beside it and compared after every step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from target_bridge.sglang.session import SGLangSession
from target_bridge.sglang.target import SGLangTarget
from tests.sglang.models import TAPS


class Truth:
    """Transformers, one text at a time, without a cache."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def __call__(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits [T, V], taps [T, M*D])."""
        with torch.no_grad():
            out = self.model(torch.tensor([ids]), output_hidden_states=True)
        return out.logits[0], torch.cat([out.hidden_states[tap + 1][0] for tap in TAPS], dim=-1)


class Texts:
    """What the slots should hold, kept beside a session and compared after every step."""

    def __init__(self, session: SGLangSession, truth: Truth) -> None:
        self.session, self.truth = session, truth
        self.texts: dict[int, list[int]] = {slot: [] for slot in range(session.max_sequences)}

    def round(self, ids: dict[int, np.ndarray], kept: dict[int, int]) -> None:
        steps = self.session.extend(ids)
        assert list(steps) == list(ids)
        for slot, new in ids.items():
            before = len(self.texts[slot])
            logits, taps = self.truth([*self.texts[slot], *new.tolist()])
            assert steps[slot].logits.dtype == torch.float32
            torch.testing.assert_close(steps[slot].logits, logits[before:], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(steps[slot].context_hidden, taps[before:], atol=1e-4, rtol=1e-4)
        self.session.commit(kept)
        for slot, count in kept.items():
            self.texts[slot] += ids[slot][:count].tolist()
        for slot, text in self.texts.items():
            assert self.session.length(slot) == len(text)
            assert self.session._texts[slot].ids.tolist() == text

    def free(self, slot: int) -> None:
        self.session.free(slot)
        self.texts[slot] = []
        assert self.session.length(slot) == 0


def require_settled(target: SGLangTarget, *sessions: SGLangSession) -> None:
    """The given sessions hold their committed tokens, in whole pages, and the tree may keep the rest of the pool.

    Without sessions: nothing is held, and the tree would give up all it has. No slot is free twice, or lost.
    """
    engine = target.engine
    page, texts = engine.facts.page_size, [text for session in sessions for text in session._texts]
    held = [text for text in texts if text.request is not None and text.request.epoch == engine.epoch]
    assert all(len(text.request.ids) == len(text.ids) > 0 for text in held)
    # A held text may have found its beginning in the tree, which is locked there and counted there.
    slots = sum(-(-len(text.ids) // page) * page for text in held) - engine.protected_tokens
    assert engine.free_tokens + engine.evictable_tokens + engine.protected_tokens + slots == engine.facts.pool_tokens
    assert engine.free_requests == engine.facts.max_requests - len(held)
    if not held:
        assert engine.protected_tokens == 0
    allocator = engine._adapter.runner.token_to_kv_pool_allocator
    pages = allocator.get_all_free_pages() if hasattr(allocator, "get_all_free_pages") else allocator.free_pages
    assert len(torch.unique(pages)) == len(pages)


def random_rounds(texts: Texts, seed: int, rounds: int, limit: int) -> None:
    """Accepts and rejections of all lengths, on changing sets of slots, with texts that end and begin."""
    rng = np.random.default_rng(seed)
    slots = texts.session.max_sequences
    for _ in range(rounds):
        ids, kept = {}, {}
        for slot in rng.permutation(slots):
            room = limit - len(texts.texts[slot])
            if rng.random() < 0.2 or room < 1:
                if room < 1 or rng.random() < 0.3:
                    texts.free(slot)
                continue
            count = int(rng.integers(1, 21) if not texts.texts[slot] else rng.integers(1, 9))
            ids[int(slot)] = rng.integers(0, 70, size=min(count, room))
            kept[int(slot)] = int(rng.integers(0, len(ids[int(slot)]) + 1))
        if ids:
            texts.round(ids, kept)
