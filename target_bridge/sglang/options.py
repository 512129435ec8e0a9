"""What a run may choose about the SGLang engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class EngineOptions:
    """Options of `target.bridge: sglang`; everything else about the engine follows from the run.

    Attributes:
        attention_backend: of SGLang; None = torch_native on a CPU, triton on a GPU (needs no extra kernels).
        load_format: auto = the weights of the files; dummy = random weights of the right shapes from config.json
            alone, for timing: neither weights nor tokenizer are needed then.
        page_size: KV slots that are allocated together.
        max_running_requests: documents in one forward, and texts decoded together, at most.
        max_total_tokens: KV slots of the pool; None = what one micro-step of the run needs, within the limits below.
        max_tokens_per_forward: tokens of one forward; None = 16384 on a GPU, 2048 on a CPU. A longer document runs
            alone.
        mem_fraction_static: share of the GPU memory that is free when the engine starts (JAX has taken its own by
            then) for weights and KV pool; None = what they need, computed. The rest is for activations, captured
            states and staging buffers.
        tp_size: GPUs that share one copy of the target.
    """

    attention_backend: str | None = None
    load_format: Literal["auto", "dummy"] = "auto"
    page_size: int = 1
    max_running_requests: int = 64
    max_total_tokens: int | None = None
    max_tokens_per_forward: int | None = None
    mem_fraction_static: float | None = None
    tp_size: int = 1

    def __post_init__(self) -> None:
        def require(name: str, holds: bool, remedy: str) -> None:
            if not holds:
                raise ValueError(f"target.sglang.{name} is {getattr(self, name)!r}; {remedy}")

        require("load_format", self.load_format in ("auto", "dummy"), "give auto or dummy")
        for name in ("page_size", "max_running_requests", "tp_size"):
            require(name, getattr(self, name) >= 1, "give a positive integer")
        for name in ("max_total_tokens", "max_tokens_per_forward"):
            value = getattr(self, name)
            require(name, value is None or value >= 1, "give a positive integer, or leave it out")
        share = self.mem_fraction_static
        require("mem_fraction_static", share is None or 0 < share < 1, "give 0 < share < 1, or leave it out")
