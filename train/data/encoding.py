"""Conversations -> ids and exact masks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .agreement import Agreement
from .formats import Conversation, RowRefused, check_ids
from .masks import Span, token_mask, without_generation_prompt
from .summary import DataError
from .templates import ChatTemplate, RenderError, TemplateError


@dataclass(frozen=True)
class Encoded:
    """A conversation as tokens: input_ids int32 [T], loss_mask int8 [T], and notes (name -> how often)."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    notes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Text:
    text: str
    spans: list[Span]
    notes: dict[str, int]


class Encoder:
    """Renders with one template and tokenises with one tokenizer."""

    def __init__(self, template: ChatTemplate, tokenizer: Any, vocab_size: int, agreement: Agreement | None):
        """Checks that the two can work together.

        Args:
            template: with generation marks.
            tokenizer: a fast one: masks need its character offsets.
            vocab_size: of the target; a row with an id at or above it is refused.
            agreement: the check against the tokenizer's own template; None = not checked.

        Raises:
            DataError: the tokenizer is not a fast one.
            TemplateError: the template marks nothing.
        """
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                f"{type(tokenizer).__name__} tells no character offsets, which masks are made from; load the "
                "fast tokenizer (tokenizer.json), or bring rows as input_ids with loss_mask"
            )
        if not template.marked:
            raise TemplateError(f"chat template {template.name} has no generation marks")
        self._template = template
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._agreement = agreement
        special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        # a newline may be a special token of a small vocabulary; markers are what nobody writes by accident
        markers = sorted((s for s in special if not s.isspace() and not s.isalnum()), key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, markers))) if markers else None

    def encode(self, conversations: Sequence[Conversation]) -> list[Encoded | RowRefused]:
        """Encodes a batch; one result a conversation, in order, a refusal where there is no sample.

        Raises:
            TemplateError: the template is unfit for the tokenizer, see Agreement and `_render`.
        """
        texts: list[_Text | RowRefused] = []
        for conversation in conversations:
            try:
                texts.append(self._render(conversation))
            except RowRefused as refused:
                texts.append(refused)
            except RenderError as error:
                texts.append(RowRefused("refused by the chat template", str(error)))
        good = [item for item in texts if isinstance(item, _Text)]
        if not good:
            return [item for item in texts if isinstance(item, RowRefused)]
        tokens = self._tokenizer(
            [item.text for item in good],
            add_special_tokens=False,  # the template writes them all: never a second BOS
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        rows = iter(zip(tokens["input_ids"], tokens["offset_mapping"]))
        results: list[Encoded | RowRefused] = []
        for conversation, item in zip(conversations, texts):
            if isinstance(item, RowRefused):
                results.append(item)
                continue
            ids, offsets = next(rows)
            try:
                results.append(self._mask(conversation, item, ids, offsets))
            except RowRefused as refused:
                results.append(refused)
        return results

    def _render(self, conversation: Conversation) -> _Text:
        """Text and supervised spans of a row.

        Raises:
            RenderError, RowRefused: the row is no sample.
            TemplateError: marks and generation prompt contradict each other, or nothing is marked.
        """
        messages, tools = conversation.messages, conversation.tools
        rendered = self._template.render(messages, tools)
        text = rendered.text
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowRefused("text is not valid Unicode", str(error)) from error
        if self._agreement is not None:
            self._agreement.check_text(conversation, text)
        if not rendered.spans:
            raise TemplateError(
                f"{conversation.place}: chat template {self._template.name} marked nothing of a conversation "
                "that has an assistant turn; its generation marks do not cover every case"
            )
        spans = without_generation_prompt(text, rendered.spans, self._template.generation_prompt)
        notes: dict[str, int] = {}
        self._check_last_turn(conversation, text, spans, notes)

        answers = sum(message["role"] == "assistant" for message in messages)
        if len(spans) < answers:
            notes["assistant turns the template does not mark"] = answers - len(spans)
        if conversation.leading_dropped:
            notes["leading turns dropped before the first user turn"] = conversation.leading_dropped
        if tools and not self._template.reads_tools:
            notes["rows whose tools the template ignores"] = 1
        if self._marker and any(m["role"] != "assistant" and self._marker.search(m["content"]) for m in messages):
            notes["rows with special tokens inside a user, system or tool message"] = 1
        lost = sum(reasoning not in text for reasoning in map(_reasoning, messages) if reasoning)
        if lost:
            notes["assistant turns whose reasoning the template leaves out"] = lost
        return _Text(text, spans, notes)

    def _check_last_turn(self, conversation: Conversation, text: str, spans: list[Span], notes: dict[str, int]) -> None:
        """Holds the marks of the last assistant turn against the prompt a server sends to get that turn."""
        messages = conversation.messages
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        prompt = self._template.render(messages[:last], conversation.tools, prompt=True).text
        if not text.startswith(prompt):
            notes["rows whose last turn does not continue the prompt a server would send"] = 1
        elif spans[-1][0] != len(prompt):
            marked, served = (text[start : start + 40] for start in (spans[-1][0], len(prompt)))
            raise TemplateError(
                f"{conversation.place}: chat template {self._template.name} marks the last answer from "
                f"{marked!r} on, but the model writes from {served!r} on: its generation marks and its "
                "generation prompt contradict each other"
            )

    def _mask(self, conversation: Conversation, item: _Text, ids: list[int], offsets: list) -> Encoded:
        check_ids(min(ids), max(ids), self._vocab_size)
        if self._agreement is not None:
            self._agreement.check_ids(conversation, ids)
        mask, straddling = token_mask(np.asarray(offsets, np.int64).reshape(-1, 2), item.spans)
        notes = item.notes
        if straddling:
            notes = {**notes, "tokens shared by an answer and what surrounds it (not supervised)": straddling}
        return Encoded(np.asarray(ids, np.int32), mask, notes)


def _reasoning(message: dict[str, Any]) -> str:
    """The reasoning of a turn, in its own field or in think tags."""
    if message["role"] != "assistant":
        return ""
    if "reasoning_content" in message:
        return message["reasoning_content"].strip()
    before, tag, _ = message["content"].partition("</think>")
    return before.rpartition("<think>")[2].strip() if tag else ""
