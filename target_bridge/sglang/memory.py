"""How one GPU is divided between JAX and the engine, decided before anything large is loaded.

    |<------------------------------- the GPU ------------------------------->|
    | JAX: train.memory_fraction | weights and KV pool | working room | rest  |
      reserved when JAX starts     mem_fraction_static   activations of one forward, captured states,
      (XLA_CLIENT_MEM_FRACTION)    of what JAX left      staging slots: torch's allocator

JAX reserves first and never gives back; SGLang measures what is left; torch takes the working room as it goes. So a
division that cannot work is known at the start, and is said then with its numbers, not at the first long row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from target_bridge.target import TargetError

#: What the engine allocates besides weights and KV (request tables, communication and kernel workspaces) [bytes].
_OVERHEAD = 512 * 2**20


@dataclass(frozen=True)
class Need:
    """What a target needs on one GPU [bytes].

    Attributes:
        weights: of this rank.
        pool: KV of all slots of the pool.
        forward: largest activations of one forward, captured states included.
        states: captured states of a micro-step until they are staged, and the staging slot.
    """

    weights: int
    pool: int
    forward: int
    states: int

    @property
    def static(self) -> int:
        """What `mem_fraction_static` must cover."""
        return self.weights + self.pool + _OVERHEAD

    @property
    def working(self) -> int:
        """What must be left beside it."""
        return self.forward + self.states

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "KV pool": self.pool,
            "one forward": self.forward,
            "captured states and staging": self.states,
            "engine tables": _OVERHEAD,
        }
        return ", ".join(f"{name} {gib(size)}" for name, size in parts.items())


def gib(size: float) -> str:
    """A size in words."""
    return f"{size / 2**30:.1f} GiB"


def count_parameters(model_path: str, revision: str | None, trust_remote_code: bool) -> int:
    """Parameters of a model, from its config alone: it is built without memory.

    Raises:
        TargetError: Transformers cannot build the model.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(model_path, revision=revision, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        raise TargetError(
            f"target {model_path}: its size on the GPU cannot be told, since Transformers cannot build it"
            f" ({type(error).__name__}: {first}); give target.sglang.mem_fraction_static yourself"
        ) from error
    return sum(parameter.numel() for parameter in model.parameters())


def kv_bytes_per_token(config: dict[str, Any], itemsize: int, tp_size: int) -> int:
    """KV of one token in all layers, on one of `tp_size` ranks.

    Args:
        config: the text part of the model's config.json.
        itemsize: bytes of a number.
        tp_size: ranks that share the KV heads (each has at least one).
    """
    layers = int(config["num_hidden_layers"])
    if config.get("kv_lora_rank"):  # latent attention keeps one compressed vector, on every rank
        return layers * (int(config["kv_lora_rank"]) + int(config.get("qk_rope_head_dim") or 0)) * itemsize
    heads = int(config["num_attention_heads"])
    size = int(config.get("head_dim") or config["hidden_size"] // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return 2 * layers * max(1, kv_heads // tp_size) * size * itemsize


def estimate_need(
    config: dict[str, Any],
    *,
    parameters: int,
    itemsize: int,
    num_taps: int,
    pool_tokens: int,
    forward_tokens: int,
    step_tokens: int,
    max_requests: int,
    tp_size: int,
) -> Need:
    """Bytes a target needs on one GPU.

    Args:
        config: the text part of the model's config.json.
        parameters: of the whole model.
        itemsize: bytes of a number.
        num_taps: M.
        pool_tokens: KV slots.
        forward_tokens: most tokens of one forward.
        step_tokens: most tokens captured for one micro-step.
        max_requests: most rows of logits.
        tp_size: ranks that share the model.
    """
    hidden = int(config["hidden_size"])
    # Widest moment of a layer: gate and up with their product, beside residual, input, output and attention's copies.
    layer = 3 * int(config.get("intermediate_size") or 4 * hidden) // tp_size + 6 * hidden
    captured = (num_taps + 1) * hidden
    return Need(
        weights=parameters * itemsize // tp_size,
        pool=pool_tokens * kv_bytes_per_token(config, itemsize, tp_size),
        # Taps exist twice for a moment: one by one, and joined.
        forward=forward_tokens * itemsize * (layer + captured + num_taps * hidden)
        + 2 * 4 * max_requests * int(config["vocab_size"]),
        states=2 * step_tokens * itemsize * captured,
    )


def plan_fraction(need: Need, *, free: int, total: int, asked: float | None) -> float:
    """The engine's share of the free memory, or an error that says what does not fit.

    Args:
        need: of the target.
        free: memory nobody has taken yet; JAX has its share already [bytes].
        total: of the GPU [bytes].
        asked: `target.sglang.mem_fraction_static`.

    Raises:
        TargetError: weights and KV pool, or the working room beside them, do not fit. With the numbers.
    """
    taken = f"{gib(free)} of {gib(total)} are free ({gib(total - free)} are JAX's, train.memory_fraction, and others')"
    if need.static + need.working > free:
        raise TargetError(
            f"the target does not fit beside JAX: it needs {gib(need.static + need.working)} ({need}), but {taken}."
            " Lower train.memory_fraction, train.batch_rows, target.sglang.max_total_tokens or"
            " target.sglang.max_tokens_per_forward, or spread the target over GPUs (target.sglang.tp_size)"
        )
    if asked is None:
        # Half of what is to spare goes to each side.
        return (need.static + (free - need.static - need.working) / 2) / free
    if need.static > asked * free:
        raise TargetError(
            f"target.sglang.mem_fraction_static is {asked}: that is {gib(asked * free)} of the free memory, but weights"
            f" and KV pool need {gib(need.static)} ({need}); {taken}. Raise it to at least"
            f" {need.static / free:.3f}, or leave it out"
        )
    if need.working > (1 - asked) * free:
        raise TargetError(
            f"target.sglang.mem_fraction_static is {asked}: that leaves {gib((1 - asked) * free)} of the free memory"
            f" for forwards, captured states and staging, which need {gib(need.working)} ({need}); {taken}. Lower it to"
            f" at most {1 - need.working / free:.3f}, or leave it out"
        )
    return asked


def static_fraction(need: Callable[[], Need], device: torch.device, asked: float | None) -> float:
    """`plan_fraction` with what is free on a GPU now.

    Args:
        need: counts; raises TargetError for a model whose size cannot be told.
        device: the GPU.
        asked: `target.sglang.mem_fraction_static`; taken as it is for a model whose size cannot be told.
    """
    try:
        counted = need()
    except TargetError:
        if asked is None:
            raise
        return asked
    free, total = torch.cuda.mem_get_info(device)
    return plan_fraction(counted, free=free, total=total, asked=asked)
