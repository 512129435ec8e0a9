"""A stuck phase is named, with the stack of the line it is stuck in, and the process ends; a slow one is left alone."""

from __future__ import annotations

import time

import pytest

from tests.train.processes import run_processes
from train.watchdog import EXIT_CODE, Watchdog


@pytest.fixture
def watched(tmp_path):
    ended: list[int] = []
    with open(tmp_path / "log", "w+") as stream:

        def make(limit: float) -> Watchdog:
            return Watchdog(limit, "rank 3 on a", stream=stream, end=ended.append)

        def told() -> str:
            stream.seek(0)
            return stream.read()

        yield make, told, ended


def a_call_that_hangs(seconds: float) -> None:
    time.sleep(seconds)


def test_a_stuck_phase_is_named_with_its_stack(watched):
    make, told, ended = watched
    with make(0.3) as dog:
        dog.alive(17)
        with dog.phase("capture"):
            a_call_that_hangs(1.0)
    assert ended == [EXIT_CODE]
    assert "rank 3 on a has been in phase 'capture' after step 17" in told()
    assert "a_call_that_hangs" in told()


def test_progress_is_left_alone_however_long_it_takes(watched):
    make, told, ended = watched
    with make(0.4) as dog:
        for step in range(10):
            with dog.phase("apply"):
                time.sleep(0.1)
            dog.alive(step)
    time.sleep(0.6)  # left: nobody is watching
    with make(0) as dog:
        time.sleep(0.1)
    assert (ended, told()) == ([], "")


def test_the_process_really_ends():
    code = """
    import time
    from train.watchdog import Watchdog
    with Watchdog(1.0, "rank 0 on here") as dog, dog.phase("waiting for a collective"):
        time.sleep(60)
    """
    (ended,) = run_processes(code, 1, limit=30)
    assert ended.code == EXIT_CODE
    assert "in phase 'waiting for a collective'" in ended.output
