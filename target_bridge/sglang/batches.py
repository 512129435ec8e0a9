"""Which requests share a forward: no padding, so only sums matter."""

from __future__ import annotations

from collections.abc import Sequence

from target_bridge.sglang.adapter import round_up


def plan_batches(
    lengths: Sequence[int], *, max_tokens: int, pool_tokens: int, max_requests: int, page_size: int
) -> list[list[int]]:
    """Split requests into forwards, in their order.

    A request longer than `max_tokens` runs alone: that budget limits batching, not what is allowed.

    Args:
        lengths: tokens of each request; each must fit the pool alone.
        max_tokens: of one forward.
        pool_tokens: KV slots; a request takes whole pages.
        max_requests: rows of one forward.
        page_size: slots of a page.

    Returns:
        Lists of indices into `lengths`, ascending; every index once.
    """
    batches: list[list[int]] = []
    tokens = slots = 0
    for index, length in enumerate(lengths):
        pages = round_up(length, page_size)
        fits = tokens + length <= max_tokens and slots + pages <= pool_tokens
        if batches and fits and len(batches[-1]) < max_requests:
            batches[-1].append(index)
        else:
            batches.append([index])
            tokens = slots = 0
        tokens += length
        slots += pages
    return batches
