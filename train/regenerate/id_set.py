"""Which ids were seen: eight bytes an id, however long the ids and whatever the rows hold."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np


class IdSet:
    """A set of strings by 64-bit digests: 100 million take 0.8 GB, and two of them meet with probability 3e-4."""

    def __init__(self):
        self._sorted = np.empty(0, np.uint64)
        self._recent: set[int] = set()

    def __len__(self) -> int:
        return len(self._sorted) + len(self._recent)

    def __contains__(self, text: str) -> bool:
        return self._has(_digest(text))

    def add(self, text: str) -> bool:
        """Puts a string in; False if it was there."""
        digest = _digest(text)
        if self._has(digest):
            return False
        self._recent.add(digest)
        if len(self._recent) > max(1 << 16, len(self._sorted) // 8):
            recent = np.fromiter(self._recent, np.uint64, len(self._recent))
            self._sorted = np.sort(np.concatenate([self._sorted, recent]))
            self._recent.clear()
        return True

    def _has(self, digest: int) -> bool:
        if digest in self._recent:
            return True
        at = int(np.searchsorted(self._sorted, np.uint64(digest)))
        return at < len(self._sorted) and int(self._sorted[at]) == digest


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
