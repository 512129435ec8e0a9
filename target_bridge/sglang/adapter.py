"""What differs between SGLang versions, behind one protocol. Only adapters import sglang."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from target_bridge.target import TargetError

#: Setters of a model class that say which layers' outputs it shall hand out, best first.
HOOKS = ("set_dspark_layers_to_capture", "set_dflash_layers_to_capture", "set_eagle3_layers_to_capture")


@dataclass(frozen=True)
class Start:
    """Everything an engine is started with, resolved.

    Attributes:
        model_path: folder or hub name.
        layer_ids: taps, ascending; tap i is the output of decoder layer i.
        dtype: "float32" or "bfloat16".
        device: of this process, with its index on a GPU.
        attention_backend: of SGLang.
        load_format: "auto" or "dummy".
        page_size: KV slots allocated together.
        max_running_requests: rows of the request pool.
        max_total_tokens: KV slots of the pool.
        mem_fraction_static: share of the free memory for weights and KV pool.
        revision: on the hub.
        trust_remote_code: run the model's own Python code.
        tp_size: ranks that share the model.
        tp_rank: of this process among them.
        port: of the rendezvous of the process group; not used when torch.distributed is already up.
    """

    model_path: str
    layer_ids: tuple[int, ...]
    dtype: str
    device: torch.device
    attention_backend: str
    load_format: str
    page_size: int
    max_running_requests: int
    max_total_tokens: int
    mem_fraction_static: float
    revision: str | None = None
    trust_remote_code: bool = False
    tp_size: int = 1
    tp_rank: int = 0
    port: int = 0

    @property
    def gpu(self) -> int:
        """Index of the device as SGLang wants it; on a CPU the rank, which names the cores."""
        return self.tp_rank if self.device.type == "cpu" else int(self.device.index or 0)


@dataclass(frozen=True)
class Packed:
    """What one forward computed, the rows of all requests one after another.

    Attributes:
        context: [N, M*D], N = suffix tokens of all requests.
        last: [N, D]: after the final norm.
        logits: [R, V'] the engine's own logits of each request's last token, V' >= V.
        counts: rows of each request, as the engine counts them.
    """

    context: torch.Tensor
    last: torch.Tensor
    logits: torch.Tensor
    counts: list[int]


class Adapter(Protocol):
    """One SGLang version. After `start`, `runner` is its ModelRunner; handles are its request objects."""

    runner: Any

    def start(self, start: Start) -> str:
        """Build the runner with weights, pools and capture; return the name of the capture hook."""
        ...

    def new_tree(self) -> Any:
        """An empty radix tree over the pools."""
        ...

    def begin(self, name: str, ids: Sequence[int], tree: Any, extra_key: str | None) -> Any:
        """A request: its longest known prefix is matched (at most len(ids) - 1, whole pages) and locked.

        Requests of another `extra_key` share nothing.
        """
        ...

    def prefix_length(self, handle: Any) -> int:
        """Tokens of the matched prefix."""
        ...

    def forward(self, handles: Sequence[Any], tree: Any) -> Packed:
        """Allocate KV for the rest of every request, run all in one forward, hand out their states."""
        ...

    def rewind(self, handle: Any, tree: Any, keep: int) -> None:
        """Free the KV of all but the first `keep` tokens; the request goes on holding those.

        Args:
            handle: after `forward`, or after another `rewind`.
            tree: the one it was begun with.
            keep: at least 1.
        """
        ...

    def grow(self, handle: Any, ids: np.ndarray) -> None:
        """After `rewind`: the text is now `ids`, of which the tokens that were kept are the prefix."""
        ...

    def release(self, handle: Any, tree: Any, keep: int) -> None:
        """Give the request back: its first `keep` tokens stay in the tree, the KV of all others is freed.

        Args:
            handle: after `forward` or `rewind`.
            tree: the one it was begun with.
            keep: 0 = nothing of it, else at least the matched prefix.
        """
        ...

    def unlock(self, handle: Any, tree: Any) -> None:
        """Give back a request that never ran."""
        ...

    def stop(self) -> None:
        """Take down what the engine set up in this process, so that another may be built."""
        ...


def prepare_process(device: torch.device) -> None:
    """Set what SGLang reads when it is first imported.

    Raises:
        TargetError: it was imported before, for the other kind of device.
    """
    on_cpu = device.type == "cpu"
    if "sglang.srt.server_args" in sys.modules and (os.environ.get("SGLANG_USE_CPU_ENGINE") == "1") != on_cpu:
        raise TargetError(
            f"sglang was imported for {'a GPU' if on_cpu else 'the CPU'} in this process and cannot change to"
            f" {device}; SGLANG_USE_CPU_ENGINE decides it once, before the import"
        )
    if on_cpu:
        # Without it SGLang's rotary embedding reaches for vllm's CUDA kernels.
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    else:
        os.environ.pop("SGLANG_USE_CPU_ENGINE", None)
        # Nothing here runs an fp8 model, and compiling its kernels takes minutes.
        os.environ.setdefault("SGLANG_ENABLE_JIT_DEEPGEMM", "0")


def server_arguments(start: Start) -> dict[str, Any]:
    """The ServerArgs that all versions share: one prompt per request, whole, eager, nothing around the runner."""
    return {
        "model_path": start.model_path,
        "revision": start.revision,
        "trust_remote_code": start.trust_remote_code,
        "load_format": start.load_format,
        "device": start.device.type,
        "dtype": start.dtype,
        "attention_backend": start.attention_backend,
        "page_size": start.page_size,
        "tp_size": start.tp_size,
        "max_total_tokens": start.max_total_tokens,
        "max_running_requests": start.max_running_requests,
        "mem_fraction_static": start.mem_fraction_static,
        "random_seed": 0,  # of dummy weights; otherwise drawn anew, and tp ranks would differ
        "disable_cuda_graph": True,  # captured states may alias a graph's buffers; prefill gains nothing from graphs
        "chunked_prefill_size": -1,
        "skip_tokenizer_init": True,
        "disable_overlap_schedule": True,
        # Made for the small messages of decoding; it maps other processes' memory and spins, beside JAX's collectives.
        "disable_custom_all_reduce": True,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "log_level": "warning",
    }


def find_hook(model_class: type, name: str) -> str:
    """The setter by which a model class is told what to capture.

    Raises:
        TargetError: it has none.
    """
    for hook in HOOKS:
        if hasattr(model_class, hook):
            return hook
    raise TargetError(
        f"target {name}: SGLang's {model_class.__name__} has no way to hand out the states of its layers (none of"
        f" {', '.join(HOOKS)}), so it can neither be captured nor serve a draft; give target.bridge: hf to train"
        " for it all the same"
    )


def plain_tree(runner: Any) -> Any:
    """A radix tree over the runner's pools; its constructor is the same in all supported versions."""
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixCache

    return RadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            page_size=runner.page_size,
        )
    )


def free_port() -> int:
    """A TCP port nobody uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def round_up(count: int, page_size: int) -> int:
    """`count` tokens in whole pages."""
    return -(-count // page_size) * page_size
