"""`Drafter`: the compiled programs of decoding around one cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
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


@dataclass(frozen=True)
class _Programs:
    """The compiled programs of one shape of drafting: a wrong shape or dtype raises, it never compiles
    again."""

    extend: Mapping[int, Callable[..., ContextCache]]  # width T -> program
    propose: Callable[..., Proposal]

    @property
    def count(self) -> int:
        return len(self.extend) + 1


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
        """Tokens per call of the compiled `extend` programs, ascending."""
        return tuple(sorted(self._programs.extend))

    @property
    def lengths(self) -> np.ndarray:
        """Context tokens in the cache, per row."""
        return self._lengths.copy()

    @property
    def cache(self) -> ContextCache:
        """The current cache; the next `extend` consumes it."""
        return self._cache

    def reset(self) -> None:
        """Forgets the context; the buffers stay and are written over."""
        self._lengths[:] = 0
        self._cache = ContextCache(
            k=self._cache.k, v=self._cache.v, length=jax.device_put(np.zeros(self.batch, np.int32))
        )

    def extend(self, context_hidden: Array | np.ndarray, count: np.ndarray | int | None = None) -> None:
        """Appends context of newly committed tokens, any number of them.

        Args:
            context_hidden: `[B, n, M*D]` (or `[n, M*D]` when `B` is 1), any `n`. NumPy, or a jax array of the
                compute dtype; the latter stays on its device when `n` is one of `widths`, else it goes
                through the host.
            count: valid tokens per row; all `n` by default.

        Raises:
            ValueError: wrong shape, a count above `n`, or a context longer than `max_context`.
        """
        hidden = context_hidden[None] if context_hidden.ndim == 2 else context_hidden
        width = self.config.num_taps * self.config.hidden_size
        if hidden.ndim != 3 or hidden.shape[0] != self.batch or hidden.shape[2] != width:
            raise ValueError(f"context_hidden has shape {hidden.shape}, expected [{self.batch}, n, {width}]")
        total = hidden.shape[1]
        counts = np.broadcast_to(np.asarray(total if count is None else count, np.int64), (self.batch,))
        if counts.min() < 0 or counts.max() > total:
            raise ValueError(f"count {counts.tolist()} is outside 0..{total}, the tokens given")
        if (self._lengths + counts).max() > self.max_context:
            raise ValueError(
                f"context would grow to {int((self._lengths + counts).max())} tokens but the cache holds "
                f"{self.max_context}: make the drafter with a larger max_context"
            )
        if isinstance(hidden, jax.Array) and total in self._programs.extend:
            self._extend_piece(hidden, counts, total)  # already of a compiled width: stays on its device
        else:
            self._extend_pieces(np.asarray(hidden), counts)
        self._lengths += counts

    def _extend_pieces(self, hidden: np.ndarray, counts: np.ndarray) -> None:
        """Cuts any number of tokens into pieces of the two compiled widths, on the host: no new shape, no
        compile."""
        narrow, wide = min(self._programs.extend), max(self._programs.extend)
        start, longest = 0, int(counts.max())
        while start < longest:
            size = narrow if longest - start <= narrow else wide
            piece = hidden[:, start : start + size]
            padded = np.zeros((self.batch, size, hidden.shape[2]), self._dtype)
            padded[:, : piece.shape[1]] = piece
            self._extend_piece(padded, np.clip(counts - start, 0, size), size)
            start += size

    def _extend_piece(self, piece: Array | np.ndarray, counts: np.ndarray, size: int) -> None:
        self._cache = self._programs.extend[size](self._params, self._cache, piece, counts.astype(np.int32))

    def propose(self, anchor_token: np.ndarray | int, uniforms: np.ndarray, temperature: float) -> Proposal:
        """See `propose`. Does not wait for the device.

        Args:
            anchor_token: the last committed token of each row (an int when `B` is 1).
            uniforms: `[B, K]` (or `[K]` when `B` is 1) in [0, 1).
            temperature: 0 for greedy.

        Raises:
            ValueError: negative temperature, a token outside the vocabulary, or a wrong number of uniforms.
        """
        tokens = np.asarray(anchor_token, np.int64).reshape(-1)
        numbers = np.array(uniforms, np.float32)  # a copy: the call is asynchronous
        numbers = numbers[None] if numbers.ndim == 1 else numbers
        if temperature < 0:
            raise ValueError(f"temperature {temperature} is negative")
        if tokens.shape != (self.batch,) or tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
            raise ValueError(
                f"anchor_token {tokens.tolist()} must be {self.batch} id(s) below {self.config.vocab_size}"
            )
        if numbers.shape != (self.batch, self.config.block_size):
            raise ValueError(f"uniforms has shape {numbers.shape}, expected {(self.batch, self.config.block_size)}")
        return self._programs.propose(
            self._params,
            self._frozen,
            self._cache,
            tokens.astype(np.int32),
            numbers,
            np.float32(temperature),
        )


def make_drafter(
    config: DraftConfig,
    dtype: DTypeLike,
    *,
    params: Params,
    frozen: FrozenHead,
    max_context: int,
    batch: int = 1,
    prefill_width: int = 128,
) -> Drafter:
    """Compiles the programs of a drafter ahead of time (or reuses those of an equal shape).

    Args:
        config: the draft.
        dtype: compute dtype.
        params: the draft's parameters.
        frozen: the target's embedding and LM head.
        max_context: most committed tokens of a sequence.
        batch: sequences decoded side by side.
        prefill_width: tokens per call while a prompt is taken in; rounds use a second, narrow program.
    """
    params = _rounded(params, dtype)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, frozen))
    leaves, tree = jax.tree.flatten(abstract)
    key = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    programs = _compile(config, jnp.dtype(dtype), batch, max_context, prefill_width, key, tree)
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
            lambda params, cache, hidden, count: extend(params, config, cache, hidden, count, dtype),
            donate_argnums=1,
        )
        hidden = struct((batch, width, config.num_taps * config.hidden_size), dtype)
        return function.lower(params, cache, hidden, struct((batch,), jnp.int32)).compile()

    # A round commits at most K + 1 tokens.
    narrow = config.block_size + 1
    propose_program = (
        jax.jit(
            lambda params, frozen, cache, anchor, uniforms, temperature: propose(
                params, config, frozen, cache, anchor, uniforms, temperature, dtype
            )
        )
        .lower(
            params,
            frozen,
            cache,
            struct((batch,), jnp.int32),
            struct((batch, config.block_size), jnp.float32),
            struct((), jnp.float32),
        )
        .compile()
    )
    return _Programs({width: extend_program(width) for width in {narrow, max(narrow, prefill_width)}}, propose_program)
