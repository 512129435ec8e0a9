"""Samples -> an endless, seeded, restartable stream of fixed rows."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from .samples import Sample


@dataclass(frozen=True)
class RowDocument:
    """Where one document lies in a batch: tokens `offset .. offset+T-1` of row `row`; input_ids int32 [T]."""

    row: int
    offset: int
    sample_id: str
    input_ids: np.ndarray


@dataclass(frozen=True)
class HostBatch:
    """One batch on the host; every field but the last three goes to the device.

    A row holds documents one after another, then padding. `positions` restart at 0 in every document;
    `document_start` is the index in the row where the token's document begins. Padding is id 0, mask 0, and
    counts as one more document of its own, so that nothing of a real document ever reaches into it.

    Attributes:
        input_ids, loss_mask, positions, document_start: int32 [B, L].
        documents: in order of row and offset.
        sample_ids: of those documents.
        epoch: of the first row of all processes' batch, counted from 0.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    positions: np.ndarray
    document_start: np.ndarray
    documents: list[RowDocument]
    sample_ids: list[str]
    epoch: int


def fill_rows(rows: Sequence[Sequence[Sample]], batch_rows: int, length: int, epoch: int = 0) -> HostBatch:
    """Lays documents into rows.

    Args:
        rows: the documents of each row; rows that are missing at the end are all padding.
        batch_rows: B.
        length: L.
        epoch: passed on.

    Raises:
        ValueError: more rows than B, or a row's documents are longer than L together.
    """
    if len(rows) > batch_rows:
        raise ValueError(f"{len(rows)} rows do not fit a batch of {batch_rows}")
    shape = (batch_rows, length)
    input_ids, loss_mask = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    document_start = np.zeros(shape, np.int32)
    documents = []
    for row, samples in enumerate(rows):
        offset = 0
        for sample in samples:
            end = offset + len(sample.input_ids)
            if end > length:
                raise ValueError(
                    f"sample {sample.id} ends at token {end} of a row of {length}; rows must be at least as "
                    "long as the longest sample (data.max_length bounds it)"
                )
            input_ids[row, offset:end] = sample.input_ids
            loss_mask[row, offset:end] = sample.loss_mask
            document_start[row, offset:end] = offset
            documents.append(RowDocument(row, offset, sample.id, sample.input_ids))
            offset = end
        document_start[row, offset:] = offset
    positions = np.arange(length, dtype=np.int32)[None, :] - document_start
    return HostBatch(
        input_ids,
        loss_mask,
        positions,
        document_start,
        documents,
        [doc.sample_id for doc in documents],
        epoch,
    )


def fingerprint(samples: Sequence[Sample]) -> str:
    """A hash of everything a dataset trains on: ids, tokens and masks of all samples, in order.

    Prepared samples bring it along.
    """
    if stored := getattr(samples, "fingerprint", ""):
        return stored
    digest = hashlib.sha256()
    for sample in samples:
        name = sample.id.encode("utf-8", "surrogatepass")
        digest.update(f"{len(name)} {len(sample.input_ids)} ".encode())
        digest.update(name)
        digest.update(np.ascontiguousarray(sample.input_ids, "<i4").tobytes())
        digest.update(np.ascontiguousarray(sample.loss_mask, "<i1").tobytes())
    return digest.hexdigest()


def _digest(packed: Sequence[Sequence[int]]) -> str:
    flat = np.array([number for row in packed for number in (len(row), *row)], "<i8")
    return hashlib.sha256(flat.tobytes()).hexdigest()


