"""`Drafter`: the compiled programs of decoding around one cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from draft_jax.batch import FrozenHead
from draft_jax.config import DraftConfig
from draft_jax.decode.propose import ContextCache, Proposal, extend, new_cache, propose
from draft_jax.models.dspark import Params

#: From so many rows on, a CPU has a program for a quarter of them too: there every row costs, and the last texts of an
#: evaluation are few.
_FEW_ROWS = 8


@dataclass(frozen=True)
class _Programs:
    """The compiled programs of one shape of drafting: a wrong shape or dtype raises, it never compiles
    again."""

    extend: Mapping[int, Callable[..., ContextCache]]  # width T -> program
    propose: Mapping[int, Callable[..., Proposal]]  # rows -> program

    @property
    def count(self) -> int:
        return len(self.extend) + len(self.propose)


def cut(count: int, widths: Sequence[int]) -> list[tuple[int, int]]:
    """Covers `count` tokens with compiled widths: (tokens, width) pieces, whole ones first, padding in the last.

    Args:
        count: 0 or more.
        widths: ascending.
    """
    pieces = [(widths[-1], widths[-1])] * (count // widths[-1])
    if left := count % widths[-1]:
        pieces.append((left, next(width for width in widths if width >= left)))
    return pieces


class Drafter:
    """A draft ready to propose: its parameters, its programs and one cache. Made by `make_drafter`.

    Several drafters of equal shape (a trained and an untrained one) share their programs.
    """

    def __init__(
        self,
        config: DraftConfig,
        params: Params,
        frozen: FrozenHead,
        batch: int,
        max_context: int,
        dtype: DTypeLike,
        programs: _Programs,
    ) -> None:
        self.config = config
        self.batch = batch
        self.max_context = max_context
        self._params = params
        self._frozen = frozen
        self._dtype = jnp.dtype(dtype)
        self._programs = programs
        self._cache = new_cache(config, batch, max_context, dtype)
        self._lengths = np.zeros(batch, np.int64)

    @property
    def compile_count(self) -> int:
        """Programs compiled for this drafter; constant over its life."""
        return self._programs.count

    @property
    def widths(self) -> tuple[int, ...]:
        """Tokens per call of the compiled `extend` programs, ascending: half of what a round can commit at most (it
        rarely commits more), all of it, and a stretch of prompts; fewer where these coincide."""
        return tuple(sorted(self._programs.extend))

    @property
    def lengths(self) -> np.ndarray:
        """Context tokens in the cache, per row."""
        return self._lengths.copy()

    @property
    def cache(self) -> ContextCache:
        """The current cache; the next `extend` consumes it."""
        return self._cache

    def reset(self, row: int | None = None) -> None:
        """Forgets the context of a row, or of all; the buffers stay and are written over."""
        self._lengths[slice(None) if row is None else row] = 0

    def extend(self, context_hidden: Array | np.ndarray, counts: np.ndarray) -> None:
        """Appends context of newly committed tokens, any number of them to any row.

        Args:
            context_hidden: `[n, M*D]`, the tokens of row 0, then those of row 1, and so on; more than there are
                tokens when padded. NumPy, or a jax array of the compute dtype; the latter stays on its device when
                `n` is one of `widths`, else it goes through the host.
            counts: `[B]`, new tokens of each row.

        Raises:
            ValueError: wrong shape, fewer states than tokens, or a context longer than `max_context`.
        """
        width = self.config.num_taps * self.config.hidden_size
        counts = np.asarray(counts, np.int64)
        if context_hidden.ndim != 2 or context_hidden.shape[1] != width:
            raise ValueError(f"context_hidden has shape {context_hidden.shape}, expected [n, {width}]")
        if counts.shape != (self.batch,) or counts.min() < 0 or counts.sum() > len(context_hidden):
            raise ValueError(
                f"counts {counts.tolist()} must be {self.batch} numbers of tokens, in all at most the "
                f"{len(context_hidden)} states given"
            )
        if (self._lengths + counts).max() > self.max_context:
            raise ValueError(
                f"context would grow to {int((self._lengths + counts).max())} tokens but the cache holds "
                f"{self.max_context}: make the drafter with a larger max_context"
            )
        total = int(counts.sum())
        rows = np.repeat(np.arange(self.batch), counts)
        first = np.cumsum(counts) - counts
        positions = np.arange(total) - np.repeat(first - self._lengths, counts)
        if isinstance(context_hidden, jax.Array) and len(context_hidden) in self._programs.extend:
            self._extend_piece(context_hidden, rows, positions)  # already of a compiled width: stays on its device
        else:
            self._extend_pieces(np.asarray(context_hidden), rows, positions)
        self._lengths += counts

    def _extend_pieces(self, hidden: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> None:
        """Cuts any number of tokens into pieces of the compiled widths, on the host: no new shape, no compile."""
        start = 0
        for size, width in cut(len(rows), self.widths):
            piece = np.zeros((width, hidden.shape[1]), self._dtype)
            piece[:size] = hidden[start : start + size]
            self._extend_piece(piece, rows[start : start + size], positions[start : start + size])
            start += size

    def _extend_piece(self, piece: Array | np.ndarray, rows: np.ndarray, positions: np.ndarray) -> None:
        size = len(piece)
        padded = np.full((2, size), self.batch, np.int32)  # a row that does not exist: dropped
        padded[0, : len(rows)], padded[1, : len(rows)] = rows, positions
        self._cache = self._programs.extend[size](self._params, self._cache, piece, padded[0], padded[1])

    def propose(
        self,
        anchor_token: np.ndarray | int,
        uniforms: np.ndarray,
        temperature: float,
        rows: Sequence[int] | None = None,
    ) -> Proposal:
        """See `propose`. Does not wait for the device.

        Args:
            anchor_token: the last committed token of each row asked for (an int when there is one).
            uniforms: `[n, K]` (or `[K]` when there is one row) in [0, 1).
            temperature: 0 for greedy.
            rows: the `n` rows to propose for; None = all `B`.

        Returns:
            A proposal of `n` rows or more; `places` tells which are those asked for.

        Raises:
            ValueError: negative temperature, a token outside the vocabulary, or a wrong number of uniforms or rows.
        """
        tokens = np.asarray(anchor_token, np.int64).reshape(-1)
        numbers = np.array(uniforms, np.float32)  # a copy: the call is asynchronous
        numbers = numbers[None] if numbers.ndim == 1 else numbers
        chosen = np.arange(self.batch) if rows is None else np.asarray(rows, np.int64)
        count = len(chosen)
        if temperature < 0:
            raise ValueError(f"temperature {temperature} is negative")
        if not 1 <= count <= self.batch or chosen.min() < 0 or chosen.max() >= self.batch:
            raise ValueError(f"rows {chosen.tolist()} must be 1 to {self.batch} rows below {self.batch}")
        if tokens.shape != (count,) or tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
            raise ValueError(f"anchor_token {tokens.tolist()} must be {count} id(s) below {self.config.vocab_size}")
        if numbers.shape != (count, self.config.block_size):
            raise ValueError(f"uniforms has shape {numbers.shape}, expected {(count, self.config.block_size)}")
        width, places = self._width(count), self.places(chosen)
        anchors, drawn = np.zeros(width, np.int32), np.zeros((width, self.config.block_size), np.float32)
        anchors[places], drawn[places] = tokens, numbers
        inputs = (anchors, drawn, np.float32(temperature))
        program = self._programs.propose[width]
        if width == self.batch:  # every row at its place: the cache is read as it lies
            return program(self._params, self._frozen, self._cache, self._lengths.astype(np.int32), *inputs)
        picked = np.pad(chosen, (0, width - count)).astype(np.int32)
        lengths = self._lengths[picked].astype(np.int32)
        return program(self._params, self._frozen, self._cache, picked, lengths, *inputs)

    def places(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Where the proposals of `rows` stand in what `propose` returns for them."""
        return np.asarray(rows) if self._width(len(rows)) == self.batch else np.arange(len(rows))

    def _width(self, count: int) -> int:
        return min(width for width in self._programs.propose if width >= count)


