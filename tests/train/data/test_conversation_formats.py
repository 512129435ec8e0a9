"""One line in, one conversation or one refusal out; files in an order of their own."""

import gzip
import json

import pytest

from train.data.files import Place, find_files, read_lines
from train.data.formats import RowRefused, parse_row
from train.data.summary import DataError

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
PLACE = Place("rows.jsonl", 3)


def parse(row, **options):
    line = row if isinstance(row, bytes) else json.dumps(row).encode()
    return parse_row(line, PLACE, **{"vocab_size": 31, **options})


REFUSED = [
    (b"{", "not JSON"),
    (b'{"messages": [' + b"9" * 5000 + b"]}", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b'{"id": "\xff"}', "not UTF-8"),
    (b"[1]", "not a JSON object"),
    (b"null", "not a JSON object"),
    ({"prompt": "x"}, "no 'messages', 'conversations', 'input_ids' or 'text' in the row"),
    ({"messages": None}, "no 'messages', 'conversations', 'input_ids' or 'text' in the row"),
    ({"text": ["x"]}, "content is not text"),
    ({"messages": [USER, ANSWER], "conversations": [USER, ANSWER]}, "row is of two formats"),
    ({"messages": {"role": "user"}}, "'messages' is not a list"),
    ({"conversations": "hi"}, "'conversations' is not a list"),
    ({"messages": []}, "'messages' is empty"),
    ({"messages": [USER, "b"]}, "message is not an object"),
    ({"messages": [USER, {"role": "model", "content": "b"}]}, "unknown role"),
    ({"messages": [USER, {"role": "gpt", "content": "b"}]}, "unknown role"),
    ({"messages": [USER, {"role": ["assistant"], "content": "b"}]}, "unknown role"),
    ({"messages": [USER, {"content": "b"}]}, "unknown role"),
    ({"messages": [USER]}, "no assistant turn"),
    ({"messages": [{"role": "system", "content": "s"}]}, "no assistant turn"),
    ({"messages": [ANSWER, USER]}, "no assistant turn"),
    ({"messages": [ANSWER]}, "no user turn"),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, "content is null without tool calls"),
    ({"messages": [USER, {"role": "assistant"}]}, "content is null without tool calls"),
    (
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}]},
        "content is null without tool calls",
    ),
    ({"messages": [{"role": "user", "content": None}, ANSWER]}, "content is null without tool calls"),
    ({"messages": [USER, {"role": "assistant", "content": 7}]}, "content is not text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, ANSWER]},
        "content has a part that is not text",
    ),
    ({"messages": [{"role": "user", "content": ["a"]}, ANSWER]}, "content has a part that is not text"),
    ({"messages": [USER, {**ANSWER, "reasoning_content": 1}]}, "content is not text"),
    ({"messages": [USER, {**ANSWER, "weight": 0}]}, "message with weight 0"),
    ({"messages": [USER, {**ANSWER, "train": False}]}, "message with weight 0"),
    ({"messages": [USER, {**ANSWER, "function_call": {"name": "f", "arguments": "{}"}}]}, "malformed tool call"),
    ({"messages": [USER, {**ANSWER, "tool_calls": {"name": "f"}}]}, "malformed tool call"),
    ({"messages": [USER, {**ANSWER, "tool_calls": ["f"]}]}, "malformed tool call"),
    (
        {"messages": [USER, {**ANSWER, "tool_calls": [{"function": {"arguments": "{}"}}]}]},
        "malformed tool call",
    ),
    ({"messages": [USER, {**ANSWER, "tool_calls": [{"name": "f"}]}]}, "malformed tool call"),
    (
        {"messages": [{**USER, "tool_calls": [{"name": "f", "arguments": "{}"}]}, ANSWER]},
        "malformed tool call",
    ),
    ({"messages": [USER, ANSWER], "tools": "not json"}, "tools are not a list of objects"),
    ({"messages": [USER, ANSWER], "tools": ["f"]}, "tools are not a list of objects"),
    (
        {"conversations": [{"role": "system", "content": "s"}, USER, ANSWER], "system": "t"},
        "two system prompts",
    ),
    ({"conversations": [USER, ANSWER], "system": 1}, "content is not text"),
    ({"input_ids": [1, 2]}, "input_ids without a 'loss_mask' list"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "input_ids and loss_mask differ in length"),
    ({"input_ids": [1, 2.0], "loss_mask": [1, 1]}, "input_ids are not a list of integers"),
    ({"input_ids": [1, True], "loss_mask": [1, 1]}, "input_ids are not a list of integers"),
    ({"input_ids": "12", "loss_mask": [1, 1]}, "input_ids are not a list of integers"),
    ({"input_ids": [], "loss_mask": []}, "input_ids are empty"),
    ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "loss_mask holds something else than 0 and 1"),
    ({"input_ids": [1, 2], "loss_mask": [0, None]}, "loss_mask holds something else than 0 and 1"),
    ({"input_ids": [1, 31], "loss_mask": [0, 1]}, "id beyond the vocabulary"),
    ({"input_ids": [1, -1], "loss_mask": [0, 1]}, "id beyond the vocabulary"),
    ({"input_ids": [1, 2**70], "loss_mask": [0, 1]}, "id beyond the vocabulary"),
]


