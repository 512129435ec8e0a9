"""Making a prepared folder: chunks go to worker processes, shards come back in order, and what is done stays done."""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from .chunks import ChunkReader, Collector, PlacedSample
from .config import DataConfig
from .identity import data_facts, way_facts
from .pipeline import check_account, chunks_of, read_records
from .prepared import FORMAT, MANIFEST, PreparedSamples, folder_for, is_prepared, open_shard, write_json, write_shard
from .rows import fingerprint
from .summary import DataError, Summary
from .workers import read_chunks

PROGRESS = "progress.json"
_LOCK = ".lock"
#: A shard is closed when so many records were read for it, or when it holds so many tokens (40 MiB), so that long rows
#: take no more memory than short ones. What is read behind the last whole shard is read again after an interruption.
SHARD_RECORDS = 8192
SHARD_TOKENS = 2**23

#: Called with the account so far and the records read since the last call.
Report = Callable[[Summary, int], None]


def prepare(
    config: DataConfig,
    tokenizer: Any,
    vocab_size: int,
    *,
    folder: str | Path | None = None,
    workers: int | None = None,
    report: Report = lambda summary, records: None,
) -> tuple[Path, Summary]:
    """Tokenises a dataset once, for any number of runs.

    The samples are those of `pipeline.load_dataset`, whatever the number of workers and however often the work was
    interrupted: an unfinished folder is gone on with.

    Args:
        config: what to read and how.
        tokenizer: of the target, or None for rows of ids.
        vocab_size: of the target.
        folder: where; None = in `config.prepared`, under a name that is a hash of all that decides the samples.
        workers: processes that tokenise; None = as many as there are cores, 0 = this process alone.
        report: told of progress.

    Returns:
        The folder, and the account.

    Raises:
        DataError: a file cannot be read; too little is left (the folder then stays unfinished, so that a lower
            data.min_retention finishes it at once); the folder holds other data; another process works on it.
        TemplateError: the chat template is unfit, see `choose_template` and `Agreement`.
    """
    facts = way_facts(config, tokenizer, vocab_size) | {"data": data_facts(config)}
    place = Path(folder) if folder is not None else folder_for(config, facts)
    place.mkdir(parents=True, exist_ok=True)
    with _alone(place):
        work = _Work(place, config, facts, tokenizer, vocab_size)
        if not is_prepared(place):
            work.run(_cores() if workers is None else workers, report)
        return place, work.finish()


class _Work:
    """The shards of one folder, those of an earlier, interrupted run included."""

    def __init__(self, folder: Path, config: DataConfig, facts: dict[str, Any], tokenizer: Any, vocab_size: int):
        self._folder = folder
        self._config = config
        self._facts = facts
        self._arguments = (config, tokenizer, vocab_size)
        self._state = self._read_state()
        self._summary = Summary.from_json(self._state["summary"])
        self._collector = Collector(config, self._summary)

    def _read_state(self) -> dict[str, Any]:
        name = MANIFEST if is_prepared(self._folder) else PROGRESS
        path = self._folder / name
        if not path.is_file():
            if others := sorted(entry.name for entry in self._folder.iterdir() if entry.name != _LOCK):
                raise DataError(
                    f"{self._folder} holds other things ({', '.join(others[:5])}); name a folder of its own"
                )
            return {
                "format": FORMAT, "facts": self._facts, "records": 0, "compared": [0, 0], "rendered": False,
                "shards": [], "summary": Summary(source=self._config.path).to_json(),
            }  # fmt: skip
        state = json.loads(path.read_text(encoding="utf-8"))
        made = state.get("facts", {}) if state.get("format") == FORMAT else {}
        names = sorted({*made, *self._facts})
        differing = [name for name in names if made.get(name) != self._facts.get(name)]
        if differing:
            raise DataError(
                f"{self._folder} holds data prepared in another way (differing: {', '.join(differing)}); name another"
                " folder, or remove this one"
            )
        return state

    def run(self, workers: int, report: Report) -> None:
        """Reads what is not yet in a shard."""
        for shard in self._state["shards"]:
            rows = open_shard(self._folder / shard["name"])
            self._collector.remember(rows.contents, rows.names())
        if self._state["records"]:
            report(self._summary, self._state["records"])
        # An interrupted run has counted the ignored files already.
        records = read_records(self._config, Summary() if self._state["records"] else self._summary)
        chunks = chunks_of(islice(records, self._state["records"], None))
        kept: list[PlacedSample] = []
        read, tokens = 0, 0
        for chunk, left_out, size in read_chunks(self._arguments, chunks, workers):
            self._summary.not_sampled += left_out
            added = list(self._collector.add(chunk))
            kept += added
            read += size
            tokens += sum(len(item.judged.sample.input_ids) for item in added)
            report(self._summary, size)
            if read >= SHARD_RECORDS or tokens >= SHARD_TOKENS:
                self._close_shard(kept, read)
                kept, read, tokens = [], 0, 0
        if read:
            self._close_shard(kept, read)

    def _close_shard(self, kept: Sequence[PlacedSample], read: int) -> None:
        name = f"{len(self._state['shards']):05}.arrow"
        write_shard(self._folder / name, kept)
        texts, ids = self._state["compared"]
        collector = self._collector
        self._state |= {
            "records": self._state["records"] + read,
            "compared": [texts + collector.texts, ids + collector.ids],
            "rendered": self._state["rendered"] or collector.rendered,
            "shards": [*self._state["shards"], {"name": name, "samples": len(kept)}],
            "summary": self._summary.to_json(),
        }
        collector.texts = collector.ids = 0
        write_json(self._folder / PROGRESS, self._state)

    def finish(self) -> Summary:
        """Judges the whole and writes the manifest, which makes the folder a finished one."""
        check_account(self._config, self._summary)
        if not is_prepared(self._folder):
            if self._state["rendered"]:
                self._summary.template = ChunkReader(*self._arguments).describe_template(*self._state["compared"])
            shards = [(shard["name"], shard["samples"]) for shard in self._state["shards"]]
            samples = PreparedSamples(self._folder, shards)
            state = {**self._state, "fingerprint": fingerprint(samples), "summary": self._summary.to_json()}
            write_json(self._folder / MANIFEST, state)
            (self._folder / PROGRESS).unlink(missing_ok=True)
        return self._summary


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps a second process out of the folder; a process that dies leaves nothing behind."""
    with (folder / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(f"another process is preparing {folder}; wait for it, or name another folder") from error
        yield


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