def make_drafter(
    config: DraftConfig,
    dtype: DTypeLike,
    *,
    params: Params,
    frozen: FrozenHead,
    max_context: int,
    batch: int = 1,
    prefill_width: int = 128,
    sample_dtype: DTypeLike = jnp.float32,
) -> Drafter:
    """Compiles the programs of a drafter ahead of time (or reuses those of an equal shape).

    Args:
        config: the draft.
        dtype: compute dtype.
        params: the draft's parameters.
        frozen: the target's embedding and LM head.
        max_context: most committed tokens of a sequence.
        batch: sequences decoded side by side.
        prefill_width: tokens per call while prompts are taken in; rounds use narrow programs, see `widths`.
        sample_dtype: see `propose`.
    """
    params = _rounded(params, dtype)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, frozen))
    leaves, tree = jax.tree.flatten(abstract)
    key = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    programs = _compile(config, jnp.dtype(dtype), jnp.dtype(sample_dtype), batch, max_context, prefill_width, key, tree)
    return Drafter(config, params, frozen, batch, max_context, dtype, programs)


def _rounded(params: Params, dtype: DTypeLike) -> Params:
    """The weights every product rounds to `dtype` anyway, rounded once: same results, half the reads in bf16.

    Norms, biases and the confidence head are used in fp32 or are too small to matter, and stay as they are.
    """

    def leaf(path: tuple[Any, ...], value: Array) -> Array:
        rounds = path[0].key != "confidence" and path[-1].key in ("kernel", "embedding")
        return value.astype(dtype) if rounds else value

    return jax.tree_util.tree_map_with_path(leaf, params)


