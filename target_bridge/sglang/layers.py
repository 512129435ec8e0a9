"""What the engine's own decoder layers put out, read beside SGLang's capture: the second opinion on every tap.

SGLang's capture hooks differ in how they count layers (some at a layer's entry, some at its end, one depending on the
first id asked for). A hook on the layer itself does not, and it needs no second copy of the weights.
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
    layers = _find_layers(engine.model, num_layers)
    wanted = sorted({near for tap in layer_ids for near in (tap - 1, tap, tap + 1) if 0 <= near < num_layers - 1})
    found: dict[int, list[torch.Tensor]] = {layer: [] for layer in wanted}
    handles = [layers[layer].register_forward_hook(_recorder(found[layer], layer)) for layer in wanted]
    try:
        for index, ids in enumerate(documents):
            request = engine.begin(ids, reuse=False, name=f"document {index}")
            engine.forward([request])
            engine.finish(request)
    finally:
        for handle in handles:
            handle.remove()
    for layer, states in found.items():
        if [len(rows) for rows in states] != [len(ids) for ids in documents]:
            raise TargetError(f"layer {layer} of the engine ran {len(states)} times for {len(documents)} documents")
    return LayerStates("the engine's layers", found, None)


def _recorder(states: list[torch.Tensor], layer: int) -> Any:
    def record(module: nn.Module, args: Any, output: Any) -> None:
        # A layer hands on its own output and the residual it is still to be added to, or one tensor that is both. The
        # sum is taken at once: the next layer's fused norm writes into either.
        parts = output if isinstance(output, (tuple, list)) else (output,)
        tensors = [part for part in parts if part is not None]
        if (
            not 1 <= len(tensors) <= 2
            or not all(isinstance(part, torch.Tensor) and part.ndim == 2 for part in tensors)
            or any(part.shape != tensors[0].shape for part in tensors)
        ):
            raise TargetError(f"layer {layer} ({type(module).__name__}) does not put out states and their residual")
        total = tensors[0].float().clone()
        states.append(total if len(tensors) == 1 else total + tensors[1].float())

    return record


def _find_layers(model: nn.Module, num_layers: int) -> nn.ModuleList:
    """The one list of `num_layers` modules of one class; lists inside a layer (experts) come later in the tree."""
    for _, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise TargetError(f"SGLang's {type(model).__name__} has no list of {num_layers} layers")
