"""A sample: ids and mask of one document, cut to length, judged by what is left to learn from."""

from dataclasses import dataclass

import numpy as np

from .masks import has_adjacent_pair


@dataclass(frozen=True)
class Sample:
    """One document: input_ids int32 [T], loss_mask int8 [T] of 0 and 1; `id` is unique within its dataset."""

    id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True)
class Judged:
    """A sample with what became of it: cut or not, and why its mask was zeroed, if it was."""

    sample: Sample
    truncated: bool
    zeroed: str | None


def make_sample(
    sample_id: str, input_ids: np.ndarray, loss_mask: np.ndarray, *, max_length: int, min_loss_tokens: int
) -> Judged:
    """Cuts ids and mask together, then looks at what is left.

    A sample that has too little to learn from keeps its place with an all-zero mask rather than being dropped
    (case T07 calls it dropped): every rank then takes the same number of steps whatever data it was dealt,
    and its loss and gradient are exactly zero. It is counted under its reason either way. Rows that arrive as
    ids and rows made from text both come through here.

    Args:
        sample_id: see Sample.
        input_ids: int [T].
        loss_mask: 0 or 1, [T].
        max_length: tokens that are kept.
        min_loss_tokens: fewer supervised tokens than this zero the mask.

    Raises:
        ValueError: ids and mask differ in length.
    """
    if len(input_ids) != len(loss_mask):
        raise ValueError(f"sample {sample_id}: {len(input_ids)} ids but {len(loss_mask)} mask entries")
    ids = np.array(input_ids[:max_length], np.int32)
    mask = np.array(loss_mask[:max_length], np.int8)
    supervised = int(mask.sum())
    zeroed = None
    if supervised == 0:
        zeroed = "no supervised token"
    elif supervised < min_loss_tokens:
        zeroed = f"fewer than {min_loss_tokens} supervised tokens"
    elif not has_adjacent_pair(mask):
        zeroed = "no two adjacent supervised tokens"
    if zeroed is not None:
        mask[:] = 0
    return Judged(Sample(sample_id, ids, mask), len(input_ids) > max_length, zeroed)
