"""A conversation answered anew, turn by turn: each answer is history of the next question."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from train.data.formats import Conversation, Message

from .answer import Answer
from .config import LoopRule, RegenerateConfig
from .loops import is_loop

#: (messages as sent, tools, turn counted from 0) -> the target's answer.
Ask = Callable[[Sequence[Message], list[dict] | None, int], Awaitable[Answer]]

TOOL_TURNS_KEPT = "tool-call turns kept from the source (not the target's words)"
ENDED_AT_CALL = "conversations ended at a tool call that has no result in the source"
CALLS_NOT_MADE = "tool calls of the source that the target did not make, left out with their results"
SECOND_ANSWERS = "second assistant turns in a row, left out"
ANSWERED_END = "questions at the end that had no answer in the source"


class RowDropped(Exception):
    """A row that is left out by an option; `reason` is what is counted."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass
class Answered:
    """What became of a conversation.

    Attributes:
        messages: in OpenAI's form.
        turns: a record of each answer: finish reason, tokens, flags.
        notes: name -> how often.
    """

    messages: list[Message] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)

    def note(self, name: str, count: int = 1) -> None:
        self.notes[name] = self.notes.get(name, 0) + count


def source_digest(conversation: Conversation) -> str:
    """A name of what the source says, so that a resumed run sees when the row behind an id has changed."""
    text = json.dumps([conversation.messages, conversation.tools], sort_keys=True)
    return blake2b(text.encode(), digest_size=8).hexdigest()


def turn_seed(seed: int, row_id: str, turn: int) -> int:
    """The seed of one request, below 2**31: the same whatever the order of rows and whichever server answers."""
    text = f"{seed}\0{row_id}\0{turn}".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=4).digest(), "little") >> 1


async def answer_conversation(conversation: Conversation, ask: Ask, config: RegenerateConfig) -> Answered:
    """Asks for every assistant turn in order.

    Raises:
        RowDropped: an option leaves the row out.
    """
    walk = _Walk(conversation, ask, config)
    await walk.go()
    return walk.done


class _Walk:
    def __init__(self, conversation: Conversation, ask: Ask, config: RegenerateConfig):
        self._source = conversation.messages
        self._tools = conversation.tools
        self._ask = ask
        self._config = config
        self.done = Answered()

    async def go(self) -> None:
        if self._config.tool_turns == "drop" and any(message.get("tool_calls") for message in self._source):
            raise RowDropped("has tool calls (--tool-turns drop)")
        at, last = 0, len(self._source)
        while at < last:
            message = self._source[at]
            if message["role"] != "assistant":
                self.done.messages.append(_openai(message))
                at += 1
            elif self.done.messages[-1]["role"] == "assistant":
                self.done.note(SECOND_ANSWERS)
                at += 1
            elif message.get("tool_calls") and self._config.tool_turns == "keep":
                self._keep(message)
                at += 1
            else:
                at = await self._answer(at)
        if self.done.messages[-1]["role"] in ("user", "tool"):
            self.done.note(ANSWERED_END)
            await self._answer(last)

    def _keep(self, message: Message) -> None:
        kept = _openai(message)
        if self._config.reasoning == "drop":
            kept.pop("reasoning_content", None)
        self.done.messages.append(kept)
        self.done.note(TOOL_TURNS_KEPT)

    def _judge(self, answer: Answer) -> list[str]:
        """The flags of an answer.

        Raises:
            RowDropped: an option drops the row for what is wrong with it, or there is no answer.
        """
        if answer.finish == "content_filter":
            raise RowDropped("answer withheld by the server's content filter")
        faults = _faults(answer, self._config)
        for what, name in faults.values():
            if what == "drop":
                raise RowDropped(f"{name} (dropped)", _tail(answer))
            self.done.note(f"{name} ({'kept' if what == 'keep' else 'marked'})")
        if not answer.content.strip() and not answer.tool_calls:
            raise RowDropped("answer is empty behind its reasoning" if answer.reasoning else "answer is empty")
        return [flag for flag, (what, _) in faults.items() if what == "mark"]

    async def _answer(self, at: int) -> int:
        """Asks for the turn at `at`; returns where the conversation goes on."""
        answer = await self._ask(self.done.messages, self._tools, len(self.done.turns))
        flags = self._judge(answer)
        calls = list(answer.tool_calls)
        wanted: list[dict[str, Any]] = self._source[at].get("tool_calls", []) if at < len(self._source) else []
        goes_on = at + 1
        if calls and _asks_for(calls) == _asks_for(wanted) and _has_result(self._source, at):
            calls = [_call(call) for call in wanted]  # the source's ids: its results refer to them
        elif calls:
            self.done.note(ENDED_AT_CALL)
            goes_on = len(self._source)
        elif wanted:
            self.done.note(CALLS_NOT_MADE, len(wanted))
            goes_on = _next_question(self._source, at)
        turn: Message = {"role": "assistant", "content": answer.content}
        if answer.reasoning and self._config.reasoning == "keep":
            turn["reasoning_content"] = answer.reasoning
        if calls:
            turn |= {"content": answer.content or None, "tool_calls": calls}
        self.done.messages.append(turn)
        record = {
            "finish": answer.finish,
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
        }
        self.done.turns.append(record | ({"flags": flags} if flags else {}))
        return goes_on


def _faults(answer: Answer, config: RegenerateConfig) -> dict[str, tuple[str, str]]:
    """Flag of a row -> (what is done about it, what is counted), for what this answer suffers from."""
    found: dict[str, tuple[str, str]] = {}
    if _loops(answer, config.loop_rule):
        found["loop"] = (config.loops, "answers that repeat themselves")
    if answer.finish == "length":
        found["truncated"] = (config.truncated, "answers cut at max_tokens")
    return found


def _loops(answer: Answer, rule: LoopRule) -> bool:
    return is_loop(answer.content, rule) or (answer.reasoning is not None and is_loop(answer.reasoning, rule))


def _tail(answer: Answer) -> str:
    return "..." + (answer.content or answer.reasoning or "")[-80:]


def _openai(message: Message) -> Message:
    """Normal form -> what the interface and its servers take: arguments are strings, no text beside calls is null."""
    if not message.get("tool_calls"):
        return dict(message)
    calls = [_call(call) for call in message["tool_calls"]]
    return {**message, "content": message["content"] or None, "tool_calls": calls}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {"name": function["name"], "arguments": text}}


def _asks_for(calls: Sequence[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Names and arguments of calls; two texts of the same arguments are equal."""
    found = []
    for call in calls:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):  # no JSON: equal only as text
                arguments = json.loads(arguments)
        found.append((call["function"]["name"], arguments))
    return found


def _has_result(messages: Sequence[Message], at: int) -> bool:
    return at + 1 < len(messages) and messages[at + 1]["role"] == "tool"


def _next_question(messages: Sequence[Message], at: int) -> int:
    return next((i for i in range(at, len(messages)) if messages[i]["role"] == "user"), len(messages))
