"""Conversations -> ids and exact masks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .agreement import Agreement
from .family_template import FamilyTemplate
from .formats import Conversation, PlainText, RowRefused, check_ids
from .masks import token_mask
from .served import ServedText, ServedTurns
from .summary import DataError
from .templates import ChatTemplate, RenderError, TemplateError

#: Most characters of a row: a tokenizer takes some 240 bytes for each, whatever is cut off afterwards.
LONGEST_TEXT = 2**21
MARKERS_IN_TEXT = "rows with special tokens inside a user, system or tool message"


@dataclass(frozen=True)
class Encoded:
    """One row as tokens.

    Attributes:
        input_ids: int32 [T].
        loss_mask: int8 [T] of 0 and 1.
        notes: name -> how often; things worth counting.
        turn: the assistant turn the row ends with, counted from 1, if it is not the conversation's last one.
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    notes: dict[str, int] = field(default_factory=dict)
    turn: int | None = None


class Encoder:
    """Renders with one template and tokenises with one tokenizer."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Any,
        vocab_size: int,
        agreement: Agreement | None,
        *,
        history: str = "fan_out",
        marker_text: str = "as_served",
        longest_text: int = LONGEST_TEXT,
    ):
        """Checks that the two can work together.

        Args:
            template: one that marks turns.
            tokenizer: a fast one: masks need its character offsets.
            vocab_size: of the target; a row with an id at or above it is refused.
            agreement: the check against the tokenizer's own template; None = not checked.
            history, marker_text: see DataConfig.
            longest_text: characters; a row with more is refused.

        Raises:
            DataError: the tokenizer is not a fast one.
            TemplateError: the template marks nothing.
        """
        require_offsets(tokenizer)
        if not template.marks_turns:
            raise TemplateError(f"chat template {template.name} has no generation marks")
        _ = template.generation_prompt  # fails here rather than at the first row
        self._template = template
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._agreement = agreement
        self._marker_text = marker_text
        self._longest_text = longest_text
        self._turns = ServedTurns(template, history)
        special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        # a newline may be a special token of a small vocabulary; markers are what nobody writes by accident
        text_markers = sorted((s for s in special if not s.isspace() and not s.isalnum()), key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, text_markers))) if text_markers else None
        known = tokenizer.get_vocab()
        markers = [known[token] for token in template.family.tokens if token in known] if template.family else []
        self._family_ids = np.asarray(markers, np.int64)

    def encode(self, conversations: Sequence[Conversation]) -> list[list[Encoded] | RowRefused]:
        """Encodes a batch; one result a conversation, in order: its rows (at least one), or the refusal.

        The result of a conversation depends on it and the options alone.

        Raises:
            TemplateError: the template is unfit for the tokenizer, see Agreement and ServedTurns.
        """
        texts: list[list[ServedText] | RowRefused] = []
        for conversation in conversations:
            try:
                texts.append(self._render(conversation))
            except RowRefused as refused:
                texts.append(refused)
            except RenderError as error:
                texts.append(RowRefused("refused by the chat template", str(error)))
        flat = [item.text for items in texts if isinstance(items, list) for item in items]
        # the template writes special tokens: never a second BOS
        tokens = iter(tokens_and_offsets(self._tokenizer, flat, add_special_tokens=False))
        results: list[list[Encoded] | RowRefused] = []
        for conversation, items in zip(conversations, texts):
            if isinstance(items, RowRefused):
                results.append(items)
                continue
            pairs = [(item, *next(tokens)) for item in items]
            try:
                results.append([self._mask(conversation, *pair) for pair in pairs])
            except RowRefused as refused:
                results.append(refused)
        return results

    def _render(self, conversation: Conversation) -> list[ServedText]:
        """The texts of a conversation's rows.

        Raises:
            RenderError, RowRefused: the row is no sample.
            TemplateError: marks and generation prompt contradict each other, nothing is marked, or the tokenizer's
                own template renders another text.
        """
        rows = self._turns.rows(conversation)
        for row in rows:
            _require_length(row.text, self._longest_text)
            try:
                row.text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise RowRefused("text is not valid Unicode", str(error)) from error
            if self._agreement is not None:
                self._agreement.check_text(conversation, row)
        self._check_messages(conversation, rows[-1])
        notes = rows[-1].notes
        if conversation.leading_dropped:
            notes["leading turns dropped before the first user turn"] = conversation.leading_dropped
        if conversation.tools and not self._template.reads_tools:
            notes["rows whose tools the template ignores"] = 1
        return rows

    def _check_messages(self, conversation: Conversation, last: ServedText) -> None:
        """Looks for special tokens inside messages: a server's tokenizer makes real ones of them, so do we.

        Raises:
            RowRefused: data.marker_text=refuse, or an answer holds the token that would have ended it.
        """
        if self._marker is None:
            return
        written = last.text[: last.spans[-1][1]] if last.spans else ""
        stop = next((found[0] for found in self._marker.finditer(written, max(0, len(written) - 64))
                     if found.end() == len(written)), None)  # fmt: skip
        inside = False
        for message in conversation.messages:
            texts = [message["content"]]
            if message["role"] == "assistant":
                texts += [message.get("reasoning_content", ""), *map(str, message.get("tool_calls", ()))]
                stops = self._template.family.tokens if self._template.family else (stop,) if stop else ()
                if found := next((token for token in stops for text in texts if token in text), None):
                    raise RowRefused("an assistant turn holds the text of a turn marker", repr(found))
            elif any(map(self._marker.search, texts)):
                inside = True
        if inside and self._marker_text == "refuse":
            raise RowRefused("special tokens inside a user, system or tool message", "data.marker_text=refuse")
        if inside:
            last.notes[MARKERS_IN_TEXT] = 1

    def _mask(self, conversation: Conversation, item: ServedText, ids: list[int], offsets: np.ndarray) -> Encoded:
        check_ids(min(ids), max(ids), self._vocab_size)
        token_ids = np.asarray(ids, np.int32)
        if self._agreement is not None:
            self._agreement.check_ids(conversation, item, ids)
        if isinstance(self._template, FamilyTemplate):
            found, expected = int(np.isin(token_ids, self._family_ids).sum()), self._template.marker_count(item.text)
            if found != expected:
                raise RowRefused("the tokenizer splits the turn markers", f"{expected} in the text, {found} in the ids")
        mask, straddling = token_mask(offsets, item.spans)
        notes = item.notes
        if straddling:
            notes = {**notes, "tokens shared by an answer and what surrounds it (not supervised)": straddling}
        last = sum(message["role"] == "assistant" for message in conversation.messages)
        return Encoded(token_ids, mask, notes, None if item.turn == last else item.turn)


def encode_plain_texts(
    tokenizer: Any, rows: Sequence[PlainText], vocab_size: int, longest_text: int = LONGEST_TEXT
) -> list[list[Encoded] | RowRefused]:
    """Encodes rows of plain text, as a completion server does: with the special tokens the tokenizer adds, which are
    nothing to learn; every other token is supervised.

    Raises:
        DataError: the tokenizer is not a fast one.
    """
    require_offsets(tokenizer)
    results: list[list[Encoded] | RowRefused] = []
    texts = [row.text if len(row.text) <= longest_text else "" for row in rows]
    for row, (ids, offsets) in zip(rows, tokens_and_offsets(tokenizer, texts, add_special_tokens=True)):
        mask = (offsets[:, 1] > offsets[:, 0]).astype(np.int8)
        try:
            _require_length(row.text, longest_text)
            if not mask.any():
                raise RowRefused("text is empty")
            check_ids(min(ids), max(ids), vocab_size)
        except RowRefused as refused:
            results.append(refused)
        else:
            results.append([Encoded(np.asarray(ids, np.int32), mask, {"rows of plain text, all supervised": 1})])
    return results


def _require_length(text: str, longest: int) -> None:
    if len(text) > longest:
        raise RowRefused("text is too long", f"{len(text):,} characters, a row may have {longest:,}")


def require_offsets(tokenizer: Any) -> None:
    """Refuses a tokenizer that does not tell where in the text its tokens stand.

    Raises:
        DataError: naming its class.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"{type(tokenizer).__name__} tells no character offsets, which masks are made from; load the "
            "fast tokenizer (tokenizer.json), or bring rows as input_ids with loss_mask"
        )


def tokens_and_offsets(
    tokenizer: Any, texts: Sequence[str], *, add_special_tokens: bool
) -> list[tuple[list[int], np.ndarray]]:
    """Ids of each text, and the characters of each token: int64 [T, 2]."""
    if not texts:
        return []
    tokens = tokenizer(
        list(texts),
        add_special_tokens=add_special_tokens,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    offsets = (np.asarray(pairs, np.int64).reshape(-1, 2) for pairs in tokens["offset_mapping"])
    return list(zip(tokens["input_ids"], offsets))
