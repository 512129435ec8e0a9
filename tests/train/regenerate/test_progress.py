"""What a run says about itself: progress, the account, and the options that are refused."""

import time

import pytest

from tests.train.regenerate.conftest import conversation, write_rows
from tests.train.regenerate.server import FakeServer
from train.data.sources import open_source
from train.regenerate.account import Account
from train.regenerate.command import parser, regenerate_config
from train.regenerate.progress import Progress, RowCount, clock


def counted(path, limit=None) -> RowCount:
    count = RowCount(open_source(str(path)), limit)
    deadline = time.monotonic() + 10
    while count.total is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return count


def test_rows_are_counted_beside_the_run(tmp_path):
    path = write_rows(tmp_path / "in.jsonl", [conversation(n) for n in range(30)])
    assert counted(path).total == 30
    assert counted(path, limit=7).total == 7


def test_speed_and_time_left(tmp_path, monkeypatch):
    clock_now = [1000.0]
    monkeypatch.setattr("train.regenerate.progress.time.monotonic", lambda: clock_now[0])
    account = Account()
    turns = [{"prompt_tokens": 1, "completion_tokens": 100}]
    answer = {"regenerated": {"turns": turns}}
    for _ in range(10):  # by an earlier run
        account.count_row(answer)
    count = RowCount.__new__(RowCount)
    count.total = 50
    progress = Progress(account, count, print, 10)
    for _ in range(4):
        account.count_row(answer)
    account.generated = 400
    account.count_left_out({"kind": "error", "reason": "HTTP 500", "id": "x"})
    account.retry("HTTP 500", "x")
    clock_now[0] += 10
    # 5 rows in 10 s, 35 to go: 70 s
    assert progress.line() == "15 of 50 rows, 400 tokens, 40 tokens/s, 1 error, 1 retries, 0:01:10 left"
    clock_now[0] += 10
    assert progress.line() == "15 of 50 rows, 400 tokens, 0 tokens/s, 1 error, 1 retries, 0:02:20 left"
    count.total = None
    assert progress.line().startswith("15 rows, ")
    assert clock(3723.4) == "1:02:03"


def test_progress_is_said_while_the_run_goes_on(call):
    with FakeServer(delay=0.05) as server:
        done = call([conversation(n) for n in range(30)], [server], "--concurrency", "2", "--progress-every", "0.1")
    lines = [line for line in done.err.splitlines() if " of 30 rows, " in line]
    assert len(lines) >= 3
    assert "tokens/s" in lines[-1]
    assert lines[-1].endswith(" left")
    assert "answered         30  30 answers, 60 tokens written, 30 read" in done.out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--temperature", "3"], "--temperature is 3.0; give a number from 0 to 2"),
        (["--top-p", "1.5"], "--top-p is 1.5"),
        (["--extra-body", '{"temperature": 1}'], r"--extra-body is \['temperature'\]; these are options of their own"),
        (["--endpoint", "localhost:30000"], "--endpoint is 'localhost:30000'; give http://HOST:PORT/v1"),
        (["--endpoint", "http://a/v1", "http://a/v1/"], "--endpoint is .*give each server once"),
        (["--output", "rows.json"], "--output is 'rows.json'; give a .jsonl file"),
        (["--retry-errors"], "--retry-errors is True; it goes with --resume"),
        (["--concurrency", "0"], "--concurrency is 0"),
        (["--request-timeout", "0"], "--request-timeout is 0.0"),
        (["--loop-count", "1"], "--loop-count is 1"),
        (["--max-error-share", "0"], "--max-error-share is 0.0"),
        (["--limit", "0"], "--limit is 0"),
    ],
)
def test_options_out_of_range_are_named(options, complaint):
    given = ["--input", "in.jsonl", "--output", "out.jsonl", "--endpoint", "http://a/v1", "--temperature", "1"]
    with pytest.raises(ValueError, match=complaint):
        regenerate_config(parser().parse_args([*given, *options]))


def test_the_temperature_has_no_default(capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["--input", "in.jsonl", "--output", "out.jsonl", "--endpoint", "http://a/v1"])
    assert "--temperature" in capsys.readouterr().err
