"""Where records come from: JSON lines, Parquet files and datasets of the hub, all read as a stream."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from .files import Place, find_files, read_lines
from .summary import DataError

HUB = "hf://"
#: One record: the bytes of a JSON object, or a row of a column store.
Record = bytes | Mapping[str, Any]
_HUB_OPTIONS = ("split", "name", "revision")


@dataclass(frozen=True)
class Source:
    """The records of a dataset.

    Attributes:
        path: as given.
        parts: what is read, in order: files as seen from `root`, or the hub dataset.
        ignored: files found beside them that no reader exists for.
        root: the folder of the files; None for a hub dataset.
    """

    path: str
    parts: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    root: Path | None = None

    def records(self) -> Iterator[tuple[Place, Record]]:
        """Every record with its place, in an order that depends on names and content alone.

        No more than one batch of one file is held in memory.

        Raises:
            DataError: a part cannot be read to its end.
        """
        for part in self.parts:
            yield from self.part(part)

    def part(self, part: str) -> Iterator[tuple[Place, Record]]:
        """The records of one of `parts`."""
        if self.root is None:
            return _hub_records(part)
        if part.endswith(".parquet"):
            return _parquet_records(self.root, part)
        return read_lines(self.root, [part])


def open_source(path: str) -> Source:
    """Finds out what a data.path means; reads nothing yet.

    Raises:
        DataError: nothing is there, or nothing that can be read.
    """
    if str(path).startswith(HUB):
        _hub_arguments(path)
        return Source(path, (path,))
    files = find_files(path)
    return Source(str(path), files.names, files.ignored, files.root)


def _parquet_records(root: Path, name: str, batch_rows: int = 1024) -> Iterator[tuple[Place, Record]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{root / name} needs pyarrow: pip install 'draft-jax[data]'") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(root / name) as file:
            for batch in file.iter_batches(batch_rows):
                for row in batch.to_pylist():
                    number += 1
                    yield Place(name, number), row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{root / name} cannot be read past row {number}: {error}") from error


def _hub_arguments(path: str) -> dict[str, Any]:
    """hf://NAME?split=...&name=...&revision=... -> arguments of datasets.load_dataset."""
    name, _, query = path.removeprefix(HUB).partition("?")
    if not name:
        raise DataError(f"data.path {path} names no dataset; give hf://owner/name?split=train")
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(set(options) - set(_HUB_OPTIONS))
    if unknown or not all(options.values()):
        raise DataError(
            f"data.path {path}: {', '.join(unknown) or 'an option is empty'}; options are {', '.join(_HUB_OPTIONS)}"
        )
    return {"path": name, "split": "train", **options}


def _hub_records(path: str) -> Iterator[tuple[Place, Record]]:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"data.path {path} needs the datasets library: pip install 'draft-jax[data]'") from error
    number = 0
    try:
        for number, row in enumerate(datasets.load_dataset(streaming=True, **_hub_arguments(path)), start=1):
            yield Place(path.partition("?")[0], number), row
    except DataError:
        raise
    except Exception as error:  # the library raises errors of many kinds, its own and those of what it reads with
        raise DataError(
            f"data.path {path} cannot be read past row {number}: {type(error).__name__}: {error}"
        ) from error
