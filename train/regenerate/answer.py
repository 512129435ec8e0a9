"""A server's reply to a chat completion -> the turn the target wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

#: Ways an answer ends; anything else (abort, a new word) is no answer.
FINISHES = ("stop", "length", "tool_calls", "content_filter")


class BadReply(Exception):
    """A reply that is no answer. Another try may give one."""


@dataclass(frozen=True)
class Answer:
    """One turn.

    Attributes:
        content: the answer without reasoning; "" beside tool calls.
        reasoning: what stood in the server's reasoning field or in think tags; None where there was none.
        tool_calls: in OpenAI's form, arguments as strings.
        finish: one of FINISHES.
        prompt_tokens, completion_tokens: the server's count; None where it gives none.
    """

    content: str
    reasoning: str | None
    tool_calls: tuple[dict[str, Any], ...]
    finish: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


def parse_reply(reply: Any) -> Answer:
    """Reads the JSON of a chat completion.

    Reasoning comes in a field (`reasoning_content`, or `reasoning`) from servers that parse it and in the content
    from those that do not; there it ends with </think>, and the opening tag may have been the prompt's. A content
    that has only the opening tag was cut while the model was thinking: all of it is reasoning.

    Raises:
        BadReply: it has another form, or the server broke the answer off.
    """
    try:
        choice = reply["choices"][0]
        message = choice["message"]
        finish = choice["finish_reason"]
    except (KeyError, IndexError, TypeError) as error:
        raise BadReply(f"no choices[0] with message and finish_reason in {_shortened(reply)}") from error
    if finish not in FINISHES or not isinstance(message, dict):
        raise BadReply(f"finish_reason is {finish!r}")
    content = message.get("content")
    reasoning = next((message[k] for k in ("reasoning_content", "reasoning") if message.get(k) is not None), None)
    for text in (content, reasoning):
        if text is not None and not isinstance(text, str):
            raise BadReply(f"content or reasoning is a {type(text).__name__}")
    content = content or ""
    if reasoning is None:
        content, reasoning = _without_tags(content)
    usage = reply.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return Answer(
        content, reasoning, _tool_calls(message.get("tool_calls")), finish,
        _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens")),
    )  # fmt: skip


def _without_tags(content: str) -> tuple[str, str | None]:
    before, tag, answer = content.partition("</think>")
    if tag:
        return answer.lstrip("\n"), before.rpartition("<think>")[2].strip("\n")
    if content.lstrip().startswith("<think>"):
        return "", content.partition("<think>")[2].strip("\n")
    return content, None


def _tool_calls(raw: Any) -> tuple[dict[str, Any], ...]:
    calls = []
    for item in raw or ():
        function = item.get("function") if isinstance(item, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadReply(f"a tool call without a function name: {_shortened(item)}")
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
        call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        calls.append(call | ({"id": item["id"]} if isinstance(item.get("id"), str) else {}))
    return tuple(calls)


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
