"""Decoding with a Transformers target: one text, one KV cache, provisional tokens that can be taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

from target_bridge.hf_taps import LayerTaps
from target_bridge.target import SessionStep, TargetError, check_ids

if TYPE_CHECKING:
    from target_bridge.hf import HFTarget


class HFSession:
    """`extend` runs provisional ids on top of the committed ones, `commit(n)` keeps the first n of them.

    The cache keeps every position of every layer, also of sliding-window layers (the window is in the mask):
    a cache that has let go of old positions could not take tokens back.
    """

    def __init__(self, target: HFTarget, max_length: int) -> None:
        from transformers import DynamicCache

        if max_length < 1 or max_length > target.info.max_length:
            raise TargetError(
                f"session max_length {max_length} must be 1..{target.info.max_length}, the most that target "
                f"{target.info.name} takes"
            )
        self._target: HFTarget | None = target
        self._max_length = max_length
        self._cache: Any = DynamicCache()
        self._length = 0
        self._pending = 0

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return self._length

    @property
    def max_length(self) -> int:
        """Most tokens this session holds, committed and provisional together."""
        return self._max_length

    def extend(self, ids: Sequence[int] | np.ndarray, *, last_logits: int | None = None) -> SessionStep:
        """Run `ids` after the committed prefix; see `target_bridge.target.Session`.

        Raises:
            TargetError: the session is closed, the last extend is not committed, an id is outside the
                vocabulary, or `max_length` would be exceeded. The session is then as it was.
        """
        target = self._open_target()
        if self._pending:
            raise TargetError(
                f"{self._pending} ids of the last extend are neither kept nor dropped: call commit(n) first "
                "(commit(0) drops all)"
            )
        array = check_ids(ids, target.info.vocab_size, "extend")
        if self._length + array.size > self._max_length:
            raise TargetError(
                f"session holds {self._length} tokens and {array.size} more would exceed its max_length "
                f"{self._max_length}; open it longer or stop the generation earlier"
            )
        rows = array.size if last_logits is None else min(int(last_logits), array.size)
        if rows < 0:
            raise TargetError(f"last_logits must not be negative, got {last_logits}")
        parts = target.parts
        tokens = torch.as_tensor(array, device=target.device)[None]
        with torch.inference_mode(), LayerTaps(parts.layers, target.info.layer_ids) as taps:
            output = parts.decoder(input_ids=tokens, use_cache=True, **{parts.cache_argument: self._cache})
            hidden = output.last_hidden_state[0]
            held = int(self._cache.get_seq_length())
            if held != self._length + array.size:
                raise TargetError(
                    f"target {target.info.name}: its KV cache holds {held} tokens after "
                    f"{self._length + array.size}; without a plain cache it cannot take tokens back"
                )
            logits = F.linear(hidden[array.size - rows :], parts.head)[:, : target.info.vocab_size].float()
            context = taps.take()[0]
        self._pending = array.size
        return SessionStep(logits=logits, context_hidden=context)

    def commit(self, n: int) -> None:
        """Keep the first `n` ids of the last `extend`; the others are as if never run."""
        self._open_target()
        if not 0 <= n <= self._pending:
            raise TargetError(f"commit({n}): the last extend left {self._pending} ids to keep or drop")
        drop = self._pending - n
        if drop:
            with torch.inference_mode():
                self._cache.crop(-drop)  # a negative number is how many to remove, in every version
        self._length += n
        self._pending = 0

    def close(self) -> None:
        """Free the cache."""
        self._cache = None
        self._target = None

    def _open_target(self) -> HFTarget:
        if self._target is None:
            raise TargetError("this session is closed; open another with target.open_session(max_length)")
        return self._target
