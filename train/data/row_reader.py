"""Records -> encoded rows: a pure function of a record, the tokenizer and the options.

A worker process makes one `RowReader` and calls it on any part of the data in any order; what comes back for a record
never depends on the others. Counting is done by who collects the results (`account_for`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .agreement import Agreement, choose_template, template_variables
from .config import DataConfig
from .encoding import LONGEST_TEXT, Encoded, Encoder, encode_plain_texts
from .files import Place
from .formats import Conversation, PlainText, RowRefused, TokenRow, parse_row
from .sources import Record
from .summary import DataError, Summary


@dataclass(frozen=True)
class ReadRow:
    """What became of one record.

    Attributes:
        place: of the record.
        id: its own, or its place.
        rows: its encoded rows; none if it was refused. All but the last end with an earlier assistant turn.
        refused: why there are none.
    """

    place: Place
    id: str
    rows: list[Encoded]
    refused: RowRefused | None = None

    def row_id(self, row: Encoded) -> str:
        """The id of one of the rows: that of the record, with the turn if it is not the last one."""
        return self.id if row.turn is None else f"{self.id}#turn{row.turn}"


class RowReader:
    """Parses, renders, tokenises and masks. The encoder is made when the first conversation comes, so rows of ids need
    neither tokenizer nor template."""

    def __init__(self, config: DataConfig, tokenizer: Any, vocab_size: int):
        """Args: config: what to read and how; tokenizer: of the target, or None; vocab_size: of the target."""
        self._config = config
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._longest_text = max(LONGEST_TEXT, 64 * config.max_length)
        self._encoder: Encoder | None = None
        self._agreement: Agreement | None = None
        self._template_name = ""

    def read(self, records: Sequence[tuple[Place, Record]]) -> list[ReadRow]:
        """One result a record, in order.

        Raises:
            DataError: there are conversations but no tokenizer, or one that cannot be used.
            TemplateError: the chat template is unfit, see `choose_template` and `Agreement`.
        """
        parsed: list[Conversation | PlainText | TokenRow | RowRefused] = []
        for place, record in records:
            try:
                parsed.append(
                    parse_row(
                        record,
                        place,
                        row_format=self._config.format,
                        leading_assistant=self._config.leading_assistant,
                        vocab_size=self._vocab_size,
                    )
                )
            except RowRefused as refused:
                parsed.append(refused)
        chats = [row for row in parsed if isinstance(row, Conversation)]
        texts = [row for row in parsed if isinstance(row, PlainText)]
        if (chats or texts) and self._tokenizer is None:
            raise DataError("the data holds text, but there is no tokenizer to make ids of it")
        encoded_chats = iter(self._get_encoder().encode(chats) if chats else ())
        encoded_texts = iter(
            encode_plain_texts(self._tokenizer, texts, self._vocab_size, self._longest_text) if texts else ()
        )
        results = []
        for (place, _), row in zip(records, parsed):
            result: list[Encoded] | RowRefused
            if isinstance(row, Conversation):
                result = next(encoded_chats)
            elif isinstance(row, PlainText):
                result = next(encoded_texts)
            elif isinstance(row, TokenRow):
                result = [Encoded(row.input_ids, row.loss_mask)]
            else:
                result = row
            name = str(place) if isinstance(row, RowRefused) else row.id
            if isinstance(result, RowRefused):
                results.append(ReadRow(place, name, [], result))
            else:
                results.append(ReadRow(place, name, result))
        return results

    def _get_encoder(self) -> Encoder:
        if self._encoder is None:
            config = self._config
            variables = template_variables(
                self._tokenizer, config.enable_thinking, config.template_options, config.date
            )
            template = choose_template(config.template, self._tokenizer, variables=variables, markers=config.markers)
            if config.verify_template:
                self._agreement = Agreement(template, self._tokenizer, variables=variables)
            self._template_name = template.name
            self._encoder = Encoder(
                template,
                self._tokenizer,
                self._vocab_size,
                self._agreement,
                history=config.history,
                marker_text=config.marker_text,
                longest_text=self._longest_text,
            )
        return self._encoder

    @property
    def rendered(self) -> bool:
        """Whether a conversation was rendered with a chat template."""
        return self._encoder is not None

    @property
    def compared(self) -> tuple[int, int]:
        """Rows compared with the tokenizer's own template so far, by text and by ids."""
        return (self._agreement.texts, self._agreement.ids) if self._agreement is not None else (0, 0)

    def describe_template(self, texts: int, ids: int) -> str:
        """One line for the summary: which template, and on how many rows it was checked, by text and by ids."""
        self._get_encoder()
        if self._agreement is None:
            return f"{self._template_name} (not compared with the tokenizer's own: data.verify_template=false)"
        return self._agreement.describe(texts, ids)


def account_for(row: ReadRow, summary: Summary) -> None:
    """Counts a record and what was noted about it; the samples made of its rows are counted by who makes them."""
    summary.rows += 1
    if row.refused is not None:
        refused = row.refused
        summary.refuse(refused.reason, f"{row.place}, {refused.detail}" if refused.detail else str(row.place))
    summary.fanned_out += max(0, len(row.rows) - 1)
    for encoded in row.rows:
        for name, count in encoded.notes.items():
            summary.note(name, str(row.place), count)
