"""What a target model must offer, and the checks on what it is asked.

A *target* is the large model whose decoding is to be sped up. Training needs its hidden states
(`capture`), the evaluator needs to continue texts with a KV cache (`open_session`), and the draft
borrows its embedding and LM head (`frozen_head`). Letters used for shapes: `T` tokens of one document,
`M` taps, `D` hidden size, `V` vocabulary.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch


class TargetError(ValueError):
    """A target, or a request to one, that cannot be served; names the thing, the value and the remedy."""


@dataclass(frozen=True)
class TargetInfo:
    """Facts about a loaded target.

    Attributes:
        name: The folder or hub name it was loaded from.
        hidden_size: D.
        num_layers: Number of decoder layers.
        vocab_size: The logical vocabulary, `config.vocab_size`; ids must be below it. The embedding and
            head may have more (padding) rows.
        max_length: Most tokens one document may have.
        layer_ids: The taps, in the order of the features.
        dtype: "float32" or "bfloat16": the dtype of parameters and states.
        config: The text part of the model's config.json, as a plain dict.
        eos_token_ids: Ids that end a generation; may be empty.
    """

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_length: int
    layer_ids: tuple[int, ...]
    dtype: str
    config: dict[str, Any] = field(repr=False)
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Capture:
    """Hidden states of documents, one entry per document, in the order they were asked for.

    Attributes:
        context_hidden: [T_i, M*D] each: outputs of the tapped layers, concatenated along the features in tap
            order.
        last_hidden: [T_i, D] each: the state after the final norm, i.e. what the LM head is applied to.
    """

    context_hidden: list[torch.Tensor]
    last_hidden: list[torch.Tensor]

    def __len__(self) -> int:
        return len(self.last_hidden)


@dataclass(frozen=True)
class SessionStep:
    """One text's share of a `Session.extend`.

    Attributes:
        logits: fp32 [n, V] (V logical): row t is the distribution of the token that follows ids[t]; n = T, or
            only the last rows if `extend` was told so.
        context_hidden: [T, M*D]: tapped states of the same ids, never of the committed prefix.
    """

    logits: torch.Tensor
    context_hidden: torch.Tensor


class Session(Protocol):
    """Many texts decoded together, with the target's KV cache behind them.

    A session has slots 0..max_sequences-1, each empty until its first `extend`. What a text's step gives does not
    depend on which other texts share the session, except for the last bits that a matrix product of another shape
    may round otherwise.
    """

    @property
    def max_sequences(self) -> int:
        """Number of slots."""
        ...

    @property
    def max_length(self) -> int:
        """Most tokens of one slot, committed and provisional together."""
        ...

    def length(self, slot: int) -> int:
        """Committed tokens of the slot; 0 when it is empty."""
        ...

    def extend(
        self, ids: Mapping[int, Sequence[int] | np.ndarray], *, last_logits: int | None = None
    ) -> dict[int, SessionStep]:
        """Run ids after the committed prefix of each named slot, in as few forwards as possible.

        They stay provisional until `commit`. Slots that are not named are left alone.

        Args:
            ids: slot -> 1-D integers, at least one; lengths may differ.
            last_logits: Compute logits for the last so many ids of each text only (a long prompt needs one row,
                not T x V).
        """
        ...

    def commit(self, kept: Mapping[int, int]) -> None:
        """Keep the first `kept[slot]` provisional ids of each slot and forget the others.

        Every slot with provisional ids must be named, and no other.
        """
        ...

    def free(self, slot: int) -> None:
        """Forget the slot's text, provisional ids included; the slot can be used again."""
        ...

    def close(self) -> None:
        """Free the cache. The session cannot be used afterwards."""
        ...


