"""Which tiles of keys a tile of query rows must visit, and the other way round.

A query row sees the keys `[low, high)` of its own, minus those `context_valid` hides. A tile of rows therefore visits
a contiguous range of key tiles; inside it lies a contiguous range of tiles that every row of the tile sees whole,
where the kernels need no mask. Anchors need not be sorted for the results to be right; when they are (as
`sample_anchors` gives them), the ranges are tight and nothing beyond a block's anchor is computed but the rest of the
tile the anchor falls into.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@dataclass(frozen=True)
class Tile:
    """How one kernel cuts its work, and how the compiler shall schedule it.

    Attributes:
        rows: query rows of a tile; a power of two.
        keys: context keys of a tile; a power of two.
        warps: warps per program; 4 make a warpgroup.
        stages: depth of the software pipeline of loads.
        splits: programs that share one tile's loop and whose results are added (gradient of keys and values only);
            0: as many as `filling` says.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    splits: int = 0


#: A grid of fewer programs leaves multiprocessors idle (an H200 has 132, and loops differ in length).
FULL_GRID = 256


def filling(tile: Tile, programs: int) -> Tile:
    """`tile` with its splits settled: a power of two that makes `programs` fill the device, at most 8."""
    if tile.splits:
        return tile
    splits = 1
    while splits < 8 and programs * splits < FULL_GRID:
        splits *= 2
    return replace(tile, splits=splits)


def ceil_to(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def key_ranges(
    low: Int[Array, "B M"], high: Int[Array, "B M"], valid: Bool[Array, "B L"], tile: Tile
) -> Int[Array, "B T 4"]:
    """For each tile of rows: key tiles `[first, last)` to visit, of which `[full_low, full_high)` need no mask.

    Args:
        low: first key of each row; `M` is a multiple of `tile.rows`.
        high: one past the last key of each row; `high <= low` means the row sees no key.
        valid: False hides a key from all rows; `L` is a multiple of `tile.keys`.
        tile: sizes.

    Returns:
        int32 (first, full_low, full_high, last), ascending.
    """
    B, L = valid.shape
    low, high = low.reshape(B, -1, tile.rows), high.reshape(B, -1, tile.rows)
    sees = high > low
    last = jnp.where(sees, -(-high // tile.keys), 0).max(-1)
    first = jnp.minimum(jnp.where(sees, low // tile.keys, L // tile.keys).min(-1), last)

    full_low = -(-low.max(-1) // tile.keys)
    full_high = jnp.where(sees.all(-1), high.min(-1) // tile.keys, 0)
    broken = (~valid.reshape(B, -1, tile.keys)).any(-1).astype(jnp.int32)  # tiles with a hidden key
    before = jnp.pad(jnp.cumsum(broken, axis=-1), ((0, 0), (1, 0)))  # [B, tiles + 1]
    hidden = jnp.take_along_axis(before, full_high, -1) - jnp.take_along_axis(before, full_low, -1)
    none = (full_high <= full_low) | (hidden > 0)
    full_low, full_high = jnp.where(none, last, full_low), jnp.where(none, last, full_high)
    return jnp.stack([first, full_low, full_high, last], axis=-1).astype(jnp.int32)


def row_ranges(ranges: Int[Array, "B T 4"], tiles: int) -> Int[Array, "B J 4"]:
    """The same for each tile of keys: row tiles `[first, last)` that see it, `[full_low, full_high)` without a mask.

    Args:
        ranges: from `key_ranges`.
        tiles: number of key tiles `J`.
    """
    T = ranges.shape[1]
    key, row = jnp.arange(tiles), jnp.arange(T)
    first, full_low, full_high, last = (ranges[..., i, None] for i in range(4))  # [B, T, 1]
    seen = (key >= first) & (key < last)  # [B, T, J]
    full = (key >= full_low) & (key < full_high)
    row = row[:, None]
    start = jnp.where(seen, row, T).min(1)
    stop = jnp.where(seen, row + 1, 0).max(1)
    start = jnp.minimum(start, stop)
    full_start = jnp.where(full, row, T).min(1)
    # The first run of whole tiles only: rows of another document may interrupt it.
    full_stop = jnp.where((row > full_start[:, None]) & ~full, row, T).min(1)
    none = full_start >= T
    full_start, full_stop = jnp.where(none, stop, full_start), jnp.where(none, stop, full_stop)
    return jnp.stack([start, full_start, full_stop, stop], axis=-1).astype(jnp.int32)
