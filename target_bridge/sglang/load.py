"""Starting an engine with a model, as a target."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace

from target_bridge.hf import pick_device
from target_bridge.hf_parts import max_length_of, num_layers_of
from target_bridge.hf_source import target_config
from target_bridge.sglang.adapter import Start, free_port, prepare_process, round_up
from target_bridge.sglang.engine import Engine
from target_bridge.sglang.memory import count_parameters, estimate_need, static_fraction
from target_bridge.sglang.options import EngineOptions
from target_bridge.sglang.target import SGLangTarget
from target_bridge.sglang.versions import adapter_name, installed_version
from target_bridge.sglang.world import tp_rank
from target_bridge.target import TargetError, validate_layer_ids

_ITEMSIZE = {"float32": 4, "bfloat16": 2}


def load_sglang_target(
    name_or_path: str,
    layer_ids: Sequence[int],
    *,
    options: EngineOptions | None = None,
    dtype: str = "auto",
    device: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    max_length: int | None = None,
    longest: int | None = None,
    step_tokens: int = 0,
    session_tokens: int = 0,
) -> SGLangTarget:
    """Start an engine with a model and prove that the draft can rely on it.

    On a GPU start JAX first and let it reserve its memory: what is free then is what the engine divides.

    Args:
        name_or_path: a model folder, or a name on the model hub. With `options.load_format` dummy a folder with
            nothing but config.json will do.
        layer_ids: taps, see `validate_layer_ids`.
        options: of the engine.
        dtype: "float32", "bfloat16", or "auto": bfloat16 on a GPU, float32 on a CPU.
        device: "cpu", "cuda", "cuda:1", or "auto": the current GPU if there is one.
        revision: on the hub.
        trust_remote_code: run Python code that comes with the model.
        max_length: most tokens of a document, needed only if the config does not say, or to lower it.
        longest: tokens of the longest document that will come; the KV pool is made for it, and takes none that is
            longer than the pool. None = `max_length`.
        step_tokens: most tokens captured for one micro-step, for the account of the GPU's memory.
        session_tokens: tokens that texts decoded side by side will have together. Fewer KV slots would do, but what
            does not fit is computed again and again.

    Raises:
        TargetError: no supported SGLang, not a model, taps out of range, no capture hook, memory that does not
            suffice, or a model whose logits are not softmax(head @ last_hidden). Each with its remedy.
    """
    options = options or EngineOptions()
    adapter_name(installed_version())
    rank = tp_rank(options.tp_size)
    torch_device = pick_device(device)
    prepare_process(torch_device)
    if dtype == "auto":
        dtype = "bfloat16" if torch_device.type == "cuda" else "float32"
    if dtype not in _ITEMSIZE:
        raise TargetError(f"target dtype {dtype!r} is not one of auto, {', '.join(_ITEMSIZE)}")
    config = target_config(name_or_path, revision=revision, trust_remote_code=trust_remote_code)
    facts = SimpleNamespace(**config)
    taps = validate_layer_ids(layer_ids, num_layers_of(facts, name_or_path))
    max_length = max_length_of(facts, max_length, name_or_path)
    longest = min(longest or max_length, max_length)
    budget = options.max_tokens_per_forward or (16384 if torch_device.type == "cuda" else 2048)
    pool_tokens = options.max_total_tokens or _default_pool(max(budget, session_tokens), longest, options)
    pool_tokens = round_up(pool_tokens, options.page_size)
    fraction = 0.5  # of no meaning on a CPU, where the pool's size alone counts
    if torch_device.type == "cuda":
        account = functools.partial(
            estimate_need,
            config,
            itemsize=_ITEMSIZE[dtype],
            num_taps=len(taps),
            pool_tokens=pool_tokens,
            forward_tokens=min(pool_tokens, max(budget, longest)),
            step_tokens=step_tokens,
            max_requests=options.max_running_requests,
            tp_size=options.tp_size,
        )
        fraction = static_fraction(
            lambda: account(parameters=count_parameters(name_or_path, revision, trust_remote_code)),
            torch_device,
            options.mem_fraction_static,
        )
    engine = Engine(
        Start(
            model_path=name_or_path,
            layer_ids=taps,
            dtype=dtype,
            device=torch_device,
            attention_backend=options.attention_backend
            or ("triton" if torch_device.type == "cuda" else "torch_native"),
            load_format=options.load_format,
            page_size=options.page_size,
            max_running_requests=options.max_running_requests,
            max_total_tokens=pool_tokens,
            mem_fraction_static=fraction,
            revision=revision,
            trust_remote_code=trust_remote_code,
            tp_size=options.tp_size,
            tp_rank=rank,
            port=free_port(),
        ),
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        max_length=max_length,
    )
    try:
        return SGLangTarget(
            engine,
            config,
            taps,
            name=name_or_path,
            dtype=dtype,
            budget=budget,
            asked_pool=pool_tokens,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
    except BaseException:
        engine.close()
        raise


def _default_pool(budget: int, longest: int, options: EngineOptions) -> int:
    """KV slots for one forward: its tokens, and a started page for each of its requests."""
    return max(budget, longest) + (options.page_size - 1) * options.max_running_requests
