"""The whole way from files to samples, with its account."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from .config import DataConfig
from .files import Place
from .row_reader import ReadRow, RowReader, account_for
from .rows import HostBatch, RowDocument, RowIterator
from .samples import Sample, make_sample
from .sources import open_source
from .summary import DataError, Summary

__all__ = ["HostBatch", "PreparedData", "RowDocument", "RowIterator", "Sample", "load_dataset", "stream_samples"]

_BATCH = 256  # records tokenised at a time


@dataclass(frozen=True)
class PreparedData:
    """Samples in the order of the files, and the account of what was read."""

    samples: Sequence[Sample]
    summary: Summary


def stream_samples(config: DataConfig, tokenizer: Any, vocab_size: int, summary: Summary) -> Iterator[Sample]:
    """Reads, renders, tokenises, masks and judges record after record; memory does not grow with the data.

    Sample ids are those of the data, so one that occurs twice there occurs twice here.

    Args:
        config: what to read and how.
        tokenizer: of the target; None will do if all rows arrive as ids.
        vocab_size: of the target; rows with an id at or above it are refused.
        summary: filled as the stream is read.

    Raises:
        DataError: a file cannot be read.
        TemplateError: the chat template is unfit, see `choose_template` and `Agreement`.
    """
    for _, sample in _placed_samples(config, tokenizer, vocab_size, summary):
        yield sample


def _placed_samples(
    config: DataConfig, tokenizer: Any, vocab_size: int, summary: Summary
) -> Iterator[tuple[Place, Sample]]:
    source = open_source(config.path)
    for name in source.ignored:
        summary.note("files of other kinds, not read", name)
    reader = RowReader(config, tokenizer, vocab_size)
    records = islice(source.records(), config.limit)
    while batch := list(islice(records, _BATCH)):
        for row in reader.read(batch):
            account_for(row, summary)
            for sample in _judged(row, config, summary):
                yield row.place, sample
        summary.template = reader.describe_template()


def _judged(row: ReadRow, config: DataConfig, summary: Summary) -> Iterator[Sample]:
    for encoded in row.rows:
        judged = make_sample(
            row.row_id(encoded),
            encoded.input_ids,
            encoded.loss_mask,
            max_length=config.max_length,
            min_loss_tokens=config.min_loss_tokens,
        )
        summary.count_sample(judged, str(row.place), len(encoded.input_ids))
        yield judged.sample


def load_dataset(config: DataConfig, tokenizer: Any, vocab_size: int) -> PreparedData:
    """Reads a whole dataset into memory.

    The result depends on the files' names and content, the tokenizer and the options only, so every process
    of a run may call it for itself.

    Args:
        config, tokenizer, vocab_size: see `stream_samples`.

    Raises:
        DataError: there is nothing to train on (the message holds the account), or a file cannot be read.
        TemplateError: the chat template is unfit, see `choose_template` and `Agreement`.
    """
    summary = Summary(source=config.path)
    samples: list[Sample] = []
    seen: set[str] = set()
    for place, sample in _placed_samples(config, tokenizer, vocab_size, summary):
        samples.append(_unique(sample, place, seen, summary))
    if summary.rows == 0:
        raise DataError(f"data.path {config.path} holds no rows; empty: {', '.join(open_source(config.path).parts)}")
    if summary.kept == 0:
        raise DataError(
            f"nothing to train on in {config.path}: every row was refused or has too few supervised tokens\n"
            + summary.format()
        )
    return PreparedData(samples, summary)


def _unique(sample: Sample, place: Place, seen: set[str], summary: Summary) -> Sample:
    """The sample under an id of its own: one that was seen before gets its place added."""
    if sample.id in seen:
        summary.note("ids that occur twice, made unique", f"{place}, id {sample.id}")
        sample = Sample(f"{sample.id}@{place}", sample.input_ids, sample.loss_mask)
    seen.add(sample.id)
    return sample
