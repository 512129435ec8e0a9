"""Forwards of a fixed shape, recorded once as a CUDA graph and then replayed.

A forward of a few tokens is a thousand small kernels. Starting them one by one from Python takes a GPU longer than
running them: 20 to 30 ms against 3 to 4 for SmolLM2 and 64 texts on an H200. A recording starts all of them at once. It
reads its inputs from memory of its own and has one shape, so decoding pads its forwards to few shapes (`fixed_shape`).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from target_bridge.hf_slots import HostLayout, Layout

#: A shape is recorded at its third forward: recording costs about three forwards.
_RECORD_AFTER = 2
#: Recordings of one session; a forward of another shape runs as it is.
_MOST = 32
#: Cells of the largest forward worth padding and recording: beyond, the kernels take longer than their starts.
_MOST_CELLS = 4096
#: Tokens a row is padded to multiples of: while texts are decoded (a block and its anchor), and while they are new.
_NARROW, _WIDE = 4, 64
#: The fewest cached positions that are read.
_LEAST_READ = 256

#: (hidden [R, T, D] after the final norm, tapped states [R, T, M*D])
States = tuple[torch.Tensor, torch.Tensor]


def fixed_shape(count: int, tokens: int, needed: int, num_slots: int, most_read: int) -> tuple[int, int, int] | None:
    """(rows, tokens, read) that a forward is padded to, or None where padding would cost more than it saves.

    Rows are all slots, or a quarter of them, a sixteenth and so on; cached positions double.

    Args:
        count: texts taking part.
        tokens: most new tokens of one.
        needed: cached positions that must be read; 0 = none.
        num_slots: of the session.
        most_read: positions of the cache.
    """
    rows = num_slots
    while (fewer := -(-rows // 4)) >= count and fewer < rows:
        rows = fewer
    step = _NARROW if needed else _WIDE
    padded = 1 if tokens == 1 else tokens + -tokens % step
    if rows * padded > _MOST_CELLS:
        return None
    read = 0
    if needed:
        read = _LEAST_READ
        while read < needed:
            read *= 2
    return rows, padded, min(read, most_read)


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    outputs: States


class ForwardGraphs:
    """Runs forwards, from a recording where there is one.

    Args:
        forward: the forward itself; what it needs besides the layout must stay where it is.
        device: of the model.
        record: whether to record at all (a CPU has nothing to record).
    """

    def __init__(self, forward: Callable[[Layout], States], device: torch.device, *, record: bool) -> None:
        self._forward, self._device = forward, device
        self._seen: Counter[tuple[int, int, int, bool]] = Counter()
        self._recordings: dict[tuple[int, int, int, bool], _Recording] = {}
        self._pool: Any = None
        self._records = record

    @property
    def recorded(self) -> int:
        """Recordings so far."""
        return len(self._recordings)

    def run(self, layout: HostLayout) -> States:
        """One forward. States of a recording are the caller's until the next call only."""
        recording = self._recordings.get(layout.shape)
        if recording is None and self._records and len(self._recordings) < _MOST:
            self._seen[layout.shape] += 1
            if self._seen[layout.shape] > _RECORD_AFTER:
                recording = self._record(layout)
        if recording is None:
            return self._forward(layout.on(torch.from_numpy(layout.packed).to(self._device)))
        recording.inputs.copy_(torch.from_numpy(layout.packed))
        recording.graph.replay()
        return recording.outputs

    def _record(self, layout: HostLayout) -> _Recording | None:
        """Records a forward of this shape, with these inputs; None, and never again, if the model does not allow it."""
        inputs = torch.from_numpy(layout.packed).to(self._device)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            # "thread_local": JAX's threads go on meanwhile, and what they call would otherwise spoil the recording.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                outputs = self._forward(layout.on(inputs))
        except RuntimeError as error:
            self._records = False
            torch.cuda.synchronize(self._device)
            warnings.warn(
                f"the target's forwards cannot be recorded as CUDA graphs and run kernel by kernel, which is slower: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )
            return None
        recording = self._recordings[layout.shape] = _Recording(graph, inputs, outputs)
        return recording
