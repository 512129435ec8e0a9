"""Decoding with the engine: many texts, each with its committed tokens' KV, provisional tokens that can be taken back.

A text is one request that goes on: `extend` computes the new tokens after the ones it holds, `commit` frees the KV of
those that are not kept. A request that holds its KV takes room, so where rows or KV slots run short those of other
texts are given back: their committed tokens, and only these, go into the radix tree, under a name of the text's own,
where the engine may evict them. The next `extend` finds what is left of them there and computes the rest again. So
whatever happens in between (eviction, a capture that resets the pools) costs time, never a wrong state.

Not finding everything has one trace: the engine's rows then begin before the tokens that were asked for. Those rows are
left out of the step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional as F

from target_bridge.sglang.adapter import round_up
from target_bridge.sglang.engine import Engine
from target_bridge.sglang.request import Computed, Request
from target_bridge.target import SessionStep, TargetError, TargetInfo, check_ids

#: Numbers of all texts of this process: a text's part of the tree has a name nothing else uses.
_TEXTS = itertools.count()


@dataclass
class _Text:
    """One slot.

    Attributes:
        ids: committed tokens.
        provisional: tokens of the last extend, until commit; None when there are none.
        request: holds the KV of both; None when the text is empty or its KV had to be given back.
        key: of its part of the tree.
    """

    ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    provisional: np.ndarray | None = None
    request: Request | None = None
    key: str = field(default_factory=lambda: str(next(_TEXTS)))

    @property
    def all_ids(self) -> np.ndarray:
        """Committed and provisional tokens."""
        return self.ids if self.provisional is None else np.concatenate([self.ids, self.provisional])


class SGLangSession:
    """See `target_bridge.target.Session`.

    Args:
        engine: Where it runs; other sessions and captures may use it in between.
        head: LM head [V', D], V' at least V.
        info: Of the target.
        max_length: Tokens a text may have.
        max_sequences: Texts side by side. More than the engine has requests or KV slots for work, but are computed
            again more often.
        max_tokens: Tokens of one forward; a text with more runs alone.

    Raises:
        TargetError: a length or a number that cannot be, or a model that cannot take tokens back.
    """

    def __init__(
        self,
        engine: Engine,
        head: torch.Tensor,
        info: TargetInfo,
        *,
        max_length: int,
        max_sequences: int = 1,
        max_tokens: int = 16384,
    ) -> None:
        pool = engine.facts.pool_tokens // engine.facts.page_size * engine.facts.page_size
        if not 1 <= max_length <= info.max_length:
            raise TargetError(
                f"session max_length {max_length} must be 1..{info.max_length}, the most that target {info.name} takes"
            )
        if round_up(max_length, engine.facts.page_size) > pool:
            raise TargetError(
                f"session max_length {max_length} does not fit the engine's {pool} KV slots; raise"
                " target.sglang.max_total_tokens"
            )
        if max_sequences < 1:
            raise TargetError(f"session max_sequences {max_sequences} must be at least 1")
        if not engine.takes_tokens_back:
            raise TargetError(
                f"target {info.name} keeps a sliding window or a recurrent state beside its KV cache, from which the"
                " bridge cannot take rejected tokens back; it can be captured for training, not evaluated"
            )
        self._engine: Engine | None = engine
        self._head = head
        self._info = info
        self._max_length = max_length
        self._max_tokens = max_tokens
        self._texts = [_Text() for _ in range(max_sequences)]
        engine.add_holder(self._relieve)

    @property
    def max_sequences(self) -> int:
        """Number of slots."""
        return len(self._texts)

    @property
    def max_length(self) -> int:
        """Most tokens of one slot, committed and provisional together."""
        return self._max_length

    def length(self, slot: int) -> int:
        """Committed tokens of the slot."""
        return len(self._text(slot).ids)

    def extend(
        self, ids: Mapping[int, Sequence[int] | np.ndarray], *, last_logits: int | None = None
    ) -> dict[int, SessionStep]:
        """Run ids after each named slot's committed prefix; see `target_bridge.target.Session`.

        Raises:
            TargetError: the session is closed, a slot does not exist or has provisional ids, an id is outside the
                vocabulary, `max_length` would be exceeded, or other sessions hold too much of the pool. The session
                is then as it was.
        """
        engine = self._open_engine()
        checked = {slot: self._check_extend(slot, ids[slot]) for slot in ids}
        if not checked:
            raise TargetError("extend was given no slot: the mapping is empty")
        if last_logits is not None and last_logits < 0:
            raise TargetError(f"last_logits must not be negative, got {last_logits}")
        steps: dict[int, SessionStep] = {}
        try:
            for slot, array in checked.items():
                self._texts[slot].provisional = array
            waiting = list(checked)
            while waiting:
                group = self._begin_group(engine, waiting)
                requests = [request for slot in group if (request := self._texts[slot].request) is not None]
                for slot, computed in zip(group, engine.forward(requests), strict=True):
                    steps[slot] = self._step(computed, len(checked[slot]), last_logits)
                waiting = waiting[len(group) :]
        except BaseException:
            for slot in checked:
                self._settle(engine, self._texts[slot], ran=slot in steps)
                self._texts[slot].provisional = None
            raise
        return steps

    def commit(self, kept: Mapping[int, int]) -> None:
        """Keep the first so many provisional ids of each slot; the KV of the others is freed.

        Raises:
            TargetError: a slot without provisional ids is named, one with them is not, or a number is out of range.
                Nothing is committed then.
        """
        engine = self._open_engine()
        for slot, count in kept.items():
            provisional = self._text(slot).provisional
            pending = 0 if provisional is None else len(provisional)
            if provisional is None or not 0 <= count <= pending:
                raise TargetError(f"commit({{{slot}: {count}}}): the last extend left {pending} ids to keep or drop")
        waiting = {slot for slot, text in enumerate(self._texts) if text.provisional is not None}
        if missing := sorted(waiting - kept.keys()):
            raise TargetError(f"commit must name every slot with provisional ids; it leaves out {missing}")
        for slot, count in kept.items():
            text = self._texts[slot]
            text.ids, text.provisional = text.all_ids[: len(text.ids) + count], None
            self._settle(engine, text, ran=True)

    def free(self, slot: int) -> None:
        """Forget the slot's text. What the tree may hold of it is never matched again, and evicted when needed."""
        engine = self._open_engine()
        text = self._text(slot)
        text.ids = text.ids[:0]
        self._give_back(engine, text)
        self._texts[slot] = _Text()

    def close(self) -> None:
        """Give everything back to the engine."""
        if self._engine is None:
            return
        for slot in range(len(self._texts)):
            self.free(slot)
        self._engine.remove_holder(self._relieve)
        self._engine = None

    def _begin_group(self, engine: Engine, waiting: Sequence[int]) -> list[int]:
        """Requests of as many of the waiting slots as one forward and the pools take; at least one."""
        group: list[int] = []
        tokens = slots = rows = 0
        for slot in waiting:
            text = self._texts[slot]
            new = text.request is None or text.request.epoch != engine.epoch
            if new and rows >= engine.free_requests:
                if group:
                    break
                self._make_room(engine, slot, waiting, lambda: engine.free_requests > 0)
            text.request = self._request(engine, text, slot)
            suffix, needed = text.request.suffix, engine.new_slots(text.request)
            if slots + needed > engine.free_tokens + engine.evictable_tokens:
                engine.relieve()
            room = engine.free_tokens + engine.evictable_tokens
            if group and (tokens + suffix > self._max_tokens or slots + needed > room):
                self._settle(engine, text, ran=False)
                break
            if needed > room:
                self._make_room(engine, slot, waiting, functools.partial(_has_room, engine, needed))
            group.append(slot)
            tokens += suffix
            slots += needed
            rows += new
        return group

    def _request(self, engine: Engine, text: _Text, slot: int) -> Request:
        """The text with its provisional tokens: the request it has, grown, or a new one."""
        assert text.provisional is not None
        if text.request is not None and text.request.epoch == engine.epoch:
            return engine.grow(text.request, text.provisional)
        return engine.begin(text.all_ids, reuse=text.key, name=f"session slot {slot}")

    def _relieve(self) -> None:
        """Give back what no extend is under way with."""
        for text in self._texts:
            if self._engine is not None and text.provisional is None:
                self._give_back(self._engine, text)

    def _make_room(self, engine: Engine, slot: int, waiting: Sequence[int], enough: Callable[[], bool]) -> None:
        """Give back other slots' KV until there is enough: of those that wait first, then of those that have run.

        What the latter commit of their provisional tokens is then computed again.
        """
        engine.relieve()
        others = sorted((other for other in range(len(self._texts)) if other != slot), key=lambda o: o not in waiting)
        for other in others:
            if enough():
                break
            self._give_back(engine, self._texts[other])

    def _give_back(self, engine: Engine, text: _Text) -> None:
        """Finish the text's request, if it has one that still counts: committed tokens stay in the tree."""
        request, text.request = text.request, None
        if request is not None and request.epoch == engine.epoch:
            engine.finish(request, keep=len(text.ids))

    def _settle(self, engine: Engine, text: _Text, *, ran: bool) -> None:
        """Let the text's request hold what is committed and nothing else.

        Args:
            engine: the engine.
            text: with the committed tokens as they shall be.
            ran: whether a forward has run its newest tokens.
        """
        request, text.request = text.request, None
        if request is None or request.epoch != engine.epoch:
            return
        if not ran and not request.held:
            engine.abandon(request)
        elif len(text.ids) == 0:
            engine.finish(request)
        else:
            text.request = engine.rewind(request, keep=len(text.ids))

    def _step(self, computed: Computed, count: int, last_logits: int | None) -> SessionStep:
        rows = count if last_logits is None else min(last_logits, count)
        skipped = len(computed.last) - count  # the tail of the committed text that no whole page holds
        with torch.inference_mode():
            hidden = computed.last[len(computed.last) - rows :]
            logits = F.linear(hidden, self._head)[:, : self._info.vocab_size].float()
        return SessionStep(logits=logits, context_hidden=computed.context[skipped:])

    def _check_extend(self, slot: int, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        text = self._text(slot)
        if text.provisional is not None:
            raise TargetError(
                f"slot {slot}: {len(text.provisional)} ids of the last extend are neither kept nor dropped: call "
                "commit first (keeping 0 drops all)"
            )
        array = check_ids(ids, self._info.vocab_size, f"slot {slot}: extend")
        if len(text.ids) + array.size > self._max_length:
            raise TargetError(
                f"slot {slot} holds {len(text.ids)} tokens and {array.size} more would exceed the session's "
                f"max_length {self._max_length}; open it longer or stop the generation earlier"
            )
        return array

    def _text(self, slot: int) -> _Text:
        if not 0 <= slot < len(self._texts):
            raise TargetError(f"slot {slot} does not exist: the session has slots 0..{len(self._texts) - 1}")
        return self._texts[slot]

    def _open_engine(self) -> Engine:
        if self._engine is None:
            raise TargetError("this session is closed; open another with target.open_session(...)")
        return self._engine


def _has_room(engine: Engine, slots: int) -> bool:
    return slots <= engine.free_tokens + engine.evictable_tokens
