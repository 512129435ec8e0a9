"""Asking a run to stop: SIGTERM and SIGINT save and exit instead of losing the work."""

import os
import signal
import sys
import time
from types import FrameType, TracebackType
from typing import Self

_WATCHED = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Context manager that turns the first SIGTERM or SIGINT into a flag the loop looks at.

    A second signal of the same kind acts as if nothing were installed: a run that hangs can still be ended. Signal
    handlers belong to the main thread; elsewhere nothing is installed and `signal` stays None.

    Args:
        patience: ignore further signals for so long [s]. A batch system signals the launcher and its processes, and
            the launcher then signals its processes once more.
    """

    def __init__(self, patience: float = 0.0) -> None:
        self.signal: int | None = None
        self._patience, self._until = patience, 0.0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in _WATCHED:
            try:
                self._previous[number] = signal.signal(number, self._request)
            except ValueError:  # not the main thread
                break
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _request(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is not None and now < self._until:
            return
        if self.signal == number:
            signal.signal(number, self._previous[number])  # type: ignore[arg-type]
            os.kill(os.getpid(), number)
            return
        self.signal, self._until = number, now + self._patience
        if not self._patience:
            signal.signal(number, self._previous[number])  # type: ignore[arg-type]
        name = signal.Signals(number).name
        print(f"{name}: saving and stopping at the last finished optimizer step", file=sys.stderr, flush=True)

    @property
    def exit_code(self) -> int:
        """The shell's convention, 128 + signal: the run did not do all it was asked, so never 0."""
        return 0 if self.signal is None else 128 + self.signal
