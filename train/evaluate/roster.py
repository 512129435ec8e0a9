"""Who is being decoded: many texts side by side, and the next prompt takes the slot of a text that ended."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from train.evaluate.sample_result import Seconds
from train.evaluate.tasks import Prompt

#: A prefill is a forward of its own: it waits until one slot in so many is free.
_REFILL_SHARE = 8


def sample_generator(seed: int, prompt_id: str, stream: str = "draft") -> np.random.Generator:
    """The random numbers of one prompt: from the seed and the prompt's id, never its place in the file."""
    digest = hashlib.blake2b(f"{stream}\0{prompt_id}".encode(), digest_size=8).digest()
    key = np.array([seed % 2**64, int.from_bytes(digest, "little")], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


@dataclass(frozen=True)
class Job:
    """One prompt to decode.

    Attributes:
        prompt: what to continue.
        max_new_tokens: tokens to generate at most, the first included.
    """

    prompt: Prompt
    max_new_tokens: int


@dataclass
class Text:
    """One prompt being decoded.

    Attributes:
        job: what was asked.
        random: the prompt's own numbers.
        remaining: tokens it may still generate.
        seconds: its share of the time of every step it took part in.
    """

    job: Job
    random: np.random.Generator
    remaining: int
    seconds: Seconds = field(default_factory=Seconds)


T = TypeVar("T", bound=Text)


class Roster(Generic[T]):
    """Slots, those who hold them, and those who wait.

    Args:
        waiting: texts to decode, in order.
        slots: texts side by side.
    """

    def __init__(self, waiting: Iterable[T], slots: int) -> None:
        self._waiting = iter(waiting)
        self._free = list(range(slots))
        self._refill = max(1, slots // _REFILL_SHARE)
        self.live: dict[int, T] = {}

    def seat(self) -> dict[int, T]:
        """Gives free slots to those who wait, once enough are free; returns the newly seated."""
        seated: dict[int, T] = {}
        if len(self._free) >= self._refill or not self.live:
            while self._free:
                text = next(self._waiting, None)
                if text is None:
                    break
                seated[self._free.pop(0)] = text
        self.live |= seated
        self.live = dict(sorted(self.live.items()))
        return seated

    def leave(self, slot: int) -> T:
        """The slot's text has ended."""
        self._free.append(slot)
        self._free.sort()
        return self.live.pop(slot)


class Clock:
    """Charges the time of a step to those who took part in it, in equal shares: the shares add up to the whole."""

    def __init__(self) -> None:
        self._mark = time.perf_counter()

    def start(self) -> None:
        """What happened since the last `charge` is nobody's (the caller's time between steps)."""
        self._mark = time.perf_counter()

    def charge(self, texts: Iterable[Text], part: str | None = None) -> None:
        """Charges the time since the last call.

        Args:
            texts: who took part.
            part: field of `Seconds` it belongs to besides `total`; None = other.
        """
        now = time.perf_counter()
        held = list(texts)
        for text in held:
            share = (now - self._mark) / len(held)
            text.seconds.total += share
            if part is not None:
                setattr(text.seconds, part, getattr(text.seconds, part) + share)
        self._mark = now


def widest(jobs: Iterable[Job], extra: int = 0) -> int:
    """Most tokens a prompt and its output may have together, `extra` included."""
    return max(len(job.prompt.input_ids) + job.max_new_tokens for job in jobs) + extra
