"""Decoding with a Transformers target: many texts, one KV cache, provisional tokens that can be taken back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

from target_bridge.batching import plan_groups
from target_bridge.hf_attention import folded_heads, without_plans
from target_bridge.hf_graphs import ForwardGraphs, States, fixed_shape
from target_bridge.hf_slots import Layout, SlotCache, SlotLayer, SlotMasks, cached_positions, make_layout
from target_bridge.hf_taps import LayerTaps
from target_bridge.target import SessionStep, TargetError, check_ids

if TYPE_CHECKING:
    from target_bridge.hf import HFTarget


class HFSession:
    """`extend` runs provisional ids on top of the committed ones of each slot, `commit` keeps the first of them.

    Texts that are new run without reading the cache, as `capture` runs them. All others share forwards padded on the
    right, with a mask of their own; see `target_bridge.hf_slots`. On a GPU forwards are padded to few shapes, and those
    that come again are replayed as CUDA graphs; see `target_bridge.hf_graphs`.

    Args:
        target: the model.
        max_length: tokens a text may have.
        max_sequences: texts side by side.
        few_shapes: pad to few shapes; None = on a GPU.

    Raises:
        TargetError: a length or a number that cannot be, or a kind of layer that cannot take tokens back.
    """

    def __init__(
        self, target: HFTarget, max_length: int, max_sequences: int = 1, *, few_shapes: bool | None = None
    ) -> None:
        if max_length < 1 or max_length > target.info.max_length:
            raise TargetError(
                f"session max_length {max_length} must be 1..{target.info.max_length}, the most that target "
                f"{target.info.name} takes"
            )
        if max_sequences < 1:
            raise TargetError(f"session max_sequences {max_sequences} must be at least 1")
        self._target: HFTarget | None = target
        self._max_length = max_length
        self._lengths = [0] * max_sequences
        self._pending: dict[int, int] = {}
        self._masks = SlotMasks(target.text_config, target.info.name)
        self._cache: SlotCache | None = SlotCache(target.info.num_layers, max_sequences, max_length)
        self._few_shapes = target.device.type == "cuda" if few_shapes is None else few_shapes
        self._graphs: ForwardGraphs | None = ForwardGraphs(
            functools.partial(_states, target, self._cache, self._masks),
            target.device,
            record=self._few_shapes and target.device.type == "cuda",
        )

    @property
    def max_sequences(self) -> int:
        """Number of slots."""
        return len(self._lengths)

    @property
    def max_length(self) -> int:
        """Most tokens of one slot, committed and provisional together."""
        return self._max_length

    def length(self, slot: int) -> int:
        """Committed tokens of the slot."""
        self._check_slot(slot)
        return self._lengths[slot]

    def extend(
        self, ids: Mapping[int, Sequence[int] | np.ndarray], *, last_logits: int | None = None
    ) -> dict[int, SessionStep]:
        """Run ids after each named slot's committed prefix; see `target_bridge.target.Session`.

        Raises:
            TargetError: the session is closed, a slot does not exist or has provisional ids, an id is outside the
                vocabulary, or `max_length` would be exceeded. The session is then as it was.
        """
        target = self._open_target()
        checked = {slot: self._check_extend(slot, ids[slot], target.info.vocab_size) for slot in ids}
        if not checked:
            raise TargetError("extend was given no slot: the mapping is empty")
        if last_logits is not None and last_logits < 0:
            raise TargetError(f"last_logits must not be negative, got {last_logits}")
        steps: dict[int, SessionStep] = {}
        new = sorted(slot for slot in checked if not self._lengths[slot])
        old = sorted(slot for slot in checked if self._lengths[slot])
        with torch.inference_mode():
            for slots in (new, old):
                for group in plan_groups([len(checked[s]) for s in slots], target.budget, target.overhead):
                    chosen = sorted(slots[index] for index in group)
                    steps |= self._forward(target, chosen, [checked[s] for s in chosen], last_logits)
        self._pending |= {slot: len(array) for slot, array in checked.items()}
        return {slot: steps[slot] for slot in checked}

    def commit(self, kept: Mapping[int, int]) -> None:
        """Keep the first so many provisional ids of each slot; the others are as if never run.

        Raises:
            TargetError: a slot without provisional ids is named, one with them is not, or a number is out of range.
                Nothing is committed then.
        """
        self._open_target()
        for slot, count in kept.items():
            self._check_slot(slot)
            pending = self._pending.get(slot, 0)
            if slot not in self._pending or not 0 <= count <= pending:
                raise TargetError(f"commit({{{slot}: {count}}}): the last extend left {pending} ids to keep or drop")
        if missing := sorted(self._pending.keys() - kept.keys()):
            raise TargetError(f"commit must name every slot with provisional ids; it leaves out {missing}")
        for slot, count in kept.items():
            self._lengths[slot] += count
        self._pending = {}

    def free(self, slot: int) -> None:
        """Forget the slot's text."""
        self._open_target()
        self._check_slot(slot)
        self._lengths[slot] = 0
        self._pending.pop(slot, None)

    def close(self) -> None:
        """Free the cache."""
        if self._cache is not None:
            self._cache.release()
        self._cache = None
        self._graphs = None
        self._target = None

    def _forward(
        self, target: HFTarget, slots: list[int], ids: list[np.ndarray], last_logits: int | None
    ) -> dict[int, SessionStep]:
        """One forward over texts that all have a prefix, or all have none."""
        assert self._graphs is not None
        counts = [len(array) for array in ids]
        starts = [self._lengths[slot] for slot in slots]
        shape = None
        if self._few_shapes:
            needed = max(start + count for start, count in zip(starts, counts)) if any(starts) else 0
            most = cached_positions(self._max_length)
            shape = fixed_shape(len(slots), max(counts), needed, self.max_sequences, most)
        layout, places = make_layout(slots, starts, ids, self.max_sequences, self._max_length, shape)
        hidden, context = self._graphs.run(layout)
        wanted = [count if last_logits is None else min(last_logits, count) for count in counts]
        rows = np.repeat(places, wanted)
        tokens = np.concatenate([np.arange(count - keep, count) for count, keep in zip(counts, wanted)])
        picked = torch.from_numpy(rows * layout.tokens + tokens).to(target.device)
        chosen = hidden.flatten(0, 1).index_select(0, picked)
        logits = F.linear(chosen, target.parts.head)[:, : target.info.vocab_size].float().split(wanted)
        context = context.clone() if self._few_shapes else context  # the next forward may write over it
        return {
            slot: SessionStep(logits=logits[index], context_hidden=context[place, : counts[index]])
            for index, (slot, place) in enumerate(zip(slots, places.tolist()))
        }

    def _check_extend(self, slot: int, ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
        self._check_slot(slot)
        if slot in self._pending:
            raise TargetError(
                f"slot {slot}: {self._pending[slot]} ids of the last extend are neither kept nor dropped: call "
                "commit first (keeping 0 drops all)"
            )
        array = check_ids(ids, vocab_size, f"slot {slot}: extend")
        if self._lengths[slot] + array.size > self._max_length:
            raise TargetError(
                f"slot {slot} holds {self._lengths[slot]} tokens and {array.size} more would exceed the session's "
                f"max_length {self._max_length}; open it longer or stop the generation earlier"
            )
        return array

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < len(self._lengths):
            raise TargetError(f"slot {slot} does not exist: the session has slots 0..{len(self._lengths) - 1}")

    def _open_target(self) -> HFTarget:
        if self._target is None:
            raise TargetError("this session is closed; open another with target.open_session(...)")
        return self._target


def _states(target: HFTarget, cache: SlotCache, masks: SlotMasks, layout: Layout) -> States:
    """Hidden and tapped states of one forward, whose keys and values go into the cache."""
    parts = target.parts
    cache.layout = layout
    arguments: dict[str, Any] = {parts.cache_argument: cache}
    mask = masks.make(layout, parts.embedding.dtype)
    if mask is not None:
        arguments["attention_mask"] = mask
    # Without a prefix the model makes its own masks, by the name of its own attention.
    attention = contextlib.nullcontext() if mask is None else folded_heads(target.text_config)
    with without_plans(target.device), attention, LayerTaps(parts.layers, target.info.layer_ids) as taps:
        output = parts.decoder(input_ids=layout.ids, position_ids=layout.positions, use_cache=True, **arguments)
        context = taps.take()
    if not all(isinstance(layer, SlotLayer) and layer.is_initialized for layer in cache.layers):
        raise TargetError(
            f"target {target.info.name}: some of its layers did not use the KV cache, so it cannot take tokens back"
        )
    return output.last_hidden_state, context


#: Largest relative difference (L2) of logits between cached and plain forwards; bf16 kernels round by shape.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def check_sessions(target: HFTarget) -> None:
    """Prove on two short texts that the model decodes with a slot cache as it does without.

    Raises:
        TargetError: it does not: it ignores masks or positions that are given, or keeps state elsewhere.
    """
    info = target.info
    length = min(12, info.max_length)
    texts = np.random.default_rng(1).integers(0, info.vocab_size, size=(2, length))
    session = HFSession(target, length, 2)
    first, second = max(1, length - 5), max(1, length // 2 - 1)
    reason = None
    try:
        session.extend({0: texts[0, :first], 1: texts[1, :second]})
        session.commit({0: max(1, first - 1), 1: second})
        done = {slot: session.length(slot) for slot in (0, 1)}
        ids = {slot: texts[slot, start:] for slot, start in done.items() if start < length}
        for slot, step in (session.extend(ids) if ids else {}).items():
            states = target.capture([texts[slot]]).last_hidden[0][done[slot] :]
            expected = F.linear(states, target.parts.head)[:, : info.vocab_size].float()
            error = float((step.logits - expected).norm() / expected.norm().clamp(min=1e-30))
            if not error <= _TOLERANCE[target.parts.embedding.dtype]:
                reason = f"logits differ by {error:.2g} of their size"
    except TargetError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    finally:
        session.close()
    if reason is not None:
        raise TargetError(
            f"target {info.name} cannot decode several texts with one cache ({reason}): it does not heed masks and "
            "positions given to it. It can be captured for training, not evaluated"
        )
