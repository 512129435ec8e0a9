"""Proposing blocks from cached context: static shapes, a few compiled programs for a whole evaluation.

The cache holds, per layer, the keys and values of the context features of every committed token before the
anchor. A proposal reads it and leaves it alone (the block's own keys and values are never stored), so there
is nothing to crop after verification; `extend` writes the newly committed tokens into the donated buffers.
"""

from draft_jax.decode.drafter import Drafter, cut, make_drafter
from draft_jax.decode.propose import (
    ContextCache,
    Proposal,
    draw,
    extend,
    largest,
    new_cache,
    propose,
)

__all__ = [
    "ContextCache",
    "Drafter",
    "Proposal",
    "cut",
    "draw",
    "extend",
    "largest",
    "make_drafter",
    "new_cache",
    "propose",
]