@pytest.mark.parametrize(("row", "reason"), REFUSED, ids=[f"{i}-{reason}" for i, (_, reason) in enumerate(REFUSED)])
def test_refused_by_reason(row, reason):
    with pytest.raises(RowRefused) as refused:
        parse(row)
    assert refused.value.reason == reason


def test_openai_row_in_normal_form():
    row = {
        "id": 12,
        "tools": [],
        "messages": [
            {"role": "system", "content": "s", "extra": 1},
            USER,
            {
                "role": "assistant",
                "content": None,
                "reasoning": "r",
                "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
            {"role": "tool", "content": "t", "tool_call_id": "c1", "name": "f"},
            {**ANSWER, "tool_calls": None, "weight": 1},
        ],
    }
    conversation = parse(row)
    assert conversation.id == "12"
    assert conversation.tools is None
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}, "id": "c1"}
    assert conversation.messages == [
        {"role": "system", "content": "s"},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "r"},
        {"role": "tool", "content": "t", "tool_call_id": "c1", "name": "f"},
        ANSWER,
    ]


def test_sharegpt_rows():
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": " "}
    assert parse(row).messages == [USER, ANSWER]
    assert parse(row).id == "rows.jsonl:3"
    assert [parse({**row, "id": name}).id for name in ("", None, True, 0, "a")] == [*["rows.jsonl:3"] * 3, "0", "a"]
    assert parse({"conversations": [USER, ANSWER], "system": "s"}).messages[0] == {
        "role": "system",
        "content": "s",
    }
    both = {"conversations": [{"role": "system", "content": "s"}, USER, ANSWER], "system": "s"}
    assert len(parse(both).messages) == 3
    assert parse({"conversations": [USER, ANSWER], "tools": '[{"name": "f"}]'}).tools == [{"name": "f"}]


def test_leading_turns():
    tool = {"role": "tool", "content": "t"}
    system = {"role": "system", "content": "s"}
    conversation = parse({"messages": [system, ANSWER, tool, USER, ANSWER]})
    assert conversation.messages == [system, USER, ANSWER]
    assert conversation.leading_dropped == 2
    with pytest.raises(RowRefused, match="before the first user turn: 2"):
        parse({"messages": [system, ANSWER, tool, USER, ANSWER]}, leading_assistant="refuse")


def test_a_named_format_refuses_the_others():
    assert parse({"messages": [USER, ANSWER], "conversations": []}, row_format="messages").messages
    with pytest.raises(RowRefused, match="no 'conversations' in the row: it has messages"):
        parse({"messages": [USER, ANSWER]}, row_format="sharegpt")


def test_token_rows():
    row = parse({"id": "x", "input_ids": [0, 30], "loss_mask": [False, 1], "extra": 1})
    assert (row.id, row.input_ids.tolist(), row.loss_mask.tolist()) == ("x", [0, 30], [0, 1])
    assert (row.input_ids.dtype, row.loss_mask.dtype) == ("int32", "int8")


def test_byte_order_mark_is_no_content():
    assert parse(b"\xef\xbb\xbf" + json.dumps({"messages": [USER, ANSWER]}).encode()).messages == [
        USER,
        ANSWER,
    ]


def test_files_of_a_folder_come_in_the_order_of_their_names(write_rows, tmp_path):
    for name in ("b.jsonl", "a/z.jsonl.gz", "a/B.jsonl", "notes.txt", "c.json"):
        write_rows([{"n": name}], name)
    files = find_files(tmp_path)
    assert files.names == ("a/B.jsonl", "a/z.jsonl.gz", "b.jsonl")
    assert files.ignored == ("c.json", "notes.txt")
    lines = list(read_lines(files.root, files.names))
    assert [str(place) for place, _ in lines] == ["a/B.jsonl:1", "a/z.jsonl.gz:1", "b.jsonl:1"]
    assert json.loads(lines[1][1]) == {"n": "a/z.jsonl.gz"}


def test_blank_lines_count_as_lines_but_not_as_rows(write_rows):
    path = write_rows([b"{}", b"", b"  ", b"[]"])
    places = [place.line for place, _ in read_lines(find_files(path).root, find_files(path).names)]
    assert places == [1, 4]


def test_paths_that_hold_nothing_readable(tmp_path, write_rows):
    with pytest.raises(DataError, match="does not exist"):
        find_files(tmp_path / "missing")
    (tmp_path / "x.csv").write_bytes(b"a,b")
    with pytest.raises(DataError, match=r"is not a \.jsonl"):
        find_files(tmp_path / "x.csv")
    with pytest.raises(DataError, match=r"holds no .* 1 files of other kinds"):
        find_files(tmp_path)


def test_a_cut_or_false_gz_names_file_and_line(tmp_path):
    data = gzip.compress(b"".join(json.dumps({"n": i, "x": str(hash(i)) * 40}).encode() + b"\n" for i in range(2000)))
    (tmp_path / "cut.jsonl.gz").write_bytes(data[: len(data) // 2])
    (tmp_path / "false.jsonl.gz").write_bytes(b"plain text\n")
    for name in ("cut.jsonl.gz", "false.jsonl.gz"):
        with pytest.raises(DataError, match=rf"{name} cannot be read past line \d+"):
            list(read_lines(tmp_path, [name]))
