"""A folder of prepared samples: Arrow shards that are mapped, never loaded, and `prepared.json` with all about them."""

import json
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import numpy as np

from .chunks import PlacedSample
from .config import DataConfig
from .identity import data_facts, key_of, way_facts
from .samples import Sample
from .summary import DataError, Summary

MANIFEST = "prepared.json"
FORMAT = 1
_KEY_CHARACTERS = 24  # of the key in a folder's name
_OPEN_SHARDS = 64  # mapped at a time: each takes a file handle


class PreparedSamples(Sequence[Sample]):
    """The samples of a prepared folder, in order. One is read when it is asked for, its arrays are views of the file.

    Attributes:
        fingerprint: as `rows.fingerprint` of these samples, stored when they were made.
    """

    def __init__(self, folder: Path, shards: Sequence[tuple[str, int]], fingerprint: str = ""):
        """Args: shards: names of the files and how many samples each holds."""
        self.fingerprint = fingerprint
        self._folder = folder
        self._names = [name for name, _ in shards]
        self._ends = np.cumsum([count for _, count in shards], dtype=np.int64)
        self._shard = lru_cache(_OPEN_SHARDS)(self._map)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shard = int(np.searchsorted(self._ends, index, side="right"))
        begin = int(self._ends[shard - 1]) if shard else 0
        return self._shard(shard).sample(index - begin)

    def __iter__(self) -> Iterator[Sample]:
        for shard in range(len(self._names)):
            rows = self._map(shard)  # one at a time: who goes through all of them comes back to none
            for row in range(len(rows)):
                yield rows.sample(row)

    def _map(self, shard: int) -> "_Shard":
        rows = open_shard(self._folder / self._names[shard])
        expected = int(self._ends[shard] - (self._ends[shard - 1] if shard else 0))
        if len(rows) != expected:
            raise DataError(f"{self._folder / self._names[shard]} holds {len(rows)} samples, {expected} were written")
        return rows


class _Shard:
    """One Arrow file, mapped."""

    def __init__(self, table: Any):
        self._names = table.column("id").chunk(0) if table.num_rows else ()
        self.contents = table.column("content").to_numpy()
        self._ids, self._offsets = self._list(table, "input_ids")
        self._masks, _ = self._list(table, "loss_mask")
        self._rows = table.num_rows

    @staticmethod
    def _list(table: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
        if not table.num_rows:
            return np.zeros(0, np.int32), np.zeros(1, np.int64)
        column = table.column(name).chunk(0)
        return column.values.to_numpy(zero_copy_only=True), column.offsets.to_numpy(zero_copy_only=True)

    def __len__(self) -> int:
        return self._rows

    def sample(self, row: int) -> Sample:
        begin, end = self._offsets[row], self._offsets[row + 1]
        return Sample(self._names[row].as_py(), self._ids[begin:end], self._masks[begin:end])

    def names(self) -> list[str]:
        return [name.as_py() for name in self._names]


def open_shard(path: Path) -> _Shard:
    """Maps a shard.

    Raises:
        DataError: it is missing or broken, or pyarrow is.
    """
    pyarrow = require_pyarrow()
    try:
        return _Shard(pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all())
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}; prepare the data anew into another folder") from error


def write_shard(path: Path, samples: Sequence[PlacedSample]) -> None:
    """Writes samples as one record batch, whole or not at all."""
    pyarrow = require_pyarrow()
    lengths = [len(item.judged.sample.input_ids) for item in samples]
    offsets = pyarrow.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), pyarrow.int64())

    def column(arrays: list[np.ndarray], dtype: type) -> Any:
        values = np.concatenate([np.asarray(a, dtype) for a in arrays]) if arrays else np.zeros(0, dtype)
        return pyarrow.LargeListArray.from_arrays(offsets, pyarrow.array(values))

    batch = pyarrow.record_batch(
        {
            "id": pyarrow.array([item.judged.sample.id for item in samples], pyarrow.large_string()),
            "place": pyarrow.array([item.place for item in samples], pyarrow.large_string()),
            "content": pyarrow.array(np.array([item.content for item in samples], np.uint64)),
            "input_ids": column([item.judged.sample.input_ids for item in samples], np.int32),
            "loss_mask": column([item.judged.sample.loss_mask for item in samples], np.int8),
        }
    )
    part = path.with_name(path.name + ".part")
    with pyarrow.OSFile(str(part), "wb") as file, pyarrow.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)
    os.replace(part, path)


def require_pyarrow() -> Any:
    """The module, with its ipc part. Raises DataError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise DataError("prepared data need pyarrow: pip install 'draft-jax[data]'") from error
    return pyarrow


def write_json(path: Path, value: Any) -> None:
    """Writes JSON, whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def is_prepared(path: str | Path) -> bool:
    """Whether a data.path is a finished prepared folder."""
    return (Path(path) / MANIFEST).is_file()


def open_prepared(folder: Path) -> tuple[PreparedSamples, Summary]:
    """Maps the samples of a finished folder; with the account of them.

    Raises:
        DataError: it is none, or was made by another version.
    """
    manifest = _manifest(folder)
    shards = [(shard["name"], shard["samples"]) for shard in manifest["shards"]]
    summary = Summary.from_json(manifest["summary"])
    summary.source = f"{summary.source}, prepared in {folder}"
    return PreparedSamples(folder, shards, manifest["fingerprint"]), summary


def folder_for(config: DataConfig, facts: dict[str, Any]) -> Path:
    """Where the data with these facts are kept unless another folder is named."""
    return Path(config.prepared) / key_of(facts)[:_KEY_CHARACTERS]


def find_prepared(config: DataConfig, tokenizer: Any, vocab_size: int) -> Path | None:
    """The prepared folder to train on: data.path itself, or one in data.prepared made of the same data in the same
    way; None if there is none.

    Raises:
        DataError: data.path is a prepared folder, but was made in another way: names what differs.
    """
    path = Path(config.path)
    if is_prepared(path):
        made, now = _manifest(path)["facts"], way_facts(config, tokenizer, vocab_size)
        differing = [
            f"{name} was {made.get(name)!r}, is {now.get(name)!r}"
            for name in sorted({*made, *now} - {"data"})
            if made.get(name) != now.get(name)
        ]
        if differing:
            raise DataError(
                f"data.path {path} was prepared in another way: {'; '.join(differing)}. Give the options it was"
                " prepared with, or prepare the data anew"
            )
        return path
    if not any(map(is_prepared, Path(config.prepared).glob("*"))):
        return None  # nothing to hash the data for
    try:
        facts = way_facts(config, tokenizer, vocab_size) | {"data": data_facts(config)}
    except DataError:
        return None  # data that may change, or cannot be read: who reads them will say so
    folder = folder_for(config, facts)
    return folder if is_prepared(folder) else None


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / MANIFEST} cannot be read: {error}; prepare the data anew") from error
    if manifest.get("format") != FORMAT:
        raise DataError(f"{folder} has format {manifest.get('format')}, this version reads {FORMAT}; prepare it anew")
    return manifest
