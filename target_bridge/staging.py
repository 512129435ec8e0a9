"""Buffers between the target and JAX: ragged documents go in, fixed rows come out.

The target's own tensors are ragged and belong to it. They are copied into preallocated slots of one shape,
so that JAX always sees the same pointers, layout and shape, and never the target's memory. Letters: `B`
rows, `L` tokens a row, `M` taps, `D` hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from target_bridge.fence import Lease, LeaseError

#: What JAX on a CPU asks of memory it shall use without copying; CUDA allocations exceed it.
ALIGNMENT = 64


class StagingError(ValueError):
    """States that do not fit a slot. The message names row, offset and value."""


def aligned_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> torch.Tensor:
    """A contiguous zero tensor whose first byte is at a multiple of `ALIGNMENT`."""
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.zeros(size + ALIGNMENT, dtype=torch.uint8, device=device)
    skip = -memory.data_ptr() % ALIGNMENT
    return memory[skip : skip + size].view(dtype).view(shape)


class Slot:
    """One pair of buffers, on lease from a `StagingRing`.

    Fill it document by document, hand it over once, fence with what JAX returned. What no document covers is
    zero. The buffers can only be reached through `hand_over`: whoever reads them has passed Fence A and owes
    Fence B.
    """

    def __init__(
        self,
        index: int,
        rows: int,
        length: int,
        context_width: int,
        hidden: int,
        dtype: torch.dtype,
        device: Any,
    ) -> None:
        self.index = index
        self.rows = rows
        self.length = length
        self._context = aligned_zeros((rows, length, context_width), dtype, device)
        self._last = aligned_zeros((rows, length, hidden), dtype, device)
        self._filled: list[list[tuple[int, int]]] = []
        self._lease: Lease | None = None

    @property
    def lease(self) -> Lease:
        """The current lease.

        Raises:
            LeaseError: the slot is not on lease.
        """
        if self._lease is None:
            raise LeaseError(f"staging slot {self.index} is not on lease; use `with ring.lease() as slot`")
        return self._lease

    def fill(self, row: int, offset: int, context: torch.Tensor, last: torch.Tensor) -> None:
        """Copy one document's states to `[row, offset : offset + T]`.

        Args:
            row: 0..B-1.
            offset: Where in the row the document begins.
            context: [T, M*D], of the slot's dtype or one that it holds exactly; on any device.
            last: [T, D].

        Raises:
            StagingError: wrong shape or dtype, outside the row, or over a document that is already there.
            LeaseError: not on lease, or already handed to JAX.
        """
        self.lease.require_open("fill it")
        count = self._check_states(row, offset, context, last)
        for begin, end in self._filled[row]:
            if offset < end and begin < offset + count:
                raise StagingError(
                    f"document at row {row}, tokens {offset}..{offset + count - 1}, overlaps the one at "
                    f"{begin}..{end - 1}"
                )
        self._filled[row].append((offset, offset + count))
        self._context[row, offset : offset + count].copy_(context)
        self._last[row, offset : offset + count].copy_(last)

    def hand_over(self, make_views: Callable[[torch.Tensor, torch.Tensor], Any]) -> Any:
        """Fence A, then let JAX see the buffers; nothing can be filled afterwards.

        Args:
            make_views: (context [B, L, M*D], last [B, L, D]) -> a tree of JAX arrays that view them, e.g. by
                `handoff.to_jax`. The arrays die with the lease.

        Returns:
            What `make_views` returned.
        """
        return self.lease.hand_over(lambda: make_views(self._context, self._last))

    def fence(self, outputs: Any) -> None:
        """Fence B: wait for the JAX programs that read the buffers, given what the last of them returned."""
        self.lease.fence(outputs)

    def _open(self, lease: Lease) -> None:
        self._lease = lease
        self._filled = [[] for _ in range(self.rows)]
        # Whatever the last lease left, non-finite values included. A full clear costs a fraction of the
        # copy, and does not depend on anybody's bookkeeping.
        self._context.zero_()
        self._last.zero_()

    def _check_states(self, row: int, offset: int, context: torch.Tensor, last: torch.Tensor) -> int:
        for what, states, buffer in (("context", context, self._context), ("last", last, self._last)):
            if states.ndim != 2 or states.shape[1] != buffer.shape[2]:
                raise StagingError(
                    f"{what} states for row {row} have shape {tuple(states.shape)}, expected "
                    f"[tokens, {buffer.shape[2]}]"
                )
            if not states.is_floating_point() or torch.promote_types(states.dtype, buffer.dtype) != buffer.dtype:
                raise StagingError(
                    f"{what} states are {states.dtype} and the staging buffers {buffer.dtype}, which would "
                    "round them. Load the target in that dtype or make the ring wider"
                )
        count = context.shape[0]
        if last.shape[0] != count:
            raise StagingError(f"row {row}: {count} context states but {last.shape[0]} last states")
        if not 0 <= row < self.rows:
            raise StagingError(f"row {row} is outside the slot's {self.rows} rows")
        if offset < 0 or offset + count > self.length:
            raise StagingError(
                f"row {row}: a document of {count} tokens at offset {offset} does not fit a row of {self.length}"
            )
        return count


class StagingRing:
    """A few slots, lent in turn.

    Args:
        num_slots: 1 for strict alternation of target and draft; 2 to fill one while JAX reads the other.
        rows: B.
        length: L.
        context_width: M*D.
        hidden: D.
        dtype: Of both buffers: the draft's compute dtype.
        device: Where the target runs and the draft trains.
    """

    def __init__(
        self,
        num_slots: int,
        rows: int,
        length: int,
        context_width: int,
        hidden: int,
        dtype: torch.dtype = torch.float32,
        device: Any = "cpu",
    ) -> None:
        sizes = {
            "num_slots": num_slots,
            "rows": rows,
            "length": length,
            "context_width": context_width,
            "hidden": hidden,
        }
        for what, value in sizes.items():
            if value < 1:
                raise StagingError(f"staging ring: {what} must be at least 1, got {value}")
        self._device = torch.device(device)
        self._slots = [
            Slot(index, rows, length, context_width, hidden, dtype, self._device) for index in range(num_slots)
        ]
        self._next = 0

    def __len__(self) -> int:
        return len(self._slots)

    @contextmanager
    def lease(self) -> Iterator[Slot]:
        """Lend the next free slot, cleared; at the end it must have been fenced if it was handed to JAX.

        Raises:
            LeaseError: every slot is in use, or the slot was handed over and never fenced.
        """
        slot = self.acquire()
        try:
            yield slot
        except BaseException:
            # Keep a slot that JAX may be reading: the error on its way matters more than the ring.
            if slot.lease.state != "handed":
                self.release(slot)
            raise
        self.release(slot)

    def acquire(self) -> Slot:
        """The next free slot, cleared and on lease until `release`. Prefer `lease`."""
        for step in range(len(self._slots)):
            slot = self._slots[(self._next + step) % len(self._slots)]
            if slot._lease is None:
                self._next = (slot.index + 1) % len(self._slots)
                slot._open(Lease(f"staging slot {slot.index}", self._device))
                return slot
        states = ", ".join(f"slot {slot.index} is {slot.lease.state}" for slot in self._slots)
        raise LeaseError(
            f"all {len(self._slots)} staging slots are in use ({states}): end a lease first; one that was "
            "handed to JAX needs fence(outputs)"
        )

    def release(self, slot: Slot) -> None:
        """End a slot's lease; see `Lease.close`."""
        slot.lease.close()
        slot._lease = None
