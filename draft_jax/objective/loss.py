"""The training objective over a batch: what the training step differentiates, and how it adds micro-steps up.

A micro-step yields a `numerator` (differentiable) and `Sums` (all additive). Both normalisations are the same
few lines in `train/step.py`:

    (_, sums), grads = jax.value_and_grad(training_loss_sums, has_aux=True)(params, frozen, batch, key, ...)
    scale = micro_step_scale(sums, objective)
    accumulated_grads = accumulated_grads + scale * grads
    accumulated_sums = accumulated_sums + sums          # entry by entry, starting from zero_sums
    # once per optimizer step:
    grads = window_scale(accumulated_sums) * accumulated_grads
    metrics = finalize(accumulated_sums, objective)     # metrics["loss"] is what grads are the gradient of

"window": `scale` is 1 and the accumulated numerator is divided by the accumulated `sum w`, so every
supervised slot of the optimizer step weighs the same. "micro_step" (DeepSpec): `scale` is
`1 / (sum w + 1e-6)` of the micro-step, and the accumulated ratios are divided by their number, micro-steps
without supervision included. A window without any supervision has `window_scale` 0, hence gradients of
exactly 0. All of it is the work of one device on its own rows; `train/step.py` adds devices up as it adds
micro-steps up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from draft_jax.anchors import Blocks, anchor_candidates, make_blocks, sample_anchors
from draft_jax.batch import DraftBatch, FrozenHead
from draft_jax.config import DraftConfig
from draft_jax.models.dspark import Params, bind
from draft_jax.objective.config import ObjectiveConfig, chunk_rows_for
from draft_jax.objective.metrics import Sums, acceptance, acceptance_sums, confidence_sums
from draft_jax.objective.reference import vocab_terms_reference
from draft_jax.objective.sanitize import sanitize, used_positions
from draft_jax.objective.terms import VocabTerms, vocab_terms
from draft_jax.sequence import deal

#: Added to a micro-step's weight, as DeepSpec does (dspark_spec 2.3); it decides nothing but 0/0.
EPSILON = 1e-6

#: Sums that count rows or their tokens: devices that share a row count them once.
_OF_ROWS = ("valid_anchors", "anchor_slots", "rows", "tokens", "nonfinite_context", "nonfinite_last")


def loss_sums(
    params: Params,
    frozen: FrozenHead,
    batch: DraftBatch,
    blocks: Blocks,
    config: DraftConfig,
    objective: ObjectiveConfig,
    *,
    dtype: DTypeLike,
    attention: str = "xla",
    implementation: Literal["chunked", "reference"] = "chunked",
    context_valid: Bool[Array, "B L"] | None = None,
    last_valid: Bool[Array, "B L"] | None = None,
    rounded: Mapping[str, Array] | None = None,
    axes: tuple[str, ...] = (),
    sequence_axis: str | None = None,
    rematerialise: bool = False,
) -> tuple[Float[Array, ""], Sums]:
    """Objective of given blocks (dspark_spec 2.3) with all sums of 2.4.

    Args:
        params: trainable parameters, fp32.
        frozen: the target's embedding and head.
        batch: finite states wherever `context_valid` and `last_valid` allow.
        blocks: from `make_blocks`, made with the same `last_valid`.
        config: the draft.
        objective: weights and options.
        dtype: compute dtype of activations and matrix products.
        attention: name of the attention implementation.
        implementation: "chunked", or "reference" for plain autodiff with all logits at once.
        context_valid: context positions that may be attended to; None: all.
        last_valid: positions that may teach, for the count of candidates only; None: all.
        rounded: kernels in `dtype`, see `models.dspark.rounded_kernels`; None: rounded here.
        axes: mesh axes of a surrounding `shard_map` that spread the micro-step's rows over devices. Sums stay those
            of this device; only the "micro_step" divisor is of all of them.
        sequence_axis: the one of them that splits rows, of a batch and blocks made by `draft_jax.sequence.deal`.
        rematerialise: compute each layer again in the backward pass instead of keeping what it made.

    Returns:
        The numerator `sum of alpha * N` over the terms, fp32, and the sums. Differentiate the numerator with
        respect to `params` only.

    Raises:
        ValueError: the head has fewer rows than the vocabulary, or `implementation` is unknown.
    """
    if frozen.lm_head.shape[0] < config.vocab_size:
        raise ValueError(
            f"the target's LM head has {frozen.lm_head.shape[0]} rows, "
            f"fewer than the draft's vocab_size {config.vocab_size}"
        )
    if context_valid is None:
        context_valid = jnp.ones(batch.loss_mask.shape, bool)
    draft = bind(config, params, dtype, rounded)
    hidden = draft(
        batch,
        blocks,
        frozen,
        context_valid,
        attention=attention,
        sequence_axis=sequence_axis,
        rematerialise=rematerialise,
    )
    z = w2 = None
    if draft.markov is not None:
        z, w2 = draft.markov.states(hidden, blocks.prev), draft.markov.w2()
    terms = _vocab_terms(hidden, z, w2, frozen, batch, blocks, config, objective, implementation)

    accept = acceptance(terms.l1)
    confidence = None
    if draft.confidence is not None:
        features = hidden
        previous = None
        if draft.markov is not None and config.confidence_head_with_markov:
            previous = draft.markov.embed(blocks.prev)
        if objective.confidence_detach:
            features, previous = jax.lax.stop_gradient((features, previous))
        confidence = draft.confidence(features, previous)
    sums = acceptance_sums(accept, blocks.valid) | confidence_sums(confidence, accept, blocks)
    numerator = terms.numerator
    if objective.confidence_alpha:
        numerator += objective.confidence_alpha * sums["confidence"]

    weight = blocks.weight.sum()
    candidates = anchor_candidates(
        batch.loss_mask,
        batch.document_start,
        last_valid,
        supervised_anchors_only=objective.supervised_anchors_only,
    )
    used = used_positions(batch.loss_mask)
    rows = used.any(axis=1).sum(dtype=jnp.float32)
    sums |= {
        "weight": weight,
        "ce": (blocks.weight * terms.ce).sum(),
        "l1": (blocks.weight * terms.l1).sum(),
        "valid_anchors": candidates.sum(dtype=jnp.float32),
        "sampled_anchors": blocks.keep.sum(dtype=jnp.float32),
        "anchor_slots": rows * blocks.keep.shape[1],
        "supervised_tokens": blocks.valid.sum(dtype=jnp.float32),
        "rows": rows,
        "tokens": used.sum(dtype=jnp.float32),
        "nonfinite_context": jnp.zeros((), jnp.float32),
        "nonfinite_last": jnp.zeros((), jnp.float32),
    }
    sums["loss_num"] = numerator * micro_step_scale(sums, objective, axes)
    # One micro-step counts as one, however many devices it is spread over.
    share = 1.0 / math.prod(jax.lax.axis_size(axis) for axis in axes)
    sums["loss_den"] = weight if objective.normalization == "window" else jnp.full((), share, jnp.float32)
    return numerator, jax.lax.stop_gradient(sums)


def _vocab_terms(
    hidden: Array,
    z: Array | None,
    w2: Array | None,
    frozen: FrozenHead,
    batch: DraftBatch,
    blocks: Blocks,
    config: DraftConfig,
    objective: ObjectiveConfig,
    implementation: str,
) -> VocabTerms:
    """The vocabulary terms over [B, N, K] rows; `ce` and `l1` in that shape."""
    rows, anchors, slots = blocks.labels.shape

    def flat(values: Array) -> Array:
        return values.reshape(rows, anchors * slots, *values.shape[3:])

    terms: Callable[..., VocabTerms]
    if implementation == "chunked":
        chunk_rows = objective.chunk_rows or chunk_rows_for(rows * anchors * slots, config.vocab_size)
        terms = functools.partial(vocab_terms, chunk_rows=chunk_rows)
    elif implementation == "reference":
        terms = vocab_terms_reference
    else:
        raise ValueError(f"objective implementation {implementation!r} is unknown; choose 'chunked' or 'reference'")
    result = terms(
        flat(hidden),
        None if z is None else flat(z),
        w2,
        frozen.lm_head,
        batch.last_hidden,
        flat(blocks.target_index),
        flat(blocks.labels),
        flat(blocks.weight),
        flat(blocks.valid),
        vocab_size=config.vocab_size,
        ce_alpha=objective.ce_alpha,
        l1_alpha=objective.l1_alpha,
    )
    shape = blocks.labels.shape
    return result._replace(ce=result.ce.reshape(shape), l1=result.l1.reshape(shape))


def training_loss_sums(
    params: Params,
    frozen: FrozenHead,
    batch: DraftBatch,
    key: jax.Array,
    config: DraftConfig,
    objective: ObjectiveConfig,
    *,
    dtype: DTypeLike,
    attention: str = "xla",
    implementation: Literal["chunked", "reference"] = "chunked",
    first_row: int | Int[Array, ""] = 0,
    rounded: Mapping[str, Array] | None = None,
    axes: tuple[str, ...] = (),
    sequence_axis: str | None = None,
    rematerialise: bool = False,
) -> tuple[Float[Array, ""], Sums]:
    """Sanitize, draw anchors, make blocks, and take `loss_sums`: the function a training step differentiates.

    Args:
        params: see `loss_sums`, like the arguments not listed here.
        frozen: see `loss_sums`.
        batch: as captured, possibly with non-finite states.
        key: random key of the optimizer step.
        config: see `loss_sums`.
        objective: see `loss_sums`.
        dtype: see `loss_sums`.
        attention: see `loss_sums`.
        implementation: see `loss_sums`.
        first_row: number of the batch's first row within the optimizer step. With one key per optimizer step
            and `first_row = micro_step * B`, the split into micro-steps does not change the anchors.
        rounded: see `loss_sums`.
        axes: see `loss_sums`.
        sequence_axis: the one of them over which the states of each row are split (`draft_jax.sequence`). Numerator
            and sums are then of this device's share of the anchors; what counts rows or tokens counts on one device.
        rematerialise: see `loss_sums`.

    Returns:
        Numerator and sums, as `loss_sums`, with `nonfinite_context` and `nonfinite_last` filled in.
    """
    clean = sanitize(batch, enabled=objective.sanitize, sequence_axis=sequence_axis)
    anchors, keep = sample_anchors(
        key,
        batch.loss_mask,
        batch.document_start,
        objective.num_anchors,
        clean.last_valid,
        supervised_anchors_only=objective.supervised_anchors_only,
        per_document=objective.anchors_per_document,
        first_row=first_row,
    )
    batch = clean.batch
    blocks = make_blocks(batch, anchors, keep, config.block_size, objective.gamma, clean.last_valid)
    if sequence_axis is not None:
        batch, blocks = deal(batch, blocks, sequence_axis)
    numerator, sums = loss_sums(
        params,
        frozen,
        batch,
        blocks,
        config,
        objective,
        dtype=dtype,
        attention=attention,
        implementation=implementation,
        context_valid=clean.context_valid,
        last_valid=clean.last_valid,
        rounded=rounded,
        axes=axes,
        sequence_axis=sequence_axis,
        rematerialise=rematerialise,
    )
    sums |= {"nonfinite_context": clean.nonfinite_context, "nonfinite_last": clean.nonfinite_last}
    if sequence_axis is not None:
        sums["anchor_slots"] = sums["rows"] * anchors.shape[1]  # of the row, not of the share
        counts = jax.lax.axis_index(sequence_axis) == 0
        sums |= {name: jnp.where(counts, sums[name], 0) for name in _OF_ROWS}
    return numerator, sums


def micro_step_scale(sums: Sums, objective: ObjectiveConfig, axes: tuple[str, ...] = ()) -> Float[Array, ""]:
    """Factor on a micro-step's gradients before they are accumulated; see the module's docstring.

    Args:
        sums: of the micro-step, on this device.
        objective: decides the normalization.
        axes: see `loss_sums`; "micro_step" sums one number over them.
    """
    if objective.normalization == "window":
        return jnp.ones((), jnp.float32)
    weight = jax.lax.psum(sums["weight"], axes) if axes else sums["weight"]
    return 1.0 / (weight + EPSILON)


def window_scale(sums: Sums) -> Float[Array, ""]:
    """Factor on accumulated gradients when the optimizer step is taken; 0 when nothing was supervised.

    Args:
        sums: accumulated over the micro-steps of one optimizer step.
    """
    divisor = sums["loss_den"]
    return jnp.where(divisor > 0, 1.0 / jnp.where(divisor > 0, divisor, 1.0), 0.0)
