"""Which files a dataset consists of, and their lines."""

import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .summary import DataError

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


@dataclass(frozen=True)
class Place:
    """Where a row stands: the file as seen from the dataset's folder, and its line, counted from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class DataFiles:
    """The files of a dataset.

    Attributes:
        root: the folder that the names below are relative to, so that names are the same on every machine.
        names: files that are read, in order.
        ignored: files found beside them that no reader exists for.
    """

    root: Path
    names: tuple[str, ...]
    ignored: tuple[str, ...]


def find_files(path: str | Path) -> DataFiles:
    """Lists the files of a dataset in an order that depends on their names alone.

    Args:
        path: a file, or a folder that is searched in depth.

    Raises:
        DataError: nothing is there, or nothing that can be read.
    """
    path = Path(path)
    kinds = " or ".join(SUFFIXES)
    if path.is_file():
        if not path.name.endswith(SUFFIXES):
            raise DataError(f"data.path {path} is not a {kinds} file; convert it to one conversation a line or row")
        return DataFiles(path.parent, (path.name,), ())
    if not path.is_dir():
        raise DataError(f"data.path {path} does not exist; give a {kinds} file or a folder of them")
    found = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    names = tuple(name for name in found if name.endswith(SUFFIXES))
    if not names:
        raise DataError(f"data.path {path} holds no {kinds} file (it holds {len(found)} files of other kinds)")
    return DataFiles(path, names, tuple(name for name in found if not name.endswith(SUFFIXES)))


def read_lines(root: Path, names: Sequence[str]) -> Iterator[tuple[Place, bytes]]:
    """Yields every line of JSON-lines files that is not blank with its place; holds only the current line in memory.

    Raises:
        DataError: a file cannot be read to its end, as a .gz that was cut off, or is no file of lines.
    """
    for name in names:
        if name.endswith(".parquet"):
            raise DataError(f"{root / name} is a Parquet file, lines are read from .jsonl and .jsonl.gz")
        opener = gzip.open if name.endswith(".gz") else open
        number = 0
        try:
            with opener(root / name, "rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield Place(name, number), line
        except (EOFError, zlib.error, OSError) as error:
            raise DataError(f"{root / name} cannot be read past line {number}: {error}") from error
