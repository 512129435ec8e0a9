"""What one training step is fed: the batch captured from the target, and the target's frozen head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftBatch:
    """`B` rows of `L` tokens with the target's hidden states; a row holds one or more documents.

    Attributes:
        input_ids: token ids; padding may be any id below the vocabulary.
        loss_mask: 1 where the token belongs to an answer, 0 elsewhere (padding included).
        positions: rotary position of each token, counted from its own document's first token.
        document_start: index *in the row* at which the token's document begins; attention and labels of an
            anchor `p` never look before `document_start[p]`, so a packed row needs no other mask.
        context_hidden: raw outputs of the `M` tapped target layers, concatenated in ascending layer order.
        last_hidden: the target's state after its final norm, so `lm_head(last_hidden)` are target logits.
    """

    input_ids: Int[Array, "B L"]
    loss_mask: Int[Array, "B L"]
    positions: Int[Array, "B L"]
    document_start: Int[Array, "B L"]
    context_hidden: Float[Array, "B L MD"]
    last_hidden: Float[Array, "B L D"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FrozenHead:
    """The target's embedding and LM head, in torch layout. Never trained and never checkpointed.

    A tied target passes the same array twice. A padded target may have more rows than `config.vocab_size`;
    logits are those of the first `vocab_size` rows.
    """

    embedding: Float[Array, "V D"]
    lm_head: Float[Array, "V D"]


def abstract_batch(rows: int, length: int, hidden_size: int, num_taps: int, dtype: DTypeLike) -> DraftBatch:
    """Shapes and dtypes of a batch, for compiling a step ahead of time.

    Args:
        rows: `B`.
        length: `L`.
        hidden_size: `D`.
        num_taps: `M`.
        dtype: dtype of both hidden-state tensors.

    Returns:
        A `DraftBatch` whose leaves are `jax.ShapeDtypeStruct`.
    """
    shape = rows, length

    def struct(*tail: int, of: DTypeLike) -> Any:  # stands where an array would
        return jax.ShapeDtypeStruct((*shape, *tail), of)

    ids = struct(of=jnp.int32)
    return DraftBatch(
        input_ids=ids,
        loss_mask=ids,
        positions=ids,
        document_start=ids,
        context_hidden=struct(num_taps * hidden_size, of=dtype),
        last_hidden=struct(hidden_size, of=dtype),
    )
