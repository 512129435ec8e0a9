"""Starting the frameworks in one process: environment, then JAX, then the target; no silent fallback."""

import os
import sys
from typing import Any

from .config import ConfigError, RunConfig

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


def start_jax(config: RunConfig) -> tuple[str, list[Any]]:
    """Start JAX's backend and choose the devices of the run.

    Returns:
        The platform (cpu, gpu, tpu) and the first `train.devices` local devices.

    Raises:
        ConfigError: fewer devices than asked for, or a GPU for the target that JAX does not see: JAX falls back to
            the CPU with a warning only, and the run would crawl.
    """
    prepare_environment(config.train.memory_fraction)
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
    if len(devices) < config.train.devices:
        raise ConfigError(f"train.devices is {config.train.devices}; JAX sees {len(devices)} on this host")
    return platform, devices[: config.train.devices]


def _torch_sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def load_target(config: RunConfig, layer_ids: tuple[int, ...], platform: str, dtype: str) -> Any:
    """Load the target with its taps, on the platform JAX runs on, over the bridge that the run names.

    Args:
        config: the run.
        layer_ids: taps of the draft.
        platform: of JAX; decides `target.device: auto`.
        dtype: resolved dtype of the target.
    """
    target = config.target
    device = target.device
    if device == "auto":
        device = "cpu" if platform == "cpu" else "cuda"
    if target.bridge == "sglang":
        import jax

        from target_bridge.sglang.load import load_sglang_target

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
            step_tokens=config.train.batch_rows * config.data.row_tokens,
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
