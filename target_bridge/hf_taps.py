"""Reading the outputs of chosen decoder layers while a forward runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from target_bridge.target import TargetError


class LayerTaps:
    """Hooks on the asked layers only: `with LayerTaps(layers, ids) as taps: model(...); taps.take()`.

    Tap `i` is what layer `i` returns: the residual stream after that layer, before the final norm. It is
    copied out at once into one [R, T, M*D] buffer: no other layer's output is kept alive, and a later layer
    that writes in place cannot change what was captured. (Transformers' `output_hidden_states=True` keeps
    every layer.)
    """

    def __init__(self, layers: nn.ModuleList, layer_ids: Sequence[int]) -> None:
        self._layers = layers
        self._layer_ids = tuple(layer_ids)
        self._handles: list[Any] = []
        self._buffer: torch.Tensor | None = None
        self._seen: set[int] = set()

    def __enter__(self) -> LayerTaps:
        for slot, layer_id in enumerate(self._layer_ids):
            self._handles.append(self._layers[layer_id].register_forward_hook(self._hook(slot, layer_id)))
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, slot: int, layer_id: int) -> Any:
        def record(module: nn.Module, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, (tuple, list)) else output
            if not isinstance(hidden, torch.Tensor) or hidden.ndim != 3:
                raise TargetError(
                    f"layer {layer_id} ({type(module).__name__}) returned {type(hidden).__name__} instead of "
                    "hidden states [rows, tokens, hidden]; its output cannot be tapped"
                )
            if slot in self._seen:
                raise TargetError(
                    f"layer {layer_id} ({type(module).__name__}) ran twice in one forward; the bridge cannot "
                    "tell which of its outputs is the tap"
                )
            self._seen.add(slot)
            width = hidden.shape[-1]
            if self._buffer is None:
                self._buffer = hidden.new_empty((*hidden.shape[:2], width * len(self._layer_ids)))
            self._buffer[..., slot * width : (slot + 1) * width].copy_(hidden)

        return record

    def take(self) -> torch.Tensor:
        """The captured states [R, T, M*D] of the forward that just ran; the recorder forgets them."""
        missing = [layer for slot, layer in enumerate(self._layer_ids) if slot not in self._seen]
        buffer, self._buffer = self._buffer, None
        self._seen.clear()
        if missing or buffer is None:
            raise TargetError(f"layers {missing} did not run in this forward, so they were not captured")
        return buffer
