"""The files of a run: answered rows, rows left out, and what the run was. Rows are appended whole, never rewritten.

Beside ROWS.jsonl stand ROWS.jsonl.errors (rows left out, a line each) and ROWS.jsonl.run (model and options). No reader
of training data takes these names, so a folder of rows can be trained on as it is.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from .account import Account
from .id_set import IdSet


class OutputError(ValueError):
    """Files that this run cannot write or go on with; the message says why."""


class Output:
    """Opens, repairs and extends the files of a run.

    Args:
        path: of the answered rows.
        identity: what the answers depend on, flat and plain.
        told: further facts that are written down and not compared.
        resume: go on with what is there; without it used files are refused.
        retry_errors: take rows that ended in an error off the errors file, so that they are asked for again.
        account: counts what is found and what is written.
        say: takes a line for the user.

    Raises:
        OutputError: used files without `resume`, files of another run or that hold something else, files in use.
    """

    def __init__(
        self,
        path: str | Path,
        identity: Mapping[str, Any],
        told: Mapping[str, Any],
        account: Account,
        say: Callable[[str], None],
        *,
        resume: bool = False,
        retry_errors: bool = False,
    ):
        self.path = Path(path)
        self.errors_path = self.path.with_name(self.path.name + ".errors")
        self.run_path = self.path.with_name(self.path.name + ".run")
        self.account = account
        self._say = say
        self._ids = IdSet()
        self._rows = IdSet()
        self._refused = IdSet()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._row_file = _locked(self.path)
        try:
            self._begin(dict(identity), dict(told), resume)
            if retry_errors:
                self._forget_errors()
            self._scan()
            self._error_file = _appended(self.errors_path)
        except BaseException:
            self._row_file.close()
            raise

    def settled(self, row_id: str, source: str) -> bool:
        """Whether a row was answered or left out before.

        Raises:
            OutputError: the id was, with another conversation behind it.
        """
        if f"{row_id}\0{source}" in self._rows:
            return True
        if row_id in self._ids:
            raise OutputError(
                f"row {row_id!r} of the input is not the one that {self.path} answered: the input has changed. Give "
                "the input it began with, or another --output"
            )
        return False

    def write_row(self, row: Mapping[str, Any]) -> None:
        """Appends an answered row; it is on its way to the disk when this returns, a killed process loses none."""
        self._note(row["id"], row["regenerated"]["source"])
        _append(self._row_file, row)
        self.account.count_row(row)

    def write_left_out(self, entry: Mapping[str, Any]) -> None:
        """Appends a line to the errors file. A refused row has no id of its own: it is written once a place."""
        if entry["kind"] == "refused":
            if not self._refused.add(entry["id"]):
                return
        else:
            self._note(entry["id"], entry["source"])
        _append(self._error_file, entry)
        self.account.count_left_out(entry)

    def close(self) -> None:
        """Puts everything on the disk."""
        for file in (self._row_file, self._error_file):
            os.fsync(file.fileno())
            file.close()

    def _note(self, row_id: str, source: str) -> None:
        if not self._ids.add(row_id):
            raise OutputError(f"{self.path}: id {row_id!r} is written twice")
        self._rows.add(f"{row_id}\0{source}")

    def _begin(self, identity: dict[str, Any], told: dict[str, Any], resume: bool) -> None:
        used = [p for p in (self.path, self.errors_path, self.run_path) if p.exists() and p.stat().st_size]
        if used and not resume:
            raise OutputError(f"{used[0]} exists: go on with --resume, or give another --output")
        if self.run_path in used:
            _compare(self.run_path, identity)
        elif used:
            raise OutputError(
                f"{used[0]} has no {self.run_path.name} that says what wrote it, so it cannot be resumed; give another "
                "--output"
            )
        else:
            text = json.dumps({"identity": identity, **told}, indent=1, ensure_ascii=False) + "\n"
            _replace(self.run_path, [text.encode()])

    def _forget_errors(self) -> None:
        if self.errors_path.exists():
            _drop_torn_line(self.errors_path, self._say)
            _replace(self.errors_path, (_line(e) for e in _lines(self.errors_path) if e.get("kind") != "error"))

    def _scan(self) -> None:
        for path in (self.path, self.errors_path):
            if not path.exists():
                continue
            _drop_torn_line(path, self._say)
            for number, row in enumerate(_lines(path), 1):
                try:
                    if path == self.path:
                        self._note(row["id"], row["regenerated"]["source"])
                        self.account.count_row(row)
                    elif row["kind"] == "refused":
                        self._refused.add(row["id"])
                        self.account.count_left_out(row)
                    else:
                        self._note(row["id"], row["source"])
                        self.account.count_left_out(row)
                except (KeyError, TypeError, AttributeError) as error:
                    raise OutputError(f"{path} line {number} is no row of this program: {error!r}") from error


def _appended(path: Path) -> FileIO:
    return open(path, "ab", buffering=0)


def _locked(path: Path) -> FileIO:
    """Opens the rows for this process alone, until they are closed or the process ends."""
    file = _appended(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise OutputError(f"{path} is being written by another process; let it finish or stop it first") from error
    return file


def _compare(path: Path, identity: Mapping[str, Any]) -> None:
    try:
        found = json.loads(path.read_text())["identity"]
    except (ValueError, KeyError, TypeError) as error:
        raise OutputError(f"{path} cannot be read ({error!r}); give another --output") from error
    identity = json.loads(json.dumps(identity))
    differs = [
        f"{name} was {found.get(name)!r}, now {identity.get(name)!r}"
        for name in sorted(found.keys() | identity.keys())
        if found.get(name) != identity.get(name)
    ]
    if differs:
        raise OutputError(
            f"{path.with_suffix('')} was written under other options and cannot be resumed: {'; '.join(differs)}. Give "
            "those it began with, or another --output"
        )


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")  # JSON's own escapes


def _append(file: FileIO, row: Mapping[str, Any]) -> None:
    data = _line(row)
    while data:  # an unbuffered write may take a part only
        data = data[file.write(data) :]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise OutputError(
                    f"{path} line {number} is not JSON ({error}); repair it or give another --output"
                ) from error
            if not isinstance(row, dict):
                raise OutputError(f"{path} line {number} is no row of this program")
            yield row


def _drop_torn_line(path: Path, say: Callable[[str], None]) -> None:
    """A line cut off by a kill is not a row: it goes, so that the next one starts a line; it is asked for again."""
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        at, whole = end, 0
        while at and not whole:
            start = max(0, at - (1 << 20))
            file.seek(start)
            found = file.read(at - start).rfind(b"\n")
            whole, at = (start + found + 1, at) if found >= 0 else (0, start)
        if whole != end:
            file.truncate(whole)
            say(f"{path}: a last line of {end - whole} bytes was cut off by a kill and is removed")


def _replace(path: Path, data: Iterable[bytes]) -> None:
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        file.writelines(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
