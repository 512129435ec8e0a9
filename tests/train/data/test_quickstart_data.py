"""The data that ships with the package, and the tool that made it."""

import collections
import gzip
import importlib.util
import json
from pathlib import Path

import pytest

from tests.places import public_conversations
from train.data import QUICKSTART, QUICKSTART_CONVERSATIONS, QUICKSTART_PROMPTS
from train.data.files import find_files, read_lines
from train.data.formats import parse_row

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def tool():
    path = ROOT / "examples" / "make_quickstart_data.py"
    if not path.is_file():
        pytest.skip("examples/ is not part of an installed package")
    spec = importlib.util.spec_from_file_location("make_quickstart_data", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def conversations():
    files = find_files(QUICKSTART_CONVERSATIONS)
    return [parse_row(line, place, vocab_size=1) for place, line in read_lines(files.root, files.names)]


@pytest.fixture(scope="module")
def prompts():
    return [json.loads(line) for line in QUICKSTART_PROMPTS.read_text(encoding="utf-8").splitlines()]


def test_shipped_conversations(conversations):
    assert len(conversations) == len({c.id for c in conversations}) == 1602
    assert QUICKSTART_CONVERSATIONS.stat().st_size <= 600_000
    assert all([m["role"] for m in c.messages] == ["user", "assistant"] for c in conversations)
    assert all(len(c.messages[1]["content"].split()) > 10 for c in conversations)
    sources = collections.Counter(c.id.rsplit("-", 1)[0] for c in conversations)
    assert sources == {"math_template": 534, "code_template": 534, "wiki_title": 534}
    readme = (QUICKSTART / "README.md").read_text(encoding="utf-8")
    assert all(word in readme for word in ("1,602", "Apache-2.0", "SmolLM2-135M-Instruct", "Wikipedia"))


def test_held_out_prompts_ask_nothing_that_was_trained_on(tool, conversations, prompts):
    assert len(prompts) == len({p["id"] for p in prompts}) == 64
    assert all(len(p["turns"]) == 1 for p in prompts)
    asked = {tool.question_key(c.messages[0]["content"]) for c in conversations}
    held_out = [tool.question_key(p["turns"][0]) for p in prompts]
    assert len(set(held_out)) == 64
    assert not asked & set(held_out)
    assert collections.Counter(key[0] for key in held_out) == {"math": 22, "code": 21, "wiki": 21}


def test_held_out_prompts_are_new_to_the_whole_file_they_were_chosen_beside(tool, prompts):
    asked = {tool.question_key(row.prompt) for row in tool.read(public_conversations())}
    assert not asked & {tool.question_key(p["turns"][0]) for p in prompts}


def test_question_key(tool):
    key = tool.question_key
    assert key("Write a Go function to sort a list. Add comments.") == key("Write a Go function to sort a list.")
    assert key("Write a Go function to sort a list.") != key("Write a C function to sort a list.")
    train = "A shop sells {} for $4 each. {} buys 7 of them and pays with a ${} voucher. Think step by step."
    assert key(train.format("toy cars", "Ben", 30)) == key(train.format("eggs", "Ivy", 30))
    assert key(train.format("toy cars", "Ben", 30)) != key(train.format("toy cars", "Ben", 31))
    assert key("What is Gold?") != key("Tell me about Gold.")


def make_input(tool, path: Path, per_source: int) -> None:
    rows = []
    for i in range(per_source):
        questions = {
            "math_template": f"A train travels {i} km in 2 hours. Think step by step.",
            "code_template": f"Write a {('Go', 'C')[i % 2]} function to sort thing {i}. Add comments.",
            "wiki_title": tool.WIKI[i % len(tool.WIKI)].format(f"Title {i}"),
            "evals": f"Question {i}?",
        }
        for source, question in questions.items():
            answer = " ".join(["word"] * (30 + 10 * i)) + (" murder" if i == 3 else "")
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            rows.append({"id": f"{source}-{i}", "source": source, "conversations": turns})
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def test_tool_chooses_the_same_rows_in_any_order_and_leaves_out_what_does_not_fit(tool, tmp_path):
    make_input(tool, tmp_path / "in.jsonl.gz", 40)
    rows = tool.read(tmp_path / "in.jsonl.gz")
    assert {row.source for row in rows} == set(tool.SOURCES)

    def count(text: str) -> int:
        return len(text.split())

    chosen = tool.select(rows, count, per_source=5)
    assert chosen == tool.select(rows[::-1], count, per_source=5)
    assert collections.Counter(row.source for row in chosen) == dict.fromkeys(tool.SOURCES, 5)
    assert all(40 <= count(row.answer) <= 309 and "murder" not in row.answer for row in chosen)
    everything = tool.select(rows, count, per_source=26)  # lengths 40..300 without the unfit one
    assert len(everything) == 78
    with pytest.raises(ValueError, match="has 26 rows that fit, 27 are needed"):
        tool.select(rows, count, per_source=27)
    prompts = tool.held_out_prompts(rows, chosen, count=12)
    assert prompts == tool.held_out_prompts(rows, chosen, count=12)
    titles = [prompt for source, prompt in prompts if source == "wiki_title"]
    shown = {row.prompt.rstrip("?.").split("Title ")[-1] for row in chosen if row.source == "wiki_title"}
    assert len(titles) == 4
    assert not any(f"Title {number}" in title.split() for number in shown for title in titles)
    tool.write_conversations(chosen, tmp_path / "c.jsonl.gz")
    tool.write_prompts(prompts, tmp_path / "p.jsonl")
    with gzip.open(tmp_path / "c.jsonl.gz", "rt") as file:
        assert [json.loads(line)["id"] for line in file] == [row.id for row in chosen]
    assert len((tmp_path / "p.jsonl").read_text().splitlines()) == 12
