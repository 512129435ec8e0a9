"""A KV cache of slots for Transformers models: many texts of different lengths in one forward.

Transformers' own caches keep one length for all rows of a batch, so a row cannot take tokens back alone. Here every
row has its own: keys and values are written at each token's own position, a mask hides what lies behind a text's end,
and taking tokens back is moving that end. Letters: `R` rows of a forward, `T` tokens of a row, `S` cached positions,
`G` kv heads, `C` head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from target_bridge.target import TargetError

#: Cached positions are read in multiples of this many, so that a growing text seldom changes a kernel's shape.
_READ_STEP = 32


@dataclass(frozen=True)
class Layout:
    """The tokens of one forward and where they stand: views of one tensor.

    Attributes:
        ids: int64 [R, T]: the tokens; padding is 0.
        positions: int64 [R, T]: position of each token in its text; padding repeats the row's last one.
        cells: int64 [R, T]: cached position each token is written to; padding goes to the spare one, `max_length`.
        slots: int64 [R]: slot of each row.
        read: how many cached positions attention reads; 0 = no row has a prefix, so the cache is not read at all.
        every: the rows are all slots in order: the cache is read in place.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    cells: torch.Tensor
    slots: torch.Tensor
    read: int
    every: bool


@dataclass(frozen=True)
class HostLayout:
    """A `Layout` on the host, in one array: one transfer brings it to a device.

    Attributes:
        packed: int64 [3 R T + R]: ids, positions, cells and slots, one after the other.
        rows: R.
        tokens: T.
        read: as in `Layout`.
        every: as in `Layout`.
    """

    packed: np.ndarray
    rows: int
    tokens: int
    read: int
    every: bool

    @property
    def shape(self) -> tuple[int, int, int, bool]:
        """What a forward's kernels depend on."""
        return self.rows, self.tokens, self.read, self.every

    def on(self, packed: torch.Tensor) -> Layout:
        """The layout whose numbers are, or will be, in `packed`, a tensor shaped like this one's array."""
        cells = self.rows * self.tokens
        ids, positions, written = packed[: 3 * cells].view(3, self.rows, self.tokens)
        return Layout(ids, positions, written, packed[3 * cells :], self.read, self.every)


def make_layout(
    slots: Sequence[int],
    starts: Sequence[int],
    ids: Sequence[np.ndarray],
    num_slots: int,
    max_length: int,
    shape: tuple[int, int, int] | None = None,
) -> tuple[HostLayout, np.ndarray]:
    """The layout of a forward over `ids[i]` after the first `starts[i]` tokens of slot `slots[i]`.

    Args:
        slots: ascending.
        starts: committed tokens of each; all 0, or none.
        ids: int64, at least one each.
        num_slots: of the cache.
        max_length: tokens a text may have.
        shape: (rows, tokens, read), each at least what is needed, to be padded to; None = no more than is needed.

    Returns:
        The layout, and int64 [n]: which of its rows each slot has.
    """
    counts = np.array([len(array) for array in ids])
    read = _up(int((np.asarray(starts) + counts).max()), _READ_STEP) if any(starts) else 0
    rows, tokens, read = shape or (len(slots), int(counts.max()), read)
    every = rows == num_slots
    # Rows that nobody asked for write to the spare position of their slot, and are not looked at.
    place = np.asarray(slots) if every else np.arange(len(slots))
    start, count = np.zeros((2, rows, 1), np.int64)
    start[place, 0], count[place, 0] = starts, counts
    packed = np.zeros(3 * rows * tokens + rows, np.int64)
    given, positions, cells = packed[: 3 * rows * tokens].reshape(3, rows, tokens)
    for row, array in zip(place, ids):
        given[row, : len(array)] = array
    offset = np.arange(tokens)[None]
    positions[:] = start + np.minimum(offset, np.maximum(count - 1, 0))
    cells[:] = np.where(offset < count, positions, max_length)
    packed[3 * rows * tokens :][place] = slots
    if every:
        packed[3 * rows * tokens :] = np.arange(num_slots)
    return HostLayout(packed, rows, tokens, read, every), place


def cached_positions(max_length: int) -> int:
    """Positions a slot has in the cache: a spare one behind the last token, in whole steps of what is read."""
    return _up(max_length + 1, _READ_STEP)


