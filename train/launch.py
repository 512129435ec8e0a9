"""Several processes as one run: joining, what must be equal before anything starts, and how a process leaves."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from .config import RunConfig
from .distributed import DistributedError, World, stop_jax, versions
from .resume import flat, settings_of
from .topology import Topology

T = TypeVar("T")

#: What changes compiled programs without being seen in the lowered text.
_ENVIRONMENT = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_OPTIMIZATION_LEVEL", "JAX_DISABLE_MOST_OPTIMIZATIONS")
#: Longest wait for a file of another host to appear on a shared file system [s]; NFS caches listings for a minute.
_SHARED_SECONDS = 90.0
#: How long rank 0, whose end takes JAX's coordinator with it, leaves the others to print their own messages [s].
_LAST_WORDS_SECONDS = 3.0

_joined: World | None = None


@contextmanager
def joined() -> Iterator[World]:
    """The processes of this launch, from the environment; a single process where no launcher is.

    After an error the process must end by `leave_at_once`: the usual way out waits for processes that may be gone.
    """
    global _joined
    topology = Topology.from_environment()
    if topology.world_size > 1:
        # JAX's and torch's collectives then launch in the order in which the host asked for them (NCCL 2.26).
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    world = _joined = World(topology)
    yield world
    world.close()
    stop_jax(world.topology)
    _joined = None


def leave_at_once(code: int) -> None:
    """After an error, once its message is printed: end this process if it is one of several.

    Leaving through the interpreter would wait: for JAX's coordinator, which waits for all processes, and for threads
    of a save that waits for the others. They would learn of the failure only when their own limits are over.
    """
    if _joined is None or _joined.size == 1:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    if _joined.is_first:
        time.sleep(_LAST_WORDS_SECONDS)
    os._exit(code)


def agree_on_start(world: World, config: RunConfig) -> None:
    """Refuse to start unless all processes have the same versions, environment and configuration.

    Raises:
        DistributedError: names each difference, with ranks and hosts.
    """
    world.agree("installed versions", versions())
    world.agree("the environment", {name: os.environ.get(name) for name in _ENVIRONMENT})
    world.agree("the configuration", flat(settings_of(config)))


def require_shared(world: World, folder: Path) -> None:
    """Refuse a run_dir that is not one folder for all processes: each writes its part of every checkpoint there.

    Raises:
        DistributedError: names the ranks that do not see what rank 0 wrote.
    """
    if world.size == 1:
        return

    def write() -> Path | None:
        if not world.is_first:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        path = folder.absolute() / f".shared-{secrets.token_hex(8)}"
        path.touch()
        return path

    probe = world.first(world.attempt(f"writing to run_dir {folder}", write), "a probe of run_dir")
    assert probe is not None
    # By the own name of the folder: the same text must lead to the same place.
    found = _within(_SHARED_SECONDS, lambda: (folder / probe.name).exists() and os.access(folder, os.W_OK))
    missing = [
        f"rank {rank} on {host}"
        for rank, (host, sees) in enumerate(world.gather((world.topology.host, found), "a probe of run_dir"))
        if not sees
    ]
    if world.is_first:
        probe.unlink(missing_ok=True)
    if missing:
        raise DistributedError(
            f"run_dir {folder} of rank 0 is not seen, or cannot be written, by {', '.join(missing)}. Give a folder on a"
            " file system that all hosts share, as an absolute path"
        )


def _within(seconds: float, check: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not check():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True
