"""What leaves the engine's own decoder layers, read beside SGLang's capture: the second opinion on every tap.

SGLang's capture hooks differ in how they count layers (some at a layer's entry, some at its end, one depending on the
first id asked for). What the first norm of layer i + 1 is given does not, and it needs no second copy of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from target_bridge.probe_reference import LayerStates
from target_bridge.sglang.engine import Engine
from target_bridge.target import TargetError


def engine_layer_states(
    engine: Engine, documents: Sequence[np.ndarray], layer_ids: Sequence[int], num_layers: int
) -> LayerStates:
    """Outputs of the tapped layers and of their neighbours, one forward per document.

    Args:
        engine: All of its layers must be in this process, unsplit (tp 1).
        documents: 1-D token ids.
        layer_ids: The taps.
        num_layers: Of the target.

    Raises:
        TargetError: the model's layers cannot be found or do not put out states.
    """
    layers = find_layers(engine.model, num_layers)
    wanted = sorted({near for tap in layer_ids for near in (tap - 1, tap, tap + 1) if 0 <= near < num_layers - 1})
    found: dict[int, list[torch.Tensor]] = {layer: [] for layer in wanted}
    handles = []
    try:
        for layer in wanted:
            norm = getattr(layers[layer + 1], "input_layernorm", None)
            if not isinstance(norm, nn.Module):
                raise TargetError(f"SGLang's {type(layers[layer + 1]).__name__} has no input_layernorm to read from")
            handles.append(norm.register_forward_pre_hook(_recorder(found[layer]), with_kwargs=True))
        for index, ids in enumerate(documents):
            request = engine.begin(ids, reuse=False, name=f"document {index}")
            engine.forward([request])
            engine.finish(request)
    finally:
        for handle in handles:
            handle.remove()
    lengths = [len(ids) for ids in documents]
    for layer, states in found.items():
        if [len(rows) for rows in states] != lengths:
            raise TargetError(
                f"the norm after layer {layer} saw {[len(rows) for rows in states]} rows of {lengths}: this SGLang"
                f" goes around it in {type(engine.model).__name__}"
            )
    return LayerStates("the engine's layers", found, None)


def find_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """The outermost list of `num_layers` modules; lists inside a layer (experts) come later in the tree.

    Raises:
        TargetError: there is none.
    """
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise TargetError(f"SGLang's {type(model).__name__} has no list of {num_layers} layers")


def _recorder(states: list[torch.Tensor]) -> Any:
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The norm is given the stream, or a layer's own output and the residual it is still to be added to. Their sum
        # is taken at once: the fused norm writes into either.
        given = [*args, *kwargs.values()]
        parts = [part for part in given if isinstance(part, torch.Tensor) and part.is_floating_point()]
        parts = [part for part in parts if part.shape == parts[0].shape][:2]
        total = parts[0].float().clone()
        states.append(total if len(parts) == 1 else total + parts[1].float())

    return record
