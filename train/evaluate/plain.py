"""Plain decoding with the target alone, token by token: the speed to beat and the tokens to equal.

It uses the same session class, the same sampling function, the same slots and the same stop rules as decoding with a
draft, so the two differ in nothing but the draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from target_bridge import fence
from target_bridge.verify_batch import verify_batch
from train.evaluate.roster import Clock, Job, Roster, Text, sample_generator, widest
from train.evaluate.sample_result import Seconds

if TYPE_CHECKING:
    from target_bridge.target import SessionStep, Target


@dataclass(frozen=True)
class PlainOutput:
    """What the target says by itself.

    Attributes:
        prompt: the prompt's id.
        tokens: generated ids, a stop token included.
        margins: per token, the gap between the two largest logits it was chosen from.
        finish: "eos" or "length".
        seconds: its share of the wall-clock seconds; `draft` is 0.
    """

    prompt: str
    tokens: list[int]
    margins: list[float]
    finish: str
    seconds: Seconds


@dataclass
class _PlainText(Text):
    numbers: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)


def last_logits(steps: Mapping[int, SessionStep]) -> torch.Tensor:
    """fp32 [n, V]: what follows the last token of each text, slots ascending."""
    return torch.stack([steps[slot].logits[-1] for slot in sorted(steps)])


def sample(logits: torch.Tensor, temperature: float, uniforms: np.ndarray) -> np.ndarray:
    """One token from each row of target logits, by the verifier itself with nothing proposed.

    Args:
        logits: fp32 [n, V].
        temperature: 0 = the largest logit.
        uniforms: fp32 [n] in [0, 1).

    Returns:
        int64 [n].
    """
    nothing = np.zeros((len(logits), 0), np.int64)
    return verify_batch(logits[:, None], None, nothing, uniforms[:, None], temperature).next_tokens


def decode_plain(
    target: Target, jobs: Sequence[Job], temperature: float, seed: int, batch: int, stop_after: int | None = None
) -> Iterator[PlainOutput]:
    """Decodes prompts without a draft, yielding each as it ends.

    Args:
        target: any target; its `eos_token_ids` stop an output.
        jobs: prompts of at least one token.
        temperature: 0 = greedy.
        seed: of the prompts' randomness.
        batch: texts side by side; it changes nothing but the speed.
        stop_after: end after so many steps (warming up).
    """
    eos = frozenset(target.info.eos_token_ids)
    roster = Roster((_open(job, seed) for job in jobs), min(batch, len(jobs)))
    session = target.open_session(widest(jobs), min(batch, len(jobs)))
    clock = Clock()
    steps_done = 0
    try:
        while True:
            clock.start()
            seated = roster.seat()
            if not roster.live:
                return
            taking_part = seated or roster.live
            ids = {
                slot: np.asarray(text.job.prompt.input_ids) if slot in seated else np.array([text.tokens[-1]])
                for slot, text in taking_part.items()
            }
            steps = session.extend(ids, last_logits=1)
            logits = last_logits(steps)
            fence.torch_done(logits.device)
            session.commit({slot: len(new) for slot, new in ids.items()})
            clock.charge(taking_part.values(), "prefill" if seated else "target")
            texts = [taking_part[slot] for slot in sorted(taking_part)]
            uniforms = np.array([text.numbers[len(text.tokens)] for text in texts], np.float32)
            chosen = sample(logits, temperature, uniforms).tolist()
            top = torch.topk(logits, 2, dim=1).values
            margins = (top[:, 0] - top[:, 1]).tolist()
            for text, token, margin in zip(texts, chosen, margins):
                text.tokens.append(token)
                text.margins.append(margin)
                text.remaining -= 1
            clock.charge(texts)
            for slot in sorted(taking_part):
                text = taking_part[slot]
                if text.tokens[-1] in eos or not text.remaining:
                    session.free(slot)
                    yield _close(roster.leave(slot), eos)
            steps_done += 1
            if stop_after is not None and steps_done >= stop_after:
                return
    finally:
        session.close()


def _open(job: Job, seed: int) -> _PlainText:
    random = sample_generator(seed, job.prompt.id, "plain")
    numbers = random.random(job.max_new_tokens, dtype=np.float32)
    return _PlainText(job, random, job.max_new_tokens, numbers=numbers)


def _close(text: _PlainText, eos: frozenset[int]) -> PlainOutput:
    finish = "eos" if text.tokens[-1] in eos else "length"
    return PlainOutput(text.job.prompt.id, text.tokens, text.margins, finish, text.seconds)
