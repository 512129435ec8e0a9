"""Processes that read chunks of records. Imports stay few: every worker pays for them."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from .chunks import Chunk, ChunkReader
from .config import DataConfig
from .files import Place
from .sources import Record
from .summary import DataError

Records = list[tuple[Place, Record]]
_reader: ChunkReader | None = None


def _start_worker(arguments: tuple[DataConfig, Any, int]) -> None:
    """Makes a worker's reader. One thread each: the tokenizer's own would fight over the cores. Ctrl-C reaches all
    processes of a terminal; the first one ends the others."""
    global _reader
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _reader = ChunkReader(*arguments)


def _read(records: Records) -> Chunk:
    assert _reader is not None
    return _reader.read(records)


def read_chunks(
    arguments: tuple[DataConfig, Any, int], chunks: Iterator[tuple[Records, int]], workers: int
) -> Iterator[tuple[Chunk, int, int]]:
    """Every chunk read, in order: what became of it, records left out by sampling, records in all.

    No more than two chunks a worker are on their way, so memory does not grow with the data.
    """
    if workers <= 0:
        reader = ChunkReader(*arguments)
        for records, left_out in chunks:
            yield reader.read(records), left_out, len(records) + left_out
        return
    # Not forked: a fork of a process with threads (JAX, tokenizers) may hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(arguments,))
    waiting: deque[tuple[Future[Chunk], int, int]] = deque()
    try:
        for records, left_out in chunks:
            waiting.append((pool.submit(_read, records), left_out, len(records) + left_out))
            if len(waiting) > 2 * workers:
                future, skipped, size = waiting.popleft()
                yield future.result(), skipped, size
        while waiting:
            future, skipped, size = waiting.popleft()
            yield future.result(), skipped, size
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process died, most likely for want of memory; run the command again with fewer --workers: it"
            " goes on where it stopped"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
