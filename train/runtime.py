"""Starting the frameworks in a process: environment, then JAX, then the target; no silent fallback."""

import os
import sys
from typing import Any

from . import distributed
from .config import ConfigError, RunConfig
from .distributed import DistributedError, World
from .topology import Topology

#: Set before JAX starts, unless the user has set it. The old name makes jaxlib raise when both are set.
_MEMORY = "XLA_CLIENT_MEM_FRACTION"
_OLD_MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def prepare_environment(memory_fraction: float) -> None:
    """Set what JAX reads when its backend starts; later it would have no effect.

    Args:
        memory_fraction: share of the accelerator JAX reserves; the target (torch) needs the rest. JAX's own default
            of three quarters would leave the target to fail.
    """
    if _MEMORY not in os.environ and _OLD_MEMORY not in os.environ:
        os.environ[_MEMORY] = str(memory_fraction)
    # Torch and XLA take turns on the same cores. A torch worker that spins for long takes XLA's turn (the quickstart
    # was five times slower), one that sleeps at once slows small layers by half; so: spin for some microseconds.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    # Rows are tokenised before any fork; without this the tokenizer library warns at every subprocess.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def start_jax(config: RunConfig, world: World | None = None) -> tuple[str, list[Any]]:
    """Start JAX's backend and choose the devices of the run.

    Args:
        config: the run.
        world: its processes; None = this one alone.

    Returns:
        The platform (cpu, gpu, tpu) and the first `train.devices` devices of each process, in the order of the
        processes.

    Raises:
        ConfigError: fewer devices than asked for, or a GPU for the target that JAX does not see: JAX falls back to
            the CPU with a warning only, and the run would crawl.
        DistributedError: the processes do not meet, or have different devices.
    """
    world = world or World(Topology())
    prepare_environment(config.train.memory_fraction)
    distributed.start_jax(world.topology)
    import jax

    devices = jax.local_devices()
    platform = jax.default_backend()
    wanted = config.target.device
    if wanted.startswith("cuda") and platform == "cpu":
        raise ConfigError(
            f"target.device is {wanted!r}, but JAX {jax.__version__} sees no GPU here: install draft-jax[cuda13], or"
            " give target.device: cpu"
        )
    if wanted == "auto" and platform == "cpu" and _torch_sees_gpu():
        print(
            "torch sees a GPU, JAX does not: both run on the CPU (install draft-jax[cuda13] to use the GPU)",
            file=sys.stderr,
        )
    if world.size > 1:
        if platform == "gpu":
            world.attempt("choosing GPUs", lambda: _choose_gpu(world.topology))
        return platform, distributed.check_devices(world, config.train.devices)
    if len(devices) < config.train.devices:
        raise ConfigError(f"train.devices is {config.train.devices}; JAX sees {len(devices)} on this host")
    return platform, devices[: config.train.devices]


def _choose_gpu(topology: Topology) -> None:
    """Make torch use the GPU that JAX was given: both number the GPUs of the host in the same way."""
    import torch

    count = torch.cuda.device_count()
    if count <= topology.local_rank:
        raise DistributedError(
            f"host {topology.host}, rank {topology.rank}: torch sees {count} GPU(s) and the local rank is"
            f" {topology.local_rank}. Every process must see all GPUs of its host: no CUDA_VISIBLE_DEVICES of its own,"
            " no --gpus-per-task"
        )
    torch.cuda.set_device(topology.local_rank)


def _torch_sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def load_target(
    config: RunConfig, layer_ids: tuple[int, ...], platform: str, dtype: str, topology: Topology | None = None
) -> Any:
    """Load the target with its taps, on the platform JAX runs on, over the bridge that the run names.

    Args:
        config: the run.
        layer_ids: taps of the draft.
        platform: of JAX; decides `target.device: auto`.
        dtype: resolved dtype of the target.
        topology: of this process among several; its local rank is the number of its GPU.
    """
    topology = topology or Topology()
    target = config.target
    device = target.device
    if device == "auto":
        gpu = "cuda" if topology.world_size == 1 else f"cuda:{topology.local_rank}"
        device = "cpu" if platform == "cpu" else gpu
    if target.bridge == "sglang":
        import jax

        from target_bridge.sglang.load import load_sglang_target

        from .sharding import row_share

        share = row_share(topology.rank, topology.world_size, config.train.devices, config.train.seq)
        # JAX reserves its share with its first array, and the engine divides what is free then.
        jax.block_until_ready(jax.numpy.zeros(()))
        return load_sglang_target(
            target.path,
            layer_ids,
            options=target.sglang,
            dtype=dtype,
            device=device,
            revision=target.revision,
            trust_remote_code=target.trust_remote_code,
            longest=config.data.max_length,
            step_tokens=config.train.batch_rows // share.count * config.data.row_tokens,
        )
    from target_bridge.hf import load_hf_target

    return load_hf_target(
        target.path,
        layer_ids,
        dtype=dtype,
        device=device,
        revision=target.revision,
        trust_remote_code=target.trust_remote_code,
    )
