"""Inputs and calls that the tests of `draft-jax regenerate` share."""

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.train.regenerate.server import FakeServer
from train.regenerate.command import main

if importlib.util.find_spec("httpx2") is None:  # the extra `regenerate`, part of `dev`
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def conversation(number: int, turns: int = 1) -> dict:
    """A row whose answers are not the target's."""
    messages = []
    for turn in range(turns):
        messages += [
            {"role": "user", "content": f"question {number}.{turn}"},
            {"role": "assistant", "content": "somebody else's answer"},
        ]
    return {"id": f"row-{number}", "source": "tests", "messages": messages}


def write_rows(path: Path, rows: Sequence[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@dataclass
class Done:
    """What a call left: exit code, rows by id, lines of the errors file, the summary, what was printed."""

    code: int
    rows: dict[str, dict]
    left_out: list[dict]
    summary: dict
    out: str
    err: str


def arguments(source: Path, output: Path, servers: Sequence[FakeServer], *more: str) -> list[str]:
    """Options of a run that does not wait."""
    return ["--input", str(source), "--output", str(output), "--endpoint", *(s.url for s in servers),
            "--temperature", "0.7", "--backoff", "0.01", "--max-backoff", "0.05",
            "--start-timeout", "5", *more]  # fmt: skip


@pytest.fixture
def call(tmp_path, capsys) -> Callable[..., Done]:
    """Runs the command in this process over rows, or over the rows of the call before."""
    output, source = tmp_path / "out" / "answers.jsonl", tmp_path / "rows.jsonl"

    def run(rows: Sequence[dict] | None, servers: Sequence[FakeServer], *more: str) -> Done:
        if rows is not None:
            write_rows(source, rows)
        code = main(arguments(source, output, servers, *more))
        captured = capsys.readouterr()
        found = read_rows(output)
        by_id = {row["id"]: row for row in found}
        assert len(by_id) == len(found), "an id occurs twice"
        summary = json.loads(Path(f"{output}.summary").read_text())
        return Done(code, by_id, read_rows(Path(f"{output}.errors")), summary, captured.out, captured.err)

    run.output = output
    return run
