"""The whole way from files to samples, with its account."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from .chunks import ChunkReader, Collector
from .config import DataConfig
from .files import Place
from .prepared import find_prepared, open_prepared
from .retention import require_retention
from .rows import HostBatch, RowDocument, RowIterator
from .samples import Sample
from .sources import Record, open_source
from .summary import DataError, Summary

__all__ = ["HostBatch", "PreparedData", "RowDocument", "RowIterator", "Sample", "load_dataset", "stream_samples"]

CHUNK_ROWS = 256  # records read at a time,
CHUNK_BYTES = 2**20  # or fewer, if they are this long together: memory is bounded by bytes, whatever the rows


@dataclass(frozen=True)
class PreparedData:
    """Samples in the order of the files, and the account of what was read."""

    samples: Sequence[Sample]
    summary: Summary


def read_records(config: DataConfig, summary: Summary) -> Iterator[tuple[Place, Record] | None]:
    """The records of a dataset that take part, and None for each that was not sampled.

    Args:
        config: what to read.
        summary: told of files that no reader exists for.

    Raises:
        DataError: a file cannot be read.
    """
    source = open_source(config.path)
    for name in source.ignored:
        summary.note("files of other kinds, not read", name)
    for place, record in islice(source.records(), config.limit):
        yield (place, record) if is_sampled(record, config.sample_share, config.sample_seed) else None


def is_sampled(record: Record, share: float, seed: int) -> bool:
    """Whether a record is among the chosen ones: decided by its content and the seed alone."""
    if share >= 1:
        return True
    data = record if isinstance(record, bytes) else json.dumps(record, sort_keys=True, default=str).encode()
    digest = hashlib.blake2b(data.strip(), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def chunks_of(
    records: Iterator[tuple[Place, Record] | None], size: int = CHUNK_ROWS, most_bytes: int = CHUNK_BYTES
) -> Iterator[tuple[list[tuple[Place, Record]], int]]:
    """Runs of `size` records, or of fewer that hold `most_bytes`: those that take part, and how many do not."""
    chosen: list[tuple[Place, Record]] = []
    left_out = held = 0
    for item in records:
        if item is None:
            left_out += 1
        else:
            chosen.append(item)
            held += _bytes_of(item[1])
        if len(chosen) + left_out == size or held >= most_bytes:
            yield chosen, left_out
            chosen, left_out, held = [], 0, 0
    if chosen or left_out:
        yield chosen, left_out


def _bytes_of(value: Any) -> int:
    """About how much a record holds."""
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_bytes_of, value.values()))
    if isinstance(value, list):
        return 8 * len(value) if value and isinstance(value[0], int) else sum(map(_bytes_of, value))
    return 8


def stream_samples(config: DataConfig, tokenizer: Any, vocab_size: int, summary: Summary) -> Iterator[Sample]:
    """Reads, renders, tokenises, masks and judges record after record.

    Memory does not grow with the data but for two hashes a sample, by which duplicates and ids that occur twice are
    found.

    Args:
        config: what to read and how.
        tokenizer: of the target; None will do if all rows arrive as ids.
        vocab_size: of the target; rows with an id at or above it are refused.
        summary: filled as the stream is read.

    Raises:
        DataError: a file cannot be read.
        TemplateError: the chat template is unfit, see `choose_template` and `Agreement`.
    """
    reader = ChunkReader(config, tokenizer, vocab_size)
    collector = Collector(config, summary)
    for records, left_out in chunks_of(read_records(config, summary)):
        summary.not_sampled += left_out
        for item in collector.add(reader.read(records)):
            yield item.judged.sample
        if collector.rendered:
            summary.template = reader.describe_template(collector.texts, collector.ids)


def load_dataset(config: DataConfig, tokenizer: Any, vocab_size: int) -> PreparedData:
    """A whole dataset: mapped from what `draft-jax prepare` made of it, if that is there, else read into memory.

    The result depends on the files' names and content, the tokenizer and the options only, so every process
    of a run may call it for itself.

    Args:
        config, tokenizer, vocab_size: see `stream_samples`.

    Raises:
        DataError: there is nothing to train on or less than data.min_retention (the message holds the account), a
            file cannot be read, or a prepared folder was made with other options.
        TemplateError: the chat template is unfit, see `choose_template` and `Agreement`.
    """
    folder = find_prepared(config, tokenizer, vocab_size)
    if folder is not None:
        prepared, summary = open_prepared(folder)
        check_account(config, summary)
        return PreparedData(prepared, summary)
    summary = Summary(source=config.path)
    samples = list(stream_samples(config, tokenizer, vocab_size, summary))
    check_account(config, summary)
    return PreparedData(samples, summary)


def check_account(config: DataConfig, summary: Summary) -> None:
    """Refuses a dataset that leaves nothing, or less than was asked for, to learn from.

    Raises:
        DataError: with the account.
    """
    if summary.rows == 0:
        if summary.not_sampled:
            raise DataError(f"none of the {summary.not_sampled:,} rows of {config.path} was sampled; raise the share")
        raise DataError(f"data.path {config.path} holds no rows; empty: {', '.join(open_source(config.path).parts)}")
    if summary.kept == 0:
        raise DataError(
            f"nothing to train on in {config.path}: every row was refused or has too few supervised tokens\n"
            + summary.format()
        )
    require_retention(summary, config.min_retention)
