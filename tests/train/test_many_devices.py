"""Every sharding mode on one, two, four and eight devices, of one, two and four processes: one curve, exact resume.

The data are uneven: in one step the last half of the devices has no supervised token, in the last step no row, and of
every second row the second half is padding. `many_devices.py` is what runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.train import many_devices
from tests.train.many_devices import LAYOUTS, SAVED_AT, STEPS, several
from tests.train.processes import run_processes

SCRIPT = Path(many_devices.__file__)
ROOT = SCRIPT.parents[2]
#: Saved on eight devices of one process, restored on processes.
SOURCES = ["8 full", "8 replicated"]


def result(output: str) -> dict:
    line = next((line for line in output.splitlines() if line.startswith("RESULT ")), None)
    assert line is not None, output[-3000:]
    return json.loads(line[7:])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def eight(folder) -> dict:
    environment = {
        **os.environ,
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return result(done.stdout)


@pytest.fixture(scope="module", params=[2, 4])
def processes(request, eight, folder) -> tuple[int, list[dict]]:
    code = f"import sys; sys.argv[1:] = {[str(folder), *SOURCES]!r}\nfrom tests.train.many_devices import main; main()"
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / f"compiled{request.param}"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    ended = run_processes(code, request.param, limit=900, extra=cache)
    for process in ended:
        assert process.code == 0, process.output[-3000:]
    return request.param, [result(process.output) for process in ended]


def assert_same_curve(ours: list[dict], expected: list[dict], name: str) -> None:
    assert len(ours) == len(expected) == STEPS
    for values, wanted in zip(ours, expected):
        assert values["loss"] == pytest.approx(wanted["loss"], rel=1e-5), name
        assert values["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5), name
        # Anchors are drawn and counted as if nothing were split.
        assert (values["anchors"], values["slots"]) == (wanted["anchors"], wanted["slots"]), name


def test_the_curve_is_that_of_one_device_whatever_is_split(eight):
    expected = eight["curves"]["1"]
    for name in LAYOUTS:
        assert_same_curve(eight["curves"][name], expected, name)
    losses = np.array([step["loss"] for step in expected])
    assert losses[-1] < losses[0]
    assert (np.abs(np.diff(losses)) > 1e-4).all(), "a step that changes nothing would pass"
    assert [step["slots"] for step in expected] == [40, 40, 20, 40, 40, 40, 40, 40, 40, 15]


def test_the_curve_does_not_depend_on_processes(eight, processes):
    size, ranks = processes
    for rank in ranks:
        assert set(rank["curves"]) == set(several(size))
        for name, curve in rank["curves"].items():
            assert_same_curve(curve, eight["curves"]["1"], f"{size} processes, {name}")


def test_each_mode_and_number_of_devices_resumes_from_each_other(eight):
    """The state is restored bit for bit; the step after it is that of the uninterrupted run."""
    assert len(eight["pairs"]) == 7 + 4 * 3 + 2 * 4 * 3
    for name, pair in eight["pairs"].items():
        source, _, onto = name.partition(" -> ")
        assert pair["restored"], name
        if source == onto:
            assert pair["bits"], name
        for what in ("loss", "grad_norm", "state"):
            assert pair[what] <= 1e-6, (name, what, pair[what])
    assert not all(pair["bits"] for pair in eight["pairs"].values()), "the order of sums should show somewhere"


def test_processes_resume_what_one_process_saved(eight, processes):
    size, ranks = processes
    for rank in ranks:
        assert len(rank["resumed"]) == len(SOURCES) * len(several(size))
        for name, step in rank["resumed"].items():
            wanted = eight["curves"][name.partition(" -> ")[0]][SAVED_AT]
            for what in ("loss", "grad_norm"):
                assert step[what] == pytest.approx(wanted[what], rel=1e-6), (size, name)