class Target(Protocol):
    """A loaded target model."""

    @property
    def info(self) -> TargetInfo: ...

    @property
    def tokenizer(self) -> Any:
        """The target's own tokenizer, loaded on first use."""
        ...

    def capture(self, documents: Sequence[np.ndarray]) -> Capture:
        """Hidden states of every document, each computed as if it were alone."""
        ...

    def open_session(self, max_length: int, max_sequences: int = 1) -> Session:
        """A fresh session of `max_sequences` texts of at most `max_length` tokens each."""
        ...

    def frozen_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(embedding [V, D], LM head [V, D]), detached. One tensor object twice if the target ties them."""
        ...


def validate_layer_ids(ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Check a list of taps and return it as a tuple of ints.

    Tap `i` is the output of decoder layer `i`. The last layer is not allowed: its output is what the
    final norm turns into `last_hidden` anyway, and servers that name a tap by the *input* of the next
    layer have no name for it.

    Args:
        ids: Layer indices, ascending, without repeats.
        num_layers: Number of decoder layers of the target.

    Raises:
        TargetError: empty, not integers, out of 0..num_layers-2, repeated, or unsorted. The message has the
            value.
    """
    if isinstance(ids, (str, bytes)) or not hasattr(ids, "__iter__"):
        raise TargetError(f"layer_ids must be a list of integers, got {ids!r}")
    ids = list(ids)
    if not ids:
        raise TargetError("layer_ids is empty: name at least one target layer whose output the draft shall see")
    for position, value in enumerate(ids):
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
            raise TargetError(f"layer_ids[{position}] = {value!r} is not an integer")
        if not 0 <= value <= num_layers - 2:
            raise TargetError(
                f"layer_ids[{position}] = {value} is out of range: the target has {num_layers} layers, so "
                f"a tap is one of 0..{num_layers - 2} (tap i is the output of layer i; the last layer is "
                "seen through last_hidden)"
            )
    for position in range(1, len(ids)):
        if ids[position] == ids[position - 1] or ids[position] in ids[:position]:
            raise TargetError(f"layer_ids[{position}] = {ids[position]} appears twice in {ids}; taps must be unique")
        if ids[position] < ids[position - 1]:
            raise TargetError(
                f"layer_ids[{position}] = {ids[position]} comes after {ids[position - 1]} in {ids}; "
                f"taps must ascend: {sorted(set(ids))}"
            )
    return tuple(int(value) for value in ids)


def check_ids(ids: Any, vocab_size: int, what: str) -> np.ndarray:
    """One sequence of token ids as an int64 array, or an error that says which id is wrong and where.

    Args:
        ids: 1-D integers: numpy, a list, or anything numpy can read.
        vocab_size: Ids must be in 0..vocab_size-1.
        what: How the message calls the sequence, e.g. "document 3".
    """
    array = np.asarray(ids)
    if array.ndim != 1:
        raise TargetError(f"{what} must be one-dimensional token ids, got shape {array.shape}")
    if array.size == 0:
        raise TargetError(f"{what} is empty: there is no token to compute a state for. Leave it out")
    if array.dtype.kind not in "iu":
        raise TargetError(f"{what} has dtype {array.dtype}; token ids must be integers")
    wrong = (array < 0) | (array >= vocab_size)
    if wrong.any():
        position = int(np.argmax(wrong))
        raise TargetError(
            f"{what} holds id {int(array[position])} at position {position}, but the target's ids are "
            f"0..{vocab_size - 1}. Tokenise with the target's own tokenizer"
        )
    return array.astype(np.int64)


def check_documents(documents: Sequence[Any], vocab_size: int, max_length: int) -> list[np.ndarray]:
    """Check all documents of a request before the model sees any of them.

    Returns:
        int64 arrays, in order.

    Raises:
        TargetError: no documents; one is empty, not 1-D integers, longer than `max_length`, or has an id
            outside the vocabulary. The message names the document's index and the value.
    """
    if len(documents) == 0:
        raise TargetError("capture was asked for no documents: the list is empty")
    checked = []
    for index, ids in enumerate(documents):
        array = check_ids(ids, vocab_size, f"document {index}")
        if array.size > max_length:
            raise TargetError(
                f"document {index} has {array.size} tokens, but the target takes at most {max_length}. "
                "Cut it when the data are prepared (data.max_length)"
            )
        checked.append(array)
    return checked
