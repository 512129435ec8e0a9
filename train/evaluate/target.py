"""The target of an evaluation, over the bridge that is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from train.evaluate.config import EvalConfig

if TYPE_CHECKING:
    from target_bridge.sglang.options import EngineOptions
    from target_bridge.target import Target
    from train.evaluate.draft import LoadedDraft

#: Tokens a prompt and its output are expected to have when nothing is said; longer ones share the KV slots of others.
USUAL_TEXT = 2048
#: Tokens the longest may have, in the engine's KV pool, when nothing is said.
LONGEST_TEXT = 8192


def load_eval_target(
    draft: LoadedDraft,
    options: EvalConfig,
    *,
    name: str | None = None,
    bridge: str | None = None,
    engine: Sequence[str] = (),
    device: str = "auto",
    trust_remote_code: bool = False,
) -> Target:
    """Load the target a draft is evaluated with. JAX is started first: on a GPU its share comes before the engine's.

    Args:
        draft: Its taps; a run of ours also says how the target was run there, which holds where nothing else is said.
        options: dtype, batch size and context lengths.
        name: Folder or hub name; None = the target the draft was made for.
        bridge: "hf", "sglang" or None.
        engine: "KEY=VALUE" options of the SGLang engine (`EngineOptions`).
        device: auto, cpu, cuda or cuda:N.
        trust_remote_code: Run Python code that comes with the target.

    Raises:
        ValueError: no target is known, the device is not there, or engine options without the engine.
        TargetError: it cannot be loaded.
    """
    import jax

    settings: Mapping[str, Any] = (draft.run_config or {}).get("target") or {}
    own = name is None  # what the run says of its target holds for that target only
    name = name or draft.target
    if not name:
        raise ValueError(f"{draft.origin} does not say which target it was made for; name it with --target")
    platform = jax.default_backend()
    if device == "auto":
        device = "cpu" if platform == "cpu" else "cuda"
    if device.startswith("cuda") and platform == "cpu":
        raise ValueError(
            f"--device {device}, but JAX {jax.__version__} sees no GPU here: install draft-jax[cuda13], "
            "or give --device cpu"
        )
    bridge = bridge or (settings.get("bridge") if own else None) or "hf"
    if engine and bridge != "sglang":
        raise ValueError(
            f"--engine {engine[0]} is for the SGLang engine, but the bridge is {bridge}; add --bridge sglang"
        )
    common: dict[str, Any] = {
        "dtype": options.dtype,
        "device": device,
        "revision": settings.get("revision") if own else None,
        "trust_remote_code": trust_remote_code or bool(own and settings.get("trust_remote_code")),
    }
    layer_ids = draft.config.target_layer_ids
    if bridge == "hf":
        from target_bridge.hf import load_hf_target

        return load_hf_target(name, layer_ids, **common)
    from target_bridge.sglang.load import load_sglang_target
    from train.evaluate.protocol import BATCH

    jax.block_until_ready(jax.numpy.zeros(()))  # JAX reserves its memory with its first array
    batch = options.batch_size or BATCH["cpu" if device == "cpu" else "cuda"]
    chosen = engine_options(engine, settings.get("sglang") if own else None)
    longest = options.max_context or LONGEST_TEXT
    return load_sglang_target(
        name,
        layer_ids,
        options=dataclasses.replace(chosen, max_running_requests=max(chosen.max_running_requests, batch)),
        longest=longest,
        session_tokens=batch * min(longest, USUAL_TEXT),
        **common,
    )


def engine_options(given: Sequence[str], base: Mapping[str, Any] | None = None) -> EngineOptions:
    """Options of the engine: a run's own, except for what makes its pool, then what is given as KEY=VALUE.

    Raises:
        ValueError: not KEY=VALUE.
        ConfigError: an unknown key or a value of another type.
    """
    from target_bridge.sglang.options import EngineOptions
    from train.config_file import apply_override, build

    tree: dict[str, Any] = dict(base or {})
    for sized_for_training in ("max_total_tokens", "mem_fraction_static"):
        tree.pop(sized_for_training, None)
    for text in given:
        key, found, value = text.partition("=")
        if not found or not key:
            raise ValueError(f"--engine {text}: give KEY=VALUE, for example page_size=16")
        apply_override(tree, key, value)
    return build(tree, EngineOptions)


def close_target(target: Target) -> None:
    """Take an engine down; a Transformers target needs nothing."""
    close = getattr(target, "close", None)
    if close is not None:
        close()
