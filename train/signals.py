"""Asking a run to stop: SIGTERM and SIGINT save and exit instead of losing the work."""

import signal
import sys
from types import FrameType, TracebackType
from typing import Self

_WATCHED = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Context manager that turns the first SIGTERM or SIGINT into a flag the loop looks at.

    A second signal of the same kind acts as if nothing were installed: a run that hangs can still be ended. Signal
    handlers belong to the main thread; elsewhere nothing is installed and `signal` stays None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
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
        self.signal = number
        signal.signal(number, self._previous[number])  # type: ignore[arg-type]
        name = signal.Signals(number).name
        print(f"{name}: saving and stopping at the last finished optimizer step", file=sys.stderr, flush=True)

    @property
    def exit_code(self) -> int:
        """The shell's convention, 128 + signal: the run did not do all it was asked, so never 0."""
        return 0 if self.signal is None else 128 + self.signal
