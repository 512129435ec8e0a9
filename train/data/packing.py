"""Which documents share a row: first-fit-decreasing by tokens, and by anchors where a document's are capped."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .samples import Sample

#: Samples packed together. Large enough that the rows come out full, small enough that packing stays cheap: the cost
#: of a window grows with its square.
WINDOW = 4096


@dataclass(frozen=True)
class Packing:
    """Rows of documents, made once for all epochs; epochs differ in the order of the rows.

    Attributes:
        rows: indices of samples, in the order they lie in the row.
        left_out: samples without anything to learn from; in a row of their own they would keep a place, here they
            would only cost the target's time.
        row_length: L.
        tokens: tokens in all rows, padding not counted.
    """

    rows: tuple[tuple[int, ...], ...]
    left_out: int
    row_length: int
    tokens: int

    @property
    def padding_share(self) -> float:
        """Share of the cells of all rows that hold padding."""
        return 1.0 - self.tokens / (len(self.rows) * self.row_length)

    def describe(self) -> str:
        """One line for the account of a dataset."""
        documents = sum(len(row) for row in self.rows)
        text = (
            f"packed    {documents:,} documents into {len(self.rows):,} rows of {self.row_length:,}: padding"
            f" {100 * self.padding_share:.1f} %, {documents / len(self.rows):.1f} documents a row"
        )
        return text + (f"; {self.left_out:,} with nothing to learn from left out" if self.left_out else "")


def count_anchors(sample: Sample, per_document: int | None = None) -> int:
    """Positions of a sample that may start a block (`draft_jax.anchors.anchor_candidates`), at most `per_document`.

    The stricter rule `supervised_anchors_only` gives no more than these.
    """
    candidates = int(np.count_nonzero(sample.loss_mask[1:]))
    return candidates if per_document is None else min(candidates, per_document)


def pack(
    samples: Sequence[Sample],
    row_length: int,
    *,
    seed: int = 0,
    num_anchors: int | None = None,
    per_document: int | None = None,
    window: int = WINDOW,
) -> Packing:
    """Packs samples into rows.

    The samples are shuffled by the seed and taken in windows; within one, the longest comes first and each goes to
    the first row that has room for it (first-fit-decreasing: at most 11/9 of the fewest rows possible).

    Args:
        samples: none longer than `row_length`.
        row_length: L, tokens of a row.
        seed: of the order in which samples are taken.
        num_anchors: N, anchors drawn per row. With `per_document` a row takes no more documents than leave each of
            them all its anchors; without, the row's anchors are drawn from all its documents together.
        per_document: most anchors drawn in one document.
        window: samples packed together.

    Raises:
        ValueError: a sample is longer than a row, or no sample has anything to learn from.
    """
    useful = np.array([i for i, sample in enumerate(samples) if sample.loss_mask.any()], np.int64)
    if not len(useful):
        raise ValueError("there is nothing to pack: no sample has a supervised token")
    lengths = np.array([len(samples[i].input_ids) for i in useful], np.int64)
    if lengths.max() > row_length:
        sample = samples[useful[int(lengths.argmax())]]
        raise ValueError(
            f"sample {sample.id} has {len(sample.input_ids)} tokens, rows have {row_length}; make rows longer"
            " (data.row_length) or data.max_length smaller"
        )
    capped = num_anchors is not None and per_document is not None
    anchors = np.array([count_anchors(samples[i], per_document) if capped else 0 for i in useful], np.int64)
    budget = num_anchors if capped and num_anchors is not None else 0
    order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(useful))
    rows: list[tuple[int, ...]] = []
    for begin in range(0, len(order), window):
        chosen = order[begin : begin + window]
        for row in _first_fit_decreasing(lengths[chosen], anchors[chosen], row_length, budget):
            rows.append(tuple(int(useful[chosen[i]]) for i in row))
    return Packing(tuple(rows), len(samples) - len(useful), row_length, int(lengths.sum()))


def _first_fit_decreasing(lengths: np.ndarray, anchors: np.ndarray, room: int, anchor_room: int) -> list[list[int]]:
    """Rows of indices. A document with more anchors than a row draws at all gets a row of its own."""
    free = np.full(len(lengths), room, np.int64)  # never more rows than documents
    free_anchors = np.full(len(lengths), anchor_room, np.int64)
    rows: list[list[int]] = []
    for index in np.lexsort((np.arange(len(lengths)), -lengths)):
        fits = (free[: len(rows)] >= lengths[index]) & (free_anchors[: len(rows)] >= anchors[index])
        row = int(fits.argmax()) if fits.any() else len(rows)
        if row == len(rows):
            rows.append([])
        rows[row].append(int(index))
        free[row] -= lengths[index]
        free_anchors[row] -= anchors[index]
    return rows
