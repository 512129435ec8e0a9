"""One record of a dataset -> a conversation in one normal form, a plain text, or ids with their mask.

Normal form: a list of messages with `role` (system, user, assistant, tool) and `content` (never null);
optional `reasoning_content`, `tool_calls`, `tool_call_id`, `name`. It is what both our templates and the
tokenizer's own are given, so a difference between them is never a difference of input.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .files import Place

Message = dict[str, Any]

_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
_SHAREGPT_ROLES = {**_ROLES, "human": "user", "gpt": "assistant"}
_FORMAT_KEYS = {"messages": "messages", "sharegpt": "conversations", "tokens": "input_ids", "text": "text"}


class RowRefused(Exception):
    """A row that is no sample. `reason` is what is counted, `detail` says more about this row."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Conversation:
    """A chat in normal form.

    Attributes:
        id: the row's own id, or its place.
        messages: in normal form; holds a user turn and, unless asked for otherwise, an assistant turn.
        tools: JSON schemas offered to the model, or None.
        leading_dropped: assistant and tool turns that stood before the first user turn and were dropped.
    """

    id: str
    place: Place
    messages: list[Message]
    tools: list[dict] | None = None
    leading_dropped: int = 0


@dataclass(frozen=True)
class PlainText:
    """A row of text without turns: what a base model is trained on. Every token of it is supervised."""

    id: str
    place: Place
    text: str


@dataclass(frozen=True)
class TokenRow:
    """A row that arrived as ids: input_ids int32 [T], loss_mask int8 [T] of 0 and 1."""

    id: str
    place: Place
    input_ids: np.ndarray
    loss_mask: np.ndarray


