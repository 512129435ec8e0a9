"""The pieces of a Transformers causal LM that the bridge needs, found by structure, not by class name."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from target_bridge.target import TargetError


@dataclass(frozen=True)
class Parts:
    """Views into a loaded model; nothing is copied.

    Attributes:
        decoder: The model without its LM head; its `last_hidden_state` is the state after the final norm.
        layers: The decoder layers, in order.
        embedding: [V', D] input embedding, detached.
        head: [V', D] LM head, detached; the very same tensor object when the model ties them.
        head_bias: Whether the LM head adds a bias.
        cache_argument: The name under which `decoder.forward` takes a KV cache.
    """

    decoder: nn.Module
    layers: nn.ModuleList
    embedding: torch.Tensor
    head: torch.Tensor
    head_bias: bool
    cache_argument: str


def text_config(config: Any) -> Any:
    """The part of a config that describes the language model (multimodal configs nest it)."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def num_layers_of(config: Any, name: str) -> int:
    """Decoder layers of a text config; at least two, or there is none to tap."""
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int) or count < 2:
        raise TargetError(f"target {name}: num_hidden_layers is {count!r}; a target needs at least two layers to tap")
    return count


def max_length_of(config: Any, asked: int | None, name: str) -> int:
    """Most tokens of a document: what a text config says, or what was asked, if that is not more."""
    own = getattr(config, "max_position_embeddings", None)
    if asked is None:
        if not isinstance(own, int) or own < 1:
            raise TargetError(f"target {name}: its config has no max_position_embeddings; give max_length yourself")
        return own
    if asked < 1 or (isinstance(own, int) and asked > own):
        raise TargetError(f"max_length {asked} must be 1..{own}, the max_position_embeddings of target {name}")
    return asked


def find_parts(model: nn.Module, num_layers: int, name: str) -> Parts:
    """Find decoder, layers, embedding and head.

    Args:
        model: A causal LM with `get_input_embeddings` and `get_output_embeddings`.
        num_layers: What the config says; the list of layers must have that length.
        name: For messages.

    Raises:
        TargetError: a piece is missing or ambiguous.
    """
    decoder = _find_decoder(model, name)
    layers = _find_layers(decoder, num_layers, name)
    lm: Any = model  # nn.Module types every attribute as a tensor
    embedding = _weight(lm.get_input_embeddings(), "input embedding", name)
    output = lm.get_output_embeddings()
    head = _weight(output, "LM head", name)
    if head.data_ptr() == embedding.data_ptr() and head.shape == embedding.shape:
        head = embedding
    return Parts(
        decoder=decoder,
        layers=layers,
        embedding=embedding,
        head=head,
        head_bias=getattr(output, "bias", None) is not None,
        cache_argument=_cache_argument(decoder),
    )


def _find_decoder(model: Any, name: str) -> nn.Module:
    if hasattr(model, "get_decoder"):
        decoder = model.get_decoder()
    else:
        decoder = getattr(model, "model", None)
    if not isinstance(decoder, nn.Module) or decoder is model:
        raise TargetError(
            f"target {name} ({type(model).__name__}) has no decoder apart from its LM head; "
            "only decoder-only causal language models can be targets"
        )
    return decoder


def _find_layers(decoder: nn.Module, num_layers: int, name: str) -> nn.ModuleList:
    def lists_of(named: Any) -> dict[str, nn.ModuleList]:
        return {k: m for k, m in named if isinstance(m, nn.ModuleList) and len(m) == num_layers}

    # Children first: a layer may itself hold a list (experts) that happens to be as long.
    found = lists_of(decoder.named_children()) or lists_of(decoder.named_modules())
    if len(found) != 1:
        raise TargetError(
            f"target {name} ({type(decoder).__name__}): its config says {num_layers} layers, and "
            + (f"{len(found)} lists have that length: {sorted(found)}" if found else "no list of modules is that long")
            + ". The bridge cannot tell which outputs to tap; this model needs a target of its own"
        )
    return next(iter(found.values()))


def _weight(module: nn.Module | None, what: str, name: str) -> torch.Tensor:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        raise TargetError(
            f"target {name} has no plain [vocabulary, hidden] matrix as its {what} "
            f"({type(module).__name__}); the draft borrows that matrix, so this model cannot be a target"
        )
    return weight.detach()


def _cache_argument(decoder: nn.Module) -> str:
    # Transformers renamed it: "past_key_values" for years, "cache" since 5.2x.
    names = inspect.signature(decoder.forward).parameters
    return "cache" if "cache" in names else "past_key_values"
