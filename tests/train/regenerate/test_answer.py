"""Replies of servers, read into answers."""

import pytest

from train.regenerate.answer import Answer, BadReply, parse_reply


def reply(message: dict, finish: str | None = "stop", **more) -> dict:
    return {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": finish}], **more}


@pytest.mark.parametrize(
    ("message", "content", "reasoning"),
    [
        ({"content": "four"}, "four", None),
        ({"content": " four\n"}, " four\n", None),  # blanks are the target's own
        ({"content": "four", "reasoning_content": "2+2"}, "four", "2+2"),
        ({"content": "four", "reasoning": "2+2"}, "four", "2+2"),
        ({"content": "<think>\n2+2\n</think>\n\nfour"}, "four", "2+2"),
        ({"content": "2+2\n</think>\n\nfour"}, "four", "2+2"),  # the prompt wrote the opening tag
        ({"content": "<think>\n\n</think>\n\nfour"}, "four", ""),
        ({"content": "<think>\n2+"}, "", "2+"),  # cut while thinking
        ({"content": None, "reasoning_content": "2+"}, "", "2+"),
        ({"content": "a </think> b", "reasoning_content": "c"}, "a </think> b", "c"),  # the server has parsed it
    ],
)
def test_reasoning_and_content(message, content, reasoning):
    answer = parse_reply(reply(message, usage={"prompt_tokens": 5, "completion_tokens": 7}))
    assert answer == Answer(content, reasoning, (), "stop", 5, 7)


def test_tool_calls():
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
        {"index": 1, "function": {"name": "g", "arguments": {"b": "ü"}}},
    ]
    answer = parse_reply(reply({"content": None, "tool_calls": calls}, "tool_calls"))
    assert answer.tool_calls == (
        {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}, "id": "c1"},
        {"type": "function", "function": {"name": "g", "arguments": '{"b": "ü"}'}},
    )
    assert (answer.content, answer.prompt_tokens) == ("", None)


@pytest.mark.parametrize(
    "broken",
    [
        None, [], "text", {}, {"choices": []}, {"choices": [{"message": {"content": "x"}}]}, {"error": {"code": 1}},
        reply({"content": "x"}, "abort"), reply({"content": "x"}, None), reply({"content": ["x"]}),
        reply({"content": "x", "reasoning_content": 3}), reply({"tool_calls": [{"function": {}}]}),
        {"choices": [{"message": "x", "finish_reason": "stop"}]},
    ],
)  # fmt: skip
def test_what_is_no_answer(broken):
    with pytest.raises(BadReply):
        parse_reply(broken)
