"""Who this process is among those of a run: read once from whichever launcher's environment is there."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass


class TopologyError(RuntimeError):
    """An environment that does not say who this process is; names the variables, their values and the remedy."""


#: What torchrun sets, and what a launch by hand has to set.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
#: What plain `srun` sets, one task per GPU.
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_ID")
#: JAX's coordinator listens next to torch's store, which owns MASTER_PORT.
_JAX_PORT_OFFSET = 1


@dataclass(frozen=True)
class Topology:
    """One process per GPU; processes are numbered host by host.

    Attributes:
        rank: of this process, 0 .. world_size-1.
        world_size: processes of the run.
        local_rank: of this process on its host; also the number of its GPU.
        local_world_size: processes on this host.
        master_address: host of rank 0.
        master_port: of torch's store there; JAX's coordinator takes the next one.
        launcher: single, torchrun or slurm: where this was read.
        host: name of this host, for messages.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    master_address: str = "127.0.0.1"
    master_port: int = 0
    launcher: str = "single"
    host: str = ""

    def __post_init__(self) -> None:
        for name, value, bound in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
        ):
            if not 0 <= value < bound:
                raise TopologyError(f"{self._where}: {name} {value} is outside 0..{bound - 1}; see docs/multi_host.md")
        if self.local_world_size > self.world_size:
            raise TopologyError(
                f"{self._where}: {self.local_world_size} processes on this host, but only {self.world_size} in all"
            )
        if self.world_size > 1 and not 1 <= self.master_port < 65535:
            raise TopologyError(f"{self._where}: master port {self.master_port} is not one of 1..65534")

    @property
    def coordinator(self) -> str:
        """host:port of JAX's coordination service."""
        return f"{self.master_address}:{self.master_port + _JAX_PORT_OFFSET}"

    @property
    def is_first(self) -> bool:
        """Whether this process writes what only one may write."""
        return self.rank == 0

    @property
    def _where(self) -> str:
        return f"host {self.host or '(unnamed)'}, launched by {self.launcher}"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None, host: str | None = None) -> Topology:
        """Read torchrun's variables (also those of a launch by hand), else Slurm's, else a single process.

        torchrun goes first: under `srun torchrun` Slurm's variables count nodes, not processes.

        Args:
            environment: instead of os.environ.
            host: instead of this host's name.

        Raises:
            TopologyError: some variables of a launcher are there and others are not, or one is no number.
        """
        env = os.environ if environment is None else environment
        host = socket.gethostname() if host is None else host
        found = [name for name in _TORCHRUN if env.get(name)]
        if "RANK" in found or "LOCAL_RANK" in found:
            missing = [name for name in _TORCHRUN if name not in found]
            if missing:
                are, nor = (("is" if len(names) == 1 else "are") for names in (found, missing))
                raise TopologyError(
                    f"host {host}: {', '.join(found)} {are} set, but {', '.join(missing)} {nor} not; launch with"
                    " torchrun, or set all of them (docs/multi_host.md)"
                )
            world, local = _number(env, "WORLD_SIZE", host), _number(env, "LOCAL_RANK", host)
            # By hand LOCAL_WORLD_SIZE is easily forgotten; one host is then the only safe reading.
            local_world = _number(env, "LOCAL_WORLD_SIZE", host) if env.get("LOCAL_WORLD_SIZE") else world
            return cls(
                _number(env, "RANK", host),
                world,
                local,
                local_world,
                env["MASTER_ADDR"],
                _number(env, "MASTER_PORT", host),
                "torchrun",
                host,
            )
        # A shell inside an allocation has some of these; only srun numbers its tasks, and one task is a single process.
        if all(env.get(name) for name in _SLURM) and _number(env, "SLURM_NTASKS", host) > 1:
            return cls(
                _number(env, "SLURM_PROCID", host),
                _number(env, "SLURM_NTASKS", host),
                _number(env, "SLURM_LOCALID", host),
                _tasks_here(env, host),
                _first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "", host),
                # Two jobs may share a node: a port of the job's own, in a range nobody hands out by itself.
                20000 + 2 * (_number(env, "SLURM_JOB_ID", host) % 6000),
                "slurm",
                host,
            )
        return cls(host=host)


def _number(env: Mapping[str, str], name: str, host: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise TopologyError(f"host {host}: {name} is {env[name]!r}, which is no whole number") from None


def _tasks_here(env: Mapping[str, str], host: str) -> int:
    """Tasks of this node from SLURM_STEP_TASKS_PER_NODE (or SLURM_TASKS_PER_NODE), e.g. `8(x3),4`."""
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or ""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise TopologyError(f"host {host}: SLURM_TASKS_PER_NODE is {text!r}; expected something like 8(x3),4")
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(env, "SLURM_NODEID", host) if env.get("SLURM_NODEID") else 0
    if node >= len(counts):
        raise TopologyError(f"host {host}: SLURM_NODEID is {node}, but SLURM_TASKS_PER_NODE {text!r} has {len(counts)}")
    return counts[node]


def _first_host(nodes: str, host: str) -> str:
    """First name of a Slurm node list: `gpu[07-09,12],cpu1` -> gpu07."""
    match = re.match(r"([^,\[]+)(?:\[([^\]]+)\]([^,\[]*))?", nodes)
    if match is None:
        raise TopologyError(f"host {host}: SLURM_STEP_NODELIST is {nodes!r}; it names no host")
    return match[1] + (re.split(r"[-,]", match[2])[0] if match[2] else "") + (match[3] or "")