@functools.lru_cache(maxsize=8)
def _compile(
    config: DraftConfig,
    dtype: np.dtype,
    sample_dtype: np.dtype,
    batch: int,
    max_context: int,
    prefill_width: int,
    leaves: tuple[tuple[tuple[int, ...], Any], ...],
    tree: Any,
) -> _Programs:
    params, frozen = jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(*leaf) for leaf in leaves])
    cache = jax.eval_shape(lambda: new_cache(config, batch, max_context, dtype))

    def struct(shape: tuple[int, ...], of: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, of)

    def extend_program(width: int) -> Callable[..., ContextCache]:
        function = jax.jit(
            lambda params, cache, hidden, rows, positions: extend(
                params, config, cache, hidden, rows, positions, dtype
            ),
            donate_argnums=1,
        )
        hidden = struct((width, config.num_taps * config.hidden_size), dtype)
        index = struct((width,), jnp.int32)
        return function.lower(params, cache, hidden, index, index).compile()

    most = batch * (config.block_size + 1)  # a round commits at most K + 1 tokens of each row
    widths = {most, max(most, prefill_width)} | ({-(-most // 2)} if batch > 1 else set())

    def propose_program(rows: int) -> Callable[..., Proposal]:
        index = struct((rows,), jnp.int32)
        inputs = (index, index, struct((rows, config.block_size), jnp.float32), struct((), jnp.float32))

        def whole(params: Params, frozen: FrozenHead, cache: ContextCache, *inputs: Any) -> Proposal:
            lengths, anchors, uniforms, temperature = inputs
            return propose(params, config, frozen, cache, lengths, anchors, uniforms, temperature, dtype, sample_dtype)

        def part(params: Params, frozen: FrozenHead, cache: ContextCache, chosen: Array, *inputs: Any) -> Proposal:
            return whole(params, frozen, ContextCache(k=cache.k[:, chosen], v=cache.v[:, chosen]), *inputs)

        if rows == batch:
            return jax.jit(whole).lower(params, frozen, cache, *inputs).compile()
        return jax.jit(part).lower(params, frozen, cache, index, *inputs).compile()

    proposals = {batch} | ({-(-batch // 4)} if batch >= _FEW_ROWS and jax.default_backend() == "cpu" else set())
    return _Programs(
        {width: extend_program(width) for width in widths}, {rows: propose_program(rows) for rows in proposals}
    )
