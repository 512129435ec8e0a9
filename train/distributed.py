"""Many processes as one run: starting both frameworks, and agreeing on things on the host.

Agreement goes through torch's gloo group: host memory only, no GPU, so it can be asked for in any phase without
touching the order of the two frameworks' NCCL calls. JAX's own helpers (`multihost_utils`) compile device programs.
"""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, TypeVar

from .topology import Topology

T = TypeVar("T")

#: What must be the same everywhere: two versions of any of these lower two programs.
_PACKAGES = ("draft-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "torch", "transformers", "numpy")

#: Longest wait for another process at an agreement [s]. Loading a large target on one host may take minutes.
TIMEOUT_SECONDS = 1800.0

#: A process that JAX's coordinator has not heard of for so long [s] is taken for dead, and the others are ended.
HEARTBEAT_SECONDS = 60


class DistributedError(RuntimeError):
    """Processes that cannot work as one; the message names the hosts and what differs between them.

    Attributes:
        kinds: names of the exceptions that other processes raised.
    """

    kinds: frozenset[str] = frozenset()


class PeerLostError(DistributedError):
    """Another process has gone, or does not come: nothing that needs all of them can be done any more."""


class World:
    """The processes of a run. Every method must be called by all of them, in the same order.

    Args:
        topology: who this one is.
        timeout: longest wait for the others [s].
    """

    def __init__(self, topology: Topology, timeout: float = TIMEOUT_SECONDS):
        self.topology = topology
        self._timeout = datetime.timedelta(seconds=timeout)
        self._group: Any = None
        if topology.world_size == 1:
            return
        import torch
        import torch.distributed as dist

        try:
            if not dist.is_initialized():
                dist.init_process_group(
                    # NCCL only where there are GPUs: SGLang's tensor-parallel groups are made within this world.
                    "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                    init_method=f"tcp://{topology.master_address}:{topology.master_port}",
                    rank=topology.rank,
                    world_size=topology.world_size,
                    timeout=self._timeout,
                )
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        except Exception as error:
            raise DistributedError(
                f"host {topology.host}, rank {topology.rank}: the {topology.world_size} processes did not meet at"
                f" {topology.master_address}:{topology.master_port} within {timeout:.0f} s:"
                f" {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}. Are all of them running,"
                " and is that port reachable from this host?"
            ) from error

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.topology.rank

    @property
    def size(self) -> int:
        """Processes of the run."""
        return self.topology.world_size

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes what only one may."""
        return self.topology.is_first

    def gather(self, value: T, what: str = "a value") -> list[T]:
        """Every process's value, by rank; plain picklable values.

        Raises:
            PeerLostError: another process did not come.
        """
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, group=self._group)
        except Exception as error:
            raise self._alone(what, error) from error
        return values

    def _alone(self, what: str, error: Exception) -> PeerLostError:
        return PeerLostError(
            f"host {self.topology.host}, rank {self.rank}: waiting for the other processes at {what!r} ended:"
            f" {str(error).splitlines()[0] if str(error) else type(error).__name__}. One of them has died or is"
            " stuck; its own output says why"
        )

    @property
    def who(self) -> str:
        """This process in messages."""
        return f"rank {self.rank} on host {self.topology.host or '(unnamed)'}"

    def close(self) -> None:
        """Leave the others, who are leaving too."""
        if self._group is not None:
            import torch.distributed as dist

            self.barrier("the end of the run")
            dist.destroy_process_group()
            self._group = None

    def barrier(self, what: str) -> None:
        """Wait until every process is here."""
        self.gather(None, what)

    def worst(self, level: int, what: str = "a level") -> int:
        """The largest of all processes' numbers: one small all-reduce, which every optimizer step can afford.

        Raises:
            PeerLostError: another process did not come.
        """
        if self.size == 1:
            return level
        import torch
        import torch.distributed as dist

        number = torch.tensor([level], dtype=torch.int64)
        try:
            dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group)
        except Exception as error:
            raise self._alone(what, error) from error
        return int(number)

    def any(self, flag: bool, what: str = "a flag") -> bool:
        """Whether it is so on any process."""
        return self.worst(int(flag), what) > 0

    def first(self, value: T, what: str = "a value") -> T:
        """Rank 0's value."""
        return self.gather(value, what)[0]

    def attempt(self, what: str, action: Callable[[], T]) -> T:
        """Run something that may fail on some hosts only; where it does, all processes raise.

        Without this the others would wait for the one that failed until a watchdog ends them.

        Raises:
            The action's own exception where it failed; DistributedError, with rank, host and message, elsewhere.
        """
        result, failure = None, None
        try:
            result = action()
        except Exception as error:
            failure = error
        if not self.any(failure is not None, what):
            return result  # type: ignore[return-value]
        told = None if failure is None else (type(failure).__name__, str(failure))
        reports = self.gather((self.topology.host, told), what)
        if failure is not None:
            raise failure
        failed = [(rank, host, *told) for rank, (host, told) in enumerate(reports) if told is not None]
        lines = [f"  rank {rank} on {host}: {kind}: {message}" for rank, host, kind, message in failed]
        lost = DistributedError(f"{what} failed on another process:\n" + "\n".join(lines))
        lost.kinds = frozenset(kind for _, _, kind, _ in failed)
        raise lost

    def agree(self, what: str, value: Any) -> None:
        """Refuse to go on unless every process has the same value.

        Args:
            what: for the message.
            value: JSON-able; a dict is compared key by key.

        Raises:
            DistributedError: names what differs, and which ranks on which hosts have which value.
        """
        text = json.dumps(value, sort_keys=True)
        reports = self.gather((self.topology.host, text), what)
        if len({other for _, other in reports}) == 1:
            return
        values = [json.loads(other) for _, other in reports]
        hosts = [host for host, _ in reports]
        if all(isinstance(each, dict) for each in values):
            names = sorted({name for each in values for name in each})
            lines = []
            for name in names:
                lines += _groups(f"{name}: ", [each.get(name) for each in values], hosts)
        else:
            lines = _groups("", values, hosts)
        raise DistributedError(f"{what} differs between the processes:\n  " + "\n  ".join(lines))


def _groups(label: str, values: Sequence[Any], hosts: Sequence[str]) -> list[str]:
    """One line `label value on rank 0 (host a), ...` for each distinct value, if there is more than one."""
    found: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(json.dumps(value, sort_keys=True), []).append(rank)
    if len(found) == 1:
        return []
    return [
        f"{label}{text} on "
        + ", ".join(f"rank {rank} ({hosts[rank]})" for rank in ranks[:4])
        + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
        for text, ranks in found.items()
    ]


def versions() -> dict[str, str]:
    """Versions of what decides which program is lowered."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def start_jax(topology: Topology, timeout: float = 300.0) -> None:
    """Join JAX's processes; before anything that starts JAX's backend. Nothing to do for one process.

    Every fact is passed: under `srun torchrun` JAX would detect Slurm's view, one task per node.

    Raises:
        DistributedError: the coordinator cannot be reached, or does not see all processes in time.
    """
    if topology.world_size == 1:
        return
    import jax

    if jax.distributed.is_initialized():
        return
    try:
        jax.distributed.initialize(
            topology.coordinator,
            topology.world_size,
            topology.rank,
            local_device_ids=None if jax.config.values["jax_platforms"] == "cpu" else [topology.local_rank],
            initialization_timeout=int(timeout),
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except Exception as error:
        raise DistributedError(
            f"host {topology.host}, rank {topology.rank}: JAX's {topology.world_size} processes did not meet at"
            f" {topology.coordinator} within {timeout:.0f} s: {str(error).splitlines()[0]}. Is that port (MASTER_PORT"
            " + 1) free on the first host and reachable from here? A *_proxy variable can also keep them apart"
        ) from error


def stop_jax(topology: Topology) -> None:
    """Leave JAX's processes; after the last program."""
    if topology.world_size > 1:
        import jax

        jax.distributed.shutdown()


def check_devices(world: World, per_process: int) -> list[Any]:
    """The devices of the whole run in rank order, after checking that every process brought the same number.

    The order is the processes': portion i of the rows belongs to process i, which the staging relies on.

    Args:
        world: the processes.
        per_process: devices each must bring.

    Raises:
        DistributedError: a process brought another number or kind, or JAX sees other processes than torch.
    """
    import jax

    local = jax.local_devices()
    kinds = sorted({device.device_kind for device in local[:per_process]})
    world.agree("the platform of JAX and its devices", {"platform": jax.default_backend(), "kinds": kinds})
    counts = world.gather((world.topology.host, len(local)), "counting devices")
    short = [f"rank {rank} on {host} sees {count}" for rank, (host, count) in enumerate(counts) if count < per_process]
    if short:
        raise DistributedError(f"train.devices is {per_process} for each process, but " + "; ".join(short))
    if jax.process_count() != world.size:
        raise DistributedError(
            f"host {world.topology.host}: JAX counts {jax.process_count()} processes, the launcher {world.size}; was"
            " jax.distributed initialised by something else?"
        )
    devices = []
    for process in range(world.size):
        own = sorted((d for d in jax.devices() if d.process_index == process), key=lambda d: d.id)
        devices += own[:per_process]
    return devices
