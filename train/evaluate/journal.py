"""Rows on disk as they finish: an evaluation that is killed goes on where it stopped, and never under another name.

A journal is a folder beside the result: `identity.json` says what is being measured, `rows-I-of-N.jsonl` holds the
decodings of one process, a line each. Whoever opens the folder later reads the rows of all processes, so that the
shares of an evaluation are put together by resuming it with nothing left to do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from train.evaluate.accounting import Round
from train.evaluate.plain import PlainOutput
from train.evaluate.sample_result import SampleResult, Seconds

IDENTITY = "identity.json"


class JournalError(ValueError):
    """Rows that belong to another evaluation, or that nobody asked to go on with; the message says what differs."""


def prepare(folder: Path, resume: bool) -> None:
    """Makes way for an evaluation: without `resume` the rows of a finished one are deleted.

    Raises:
        JournalError: the rows are of an evaluation that was not finished, or cannot be told.
    """
    found = _read_identity(folder)
    if found is None or resume:
        return
    rows = sum(path.read_bytes().count(b"\n") for path in _row_files(folder))
    if rows and not found["finished"]:
        raise JournalError(
            f"{folder} holds {rows} rows of an evaluation that was not finished: go on with --resume, or delete the "
            "folder to start anew"
        )
    (folder / IDENTITY).unlink()
    for path in _row_files(folder):
        path.unlink()


def shares(folder: Path) -> int:
    """How many processes decoded the rows side by side, each charging its own time; 1 for an empty folder."""
    return max((int(path.stem.rpartition("-of-")[2]) for path in _row_files(folder)), default=1)


def _row_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("rows-*-of-*.jsonl"))


def _read_identity(folder: Path) -> dict[str, Any] | None:
    path = folder / IDENTITY
    try:
        return json.loads(path.read_text()) if path.exists() else None
    except ValueError as error:
        raise JournalError(f"{path} cannot be read ({error}); delete {folder} to start anew") from error


class Journal:
    """The rows of one evaluation.

    Args:
        folder: made when absent.
        identity: what the numbers depend on, plain values; rows of another identity are refused.
        resume: go on with the rows found. Without it, rows of an evaluation that was not finished are refused, and
            those of a finished one are replaced.
        share: (i, n): this process decodes the i-th of n shares.

    Attributes:
        drafted: prompt id -> decoding with the draft.
        plain: prompt id -> decoding without.

    Raises:
        JournalError: see `resume`, and rows of another evaluation: the message names every setting that differs.
    """

    def __init__(
        self, folder: Path, identity: Mapping[str, Any], *, resume: bool, share: tuple[int, int] = (0, 1)
    ) -> None:
        self.folder = folder
        self.drafted: dict[str, SampleResult] = {}
        self.plain: dict[str, PlainOutput] = {}
        self._identity = json.loads(json.dumps(identity))
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder, resume)
        found = _read_identity(folder)
        if found is None:
            self._write_identity(finished=False)
        else:
            self._check(found)
        for path in _row_files(folder):
            self._read(path)
        path = folder / f"rows-{share[0] + 1}-of-{share[1]}.jsonl"
        _drop_torn_line(path)
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def add_draft(self, sample: SampleResult) -> None:
        """A prompt has been decoded with the draft; the row is on disk when this returns."""
        self.drafted[sample.prompt] = sample
        self._write({"kind": "draft", **asdict(sample)})

    def add_plain(self, output: PlainOutput) -> None:
        """A prompt has been decoded without the draft."""
        self.plain[output.prompt] = output
        self._write({"kind": "plain", **asdict(output)})

    def finish(self) -> None:
        """Everything is decoded: the next evaluation here starts anew."""
        self._write_identity(finished=True)

    def close(self) -> None:
        """Closes the file; the rows stay."""
        self._file.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(row) + "\n")

    def _write_identity(self, finished: bool) -> None:
        partial = self.folder / f".{IDENTITY}.partial-{os.getpid()}"
        partial.write_text(json.dumps({"finished": finished, "identity": self._identity}, indent=1) + "\n")
        os.replace(partial, self.folder / IDENTITY)

    def _check(self, found: Mapping[str, Any]) -> None:
        theirs, ours = found["identity"], self._identity
        differs = [
            f"{name} was {theirs.get(name)!r}, now {ours.get(name)!r}"
            for name in sorted(theirs.keys() | ours.keys())
            if theirs.get(name) != ours.get(name)
        ]
        if differs:
            raise JournalError(
                f"{self.folder} was written by another evaluation and cannot be resumed: {'; '.join(differs)}. Give "
                "the settings it began with, or another --output"
            )

    def _read(self, path: Path) -> None:
        for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):  # what follows the last \n is torn
            try:
                row = json.loads(line)
                kind = row.pop("kind")
                if kind == "draft":
                    sample = _sample(row)
                    self.drafted[sample.prompt] = sample
                else:
                    output = PlainOutput(**{**row, "seconds": Seconds(**row["seconds"])})
                    self.plain[output.prompt] = output
            except (ValueError, KeyError, TypeError) as error:
                raise JournalError(f"{path} line {number} is no row of an evaluation: {error}") from error


def _sample(row: dict[str, Any]) -> SampleResult:
    rounds = [_round(item) for item in row["rounds"]]
    seconds = {name: Seconds(**row[name]) for name in ("seconds", "plain_seconds") if row[name] is not None}
    return SampleResult(**{**row, "rounds": rounds, **seconds})


def _round(item: dict[str, Any]) -> Round:
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in item.items()}
    return Round(**fields)


def _drop_torn_line(path: Path) -> None:
    """A line cut off by a kill is not a row: it goes, so that the next one starts a line."""
    if not path.exists():
        return
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
