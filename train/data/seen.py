"""Which 64-bit hashes came before: eight bytes each, so that a hundred million samples fit in a gigabyte."""

import numpy as np


class SeenHashes:
    """A growing set of uint64.

    Sorted arrays of doubling size: each new batch is merged into its neighbour while that is no larger, so a batch is
    looked up in a handful of arrays and every hash is moved a logarithmic number of times.
    """

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def add(self, hashes: np.ndarray) -> np.ndarray:
        """Adds a batch.

        Args:
            hashes: uint64 [N].

        Returns:
            Boolean [N]: True where the hash was seen for the first time, in this batch too.
        """
        hashes = np.asarray(hashes, np.uint64)
        distinct, first = np.unique(hashes, return_index=True)
        fresh = np.ones(len(distinct), bool)
        for run in self._runs:
            place = np.minimum(np.searchsorted(run, distinct), len(run) - 1)
            fresh &= run[place] != distinct
        new = np.zeros(len(hashes), bool)
        new[first[fresh]] = True
        added = distinct[fresh]
        while len(added) and self._runs and len(self._runs[-1]) <= len(added):
            added = np.sort(np.concatenate([self._runs.pop(), added]), kind="stable")
        if len(added):
            self._runs.append(added)
        return new
