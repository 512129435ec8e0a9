"""SGLang in a process that shares torch.distributed with a trainer: its globals, its groups, the patch they need.

Nothing else of the bridge touches SGLang's globals or replaces anything in it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

from target_bridge.target import TargetError


class Peers:
    """The ranks that share one copy of the target, seen from one of them. All must call each method, in one order.

    Attributes:
        rank: of this process among them.
        size: how many there are.
    """

    def __init__(self) -> None:
        from sglang.srt.distributed.parallel_state import get_tp_group

        self._group = get_tp_group()
        self.rank = int(self._group.rank_in_group)
        self.size = int(self._group.world_size)

    def gather(self, value: Any) -> list[Any]:
        """Everybody's `value`, in the order of the ranks; over the host, so no GPU work is ordered by it."""
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self._group.cpu_group)
        return values

    def join_rows(self, shard: torch.Tensor) -> torch.Tensor:
        """[size * n, D]: everybody's [n, D], one below the other."""
        shards = [torch.empty_like(shard) for _ in range(self.size)]
        torch.distributed.all_gather(shards, shard.contiguous(), group=self._group.device_group)
        return torch.cat(shards)


class _AnyMultiple(int):
    """A number of processes that passes for each of its divisors when compared."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int) and other > 0 and int(self) % other == 0

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = int.__hash__


@contextlib.contextmanager
def larger_world_allowed() -> Iterator[None]:
    """While an engine starts: let it form its groups in a world that holds several copies of the target.

    SGLang's `initialize_model_parallel` builds world // tp groups of neighbouring ranks already. Only a check before
    that refuses a world larger than one copy, so the check is given a size that equals each of its divisors.
    """
    from sglang.srt.distributed import bootstrap

    initialize, world_size = bootstrap.initialize_model_parallel, torch.distributed.get_world_size

    def lenient(*args: Any, **kwargs: Any) -> Any:
        def size(group: Any = None) -> int:
            return _AnyMultiple(world_size()) if group is None else world_size(group)

        torch.distributed.get_world_size = size
        try:
            return initialize(*args, **kwargs)
        finally:
            torch.distributed.get_world_size = world_size

    bootstrap.initialize_model_parallel = lenient
    try:
        yield
    finally:
        bootstrap.initialize_model_parallel = initialize


def tp_rank(tp_size: int) -> int:
    """Rank of this process among the `tp_size` neighbouring ranks that share a target.

    Raises:
        TargetError: torch.distributed is not initialised, or its processes do not divide into such groups.
    """
    if tp_size == 1:
        return 0
    if not world_exists():
        raise TargetError(
            f"target.sglang.tp_size is {tp_size}, but this process is alone: start {tp_size} processes or a multiple"
            " (docs/multi_host.md); each must initialise torch.distributed before it loads the target"
        )
    world = torch.distributed.get_world_size()
    if world % tp_size:
        raise TargetError(f"target.sglang.tp_size is {tp_size}; it must divide the number of processes, {world}")
    return torch.distributed.get_rank() % tp_size


def tear_down(runner: Any, *, owns_world: bool) -> None:
    """Take down SGLang's process groups and globals, so that another engine may be built in this process.

    Args:
        runner: the ModelRunner, or None if there never was one; of no use afterwards.
        owns_world: SGLang initialised torch.distributed; otherwise that stays as it is, for whoever did.
    """
    from sglang.srt.distributed import parallel_state
    from sglang.srt.eplb.expert_location import set_global_expert_location_metadata

    parallel_state.destroy_model_parallel()
    if owns_world:
        parallel_state.destroy_distributed_environment()
    else:
        world, parallel_state._WORLD = parallel_state._WORLD, None
        if world is not None:
            world.destroy()
    # Published once per process for mixtures of experts; a second one would be refused.
    set_global_expert_location_metadata(None, allow_overwrite=True)
    # Methods of the runner stay registered in SGLang's globals, and with it weights and pools would stay. What an
    # engine leaves behind on a GPU is missing when the next one measures what is free.
    if runner is not None:
        vars(runner).clear()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def world_exists() -> bool:
    """Whether torch.distributed is initialised in this process."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
