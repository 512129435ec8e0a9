"""Which positions start a block, and what a block is taught: pure functions of masks, ids and borders."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from draft_jax.batch import DraftBatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """`N` blocks of `K` slots per row: the anchors, and label, weight and target state of every slot.

    Slot `j` of the block with anchor `p` stands at position `p + j` and predicts token `p + 1 + j`.

    Attributes:
        anchors: position `p` in the row at which the block starts; 0 in a dummy block.
        keep: False marks a dummy block, which fills up a row with fewer candidates than `N`.
        start: index in the row at which the anchor's document begins; the block's context is `[start, p)`.
        tokens: the anchor token `x_p`, the only true token the block is given.
        labels: `x_{p+1+j}`; past the end of the document or the row, the last label inside it (never
            counted).
        prev: token before each label, for the Markov and confidence heads: `[x_p, label_0, ...,
            label_{K-2}]`.
        valid: whether the slot is supervised; a contiguous prefix of the block.
        weight: `exp(-j / gamma)` where valid, else 0.
        target_index: position in the row whose `last_hidden` predicts the label, `p + j`, kept inside the
            document like the labels.
    """

    anchors: Int[Array, "B N"]
    keep: Bool[Array, "B N"]
    start: Int[Array, "B N"]
    tokens: Int[Array, "B N"]
    labels: Int[Array, "B N K"]
    prev: Int[Array, "B N K"]
    valid: Bool[Array, "B N K"]
    weight: Float[Array, "B N K"]
    target_index: Int[Array, "B N K"]


def anchor_candidates(
    loss_mask: Int[Array, "B L"],
    document_start: Int[Array, "B L"],
    supervised_ok: Bool[Array, "B L"] | None = None,
    *,
    supervised_anchors_only: bool = False,
) -> Bool[Array, "B L"]:
    """Positions that may start a block: those whose *next* token is a supervised one of the same document.

    The anchor's own token need not be supervised, so that the first token of an answer is a label too
    (cases.md T16). dspark_spec 2.1 asks that it is; `supervised_anchors_only` is that rule.

    Args:
        loss_mask: 1 on supervised tokens.
        document_start: index in the row at which each token's document begins.
        supervised_ok: False where the target's state cannot teach the next token (it is not finite).
        supervised_anchors_only: also ask for a supervised anchor token (DeepSpec's recipe).

    Returns:
        Boolean [B, L]; the last position of a row is never a candidate.
    """
    supervised = loss_mask > 0
    candidates = supervised[:, 1:] & (document_start[:, 1:] == document_start[:, :-1])
    if supervised_anchors_only:
        candidates &= supervised[:, :-1]
    if supervised_ok is not None:
        candidates &= supervised_ok[:, :-1]
    return jnp.pad(candidates, ((0, 0), (0, 1)))


def sample_anchors(
    key: jax.Array,
    loss_mask: Int[Array, "B L"],
    document_start: Int[Array, "B L"],
    num_anchors: int,
    supervised_ok: Bool[Array, "B L"] | None = None,
    *,
    supervised_anchors_only: bool = False,
    per_document: int | None = None,
    first_row: int | Int[Array, ""] = 0,
) -> tuple[Int[Array, "B N"], Bool[Array, "B N"]]:
    """Draw `num_anchors` candidates of every row, uniformly and without replacement (dspark_spec 2.1).

    Every position gets 32 random bits that depend on the key, the row's number and the position alone; the
    candidates with the smallest ones win. So neither the padded width, nor rows added behind, nor the number
    of devices changes the anchors of a row. Give `first_row` the number of the batch's first row in its
    optimizer step and the split of a global batch into micro-steps changes nothing either.

    Args:
        key: one JAX random key, typed or raw.
        loss_mask: 1 on supervised tokens.
        document_start: index in the row at which each token's document begins.
        num_anchors: `N`; may exceed the number of positions.
        supervised_ok: see `anchor_candidates`.
        supervised_anchors_only: see `anchor_candidates`.
        per_document: most anchors of one document; None = no bound but the row's `N`.
        first_row: number of row 0; may be a traced scalar.

    Returns:
        Anchors int32 [B, N], the kept ones first and ascending, then dummies (0); and the keep mask.

    Raises:
        ValueError: `num_anchors` or `per_document` is below 1.
    """
    for name, value in (("num_anchors", num_anchors), ("per_document", per_document)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; a row needs at least 1 anchor")
    rows, length = loss_mask.shape
    candidates = anchor_candidates(
        loss_mask, document_start, supervised_ok, supervised_anchors_only=supervised_anchors_only
    )
    positions = jnp.arange(length, dtype=jnp.int32)

    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)

    def row_bits(row: Array) -> Array:
        row_key = jax.random.fold_in(key, row)
        # A folded key is itself a hash of (row key, position): its first word is a uniform one.
        folded = jax.vmap(lambda t: jax.random.fold_in(row_key, t))(positions)
        return jax.random.key_data(folded)[:, 0]

    bits = jax.vmap(row_bits)(first_row + jnp.arange(rows, dtype=jnp.int32))  # [B, L]
    if per_document is not None:
        candidates &= _rank_in_document(candidates, document_start, bits) < per_document
    # Two sort keys instead of a score with a sentinel: the largest random word stays an ordinary draw.
    excluded = (~candidates).astype(jnp.int32)
    _, _, drawn = jax.lax.sort((excluded, bits, jnp.broadcast_to(positions, bits.shape)), dimension=1, num_keys=2)
    slots = min(num_anchors, length)
    rank = jnp.arange(slots)
    chosen = jnp.where(rank < candidates.sum(axis=1, keepdims=True), drawn[:, :slots], length)
    chosen = jnp.pad(jnp.sort(chosen, axis=1), ((0, 0), (0, num_anchors - slots)), constant_values=length)
    keep = chosen < length
    return jnp.where(keep, chosen, 0), keep


def _rank_in_document(
    candidates: Bool[Array, "B L"], document_start: Int[Array, "B L"], bits: Array
) -> Int[Array, "B L"]:
    """How many candidates of the same document have smaller random bits; meaningless where there is no candidate."""
    index = jnp.broadcast_to(jnp.arange(bits.shape[1], dtype=jnp.int32), bits.shape)
    excluded = (~candidates).astype(jnp.int32)
    # Documents stay in order, the candidates of each come first and by their bits.
    documents, _, _, drawn = jax.lax.sort((document_start, excluded, bits, index), dimension=1, num_keys=3)
    begins = jnp.pad(documents[:, 1:] != documents[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    rank = index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    return jax.lax.sort((drawn, rank), dimension=1, num_keys=1)[1]


def slot_decay(block_size: int, gamma: float | None) -> Float[Array, " K"]:
    """Weight of a slot before masking: `exp(-j / gamma)`, or 1 for `gamma` None or <= 0 (dspark_spec 2.3)."""
    slots = jnp.arange(block_size, dtype=jnp.float32)
    return jnp.ones_like(slots) if gamma is None or gamma <= 0 else jnp.exp(-slots / gamma)


def make_blocks(
    batch: DraftBatch,
    anchors: Int[Array, "B N"],
    keep: Bool[Array, "B N"],
    block_size: int,
    gamma: float | None,
    last_valid: Bool[Array, "B L"] | None = None,
) -> Blocks:
    """Labels, validity and weights of given anchors (dspark_spec 2.2); never across a document's border.

    A slot counts while every slot up to it has a supervised label inside the anchor's document and a usable
    target state, so supervision never jumps over a user turn, a border or a broken state.

    Args:
        batch: only ids, mask and document starts are read.
        anchors: positions in the row.
        keep: False for dummy blocks; nothing of theirs is valid.
        block_size: `K`.
        gamma: decay over the slots; None or <= 0 means none.
        last_valid: False where `last_hidden` must not teach; None means usable everywhere.

    Returns:
        The blocks, shapes [B, N] and [B, N, K].
    """
    rows, length = batch.input_ids.shape
    num_anchors = anchors.shape[1]

    def at(values: Array, index: Array) -> Array:
        return jnp.take_along_axis(values, index.reshape(rows, -1), axis=1).reshape(index.shape)

    start = at(batch.document_start, anchors)
    offsets = jnp.arange(1, block_size + 1, dtype=anchors.dtype)
    label_index = anchors[:, :, None] + offsets  # [B, N, K]
    in_row = jnp.minimum(label_index, length - 1)
    inside = (label_index < length) & (at(batch.document_start, in_row) == start[:, :, None])
    # A document is contiguous, so the slots inside it are a prefix and their number is where it ends.
    reach = anchors[:, :, None] + inside.sum(axis=-1, keepdims=True, dtype=anchors.dtype)
    label_index = jnp.minimum(label_index, reach)
    target_index = jnp.minimum(anchors[:, :, None] + offsets - 1, reach)

    taught = inside & (at(batch.loss_mask, label_index) > 0) & keep[:, :, None]
    if last_valid is not None:
        taught &= at(last_valid, target_index)
    valid = jnp.cumprod(taught.astype(jnp.int32), axis=-1) > 0

    tokens = at(batch.input_ids, anchors)
    labels = at(batch.input_ids, label_index)
    prev = jnp.concatenate([tokens[:, :, None], labels[:, :, :-1]], axis=-1)
    weight = jnp.where(valid, slot_decay(block_size, gamma), 0.0)
    assert labels.shape == (rows, num_anchors, block_size)
    return Blocks(anchors, keep, start, tokens, labels, prev, valid, weight, target_index)
