"""Reduced draft vocabularies: which target ids a draft can propose, and the two tables that say so.

The rule. Count every token at a supervised position of the training data. Take the `draft_size` ids with the highest
counts; of equal counts the smaller id first, so that a repeated build gives the same table. Ids that must be there
(stop tokens) come before all others. If fewer ids occur than are asked for, the smallest ids that do not occur fill up.
The chosen ids are then put in ascending order: draft id i stands for the i-th of them.

The tables, as SGLang and vLLM read them: `d2t` int64 [draft_size] holds offsets, target id = draft id + d2t[draft id];
`t2d` bool [target_size] is true where a target id can be drafted. A draft vocabulary as large as the target's, or
larger because it was padded, is no reduction: there are no tables then.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


class VocabularyError(ValueError):
    """Tables that cannot be right; the message names the first wrong entry."""


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """The target ids a draft can propose.

    Attributes:
        target_ids: int64 [draft_size], ascending, unique, each 0..target_size-1.
        target_size: rows of the target's vocabulary that mean something.
    """

    target_ids: np.ndarray
    target_size: int

    def __post_init__(self):
        ids = np.asarray(self.target_ids, np.int64)
        object.__setattr__(self, "target_ids", ids)
        if ids.ndim != 1 or not 0 < len(ids) < self.target_size:
            raise VocabularyError(
                f"a draft vocabulary of {ids.size} ids for a target of {self.target_size} is no reduction; leave the "
                "tables out"
            )
        outside = ids[(ids < 0) | (ids >= self.target_size)]
        if len(outside):
            raise VocabularyError(f"draft vocabulary holds id {outside[0]}, the target has 0..{self.target_size - 1}")
        falling = np.flatnonzero(np.diff(ids) <= 0)
        if len(falling):
            at = int(falling[0])
            raise VocabularyError(f"draft ids {at} and {at + 1} stand for target ids {ids[at]} and {ids[at + 1]}: "
                                  "ids must ascend and occur once")  # fmt: skip

    @classmethod
    def from_d2t(cls, d2t: np.ndarray, target_size: int) -> "DraftVocabulary":
        """Reads a `d2t` table of offsets.

        Raises:
            VocabularyError: it points outside the target's vocabulary, at an id twice, or is no reduction.
        """
        d2t = np.asarray(d2t)
        if d2t.ndim != 1 or d2t.dtype.kind not in "iu":
            raise VocabularyError(f"d2t must be integers of one dimension, it is {d2t.dtype} {list(d2t.shape)}")
        return cls(d2t.astype(np.int64) + np.arange(len(d2t)), target_size)

    @property
    def draft_size(self) -> int:
        return len(self.target_ids)

    @cached_property
    def d2t(self) -> np.ndarray:
        """int64 [draft_size]: target id minus draft id."""
        return self.target_ids - np.arange(self.draft_size)

    @cached_property
    def t2d(self) -> np.ndarray:
        """bool [target_size]: whether a target id can be drafted."""
        table = np.zeros(self.target_size, bool)
        table[self.target_ids] = True
        return table

    @cached_property
    def draft_ids(self) -> np.ndarray:
        """int64 [target_size]: draft id of each target id, -1 where there is none: such a label carries no loss."""
        table = np.full(self.target_size, -1, np.int64)
        table[self.target_ids] = np.arange(self.draft_size)
        return table

    def require_same(self, other: "DraftVocabulary") -> None:
        """Refuses to put another table over weights that were trained with this one.

        Raises:
            VocabularyError: they differ, and where first.
        """
        if self.target_size != other.target_size or self.draft_size != other.draft_size:
            raise VocabularyError(
                f"the draft was trained with {self.draft_size} of {self.target_size} ids, the table given has "
                f"{other.draft_size} of {other.target_size}"
            )
        differing = np.flatnonzero(self.target_ids != other.target_ids)
        if len(differing):
            at = int(differing[0])
            raise VocabularyError(
                f"the table given differs from the one the draft was trained with in {len(differing)} of "
                f"{self.draft_size} ids: draft id {at} was target id {self.target_ids[at]}, would be "
                f"{other.target_ids[at]}. Every row of the draft's head would mean another token; start a new draft "
                "or keep its own table"
            )


def select_vocabulary(counts: np.ndarray, draft_size: int, always: Sequence[int] = ()) -> DraftVocabulary | None:
    """Chooses the ids by the rule above.

    Args:
        counts: int [target_size]: how often each id stands at a supervised position.
        draft_size: ids to choose.
        always: ids that are chosen whatever their counts, as the target's stop tokens.

    Returns:
        None if draft_size is not smaller than the target's vocabulary: no reduction, no tables.

    Raises:
        VocabularyError: draft_size is below 1 or below the number of `always`, or one of those is no id.
    """
    counts = np.asarray(counts)
    target_size = len(counts)
    wanted = sorted({int(token) for token in always})
    if draft_size < 1 or draft_size < len(wanted):
        raise VocabularyError(
            f"a draft vocabulary of {draft_size} cannot hold the {len(wanted)} ids that must be in it"
        )
    if draft_size >= target_size:
        return None
    if wanted and not 0 <= wanted[0] <= wanted[-1] < target_size:
        raise VocabularyError(
            f"ids that must be in the draft vocabulary: {wanted}; the target has 0..{target_size - 1}"
        )
    must = np.zeros(target_size, bool)
    must[wanted] = True
    # the last key decides first; a stable order leaves equal counts in ascending ids, unused ids behind all others
    order = np.lexsort((np.arange(target_size), -counts.astype(np.int64), ~must))
    return DraftVocabulary(np.sort(order[:draft_size]), target_size)