def _up(count: int, step: int) -> int:
    return count + -count % step


class SlotLayer(CacheLayerMixin):
    """Keys and values of one decoder layer, [slots, G, `cached_positions`, C] each.

    Args:
        owner: gives the layout of the forward that runs.
    """

    is_sliding = False  # every position is kept; the window is in the mask

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self._owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocates on first use: only the forward knows heads, dims and dtype."""
        length = cached_positions(self._owner.max_length)

        def room(states: torch.Tensor) -> torch.Tensor:
            # Zeros: what is masked has weight 0, and 0 times what memory happens to hold need not be 0.
            shape = (self._owner.num_slots, states.shape[1], length, states.shape[3])
            try:
                return states.new_zeros(shape)
            except torch.OutOfMemoryError as error:
                owner, size = self._owner, 2 * len(self._owner) * states.element_size() * math.prod(shape) / 2**30
                raise TargetError(
                    f"the KV cache of {owner.num_slots} texts of {owner.max_length} tokens needs {size:.1f} GiB on "
                    f"{states.device}, which are not free: decode fewer side by side (eval.batch_size), or shorter "
                    "texts (eval.max_context)"
                ) from error

        self.keys, self.values = room(key_states), room(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores [R, G, T, C] at the layout's cells; returns what the rows attend to, [R, G, S, C]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        layout = self._owner.layout
        rows = layout.slots[:, None]
        found = []
        for kept, states in ((self.keys, key_states), (self.values, value_states)):
            assert kept is not None
            kept[rows, :, layout.cells] = states.transpose(1, 2)
            if not layout.read:
                found.append(states)
            else:
                view = kept[:, :, : layout.read]
                found.append(view if layout.every else view[layout.slots])
        return found[0], found[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of a forward without prefixes, the only one whose mask Transformers makes."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """0: positions are given explicitly."""
        return 0

    def get_max_length(self) -> int:
        return self._owner.max_length

    #: Its name before Transformers 5.1x.
    get_max_cache_shape = get_max_length


class SlotCache(Cache):
    """The layers of a `SlotLayer` cache, and the layout they share.

    Args:
        num_layers: of the decoder.
        num_slots: texts side by side.
        max_length: tokens a text may have.
    """

    layout: Layout

    def __init__(self, num_layers: int, num_slots: int, max_length: int) -> None:
        self.num_slots, self.max_length = num_slots, max_length
        super().__init__(layers=[SlotLayer(self) for _ in range(num_layers)])

    def release(self) -> None:
        """Gives the memory back at once: cache and layers hold each other, so it would wait for Python's collector."""
        self.layers = []


class SlotMasks:
    """The attention masks a model wants beside a `SlotCache`.

    Args:
        config: the model's text config: `layer_types` and `sliding_window` say which layers see how far.
        name: the target's, for messages.

    Raises:
        TargetError: a kind of layer whose mask is not known here.
    """

    def __init__(self, config: Any, name: str) -> None:
        kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
        window = getattr(config, "sliding_window", None)
        known = {"full_attention": None, "sliding_attention": window}
        if unknown := [kind for kind in kinds if kind not in known]:
            raise TargetError(
                f"target {name} has layers of kind {', '.join(map(repr, unknown))}; decoding with a cache knows "
                f"{', '.join(known)}. It can be captured for training, not evaluated"
            )
        self._windows: dict[str, int | None] = {kind: known[kind] for kind in kinds} or {"": window}

    def make(self, layout: Layout, dtype: torch.dtype) -> Any:
        """Additive masks [R, 1, T, S] of one forward: one tensor, or one per kind of layer where kinds differ.

        None when no row has a prefix: the model's own causal mask is right then, because padding is on the right.
        """
        if not layout.read:
            return None
        key = torch.arange(layout.read, device=layout.positions.device)
        query = layout.positions[:, None, :, None]
        masks = {}
        for kind, window in self._windows.items():
            seen = key <= query
            if window is not None:
                seen = seen & (key > query - window)
            hidden = torch.finfo(dtype).min
            masks[kind] = torch.zeros(seen.shape, dtype=dtype, device=key.device).masked_fill_(~seen, hidden)
        return masks if len(masks) > 1 else next(iter(masks.values()))
