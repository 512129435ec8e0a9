"""Which documents run together in one forward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: What starting a forward costs, in the time a GPU and a CPU need for this many multiply-adds (estimates, for
#: an H200: 20 ms to launch the layers of a small model, at a third of the product rate; a CPU starts at once).
_OVERHEAD_OPERATIONS = {"cuda": 2.7e12, "cpu": 5e8}
_MOST_OVERHEAD, _LEAST_OVERHEAD = 16384, 16


def overhead_tokens(device_type: str, parameters: int) -> int:
    """Cells of padding that cost as much as one more forward.

    Args:
        device_type: of torch; anything but "cpu" counts as a GPU.
        parameters: of the target; a token costs about one multiply-add each.
    """
    operations = _OVERHEAD_OPERATIONS["cpu" if device_type == "cpu" else "cuda"]
    return int(min(_MOST_OVERHEAD, max(_LEAST_OVERHEAD, operations / max(parameters, 1))))


def plan_groups(lengths: Sequence[int], max_tokens: int, overhead: int) -> list[list[int]]:
    """Group documents so that padding never costs more than the forward it saves.

    A document longer than `max_tokens` runs alone: the budget limits batching, not what is allowed.

    Args:
        lengths: Tokens of each document.
        max_tokens: Most cells (rows x longest) of a group.
        overhead: Most cells of padding in a group, see `overhead_tokens`.

    Returns:
        Lists of indices into `lengths`; every index once; the plan depends on the lengths alone.
    """
    groups: list[list[int]] = []
    longest = padding = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        gap = longest - lengths[index]
        if groups and (len(groups[-1]) + 1) * longest <= max_tokens and padding + gap <= overhead:
            groups[-1].append(index)
            padding += gap
        else:
            groups.append([index])
            longest, padding = lengths[index], 0
    return groups


def pad_right(documents: Sequence[np.ndarray]) -> np.ndarray:
    """[R, T] int64: ids on the left, zeros on the right.

    In a causal model nothing to the left sees the padding, so no attention mask is needed and the ids of the
    padding do not matter (`hf_check` proves that for each model at load).
    """
    padded = np.zeros((len(documents), max(len(ids) for ids in documents)), dtype=np.int64)
    for row, ids in enumerate(documents):
        padded[row, : len(ids)] = ids
    return padded