def parse_row(
    record: bytes | Mapping[str, Any],
    place: Place,
    *,
    row_format: str = "auto",
    leading_assistant: str = "drop",
    unanswered: bool = False,
    vocab_size: int,
) -> Conversation | PlainText | TokenRow:
    """Reads one record.

    Args:
        record: the raw bytes of a JSON object, or what a column store gives for a row. The latter fills fields that
            other rows have with nulls, inside tool arguments and schemas too, and cannot tell them from nulls that
            were meant; they are left out there.
        row_format, leading_assistant: see DataConfig.
        unanswered: take conversations without an assistant turn, for those who will answer them.
        vocab_size: ids of a pre-tokenised row must be below it.

    Raises:
        RowRefused: with the reason that is counted.
    """
    columnar = not isinstance(record, bytes)
    row = dict(record) if isinstance(record, Mapping) else _json_object(record)
    present = [name for name, key in _FORMAT_KEYS.items() if row.get(key) is not None]
    if row_format != "auto":
        if row_format not in present:
            raise RowRefused(
                f"no {_FORMAT_KEYS[row_format]!r} in the row", f"it has {', '.join(sorted(row)) or 'no keys'}"
            )
        found = row_format
    elif present and (len(present) == 1 or present[1:] == ["text"]):  # a text beside a chat is the chat once more
        found = present[0]
    elif present:
        raise RowRefused("row is of two formats", f"it has {' and '.join(_FORMAT_KEYS[name] for name in present)}")
    else:
        raise RowRefused(
            "no 'messages', 'conversations', 'input_ids' or 'text' in the row",
            f"it has {', '.join(sorted(row)) or 'no keys'}",
        )
    identity = row.get("id")
    named = isinstance(identity, str | int) and not isinstance(identity, bool) and identity != ""
    name = str(identity) if named else str(place)
    if found == "tokens":
        return _token_row(row, name, place, vocab_size)
    if found == "text":
        if not isinstance(row["text"], str):
            raise RowRefused("content is not text", f"'text' is a {type(row['text']).__name__}")
        return PlainText(name, place, row["text"])
    if columnar:
        row |= {"messages": _without_nulls(row.get("messages")), "tools": _without_nulls(row.get("tools"))}
    messages = _messages(row, _FORMAT_KEYS[found])
    messages, dropped = _from_first_user(messages)
    if dropped and leading_assistant == "refuse":
        raise RowRefused("assistant turn before the first user turn", f"{dropped} such turns")
    if not unanswered and not any(message["role"] == "assistant" for message in messages):
        raise RowRefused("no assistant turn", f"after {dropped} leading turns were dropped" if dropped else "")
    return Conversation(name, place, messages, _tools(row.get("tools")), dropped)


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RowRefused("not UTF-8", f"byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise RowRefused("not JSON", str(error)) from error
    if not isinstance(row, dict):
        raise RowRefused("not a JSON object", f"a {type(row).__name__}")
    return row


def _token_row(row: dict[str, Any], name: str, place: Place, vocab_size: int) -> TokenRow:
    ids, mask = row["input_ids"], row.get("loss_mask")
    if not isinstance(mask, list):
        raise RowRefused("input_ids without a 'loss_mask' list")
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise RowRefused("input_ids are not a list of integers")
    if not ids:
        raise RowRefused("input_ids are empty")
    if len(ids) != len(mask):
        raise RowRefused("input_ids and loss_mask differ in length", f"{len(ids)} and {len(mask)}")
    if not all(type(value) in (int, bool) and value in (0, 1) for value in mask):
        raise RowRefused("loss_mask holds something else than 0 and 1")
    check_ids(min(ids), max(ids), vocab_size)
    return TokenRow(name, place, np.asarray(ids, np.int32), np.asarray(mask, np.int8))


def check_ids(lowest: int, highest: int, vocab_size: int) -> None:
    """Refuses ids that the target has no embedding for.

    Raises:
        RowRefused: naming the first id out of 0..vocab_size-1.
    """
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise RowRefused("id beyond the vocabulary", f"id {wrong}, vocabulary {vocab_size}")


def _messages(row: dict[str, Any], key: str) -> list[Message]:
    raw = row[key]
    if not isinstance(raw, list):
        raise RowRefused(f"{key!r} is not a list", f"a {type(raw).__name__}")
    if not raw:
        raise RowRefused(f"{key!r} is empty")
    messages = [_message(item) for item in raw]
    system = row.get("system")  # ShareGPT's place for the system prompt
    if system is not None and not isinstance(system, str):
        raise RowRefused("content is not text", f"'system' is a {type(system).__name__}")
    if system and system.strip():
        if messages[0]["role"] == "system" and messages[0]["content"] != system:
            raise RowRefused("two system prompts", "the row's 'system' and its first message")
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
    return messages


def _message(raw: Any) -> Message:
    if not isinstance(raw, dict):
        raise RowRefused("message is not an object", f"a {type(raw).__name__}")
    sharegpt = "from" in raw
    name = raw.get("from" if sharegpt else "role")
    role = (_SHAREGPT_ROLES if sharegpt else _ROLES).get(name) if isinstance(name, str) else None
    if role is None:
        raise RowRefused("unknown role", repr(name))
    if raw.get("weight") == 0 or raw.get("train") is False:
        raise RowRefused("message with weight 0", "leaving single turns out of the loss is not supported")
    if raw.get("function_call") is not None:
        raise RowRefused("malformed tool call", "function_call is the old form; give tool_calls")
    message: Message = {"role": role}
    calls = _tool_calls(raw.get("tool_calls"), role)
    content = _joined_parts(raw.get("value" if sharegpt else "content"), role)
    if content is None:
        if not calls:
            raise RowRefused("content is null without tool calls", f"role {role}")
        content = ""  # never the word "None" in the text
    if not isinstance(content, str):
        raise RowRefused("content is not text", f"role {role}, a {type(content).__name__}")
    message["content"] = content
    if calls:
        message["tool_calls"] = calls
    if role == "assistant":
        reasoning = next(
            (raw[k] for k in ("reasoning_content", "reasoning", "thinking") if raw.get(k) is not None), None
        )
        if reasoning is not None:
            if not isinstance(reasoning, str):
                raise RowRefused("content is not text", f"reasoning is a {type(reasoning).__name__}")
            message["reasoning_content"] = reasoning
    for key in ("name", "tool_call_id"):
        if isinstance(raw.get(key), str):
            message[key] = raw[key]
    return message


def _joined_parts(content: Any, role: str) -> Any:
    """Content in parts -> one text, with a blank between parts as SGLang joins them; other content as it is."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "input_text") or not isinstance(part.get("text"), str):
            raise RowRefused("content has a part that is not text", f"role {role}, {kind}")
        texts.append(part["text"])
    return " ".join(texts)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _tool_calls(raw: Any, role: str) -> list[dict]:
    """OpenAI's form, nested or flat. Arguments in a string are parsed when they are a JSON object, as servers
    do before they render; other strings go to the template as they are."""
    if raw is None or raw == []:
        return []
    if role != "assistant":
        raise RowRefused("malformed tool call", f"in a {role} turn")
    if not isinstance(raw, list):
        raise RowRefused("malformed tool call", f"tool_calls is a {type(raw).__name__}")
    calls = []
    for item in raw:
        function = item.get("function", item) if isinstance(item, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowRefused("malformed tool call", "no function name")
        arguments = function.get("arguments")
        if not isinstance(arguments, str | dict):
            raise RowRefused("malformed tool call", f"arguments are a {type(arguments).__name__}")
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments)
            except (ValueError, RecursionError):
                parsed = None
            arguments = parsed if isinstance(parsed, dict) else arguments
        call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        if isinstance(item.get("id"), str):
            call["id"] = item["id"]
        calls.append(call)
    return calls


def _tools(raw: Any) -> list[dict] | None:
    if isinstance(raw, str) and raw.strip():  # ShareGPT files keep the schemas in a string
        try:
            raw = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise RowRefused("tools are not a list of objects", str(error)) from error
    if not raw:
        return None
    if not isinstance(raw, list) or not all(isinstance(tool, dict) for tool in raw):
        raise RowRefused("tools are not a list of objects")
    return raw


def _from_first_user(messages: list[Message]) -> tuple[list[Message], int]:
    """Drops assistant and tool turns before the first user turn; system turns there stay."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        if any(message["role"] == "assistant" for message in messages):
            raise RowRefused("no user turn")
        raise RowRefused("no assistant turn", "nor a user turn")
    head = [message for message in messages[:first] if message["role"] == "system"]
    return head + messages[first:], first - len(head)
