"""Trackers: strict JSON lines, optional imports, resume, and no inheritance by fork."""

import json
import math
import os
import subprocess
import sys

import pytest

from train.tracker import JsonlTracker, TrackerError, open_trackers, strict_json


def refuse(text: str):
    raise AssertionError(f"{text} is not JSON")


def test_lines_are_strict_json(tmp_path):
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    tracker.log(1, {"loss": 1.5, "accept_rate@3": math.nan, "x": -math.inf, "epoch": 0})
    line = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refuse)
    assert line == {
        "step": 1,
        "loss": 1.5,
        "accept_rate@3": None,
        "x": None,
        "epoch": 0,
        "nonfinite": ["accept_rate@3", "x"],
    }
    tracker.finish()


def test_a_line_is_on_disk_when_log_returns(tmp_path):
    tracker = JsonlTracker(tmp_path / "m.jsonl")
    tracker.log(1, {"loss": 1.0})
    assert (tmp_path / "m.jsonl").read_text() == strict_json({"step": 1, "loss": 1.0}) + "\n"


def test_resume_keeps_one_curve(tmp_path):
    """Lines behind the checkpoint, and one torn by a kill, make room for the ones that are computed again."""
    file = tmp_path / "m.jsonl"
    first = JsonlTracker(file)
    for step in range(1, 6):
        first.log(step, {"loss": float(step)})
    first.finish()
    with file.open("a") as stream:
        stream.write('{"step": 6, "lo')
    again = JsonlTracker(file, last_step=3)
    assert again.dropped_lines == 3
    again.log(4, {"loss": 40.0})
    again.finish()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["loss"] == 40.0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_worker_cannot_log(tmp_path):
    code = """
import os, sys
from pathlib import Path
from train.tracker import JsonlTracker, TrackerError
tracker = JsonlTracker(Path(sys.argv[1]))
if os.fork() == 0:
    try:
        tracker.log(1, {"loss": 0.0})
    except TrackerError as error:
        os._exit(0 if "forked process" in str(error) else 2)
    os._exit(3)
status = os.waitstatus_to_exitcode(os.wait()[1])
tracker.log(2, {"loss": 0.0})
sys.exit(status)
"""
    file = tmp_path / "m.jsonl"
    subprocess.run([sys.executable, "-c", code, str(file)], check=True)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [2]


def test_optional_trackers_are_imported_only_when_asked(tmp_path):
    code = """
import sys
from pathlib import Path
import train.tracker
trackers = train.tracker.open_trackers((), Path(sys.argv[1]))
trackers.log(1, {"loss": 1.0})
trackers.finish()
assert not {"tensorboardX", "wandb", "tensorflow"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    trackers = open_trackers(("tensorboard",), tmp_path)
    trackers.log(1, {"loss": 1.0, "name": "text is skipped"})
    trackers.finish()
    assert list((tmp_path / "tensorboard").iterdir())
    assert "tensorflow" not in sys.modules


def test_a_run_that_goes_back_logs_on_and_loses_no_line(tmp_path):
    """Steps 1..5, back to 3, then 4 and 5 anew: one curve of five steps, the first 4 and 5 beside it."""
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    trackers = open_trackers(("tensorboard",), tmp_path)
    for step in range(1, 6):
        trackers.log(step, {"loss": float(step)})
    trackers.rewind(3)
    for step in (4, 5):
        trackers.log(step, {"loss": 10.0 * step})
    trackers.finish()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0), (5, 50.0)]
    lost = [json.loads(line) for line in (tmp_path / "metrics.rolled_back.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lost] == [(4, 4.0), (5, 5.0)]

    events = []
    for path in sorted((tmp_path / "tensorboard").iterdir(), key=lambda path: len(path.name)):
        data = path.read_bytes()
        while data:  # length, its checksum, the event, its checksum
            size = int.from_bytes(data[:8], "little")
            events.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    marks = [event.step for event in events if event.session_log.status == 1]
    assert marks == [4], "TensorBoard is told to hide what it had from step 4 on"
    assert [event.step for event in events if event.summary.value] == [1, 2, 3, 4, 5, 4, 5]


def test_wandb_gets_numbers_and_continues_its_run(tmp_path, monkeypatch):
    """The calls made to wandb, on a stand-in module: the real one would want an account."""
    calls = []

    class Run:
        id = "abc"

        def log(self, metrics, step):
            calls.append((step, metrics))

        def finish(self):
            calls.append("finish")

    class Wandb:
        @staticmethod
        def init(**options):
            calls.append(options)
            return Run()

    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    for _ in range(2):
        trackers = open_trackers(("wandb",), tmp_path, project="p", config={"a": 1})
        trackers.log(3, {"loss": 1.0, "text": "t"})
        trackers.finish()
    assert [c["id"] for c in calls if isinstance(c, dict)] == [None, "abc"]
    assert calls[1:3] == [(3, {"loss": 1.0}), "finish"]


def test_missing_packages_and_unknown_names(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(TrackerError, match="pip install wandb"):
        open_trackers(("wandb",), tmp_path)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(TrackerError, match="pip install tensorboardX"):
        open_trackers(("tensorboard",), tmp_path)
    with pytest.raises(TrackerError, match="unknown tracker 'clu'"):
        open_trackers(("clu",), tmp_path)
