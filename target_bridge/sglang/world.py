"""What SGLang keeps in this process's globals, and the run-time patches it needs: nothing else touches either."""

from __future__ import annotations

import torch


def tear_down(*, owns_world: bool) -> None:
    """Take down SGLang's process groups and globals, so that another engine may be built in this process.

    Args:
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


def world_exists() -> bool:
    """Whether torch.distributed is initialised in this process."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
