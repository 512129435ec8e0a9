"""Running a script as several processes of one run, as a launch by hand does; used by tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """How one process ended; code None = it was still running at the limit and was killed."""

    code: int | None
    output: str


def free_ports(count: int = 2) -> int:
    """First of `count` neighbouring ports that are free now."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
        try:
            for offset in range(1, count):
                with socket.socket() as other:
                    other.bind(("127.0.0.1", port + offset))
        except OSError:
            continue
        if port + count < 65535:
            return port


def run_processes(code: str, size: int, *, limit: float = 120.0, extra: dict[str, str] | None = None) -> list[Ended]:
    """Run `code` in `size` processes at once; returns by rank. Kills what is left at the limit [s]."""
    port = free_ports()
    processes = []
    for rank in range(size):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            **(extra or {}),
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(code)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    end = time.monotonic() + limit
    ended = []
    for process in processes:
        try:
            output, _ = process.communicate(timeout=max(0.1, end - time.monotonic()))
            ended.append(Ended(process.returncode, output))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            ended.append(Ended(None, output))
    return ended
