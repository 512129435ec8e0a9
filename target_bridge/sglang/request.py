"""What goes into a forward of the engine, and each request's share of what comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from target_bridge.sglang.adapter import Packed
from target_bridge.target import TargetError


@dataclass(frozen=True)
class Request:
    """A text on its way through the engine: begun, run by one forward, finished.

    Attributes:
        name: for messages.
        ids: int64 [T], the whole text.
        prefix: first tokens whose KV was found in the tree, or is held since an earlier forward; they are not computed
            again.
        handle: the adapter's.
        epoch: of the engine when it was begun; a reset makes it void.
        held: whether it holds the prefix since an earlier forward (`rewind`).
    """

    name: str
    ids: np.ndarray
    prefix: int
    handle: Any
    epoch: int
    held: bool = False

    @property
    def suffix(self) -> int:
        """Tokens a forward computes."""
        return len(self.ids) - self.prefix


@dataclass(frozen=True)
class Computed:
    """One request's share of a forward; rows of the suffix only.

    Attributes:
        prefix: tokens before the first row.
        context: [T - prefix, M*D] outputs of the tapped layers.
        last: [T - prefix, D] after the final norm.
        logits: [V] the engine's own logits of the last token, V logical.
    """

    prefix: int
    context: torch.Tensor
    last: torch.Tensor
    logits: torch.Tensor


def match_rows(
    requests: Sequence[Request], packed: Packed, *, num_taps: int, hidden_size: int, vocab_size: int
) -> list[Computed]:
    """Divide a forward's rows among its requests.

    Args:
        requests: that ran, in order.
        packed: what came back.
        num_taps: M.
        hidden_size: D.
        vocab_size: V, logical.

    Raises:
        TargetError: a request has other rows than its suffix, or a tensor another shape than they make together.
    """
    for request, count in zip(requests, packed.counts):
        if count != request.suffix:
            raise TargetError(f"{request.name}: expected {request.suffix} rows from the engine, got {count}")
    total = sum(packed.counts)
    expected = {
        "context": (packed.context, (total, num_taps * hidden_size)),
        "last": (packed.last, (total, hidden_size)),
        "logits": (packed.logits, (len(requests), packed.logits.shape[-1])),
    }
    for what, (tensor, shape) in expected.items():
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shape:
            got = list(tensor.shape) if isinstance(tensor, torch.Tensor) else "none"
            rows = ", ".join(f"{request.name} ({request.suffix} rows)" for request in requests)
            raise TargetError(f"{what} states of {rows}: expected {list(shape)} from the engine, got {got}")
    return [
        Computed(request.prefix, context, last, logits[:vocab_size])
        for request, context, last, logits in zip(
            requests, packed.context.split(packed.counts), packed.last.split(packed.counts), packed.logits
        )
    ]
