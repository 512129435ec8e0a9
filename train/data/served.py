"""A conversation as serving sees it: for each assistant turn, the prompt that was sent and what the model wrote.

Many templates rewrite history: the reasoning of a turn is rendered while the turn is the last one and gone later, an
end token changes, an empty think block appears or vanishes. A draft meets every turn in the form it had when it was
generated, so that form is what a turn is supervised in. One row holds all turns whose text, up to their stop token,
is still the same in it; where the template rewrote an earlier turn, `data.history` decides what becomes of it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .families import header_end
from .formats import Conversation, Message, RowRefused
from .masks import Span, without_generation_prompt
from .templates import ChatTemplate, TemplateError

REASONING_LOST = "assistant turns whose reasoning the template leaves out"
NOT_CONTINUED = "assistant turns that do not continue the prompt a server would send, supervised as rendered"
UNMARKED = "assistant turns the template does not mark"
SPLICED = "assistant turns put behind the prompt a server sends, which the template renders otherwise"
SCAFFOLD = "empty think blocks that the prompt opens (not supervised)"
STOP_APPENDED = "stop tokens appended that the template leaves to the next turn"

_OPENED_TAG = re.compile(r"<think>\s*\Z")
_CLOSED_EMPTY = re.compile(r"\n</think>\n\n|\s*</think>")
_EMPTY_BLOCK = re.compile(r"<think>\n\n</think>\n\n|\n?<think>\n?</think>|</think>|<\|channel>thought\n<channel\|>")


@dataclass(frozen=True)
class ServedText:
    """The text of one row.

    Attributes:
        text: what is tokenised.
        spans: [start, end) in characters of what the model wrote and is supervised, in order, disjoint.
        turn: which assistant turn the row ends with, counted from 1.
        messages: what it was rendered from.
        rendered: the template's own rendering of them, before anything was put in its place.
        notes: name -> how often.
    """

    text: str
    spans: list[Span]
    turn: int
    messages: Sequence[Message]
    rendered: str
    notes: dict[str, int] = field(default_factory=dict)


class ServedTurns:
    """Makes the rows of a conversation with one template."""

    def __init__(self, template: ChatTemplate, history: str):
        """Args: template: one that marks turns; history: see DataConfig."""
        self._template = template
        self._history = history

    def rows(self, conversation: Conversation) -> list[ServedText]:
        """The rows of a conversation, earlier turns first; the last one ends with the last assistant turn.

        Raises:
            RenderError: the template does not take the conversation.
            RowRefused: it leaves tool calls out.
            TemplateError: generation marks and generation prompt contradict each other, or nothing is marked.
        """
        conversation = replace(conversation, messages=self._template.with_reasoning_fields(conversation.messages))
        turns = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if self._history == "as_rendered":
            rows = [self._as_rendered(conversation, turns)]
        else:
            last = self._turn(conversation, turns, len(turns))
            if len(turns) == 1:
                rows = [last]
            elif self._history == "last_turn":
                rows = [last]
                _count(last.notes, "assistant turns not supervised (data.history=last_turn)", len(turns) - 1)
            else:
                rows = self._merged(conversation, turns, last)
        _count(
            rows[-1].notes,
            "turns after the last assistant turn, left out",
            len(conversation.messages) - len(rows[-1].messages),
        )
        return rows

    def _merged(self, conversation: Conversation, turns: list[int], last: ServedText) -> list[ServedText]:
        """As few rows as hold every turn as it was served (`fan_out`), or one with those it can hold."""
        rows, own = [last], list(last.spans)
        spans = {last.turn: own}
        for number in range(len(turns) - 1, 0, -1):
            turn = self._turn(conversation, turns, number)
            if not turn.spans:
                _count(last.notes, UNMARKED)
                continue
            end = turn.spans[-1][1]
            home = next((row for row in rows if row.text.startswith(turn.text[:end])), None)
            if home is not None:
                spans[home.turn].insert(0, turn.spans[-1])
                for name in (SPLICED, SCAFFOLD, REASONING_LOST, NOT_CONTINUED):
                    _count(home.notes, name, turn.notes.get(name, 0))
            elif self._history == "fan_out":
                rows.append(turn)
                spans[turn.turn] = list(turn.spans)
            else:
                _count(last.notes, "assistant turns not supervised (data.history=one_row: the template rewrites them)")
        return [
            ServedText(row.text, sorted(spans[row.turn]), row.turn, row.messages, row.rendered, row.notes)
            for row in reversed(rows)
        ]

    def _turn(self, conversation: Conversation, turns: list[int], number: int) -> ServedText:
        """The row that ends with assistant turn `number` (from 1), that turn alone supervised."""
        template, tools = self._template, conversation.tools
        messages = conversation.messages[: turns[number - 1] + 1]
        message = messages[-1]
        prompt = template.render(messages[:-1], tools, prompt=True).text
        rendered = template.render(messages, tools)
        text = rendered.text
        notes: dict[str, int] = {}

        def row(text: str, spans: list[Span]) -> ServedText:
            return ServedText(text, spans, number, messages, rendered.text, notes)

        if not rendered.spans:
            raise self._marked_nothing(conversation)
        start, end = rendered.spans[-1]
        continued = text.startswith(prompt)
        shared = len(prompt) if continued else _common_length(prompt, text)
        if end <= shared:  # the span is an earlier turn's: this one's header has no marker
            stop_end = self._stop_behind(text, len(prompt)) if continued else None
            if stop_end is None:
                _count(notes, UNMARKED)
                return row(text, [])
            start, end = len(prompt), stop_end
        inner, in_content = written_reasoning(message)
        reasoning = inner.strip()
        answer = message["content"].rpartition("</think>")[2] if in_content else message["content"]
        # an answer may repeat its reasoning word for word
        lost = bool(reasoning) and text[start:end].count(reasoning) <= answer.count(reasoning)
        if continued and start > len(prompt):
            raise self._contradiction(conversation, text, start, len(prompt))

        self._check_calls(message, text[start:end])
        header = self._header_end(prompt, text, start)
        if header is not None and (lost or not continued):
            spliced = self._splice(prompt, header, text[start:end], message, lost)
            if spliced is not None:
                dropped = lost and spliced[header:].count(reasoning) <= answer.count(reasoning)
                text = spliced + text[end:]
                _count(notes, SPLICED)
                _count(notes, REASONING_LOST, int(dropped))
                start, end, lost, continued = len(prompt), len(spliced), False, True
        _count(notes, REASONING_LOST, int(lost))
        if continued:
            start = max(start, len(prompt))
            if _OPENED_TAG.search(prompt) and (closed := _CLOSED_EMPTY.match(text, start, end)):
                start = closed.end()
                _count(notes, SCAFFOLD)
        else:
            _count(notes, NOT_CONTINUED)
            if self._template.family and not reasoning and (block := _EMPTY_BLOCK.match(text, start, end)):
                start = block.end()
        if self._stop_is_missing(text[start:end]):
            family = self._template.family
            assert family is not None
            stop = family.stop_after_calls if message.get("tool_calls") and family.stop_after_calls else family.stop
            text, end = text[:end] + stop, end + len(stop)
            _count(notes, STOP_APPENDED)
        return row(text, [(start, end)])

    def _stop_behind(self, text: str, start: int) -> int | None:
        """The end of the first stop token behind `start`; None if there is none, or the template has marks to go by."""
        ends = self._template.family.ends if self._template.family else ()
        found = [text.index(token, start) + len(token) for token in ends if token in text[start:]]
        return min(found, default=None)

    def _header_end(self, prompt: str, text: str, start: int) -> int | None:
        """Where in the prompt the header of its last turn ends; None if that cannot be told.

        Args:
            prompt: what a server sends.
            text: of the conversation with the turn; its header ends at `start`.
        """
        if self._template.family is not None:
            return header_end(self._template.family, prompt)
        return start if prompt[:start] == text[:start] else None

    def _splice(self, prompt: str, start: int, body: str, message: Message, lost: bool) -> str | None:
        """The prompt with what the model wrote behind it, where the template renders the turn in another way.

        Args:
            prompt: what the server sends.
            start: where in it the turn's header ends.
            body: what the template renders behind that header.
            message: the turn.
            lost: the template leaves its reasoning out.

        Returns:
            The text up to the end of the turn, or None if it cannot be told.
        """
        tail = prompt[start:]
        block = _EMPTY_BLOCK.match(body)
        answer = body[block.end() :] if block else body
        inner, in_content = written_reasoning(message)
        if tail and _EMPTY_BLOCK.fullmatch(tail):  # served without thinking
            return prompt + answer if lost or not inner.strip() else None
        if not lost:
            return prompt[:start] + body if body.startswith(tail) else None
        if self._template.family is None:
            return None
        for opening, closing in sorted(self._template.family.think, key=lambda form: form[0] != tail):
            known = closing.strip() in self._template.source
            guessed = self._template.family.think_if_opened and opening != tail
            if not known or guessed or (not tail and opening.strip() in self._template.generation_prompt):
                continue  # this template's model does not think, or not in this turn, or not in this form
            if in_content:
                written = f"<think>{inner}</think>"
            else:
                written = opening + (inner.strip("\n") if opening.endswith("\n") else inner) + closing
            if written.startswith(tail):
                return prompt[:start] + written + answer
        return None

    def _as_rendered(self, conversation: Conversation, turns: list[int]) -> ServedText:
        """One row with every turn supervised in the form it has there, whatever it was when it was served; the last one
        as it was served, if the history before it is the same."""
        last = self._turn(conversation, turns, len(turns))
        rendered = self._template.render(conversation.messages[: turns[-1] + 1], conversation.tools)
        earlier = without_generation_prompt(rendered.text, rendered.spans[:-1], self._template.generation_prompt)
        if self._template.family:
            blocks = ((span, _EMPTY_BLOCK.match(rendered.text, *span)) for span in earlier)
            earlier = [(block.end(), span[1]) if block else span for span, block in blocks]
        _count(last.notes, UNMARKED, len(turns) - len(rendered.spans))
        text, own = last.text, last.spans
        if earlier and not text.startswith(rendered.text[: earlier[-1][1]]):
            # as it was served the last turn stands behind another history
            text = rendered.text
            own = without_generation_prompt(text, rendered.spans[-1:], self._template.generation_prompt)
        return ServedText(text, [*earlier, *own], last.turn, last.messages, last.rendered, last.notes)

    def _check_calls(self, message: Message, body: str) -> None:
        """Refuses a turn whose tool calls are not all in what the template renders of it."""
        names = [call["function"]["name"] for call in message.get("tool_calls", ())]
        lost = sorted(
            name for name in set(names) if len(re.findall(rf"(?<!\w){re.escape(name)}(?!\w)", body)) < names.count(name)
        )
        if lost:
            raise RowRefused("tool calls that the template leaves out", f"of {', '.join(lost)}")

    def _stop_is_missing(self, written: str) -> bool:
        family = self._template.family
        return bool(family and family.stop) and not written.endswith((*family.ends, *family.borrowed))  # type: ignore[union-attr]

    def _marked_nothing(self, conversation: Conversation) -> TemplateError:
        return TemplateError(
            f"{conversation.place}: chat template {self._template.name} marked nothing of a conversation "
            "that has an assistant turn; its generation marks do not cover every case"
        )

    def _contradiction(self, conversation: Conversation, text: str, start: int, served: int) -> TemplateError:
        return TemplateError(
            f"{conversation.place}: chat template {self._template.name} marks the answer from "
            f"{text[start : start + 40]!r} on, but the model writes from {text[served : served + 40]!r} on: its "
            "generation marks and its generation prompt contradict each other"
        )


def written_reasoning(message: Message) -> tuple[str, bool]:
    """The reasoning of a turn with its blanks ("" = there is none), and whether it stands in the content, in tags."""
    if "reasoning_content" in message:
        return message["reasoning_content"], False
    before, tag, _ = message["content"].partition("</think>")
    return (before.rpartition("<think>")[2], True) if tag else ("", False)


def _common_length(a: str, b: str) -> int:
    """Characters that two texts have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _count(notes: dict[str, int], name: str, count: int = 1) -> None:
    if count > 0:
        notes[name] = notes.get(name, 0) + count
