"""A record as the model sees it: its tokens, which of them are supervised, and what a server would send instead."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from .agreement import OwnTemplate, template_variables
from .config import DataConfig
from .files import Place
from .formats import Conversation, RowRefused, parse_row
from .row_reader import ReadRow, RowReader
from .samples import Judged, make_sample
from .sources import Record
from .templates import RenderError


@dataclass(frozen=True)
class TokenView:
    """A token, or several that make one character together.

    Attributes:
        text: as decoded.
        ids: of the tokens.
        supervised: whether all of them are.
        special: whether it is a special token.
    """

    text: str
    ids: tuple[int, ...]
    supervised: bool
    special: bool


@dataclass(frozen=True)
class ServedTurn:
    """The prompt that a server sends for one assistant turn, held against the training rows.

    Attributes:
        turn: counted from 1.
        prompt: what is sent, as text, generation prompt included; "" if the template refuses it.
        prompt_tokens: how many.
        row: index of the training row that begins with exactly these ids and supervises what comes next; None = none.
        verdict: in words.
    """

    turn: int
    prompt: str
    prompt_tokens: int
    row: int | None
    verdict: str


@dataclass(frozen=True)
class SampleView:
    """One training row: its tokens, and what `make_sample` said of it."""

    id: str
    tokens: list[TokenView]
    judged: Judged
    length: int
    notes: dict[str, int]


@dataclass(frozen=True)
class RecordView:
    """One record of the data.

    Attributes:
        place: where it stands.
        samples: its training rows; none if it was refused.
        served: every assistant turn as a server would meet it; none for rows of ids and plain text.
        refused: why there are no rows.
    """

    place: str
    samples: list[SampleView]
    served: list[ServedTurn]
    refused: str = ""


class Inspector:
    """Looks at records with the reader that training uses."""

    def __init__(self, config: DataConfig, tokenizer: Any, vocab_size: int):
        """See `RowReader`; the tokenizer is needed to show text, None shows ids."""
        self._config = config
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._reader = RowReader(config, tokenizer, vocab_size)
        self._special = set(tokenizer.added_tokens_decoder) if tokenizer is not None else set()
        self._own: OwnTemplate | None = None
        if tokenizer is not None and tokenizer.chat_template:
            variables = template_variables(tokenizer, config.enable_thinking, config.template_options, config.date)
            self._own = OwnTemplate(tokenizer, variables)

    def look(self, place: Place, record: Record) -> RecordView:
        """One record.

        Raises:
            TemplateError: the template is unfit; the message shows the first difference to the tokenizer's own.
        """
        (row,) = self._reader.read([(place, record)])
        if row.refused is not None:
            detail = f": {row.refused.detail}" if row.refused.detail else ""
            return RecordView(str(place), [], [], f"{row.refused.reason}{detail}")
        samples = [self._sample(row, i) for i in range(len(row.rows))]
        return RecordView(str(place), samples, self._served(place, record, row, samples))

    def _sample(self, row: ReadRow, index: int) -> SampleView:
        encoded, config = row.rows[index], self._config
        judged = make_sample(
            row.row_id(encoded),
            encoded.input_ids,
            encoded.loss_mask,
            max_length=config.max_length,
            min_loss_tokens=config.min_loss_tokens,
        )
        sample = judged.sample
        tokens = token_views(self._tokenizer, sample.input_ids, sample.loss_mask, self._special)
        return SampleView(sample.id, tokens, judged, len(encoded.input_ids), encoded.notes)

    def _served(self, place: Place, record: Record, row: ReadRow, samples: Sequence[SampleView]) -> list[ServedTurn]:
        try:
            conversation = parse_row(
                record,
                place,
                row_format=self._config.format,
                leading_assistant=self._config.leading_assistant,
                vocab_size=self._vocab_size,
            )
        except RowRefused:
            return []
        if not isinstance(conversation, Conversation):
            return []
        turns = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        return [self._turn(conversation, number, end, row, samples) for number, end in enumerate(turns, start=1)]

    def _turn(
        self, conversation: Conversation, number: int, end: int, row: ReadRow, samples: Sequence[SampleView]
    ) -> ServedTurn:
        if self._own is None:
            return ServedTurn(number, "", 0, None, "the tokenizer has no chat template, so a server has none either")
        try:
            prompt, ids = self._prompt(conversation, end)
        except RenderError as error:
            return ServedTurn(number, "", 0, None, f"the tokenizer's own template refuses the prompt: {error}")
        count = len(ids)
        found = [i for i, encoded in enumerate(row.rows) if encoded.input_ids[:count].tolist() == ids]
        taught = [i for i in found if count < len(row.rows[i].loss_mask) and row.rows[i].loss_mask[count]]
        if taught:
            verdict = "as served: the model's first token is supervised"
            if samples[taught[0]].judged.zeroed:
                verdict = "as served, but the mask of its row is zeroed"
            elif count >= len(samples[taught[0]].judged.sample.input_ids):
                verdict = "as served, but cut off by data.max_length"
            return ServedTurn(number, prompt, count, taught[0], verdict)
        if found:
            begun = row.rows[found[0]]
            behind = np.flatnonzero(begun.loss_mask[count:])
            if not len(behind):
                return ServedTurn(number, prompt, count, None, "same prompt, but the turn is not supervised")
            skipped = self._text(begun.input_ids[count : count + int(behind[0])])
            verdict = f"same prompt; supervised only behind {skipped!r}, which stands where the model starts to write"
            return ServedTurn(number, prompt, count, None, verdict)
        ours: list[int] = row.rows[-1].input_ids.tolist()
        at = next((i for i, (a, b) in enumerate(zip(ours, ids)) if a != b), min(len(ours), count))
        verdict = (
            f"differs at token {at}: training has {self._text(ours[at : at + 8])!r}, a server sends"
            f" {self._text(ids[at : at + 8])!r}; the turn is not trained on as it is served"
        )
        return ServedTurn(number, prompt, count, None, verdict)

    def _prompt(self, conversation: Conversation, end: int) -> tuple[str, list[int]]:
        """Text and ids of what a server sends before message `end`, by the tokenizer's own template."""
        assert self._own is not None
        own = self._own.of(conversation.tools)
        text = own.render(conversation.messages[:end], conversation.tools, prompt=True).text
        if own.reads_clock:  # apply_chat_template would write another date than data.date
            return text, self._tokenizer(text, add_special_tokens=False)["input_ids"]
        config = self._config
        switches = dict(config.template_options)
        if config.enable_thinking is not None:
            switches |= {"enable_thinking": config.enable_thinking, "thinking": config.enable_thinking}
        ids = self._tokenizer.apply_chat_template(
            own.messages_for(conversation.messages[:end]),
            tools=conversation.tools,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **switches,
        )["input_ids"]
        return text, list(ids)

    def _text(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._tokenizer.decode(list(map(int, ids)), clean_up_tokenization_spaces=False)


def token_views(tokenizer: Any, ids: np.ndarray, mask: np.ndarray, special: set[int]) -> list[TokenView]:
    """The tokens of a row with their text; tokens that hold a part of a character only are shown together.

    Args:
        tokenizer: None shows ids.
        ids: int [T].
        mask: 0 or 1, [T].
        special: ids of special tokens.
    """
    views: list[TokenView] = []
    if tokenizer is None:
        return [TokenView(f"{i} ", (int(i),), bool(m), False) for i, m in zip(ids, mask)]

    def decode(part: Sequence[int]) -> str:
        return tokenizer.decode(list(part), clean_up_tokenization_spaces=False) if len(part) else ""

    numbers, begin, before = ids.tolist(), 0, 0
    for end in range(1, len(numbers) + 1):
        context = numbers[before:begin]  # the token before, as some tokenizers drop a blank at the start of a text
        text = decode(numbers[before:end])[len(decode(context)) :]
        if text.endswith("\ufffd") and end < len(numbers) and end - begin < 8:
            continue
        group = tuple(numbers[begin:end])
        views.append(TokenView(text, group, bool(mask[begin:end].all()), group[0] in special))
        begin, before = end, end - 1
    return views


def choose(records: Iterable[tuple[Place, Record]], count: int, seed: int, scan: int) -> list[tuple[Place, Record]]:
    """`count` records out of the first `scan`, each set of them equally likely, in their order (reservoir sampling)."""
    generator = random.Random(seed)
    chosen: list[tuple[int, tuple[Place, Record]]] = []
    for number, item in enumerate(islice(records, scan)):
        if len(chosen) < count:
            chosen.append((number, item))
        elif (slot := generator.randrange(number + 1)) < count:
            chosen[slot] = (number, item)
    return [item for _, item in sorted(chosen, key=lambda pair: pair[0])]
