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
_WITHOUT_NETWORK = (
    "fetch it where there is one (hf download {name} --repo-type dataset --local-dir FOLDER) and give data.path=FOLDER"
)


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


#: Rows of a Parquet file read at a time: so many, or as many as hold so many bytes.
_BATCH_ROWS, _BATCH_BYTES = 1024, 2**23


def _parquet_records(root: Path, name: str) -> Iterator[tuple[Place, Record]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{root / name} needs pyarrow: pip install 'draft-jax[data]'") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(root / name) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            longest = max((group.total_byte_size / max(1, group.num_rows) for group in groups), default=0.0)
            for batch in file.iter_batches(max(1, min(_BATCH_ROWS, int(_BATCH_BYTES / max(1.0, longest))))):
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
    arguments = _hub_arguments(path)
    split, revision = arguments.pop("split"), arguments.get("revision")
    try:
        builder = datasets.load_dataset_builder(**arguments)
        # Without network the library takes the newest copy of its cache, whatever revision was asked for.
        if revision and "packaged_modules.cache" in type(builder).__module__ and builder.hash != revision:
            raise DataError(
                f"data.path {path}: the hub cannot be reached, and the cached copy is of revision {builder.hash}; ask"
                f" for that one, or {_WITHOUT_NETWORK.format(name=arguments['path'])}"
            )
        for number, row in enumerate(builder.as_streaming_dataset(split=split), start=1):
            yield Place(path.partition("?")[0], number), row
    except DataError:
        raise
    except Exception as error:  # the library raises errors of many kinds, its own and those of what it reads with
        unreachable = isinstance(error, ConnectionError | FileNotFoundError)
        remedy = f". Without network {_WITHOUT_NETWORK.format(name=arguments['path'])}" if unreachable else ""
        raise DataError(
            f"data.path {path} cannot be read past row {number}: {type(error).__name__}: {error}{remedy}"
        ) from error
