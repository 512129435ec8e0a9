"""The two device syncs between torch and JAX, and the lease that insists on them.

Memory that torch wrote is read by JAX in place, and neither framework waits for the other:

* Fence A, `torch_done`: all torch work on the device is finished, so what JAX is about to read is there.
  (DLPack makes JAX wait for torch's *current* stream only; an engine with side streams is not covered by that.)
* Fence B, `jax_done`: all JAX programs that read the memory are finished, so torch may write to it again,
  reset the pools it came from, or launch its own collectives.

Overwriting without Fence B gives silently wrong training, not a crash. Hence the lease: memory is lent out,
handed to JAX, fenced, and only then free again; any other order raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


class LeaseError(RuntimeError):
    """Shared memory was used out of order. The message names it, the state it is in, and what is missing."""


def torch_done(device: Any) -> None:
    """Fence A: wait for all torch work on a device. On a CPU torch has already finished when it returns.

    Args:
        device: A torch device or its name.
    """
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        raise LeaseError(f"no fence is known for torch device {device}; the bridge runs on cpu and cuda")


def jax_done(outputs: Any) -> None:
    """Fence B: wait until the programs that made `outputs` are finished.

    Args:
        outputs: Any tree with at least one JAX array: what the *last* programs that read the shared memory
            returned.

    Raises:
        LeaseError: no array to wait for, or one that was donated to a later program (fence on that one's
        outputs).
    """
    arrays = [leaf for leaf in jax.tree.leaves(outputs) if isinstance(leaf, jax.Array)]
    if not arrays:
        raise LeaseError("fence on nothing: give the outputs of the JAX programs that read the shared memory")
    for array in arrays:
        if array.is_deleted():
            raise LeaseError(
                f"fence on a {array.dtype}{list(array.shape)} array that was donated or deleted: fence on "
                "the outputs of the last program instead"
            )
    jax.block_until_ready(arrays)


class Lease:
    """The right to write to memory that JAX may be reading: a staging slot, or an engine's pool.

    States: "open" (torch writes) -> "handed" (JAX reads; Fence A has passed) -> "fenced" (Fence B has
    passed) -> "closed". An open lease may be closed at once, since JAX has seen nothing. As a context
    manager:

        with Lease("kv pool", "cuda", on_release=pool.reset) as lease:
            ...                                   # torch writes
            arrays = lease.hand_over(make_arrays) # Fence A, then JAX sees the memory
            outputs = step(*arrays)
            lease.fence(outputs)                  # Fence B
        # here on_release has run

    Args:
        what: Name of the memory, for messages.
        device: Torch device that writes it.
        on_release: Called once, when the lease is closed and nobody reads the memory any more.
    """

    def __init__(self, what: str, device: Any, on_release: Callable[[], None] | None = None) -> None:
        self._what = what
        self._device = device
        self._on_release = on_release
        self._state = "open"
        self._views: list[jax.Array] = []

    @property
    def state(self) -> str:
        """One of "open", "handed", "fenced", "closed"."""
        return self._state

    def require_open(self, action: str) -> None:
        """Raise unless torch may still write.

        Args:
            action: What was tried, for the message.
        """
        if self._state != "open":
            raise LeaseError(
                f"{self._what}: cannot {action}, its lease is {self._state}"
                + (" and JAX may be reading it" if self._state == "handed" else "; take a new lease")
            )

    def hand_over(self, make_views: Callable[[], Any]) -> Any:
        """Fence A, then let JAX see the memory.

        Args:
            make_views: Called after the fence; returns a tree of the JAX arrays that view the memory. They
                are deleted when the lease is closed, so that a late read raises instead of seeing the next
                contents.

        Returns:
            What `make_views` returned.
        """
        self.require_open("hand it to JAX")
        torch_done(self._device)
        views = make_views()
        self._state = "handed"
        self._views = [leaf for leaf in jax.tree.leaves(views) if isinstance(leaf, jax.Array)]
        return views

    def fence(self, outputs: Any) -> None:
        """Fence B. `outputs` is what the last JAX programs that read the memory returned; see `jax_done`."""
        if self._state != "handed":
            raise LeaseError(f"{self._what}: nothing to fence, its lease is {self._state}")
        jax_done(outputs)
        self._state = "fenced"

    def close(self) -> None:
        """End the lease: delete JAX's views and release the memory.

        Raises:
            LeaseError: it was handed to JAX and not fenced. It then stays in use, and may still be fenced.
        """
        if self._state == "handed":
            raise LeaseError(
                f"{self._what} was handed to JAX and never fenced, so it cannot be reused: call "
                "fence(outputs) with what the JAX programs that read it returned, before its lease ends"
            )
        if self._state == "closed":
            return
        self._state = "closed"
        for view in self._views:
            view.delete()
        self._views = []
        if self._on_release is not None:
            self._on_release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None and self._state == "handed":
            return  # the error that is on its way matters more; the memory stays in use
        self.close()
