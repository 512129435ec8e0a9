"""Turn by turn: which turns are asked for, with which history, and what becomes of tools and reasoning."""

import asyncio
import copy
import json
from collections.abc import Sequence

import pytest

from train.data.files import Place
from train.data.formats import parse_row
from train.regenerate.answer import Answer
from train.regenerate.config import Network, RegenerateConfig, Sampling
from train.regenerate.conversation import RowDropped, answer_conversation, turn_seed

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def calls(**arguments):
    call = {"id": "s1", "type": "function", "function": {"name": "add", "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


RESULT = {"role": "tool", "content": "3", "tool_call_id": "s1"}


def text(content, reasoning=None, finish="stop"):
    return Answer(content, reasoning, (), finish, 10, 5)


def call(spelled):
    made = {"id": "t9", "type": "function", "function": {"name": "add", "arguments": spelled}}
    return Answer("", None, (made,), "tool_calls", 10, 5)


def answered(messages: Sequence[dict], answers: Sequence[Answer], tools=None, **options):
    """The conversation as it comes out, and the histories that were sent."""
    config = RegenerateConfig("in", "out.jsonl", Sampling(1.0), Network(("http://x/v1",)), **options)
    row = {"id": "r", "messages": messages} | ({"tools": tools} if tools else {})
    conversation = parse_row(json.dumps(row).encode(), Place("in", 1), unanswered=True, vocab_size=0)
    sent, left = [], list(answers)

    async def ask(history, offered, turn):
        assert offered == tools
        assert turn == len(sent)
        sent.append(copy.deepcopy(list(history)))
        return left.pop(0)

    done = asyncio.run(answer_conversation(conversation, ask, config))
    assert not left, "fewer questions than expected"
    return done, sent


def test_system_in_the_middle_and_a_question_at_the_end():
    given = [user("a"), said("x"), {"role": "system", "content": "s"}, user("b"), said("y"), said("z"), user("c")]
    done, sent = answered(given, [text("A"), text("B"), text("C")])
    system = {"role": "system", "content": "s"}
    assert done.messages == [user("a"), said("A"), system, user("b"), said("B"), user("c"), said("C")]
    assert sent == [done.messages[:1], done.messages[:4], done.messages[:6]]
    assert done.notes == {
        "second assistant turns in a row, left out": 1,
        "questions at the end that had no answer in the source": 1,
    }


TOOL_TALK = [user("1+2?"), calls(a=1, b=2), RESULT, said("three"), user("thanks"), said("ok")]


def test_tool_turns_are_kept_and_what_follows_their_results_is_asked_for():
    done, sent = answered(TOOL_TALK, [text("3!"), text("bye")], TOOLS)
    assert done.messages == [user("1+2?"), calls(a=1, b=2), RESULT, said("3!"), user("thanks"), said("bye")]
    assert sent == [done.messages[:3], done.messages[:5]]
    assert done.notes == {"tool-call turns kept from the source (not the target's words)": 1}


def test_tool_turns_are_asked_for_and_the_same_call_gets_the_result_of_the_source():
    done, sent = answered(
        TOOL_TALK, [call('{"b":2,  "a": 1}'), text("3!"), text("bye")], TOOLS, tool_turns="regenerate"
    )
    assert done.messages == [user("1+2?"), calls(a=1, b=2), RESULT, said("3!"), user("thanks"), said("bye")]
    assert sent == [done.messages[:1], done.messages[:3], done.messages[:5]]
    assert len(done.turns) == 3


def test_another_call_ends_the_conversation():
    done, _ = answered(TOOL_TALK, [call('{"a": 7}')], TOOLS, tool_turns="regenerate")
    (made,) = done.messages[1]["tool_calls"]
    assert (made["id"], made["function"]["arguments"]) == ("t9", '{"a": 7}')
    assert done.messages[1]["content"] is None
    assert len(done.messages) == 2
    assert done.notes == {"conversations ended at a tool call that has no result in the source": 1}


def test_a_call_that_is_not_made_takes_its_result_with_it():
    done, sent = answered(TOOL_TALK, [text("3, I know"), text("bye")], TOOLS, tool_turns="regenerate")
    assert done.messages == [user("1+2?"), said("3, I know"), user("thanks"), said("bye")]
    assert sent[1] == done.messages[:3]


def test_a_call_where_the_source_has_none_ends_the_conversation():
    done, _ = answered([user("a"), said("x"), user("b"), said("y")], [call("{}")], TOOLS)
    assert [m["role"] for m in done.messages] == ["user", "assistant"]


def test_rows_with_tool_calls_are_dropped_before_anything_is_asked():
    with pytest.raises(RowDropped, match="has tool calls"):
        answered(TOOL_TALK, [], TOOLS, tool_turns="drop")


@pytest.mark.parametrize("reasoning", ["keep", "drop"])
def test_reasoning(reasoning):
    given = [user("a"), {**calls(a=1), "reasoning_content": "old"}, RESULT, said("x"), user("b"), said("y")]
    done, sent = answered(given, [text("A", "hm"), text("B")], TOOLS, reasoning=reasoning)
    found = [m.get("reasoning_content") for m in done.messages if m["role"] == "assistant"]
    assert found == (["old", "hm", None] if reasoning == "keep" else [None, None, None])
    assert sent[1] == done.messages[:5]


@pytest.mark.parametrize(
    ("answer", "options", "reason"),
    [
        (text(""), {}, "answer is empty"),
        (text(" \n", "hm"), {}, "answer is empty behind its reasoning"),
        (text("x", finish="length"), {"truncated": "drop"}, r"answers cut at max_tokens \(dropped\)"),
        (text("x", "I see. " * 90), {}, r"answers that repeat themselves \(dropped\)"),
        (text("x", finish="content_filter"), {}, "content filter"),
    ],
)
def test_answers_that_drop_the_row(answer, options, reason):
    with pytest.raises(RowDropped, match=reason):
        answered([user("a")], [answer], **options)


def test_faults_are_marked_or_kept_and_counted():
    loop = text("I see. " * 90, finish="length")
    done, _ = answered([user("a")], [loop], loops="mark")
    assert done.turns == [
        {"finish": "length", "prompt_tokens": 10, "completion_tokens": 5, "flags": ["loop", "truncated"]}
    ]
    done, _ = answered([user("a")], [loop], loops="keep", truncated="keep")
    assert "flags" not in done.turns[0]
    assert done.notes["answers that repeat themselves (kept)"] == done.notes["answers cut at max_tokens (kept)"] == 1


def test_seeds_differ_by_row_turn_and_seed_and_fit_31_bits():
    seeds = {turn_seed(s, row, turn) for s in range(5) for row in ("a", "b", "\ud800") for turn in range(20)}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert turn_seed(0, "row-0", 0) == 623437596  # a resumed run must ask with the same seeds, next year too
