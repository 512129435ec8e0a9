"""When a step exceeds its limit: say where this process is, with its stacks, and end it.

A process that waits in a collective for one that is gone waits for ever; nothing else in the job would say why.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TextIO

#: Exit code of a process that its watchdog ended: the `timeout` command's, which batch systems know.
EXIT_CODE = 124


class Watchdog:
    """Watches the phases of a loop; each must end, or the next begin, within the limit.

    Args:
        limit: longest time between two signs of life [s]; 0 = do not watch.
        who: this process in messages, e.g. `rank 3 on host a`.
        stream: where the message and the stacks go.
        end: what ends the process; for tests.
    """

    def __init__(
        self,
        limit: float,
        who: str,
        *,
        stream: TextIO | None = None,
        end: Callable[[int], None] = os._exit,
    ):
        self._limit, self._who, self._end = limit, who, end
        self._stream = sys.stderr if stream is None else stream
        self._phase, self._step, self._since = "starting", 0, time.monotonic()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._limit > 0:
            self.alive()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def alive(self, step: int | None = None) -> None:
        """A sign of life; `step` is told in the message."""
        self._since = time.monotonic()
        if step is not None:
            self._step = step

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What the process is doing, for the message; beginning and ending are signs of life."""
        before, self._phase = self._phase, name
        self.alive()
        try:
            yield
        finally:
            self._phase = before
            self.alive()

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self._limit / 4)):
            idle = time.monotonic() - self._since
            if idle > self._limit:
                self._report(idle)
                self._end(EXIT_CODE)
                return

    def _report(self, idle: float) -> None:
        print(
            f"\nwatchdog: {self._who} has been in phase {self._phase!r} after step {self._step} for {idle:.0f} s"
            f" (limit {self._limit:.0f} s, train.watchdog_seconds). Ending this process, so that the job ends and can"
            " be resumed. If all ranks report the same phase, the work itself is stuck or too slow for the limit; if"
            " one reports another phase or nothing, that one is the cause. Stacks of all threads:",
            file=self._stream,
            flush=True,
        )
        faulthandler.dump_traceback(file=self._stream, all_threads=True)
        self._stream.flush()
