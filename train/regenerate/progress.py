"""How far a run is: rows, tokens a second, time left."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from train.data.sources import Source

from .account import Account


class RowCount:
    """Counts the rows of a source in a thread of its own, for the time that is left; a run does not wait for it.

    Attributes:
        total: rows, as soon as they are counted; None before, and where counting failed or is not worth it.
    """

    def __init__(self, source: Source, limit: int | None):
        self.total: int | None = None
        self._stop = False
        if source.root is None:  # a dataset of the hub would be downloaded twice
            self.total = limit
            return
        threading.Thread(target=self._count, args=(source, limit), daemon=True).start()

    def stop(self) -> None:
        self._stop = True

    def _count(self, source: Source, limit: int | None) -> None:
        number = 0
        try:
            for number, _ in enumerate(source.records(), 1):
                if self._stop or number == limit:
                    break
        except ValueError:  # a broken file is reported by the run when it comes there
            return
        self.total = number if not self._stop else None


class Progress:
    """Says every few seconds how far a run is.

    Args:
        account: of the run; its counts at this moment are where the run begins.
        count: of the input's rows.
        say: takes a line.
        every: seconds.
    """

    def __init__(self, account: Account, count: RowCount, say: Callable[[str], None], every: float):
        self._account = account
        self._count = count
        self._say = say
        self._every = every
        self._began = time.monotonic()
        self._settled = account.settled
        self._last = (self._began, 0)

    async def run(self) -> None:
        """Speaks until it is cancelled."""
        while True:
            await asyncio.sleep(self._every)
            self._say(self.line())

    def line(self) -> str:
        """One line: what is done, at which speed since the last line, and the time left at the run's mean speed."""
        account, now = self._account, time.monotonic()
        since, tokens = self._last
        speed = (account.generated - tokens) / max(now - since, 1e-9)
        self._last = (now, account.generated)
        done = account.settled + account.twice.count
        total = self._count.total
        of = f" of {total:,}" if total else ""
        parts = [f"{done:,}{of} rows", f"{account.generated:,} tokens", f"{speed:,.0f} tokens/s"]
        parts += [f"{account.number(kind):,} {kind}" for kind in account.left_out if account.number(kind)]
        if retries := sum(tally.count for tally in account.retries.values()):
            parts.append(f"{retries:,} retries")
        here = account.settled - self._settled
        if total and here and total >= done:
            parts.append(f"{clock((total - done) * (now - self._began) / here)} left")
        return ", ".join(parts)


def clock(seconds: float) -> str:
    """1:02:03 of 3723 seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
