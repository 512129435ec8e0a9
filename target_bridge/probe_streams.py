"""The streams of states a probe looks at, and what is measured of each.

Relative differences are per token, ||a - b|| / ||b||, and averaged over tokens. A norm over everything would see
nothing but the few tokens whose states are a thousand times larger than the others'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from target_bridge.probe_reference import LayerStates
from target_bridge.target import Capture, TargetInfo

#: Name of the stream that is no tap: the state after the final norm.
FINAL = "final"


@dataclass(frozen=True)
class Comparison:
    """One stream against one reference.

    Attributes:
        difference: Relative, mean over all tokens.
        worst: The same of the worst document: two documents exchanged show here.
        best: The layer that fits best; None for the final state and where nothing can be told.
    """

    difference: float
    worst: float
    best: int | None


@dataclass(frozen=True)
class Stream:
    """What was measured of one stream of states.

    Attributes:
        name: "layer 12" or "final".
        layer: 12, or None.
        finite: Share of finite numbers.
        rms: Median over tokens of the root mean square of a state.
        spread: How much of a state depends on the token: ||x - mean over tokens|| / ||x||, of the document where that
            is least.
        nearest_stream: The other stream it resembles most, and how much it differs from it.
        references: Source -> comparison; None where it was not compared.
    """

    name: str
    layer: int | None
    finite: float
    rms: float
    spread: float
    nearest_stream: tuple[str, float] | None
    references: dict[str, Comparison | None]


def split_streams(capture: Capture, info: TargetInfo) -> dict[str, list[torch.Tensor]]:
    """Name -> fp32 [T_i, D] per document, on the CPU."""
    taps = [states.detach().float().cpu().chunk(len(info.layer_ids), dim=-1) for states in capture.context_hidden]
    streams = {f"layer {layer}": [parts[index] for parts in taps] for index, layer in enumerate(info.layer_ids)}
    streams[FINAL] = [states.detach().float().cpu() for states in capture.last_hidden]
    return streams


def measure(name: str, streams: dict[str, list[torch.Tensor]], references: Sequence[LayerStates]) -> Stream:
    """Measure one stream; `streams` has them all, the final one under `FINAL`."""
    documents = streams[name]
    states = torch.cat(documents)
    others = [(other, _difference(documents, streams[other])[0]) for other in streams if other != name]
    layer = layer_of(name)
    return Stream(
        name=name,
        layer=layer,
        finite=float(torch.isfinite(states).double().mean()),
        rms=float(states.pow(2).mean(-1).sqrt().median()),
        spread=float(np.min([float((x - x.mean(0)).norm() / x.norm()) for x in documents if len(x) > 1] or [1.0])),
        nearest_stream=min(others, key=lambda pair: pair[1]) if others else None,
        references={reference.source: _compare(documents, reference, layer) for reference in references},
    )


def _compare(documents: list[torch.Tensor], reference: LayerStates, layer: int | None) -> Comparison | None:
    if layer is None:
        return None if reference.last is None else Comparison(*_difference(documents, reference.last), None)
    if layer not in reference.layers:
        return None
    near = {index: _difference(documents, states) for index, states in reference.layers.items()}
    difference, worst = near[layer]
    best = min(near, key=lambda index: near[index][0])
    return Comparison(difference, worst, best if difference == difference else None)


def _difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> tuple[float, float]:
    """(mean over all tokens, mean over the tokens of the worst document); NaN if anything is."""
    tokens = [
        (a - b.to(a)).norm(dim=-1) / b.to(a).norm(dim=-1).clamp_min(1e-30) for a, b in zip(ours, theirs, strict=True)
    ]
    return float(torch.cat(tokens).mean()), float(np.max([float(document.mean()) for document in tokens]))


def layer_of(name: str) -> int | None:
    """The layer a stream's name says, None for the final one."""
    return None if name == FINAL else int(name.removeprefix("layer "))
