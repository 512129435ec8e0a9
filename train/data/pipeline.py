"""The whole way from files to samples, with its account."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from .agreement import Agreement, choose_template
from .config import DataConfig
from .encoding import Encoded, Encoder
from .files import Place, find_files, read_lines
from .formats import Conversation, RowRefused, TokenRow, parse_row
from .rows import HostBatch, RowDocument, RowIterator
from .samples import Sample, make_sample
from .summary import DataError, Summary

__all__ = ["HostBatch", "PreparedData", "RowDocument", "RowIterator", "Sample", "load_dataset"]

Row = Conversation | TokenRow
_BATCH = 256  # conversations tokenised at a time


@dataclass(frozen=True)
class PreparedData:
    """Samples in the order of the files, and the account of what was read."""

    samples: Sequence[Sample]
    summary: Summary


def load_dataset(config: DataConfig, tokenizer: Any, vocab_size: int) -> PreparedData:
    """Reads, renders, tokenises, masks and judges every row.

    The result depends on the files' names and content, the tokenizer and the options only, so every process
    of a run may call it for itself.

    Args:
        config: what to read and how.
        tokenizer: of the target; None will do if all rows arrive as ids.
        vocab_size: of the target; rows with an id at or above it are refused.

    Raises:
        DataError: there is nothing to train on (the message holds the account), or a file cannot be read.
        TemplateError: the chat template is unfit, see `choose_template` and `Agreement`.
    """
    files = find_files(config.path)
    summary = Summary(source=config.path)
    for name in files.ignored:
        summary.note("files of other kinds, not read", name)
    reader = _Reader(config, tokenizer, vocab_size, summary)
    samples: list[Sample] = []
    for row, encoded in reader.encoded(islice(read_lines(files.root, files.names), config.limit)):
        judged = make_sample(
            reader.unique_id(row),
            encoded.input_ids,
            encoded.loss_mask,
            max_length=config.max_length,
            min_loss_tokens=config.min_loss_tokens,
        )
        if judged.truncated:
            summary.truncated.add(f"{row.place}, {len(encoded.input_ids):,} tokens")
        if judged.zeroed:
            summary.zero(judged.zeroed, str(row.place))
        samples.append(judged.sample)
        summary.samples += 1
        summary.tokens += len(judged.sample.input_ids)
        summary.supervised_tokens += int(judged.sample.loss_mask.sum())
        summary.longest = max(summary.longest, len(judged.sample.input_ids))
    summary.template = reader.describe_template()
    if summary.rows == 0:
        raise DataError(f"data.path {config.path} holds no rows; empty: {', '.join(files.names)}")
    if summary.kept == 0:
        raise DataError(
            f"nothing to train on in {config.path}: every row was refused or has too few supervised tokens\n"
            + summary.format()
        )
    return PreparedData(samples, summary)


class _Reader:
    """Lines -> rows with ids and masks, in order; counts what it refuses and notes. The encoder is made when
    the first conversation comes, so rows of ids need neither tokenizer nor template."""

    def __init__(self, config: DataConfig, tokenizer: Any, vocab_size: int, summary: Summary):
        self._config = config
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._summary = summary
        self._encoder: Encoder | None = None
        self._agreement: Agreement | None = None
        self._template_name = ""
        self._ids: set[str] = set()

    def encoded(self, lines: Iterable[tuple[Place, bytes]]) -> Iterator[tuple[Row, TokenRow | Encoded]]:
        rows = self._parsed(lines)
        while batch := list(islice(rows, _BATCH)):
            conversations = [row for row in batch if isinstance(row, Conversation)]
            results = iter(self._get_encoder().encode(conversations) if conversations else ())
            for row in batch:
                result = row if isinstance(row, TokenRow) else next(results)
                if isinstance(result, RowRefused):
                    self._refuse(result, row.place)
                    continue
                if isinstance(result, Encoded):
                    for name, count in result.notes.items():
                        self._summary.note(name, str(row.place), count)
                yield row, result

    def _parsed(self, lines: Iterable[tuple[Place, bytes]]) -> Iterator[Row]:
        for place, line in lines:
            self._summary.rows += 1
            try:
                row = parse_row(
                    line,
                    place,
                    row_format=self._config.format,
                    leading_assistant=self._config.leading_assistant,
                    vocab_size=self._vocab_size,
                )
            except RowRefused as refused:
                self._refuse(refused, place)
            else:
                yield row

    def _refuse(self, refused: RowRefused, place: Place) -> None:
        self._summary.refuse(refused.reason, f"{place}, {refused.detail}" if refused.detail else str(place))

    def _get_encoder(self) -> Encoder:
        if self._encoder is None:
            if self._tokenizer is None:
                raise DataError("the data holds conversations, but there is no tokenizer to make ids of them")
            thinking = self._config.enable_thinking
            template = choose_template(self._config.template, self._tokenizer, thinking)
            if self._config.verify_template:
                self._agreement = Agreement(template, self._tokenizer, thinking)
            self._template_name = template.name
            self._encoder = Encoder(template, self._tokenizer, self._vocab_size, self._agreement)
        return self._encoder

    def unique_id(self, row: Row) -> str:
        """The row's id; one that was seen before gets its place added."""
        name = row.id
        if name in self._ids:
            self._summary.note("ids that occur twice, made unique", f"{row.place}, id {name}")
            name = f"{name}@{row.place}"
        self._ids.add(name)
        return name

    def describe_template(self) -> str:
        if self._encoder is None:
            return "none needed"
        if self._agreement is None:
            return f"{self._template_name} (not compared with the tokenizer's own: data.verify_template=false)"
        return self._agreement.describe()
