"""What is proved about a model in the engine when it is loaded, on a probe of a few tokens; see `model_check`."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from target_bridge.model_check import (
    causality_reasons,
    check_matrices,
    embedding_reasons,
    logit_reasons,
    probe_ids,
    refuse,
)
from target_bridge.sglang.engine import Engine
from target_bridge.sglang.layers import find_layers
from target_bridge.sglang.request import Computed
from target_bridge.target import TargetError


def check_engine(
    engine: Engine, embedding: torch.Tensor, head: torch.Tensor, config: dict[str, Any], *, name: str
) -> None:
    """Refuse a model whose states, head or embedding do not mean what the draft assumes.

    Args:
        engine: with nothing under way.
        embedding: [V, D].
        head: [V, D].
        config: the text part of the model's config.json.
        name: of the target.

    Raises:
        TargetError: with every reason found and what can be done.
    """
    facts = engine.facts
    check_matrices(embedding, head, name, facts.vocab_size, facts.hidden_size)
    ids = torch.as_tensor(probe_ids(facts.vocab_size, facts.context_length))[None]
    first_input, computed = _with_first_input(engine, int(config["num_hidden_layers"]), ids)
    reasons = embedding_reasons(first_input, embedding[ids[0].to(embedding.device)])
    own = F.linear(computed.last[-1], head).float()
    head_bias = getattr(getattr(engine.model, "lm_head", None), "bias", None) is not None
    reasons += logit_reasons(computed.logits.float(), own, head.dtype, head_bias)

    def forward(changed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        other = _run(engine, changed)
        return other.context[None], other.last[None]

    reasons += causality_reasons(forward, ids, computed.context[None], computed.last[None], facts.vocab_size)
    refuse(reasons, config, name, type(engine.model).__name__)


def _run(engine: Engine, ids: torch.Tensor) -> Computed:
    request = engine.begin(ids[0].numpy(), reuse=False, name="probe")
    (computed,) = engine.forward([request])
    engine.finish(request)
    return computed


def _with_first_input(engine: Engine, num_layers: int, ids: torch.Tensor) -> tuple[torch.Tensor | None, Computed]:
    """Run ids [1, T], and also return what entered the first decoder layer: [T, D], or None where it is not plain."""
    shape = (ids.shape[1], engine.facts.hidden_size)
    seen: list[torch.Tensor] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and tuple(value.shape) == shape:
                seen.append(value.clone())
                return

    handle = None
    with contextlib.suppress(TargetError):  # without a plain list of layers nothing is known about the embeddings
        handle = find_layers(engine.model, num_layers)[0].register_forward_pre_hook(record, with_kwargs=True)
    try:
        computed = _run(engine, ids)
    finally:
        if handle is not None:
            handle.remove()
    return (seen[0] if seen else None), computed
