"""Captured states kept in host memory, so that a frozen target is not asked twice about the same document.

On a CPU the target's forward is most of a training step, and every epoch asks for the same states again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from target_bridge.target import Capture, Session, Target, TargetError, TargetInfo, check_documents


@dataclass(frozen=True)
class CacheStats:
    """What the cache has done so far.

    Attributes:
        hits: Documents answered from memory.
        misses: Documents the target had to run.
        evictions: Documents dropped to make room.
        too_large: Documents that alone exceed the limit and were not kept.
        entries: Documents held now.
        bytes: Held now, states and keys.
    """

    hits: int
    misses: int
    evictions: int
    too_large: int
    entries: int
    bytes: int


class CaptureCache:
    """A `Target` that remembers what the one behind it captured, least recently used first out.

    The states of a document are a function of its ids and the taps, so those are the key: the ids
    themselves, not a hash. Every missing document is captured *by itself*: in a shared forward its last bits
    could depend on which others were missing too, and then a resumed run, whose cache starts empty, would
    differ from one that was not interrupted. Cached or not, the bits are the same.

    Args:
        target: Any target. Everything but `capture` goes straight to it.
        max_bytes: Most memory for states and keys.
    """

    def __init__(self, target: Target, max_bytes: int) -> None:
        if max_bytes < 1:
            raise TargetError(f"capture cache: max_bytes must be positive, got {max_bytes}; leave the cache out")
        self._target = target
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = OrderedDict()
        self._bytes = 0
        self._hits = self._misses = self._evictions = self._too_large = 0

    @property
    def info(self) -> TargetInfo:
        """The target's."""
        return self._target.info

    @property
    def tokenizer(self) -> Any:
        """The target's."""
        return self._target.tokenizer

    @property
    def stats(self) -> CacheStats:
        """Counts so far."""
        return CacheStats(
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
            too_large=self._too_large,
            entries=len(self._entries),
            bytes=self._bytes,
        )

    def capture(self, documents: Sequence[np.ndarray]) -> Capture:
        """Hidden states of every document, on the CPU, in the target's dtype.

        The tensors are the cache's own. They are inference tensors: torch refuses to write to them in place.

        Raises:
            TargetError: see `Target.capture`; nothing has run and nothing is counted then.
        """
        info = self._target.info
        checked = check_documents(documents, info.vocab_size, info.max_length)
        context, last = [], []
        for ids in checked:
            states = self._states(ids, info.layer_ids)
            context.append(states[0])
            last.append(states[1])
        return Capture(context_hidden=context, last_hidden=last)

    def open_session(self, max_length: int, max_sequences: int = 1) -> Session:
        """The target's."""
        return self._target.open_session(max_length, max_sequences)

    def frozen_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's."""
        return self._target.frozen_head()

    def clear(self) -> None:
        """Forget all states; the counts stay."""
        self._entries.clear()
        self._bytes = 0

    def _states(self, ids: np.ndarray, layer_ids: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        key = (layer_ids, ids.astype(np.int32).tobytes())
        found = self._entries.get(key)
        if found is not None:
            self._hits += 1
            self._entries.move_to_end(key)
            return found
        self._misses += 1
        captured = self._target.capture([ids])
        # Own memory: a view would keep the whole forward's buffers alive and be counted as less than it
        # holds.
        with torch.inference_mode():
            states = (_own(captured.context_hidden[0]), _own(captured.last_hidden[0]))
        size = len(key[1]) + sum(tensor.nbytes for tensor in states)
        if size > self._max_bytes:
            self._too_large += 1
            return states
        while self._bytes + size > self._max_bytes:
            old_key, old = self._entries.popitem(last=False)
            self._bytes -= len(old_key[1]) + sum(tensor.nbytes for tensor in old)
            self._evictions += 1
        self._entries[key] = states
        self._bytes += size
        return states


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
