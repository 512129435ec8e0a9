"""A run that is killed at any moment and resumed: every id exactly once, nothing lost but what was in flight."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.regenerate.conftest import arguments, conversation, read_rows, write_rows
from tests.train.regenerate.server import FakeServer
from train.regenerate.command import main
from train.regenerate.output import OutputError

ROOT = Path(__file__).resolve().parents[3]


def start(source: Path, output: Path, servers, *more: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "train.cli", "regenerate", *arguments(source, output, servers, *more)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def wait_for_rows(process: subprocess.Popen, output: Path, number: int) -> None:
    deadline = time.monotonic() + 60
    while not output.exists() or output.read_bytes().count(b"\n") < number:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def whole_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]


def test_killed_with_9_again_and_again(tmp_path):
    source, output = write_rows(tmp_path / "in.jsonl", [conversation(n) for n in range(90)]), tmp_path / "out.jsonl"
    servers = [FakeServer(delay=0.02), FakeServer(delay=0.02)]
    for goal in (15, 40):
        process = start(source, output, servers, "--resume", "--concurrency", "3")
        wait_for_rows(process, output, goal)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        written = len(whole_lines(output))
        answered = sum(len(server.answered) for server in servers)
        assert goal <= written <= answered
        with open(output, "ab") as file:  # what a kill in the middle of a write leaves
            file.write(b'{"id": "row-77", "messages": [{"role": "us')
    before = whole_lines(output)
    process = start(source, output, servers, "--resume", "--concurrency", "3")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert "a last line of 42 bytes was cut off by a kill and is removed" in said
    assert whole_lines(output)[: len(before)] == before  # appended to, never rewritten
    rows = read_rows(output)
    assert sorted(row["id"] for row in rows) == sorted(f"row-{n}" for n in range(90))
    # Each kill costs what was in flight, 6 requests, at most; nothing that was written is asked for again.
    assert 90 <= sum(len(server.asked) for server in servers) <= 90 + 2 * 6
    for server in servers:
        server.close()


def test_sigterm_stops_at_once_and_says_how_to_go_on(tmp_path):
    source, output = write_rows(tmp_path / "in.jsonl", [conversation(n) for n in range(60)]), tmp_path / "out.jsonl"
    slow = lambda body, number: "hang" if number > 20 else None  # noqa: E731
    with FakeServer(delay=0.01, fault=slow) as server:
        process = start(source, output, [server], "--concurrency", "2")
        wait_for_rows(process, output, 10)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=20)
    assert process.returncode == 143, said
    assert "stopped by SIGTERM; go on with --resume" in said
    assert "answered " in said
    with FakeServer() as server:
        assert main(arguments(source, output, [server], "--resume")) == 0
    assert sorted(row["id"] for row in read_rows(output)) == sorted(f"row-{n}" for n in range(60))


def test_two_runs_never_write_to_one_file(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    source, output = write_rows(tmp_path / "in.jsonl", [conversation(n) for n in range(50)]), tmp_path / "out.jsonl"
    with FakeServer(delay=0.1) as server:
        process = start(source, output, [server], "--concurrency", "1")
        wait_for_rows(process, output, 2)
        with pytest.raises(OutputError, match="is being written by another process"):
            main(arguments(source, output, [server], "--resume"))
        process.kill()
        process.communicate()


def test_memory_does_not_grow_with_the_input(tmp_path):
    """Peak memory over 200 and over 4,000 rows of 20 kB (80 MB), most of them settled in an earlier run."""
    code = (
        "import sys; from train.cli import main; code = main(sys.argv[1:]); from pathlib import Path;"
        "print('peak', Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]); sys.exit(code)"
    )
    peaks = []
    for number in (200, 4000):
        rows = [conversation(n) for n in range(number)]
        for row in rows:
            row["messages"][0]["content"] *= 1600
        source, output = write_rows(tmp_path / f"{number}.jsonl", rows), tmp_path / f"out{number}.jsonl"
        del rows
        with FakeServer() as server:
            done = subprocess.run(
                [sys.executable, "-c", code, "regenerate", *arguments(source, output, [server], "--limit", "50")],
                cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_PROXY": "127.0.0.1"},
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            settled = [json.loads(line) for line in output.read_text().splitlines()]
            write_settled(output, settled[0], source, number)
            done = subprocess.run(
                [sys.executable, "-c", code, "regenerate", *arguments(source, output, [server], "--resume")],
                cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_PROXY": "127.0.0.1"},
            )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert len(read_rows(output)) == number
        peaks.append(int(done.stdout.split("peak ")[1]) / 1024)
    assert peaks[1] < peaks[0] + 16, f"peaks in MiB: {peaks}"


def write_settled(output: Path, like: dict, source: Path, number: int) -> None:
    """Rows for all but the last 100 of the input, as a run would have written them."""
    from train.data.files import Place, read_lines
    from train.data.formats import parse_row
    from train.regenerate.conversation import source_digest

    with open(output, "w") as file:
        for place, line in read_lines(source.parent, [source.name]):
            if place.line > number - 100:
                break
            conversation = parse_row(line, Place(source.name, place.line), vocab_size=0)
            made = {**like["regenerated"], "source": source_digest(conversation)}
            file.write(json.dumps({**like, "id": conversation.id, "regenerated": made}) + "\n")
