"""The files of a run: repaired, compared, extended."""

import json

import pytest

from tests.train.regenerate.conftest import read_rows
from train.regenerate.account import Account
from train.regenerate.id_set import IdSet
from train.regenerate.output import Output, OutputError


def row(number: int, **more) -> dict:
    turns = [{"finish": "stop", "prompt_tokens": 3, "completion_tokens": 4}]
    return {"id": f"r{number}", "messages": [], **more, "regenerated": {"turns": turns, "source": f"s{number}"}}


def left_out(number: int, kind: str = "error", reason: str = "HTTP 500") -> dict:
    entry = {"id": f"r{number}", "kind": kind, "reason": reason, "detail": ""}
    return entry if kind == "refused" else entry | {"source": f"s{number}"}


@pytest.fixture
def opened(tmp_path):
    said, outputs = [], []

    def open_output(resume=True, retry_errors=False, **identity):
        output = Output(
            tmp_path / "deep" / "out.jsonl", {"model": "m", **identity}, {"input": "in"}, Account(), said.append,
            resume=resume, retry_errors=retry_errors,
        )  # fmt: skip
        outputs.append(output)
        return output

    open_output.said = said
    yield open_output
    for output in outputs:
        if not output._row_file.closed:
            output.close()


def test_a_second_life_knows_the_first(opened):
    first = opened(resume=False)
    first.write_row(row(0, kind="a value of the source", text="\ud800 ü"))
    first.write_left_out(left_out(1))
    first.write_left_out(left_out(2, "dropped", "answer is empty"))
    first.write_left_out(left_out(3, "refused", "not JSON"))
    first.close()
    second = opened()
    assert [second.settled(f"r{n}", f"s{n}") for n in range(4)] == [True, True, True, False]
    second.write_left_out(left_out(3, "refused", "not JSON"))  # met again in the input, written once
    assert len(read_rows(second.errors_path)) == 3
    account = second.account
    assert (account.answered, account.turns, account.prompt_tokens, account.completion_tokens) == (1, 1, 3, 4)
    assert [account.number(kind) for kind in ("error", "dropped", "refused")] == [1, 1, 1]
    assert account.settled == 4
    assert read_rows(second.path)[0]["text"] == "\ud800 ü"
    with pytest.raises(OutputError, match="id 'r0' is written twice"):
        second.write_row(row(0))


def test_errors_are_forgotten_on_demand_and_what_was_dropped_is_not(opened):
    first = opened()
    for entry in (left_out(0), left_out(1, "dropped", "answer is empty"), left_out(2)):
        first.write_left_out(entry)
    first.close()
    second = opened(retry_errors=True)
    assert [second.settled(f"r{n}", f"s{n}") for n in range(3)] == [False, True, False]
    assert [entry["id"] for entry in read_rows(second.errors_path)] == ["r1"]


@pytest.mark.parametrize("torn", [b"{", b'{"id": "r9", "messages"', b"x" * (3 << 20), b'{"id": "r1"}'])
@pytest.mark.parametrize("whole", [0, 1])
def test_a_torn_last_line_is_removed(opened, torn, whole):
    first = opened()
    for number in range(whole):
        first.write_row(row(number))
        first.write_left_out(left_out(number + 5))
    first.close()
    for path in (first.path, first.errors_path):
        with open(path, "ab") as file:
            file.write(torn)
    second = opened()
    assert (second.account.answered, second.account.number("error")) == (whole, whole)
    assert sum(f"a last line of {len(torn)} bytes was cut off" in line for line in opened.said) == 2
    second.write_row(row(7))
    assert [found["id"] for found in read_rows(second.path)] == ["r0", "r7"][1 - whole :]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"id": "a"\n', "line 1 is not JSON"),
        (b"[1]\n", "line 1 is no row of this program"),
        (b'{"id": "a", "messages": []}\n', "line 1 is no row of this program"),
        ((json.dumps(row(1)) + "\n").encode() * 2, "id 'r1' is written twice"),
    ],
)
def test_other_content_is_refused_and_left_alone(opened, content, complaint):
    first = opened()
    first.close()
    first.path.write_bytes(content)
    with pytest.raises(OutputError, match=complaint):
        opened()
    assert first.path.read_bytes() == content


def test_files_of_something_else_are_refused(opened, tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "out.jsonl").write_text('{"id": "x", "messages": []}\n')
    with pytest.raises(OutputError, match=r"has no out.jsonl.run that says what wrote it"):
        opened()
    with pytest.raises(OutputError, match=r"exists: go on with --resume"):
        opened(resume=False)


def test_ids_by_digest_behave_like_a_set():
    ids, reference = IdSet(), set()
    for number in range(200_000):
        name = f"id-{number * 7919 % 150_000}"
        assert ids.add(name) is (name not in reference)
        reference.add(name)
    assert len(ids) == len(reference) == 150_000
    assert "id-149999" in ids
    assert "id-150000" not in ids