class RowIterator(Iterator[HostBatch]):
    """Batches of B rows of L tokens, in an order given by the seed alone; one document a row, or packed ones.

    Every epoch visits every row once, in an order of its own; a batch may hold the end of one epoch and
    the start of the next. With `epochs` the stream ends after that many, its last batch filled up with rows
    that are all padding: shapes never change. The order is the same on every machine and for any number of
    processes.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        batch_rows: int,
        length: int,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        packed: Sequence[Sequence[int]] | None = None,
        share: tuple[int, int] = (0, 1),
    ):
        """Lays out the order; nothing is read before the first batch.

        Args:
            samples: at least one; none longer than `length`.
            batch_rows: B.
            length: L.
            seed: of the order, 0 .. 2**32-1.
            shuffle: a new order every epoch; False = the order of `samples`.
            epochs: stop after so many passes; None = never.
            packed: indices of the samples of each row (`packing.Packing.rows`); None = every sample has its own.
            share: (i, n): give rows i*B/n .. (i+1)*B/n - 1 of every batch, those of process i of n. No part of the
                position: a run goes on with another number of processes.

        Raises:
            ValueError: one of them cannot be meant.
        """
        for name, value in (
            ("batch_rows", batch_rows),
            ("length", length),
            ("epochs", 1 if epochs is None else epochs),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}; give at least 1")
        if not samples:
            raise ValueError("there are no samples to make rows of")
        if batch_rows % share[1]:
            raise ValueError(f"batch_rows is {batch_rows}; it must be a multiple of the {share[1]} processes")
        longest = max(samples, key=lambda sample: len(sample.input_ids))
        if len(longest.input_ids) > length:
            raise ValueError(
                f"sample {longest.id} has {len(longest.input_ids)} tokens, rows have {length}; make rows "
                "longer or data.max_length smaller"
            )
        self._samples = samples
        self._packed = packed or None
        self._row_count = len(packed or samples)
        self._batch_rows = batch_rows
        self._own_rows = batch_rows // share[1]
        self._first_row = share[0] * self._own_rows
        self._length = length
        # What a position in the stream means; a saved one is refused where any of this differs.
        self._identity: dict[str, Any] = {
            "samples": len(samples),
            "fingerprint": fingerprint(samples),
            "batch_rows": batch_rows,
            "length": length,
            "seed": seed,
            "shuffle": shuffle,
            "packing": None if packed is None else _digest(packed),
        }
        order = grain.MapDataset.range(self._row_count).seed(seed)
        if shuffle:
            order = order.shuffle()
        # Indexed by the batch's number, so the state is that number and nothing else.
        self._batches = order.repeat(epochs).batch(batch_rows, drop_remainder=False, batch_fn=list)
        # An endless dataset has a length all the same, which does not fit an int for every batch size.
        self._total = None if epochs is None else len(self._batches)
        self._next = 0

    @property
    def steps_per_epoch(self) -> int:
        """Batches that it takes to visit every row once, the last one perhaps not full."""
        return -(-self._row_count // self._batch_rows)

    @property
    def rows_per_epoch(self) -> int:
        """Rows that hold every sample once."""
        return self._row_count

    @property
    def total_steps(self) -> int | None:
        """Batches until the stream ends; None = it does not."""
        return self._total

    def __next__(self) -> HostBatch:
        if self._total is not None and self._next >= self._total:
            raise StopIteration
        dealt = self._batches[self._next][self._first_row : self._first_row + self._own_rows]
        rows = [[self._samples[i] for i in (self._packed[row] if self._packed else (row,))] for row in dealt]
        epoch = self._next * self._batch_rows // self._row_count
        self._next += 1
        return fill_rows(rows, self._own_rows, self._length, epoch)

    def get_state(self) -> dict[str, Any]:
        """The position as a JSON-able dict: another iterator over the same data can go on from it."""
        return {"next_batch": self._next, **self._identity}

    def set_state(self, state: dict[str, Any]) -> None:
        """Moves to a saved position.

        Raises:
            ValueError: it was saved over other data or for other rows: names what differs.
        """
        missing = [key for key in ("next_batch", *self._identity) if key not in state]
        if missing:
            raise ValueError(f"the saved data position lacks {', '.join(missing)}")
        differing = [
            f"{key} was {state[key]}, is {value}" for key, value in self._identity.items() if state[key] != value
        ]
        if differing:
            raise ValueError(
                "the saved data position belongs to another stream of rows: "
                + "; ".join(differing)
                + ". Resume with the data and options it was saved with, or start a new run"
            )
        self._next = int(state["next_batch"])
