"""From the next rows of the data to one batch on the devices: capture, stage, fence A, hand over."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jax.sharding import Mesh

from draft_jax.batch import DraftBatch
from target_bridge import handoff
from target_bridge.staging import Slot, StagingRing
from target_bridge.target import Target

from .data.rows import HostBatch, RowIterator
from .sharding import states_sharding


class NonFiniteStateError(RuntimeError):
    """With `objective.sanitize: off`: the target's states of a sample are not finite; the message names it."""


class Feeder:
    """Feeds micro-steps in the order of the data, and knows the position behind the last batch it gave.

    Args:
        rows: the stream of rows; read one batch ahead, while the devices work.
        target: captures the states; may be a cache before the real one.
        ring: staging slots of [B, L, M*D] and [B, L, D].
        mesh: rows go over all its devices.
        sanitize: False = states that are not finite are an error that names the sample.
        attempt: runs the capture of a batch (`World.attempt`). With several processes whose micro-steps exchange
            numbers, one that fails here must not leave the others waiting in theirs.
        first_token: of each row, where the part begins that the ring's slots hold; the rest of a row's states is
            another process's, which captures the same row.

    Attributes:
        position: state of `rows` behind the last batch given.
        capture_seconds: wall time spent in the target and the staging so far.
    """

    def __init__(
        self,
        rows: RowIterator,
        target: Target,
        ring: StagingRing,
        mesh: Mesh,
        *,
        sanitize: bool,
        attempt: Callable[[str, Callable[[], None]], None] = lambda what, action: action(),
        first_token: int = 0,
    ):
        self._rows, self._target, self._ring = rows, target, ring
        self._sharding, self._first_token = states_sharding(mesh), first_token
        self._sanitize, self._attempt = sanitize, attempt
        self._ahead: HostBatch | None = None
        self.position = rows.get_state()
        self.capture_seconds = 0.0

    def prefetch(self) -> None:
        """Read the next rows now; host work only, for the time the devices are busy."""
        if self._ahead is None:
            self._ahead = next(self._rows)

    @contextmanager
    def next_batch(self) -> Iterator[tuple[HostBatch, DraftBatch, Slot]]:
        """The next rows and their batch, on lease.

        Yields:
            The rows on the host, the batch on the devices, and the slot: call `slot.fence(outputs)` (fence B) with
            what the program that read the batch returned, before leaving.
        """
        self.prefetch()
        host, self._ahead = self._ahead, None
        assert host is not None
        self.position = self._rows.get_state()
        with self._ring.lease() as slot:
            begin = time.perf_counter()
            self._attempt("capturing the states of a micro-step", lambda: self._fill(slot, host))
            batch = handoff.to_batch(slot, host, self._sharding, vocab_size=self._target.info.vocab_size)
            self.capture_seconds += time.perf_counter() - begin
            yield host, batch, slot

    def _fill(self, slot: Slot, host: HostBatch) -> None:
        if not host.documents and not getattr(self._target, "lockstep", False):
            return
        captured = self._target.capture([document.input_ids for document in host.documents])
        if not self._sanitize:
            _require_finite(host, captured.context_hidden, captured.last_hidden)
        in_parts = slot.length < host.input_ids.shape[1]
        for document, context, last in zip(host.documents, captured.context_hidden, captured.last_hidden):
            offset = document.offset - self._first_token
            if in_parts:
                begin, end = max(0, -offset), min(len(context), slot.length - offset)
                if begin >= end:
                    continue  # all of it belongs to other processes
                offset, context, last = offset + begin, context[begin:end], last[begin:end]
            slot.fill(document.row, offset, context, last)


def _require_finite(host: HostBatch, contexts: Sequence[Any], lasts: Sequence[Any]) -> None:
    for document, context, last in zip(host.documents, contexts, lasts):
        for name, states in (("context_hidden", context), ("last_hidden", last)):
            finite = states.isfinite().all(dim=-1)
            if not bool(finite.all()):
                token = int((~finite).nonzero()[0, 0])
                raise NonFiniteStateError(
                    f"sample {document.sample_id}: {name} of token {token} is not finite. Remove the sample, load the"
                    " target in a wider dtype, or set objective.sanitize: true to mask such states out"
                )
