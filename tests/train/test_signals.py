"""Stop requests: the first is a flag, a later one ends the process, a launcher's copy of the first does nothing."""

import os
import signal
import time

import pytest

from train.signals import StopRequest


@pytest.fixture
def received():
    """What a handler outside of the run gets."""
    found = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


def test_the_second_signal_acts_as_if_nothing_were_installed(received):
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.signal, stop.exit_code, received) == (signal.SIGTERM, 143, [])
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]


def test_a_launchers_copy_of_a_signal_is_ignored_for_a_while(received):
    with StopRequest(patience=0.2) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.signal, received) == (signal.SIGTERM, [])
        time.sleep(0.25)
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == [signal.SIGTERM]
    os.kill(os.getpid(), signal.SIGTERM)
    assert received == [signal.SIGTERM] * 2
