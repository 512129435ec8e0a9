"""Which documents run together in one forward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# A document joins a group while the group's longest is at most this much longer: a quarter, or a few tokens.
_SLACK_FRACTION = 0.25
_SLACK_TOKENS = 16


def plan_groups(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group documents of similar length so that a padded group has at most ``max_tokens`` cells.

    A document longer than ``max_tokens`` runs alone: the budget limits batching, not what is allowed.

    Args:
        lengths: Tokens of each document.
        max_tokens: Most cells (rows x longest) of a group.

    Returns:
        Lists of indices into ``lengths``; every index once; the plan depends on the lengths alone.
    """
    groups: list[list[int]] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        slack = max(_SLACK_TOKENS, int(longest * _SLACK_FRACTION))
        if groups and (len(groups[-1]) + 1) * longest <= max_tokens and longest - lengths[index] <= slack:
            groups[-1].append(index)
        else:
            groups.append([index])
            longest = lengths[index]
    return groups


def pad_right(documents: Sequence[np.ndarray]) -> np.ndarray:
    """[R, T] int64: ids on the left, zeros on the right.

    In a causal model nothing to the left sees the padding, so no attention mask is needed and the ids of the
    padding do not matter (``hf_check`` proves that for each model at load).
    """
    padded = np.zeros((len(documents), max(len(ids) for ids in documents)), dtype=np.int64)
    for row, ids in enumerate(documents):
        padded[row, : len(ids)] = ids
    return padded
