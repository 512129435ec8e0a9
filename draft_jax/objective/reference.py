"""The vocabulary terms in plain autodiff, all logits at once: what `terms.py` must equal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from draft_jax.objective.terms import VocabTerms


def reference_row_losses(
    logits: Float[Array, "*rows V"], target_logits: Float[Array, "*rows V"], labels: Int[Array, "*rows"]
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """CE with the label and L1 between the two softmaxes, both at temperature 1 (dspark_spec 2.3)."""
    log_total = jax.nn.logsumexp(logits, axis=-1)
    ce = log_total - jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    p = jnp.exp(logits - log_total[..., None])
    l1 = jnp.abs(p - jax.nn.softmax(target_logits, axis=-1)).sum(axis=-1)
    return ce, l1


def vocab_terms_reference(
    hidden: Float[Array, "B S D"],
    z: Float[Array, "B S R"] | None,
    w2: Float[Array, "V R"] | None,
    lm_head: Float[Array, "P D"],
    last_hidden: Float[Array, "B L D"],
    target_index: Int[Array, "B S"],
    labels: Int[Array, "B S"],
    weights: Float[Array, "B S"],
    valid: Bool[Array, "B S"],
    *,
    vocab_size: int,
    ce_alpha: float,
    l1_alpha: float,
) -> VocabTerms:
    """`vocab_terms` without chunks; arguments and result as there. Needs several fp32 arrays of [B, S, V]."""
    head = lm_head[:vocab_size].astype(hidden.dtype)

    def product(states: Array, matrix: Array) -> Array:
        return jnp.einsum("bsm,vm->bsv", states, matrix, preferred_element_type=jnp.float32)

    # Values of rows that do not count are replaced, not multiplied by 0: NaN times 0 is NaN, in gradients
    # too.
    logits = product(jnp.where(valid[..., None], hidden, 0), head)
    if z is not None and w2 is not None:
        logits += product(jnp.where(valid[..., None], z, 0).astype(hidden.dtype), w2.astype(hidden.dtype))
    states = jnp.take_along_axis(last_hidden, target_index[..., None], axis=1)
    states = jnp.where(valid[..., None], states, 0)
    target_logits = jax.lax.stop_gradient(product(states.astype(hidden.dtype), head))
    ce, l1 = reference_row_losses(logits, target_logits, labels)
    ce, l1 = jnp.where(valid, ce, 0.0), jnp.where(valid, l1, 0.0)
    numerator = (jnp.where(valid, weights, 0.0) * (ce_alpha * ce + l1_alpha * l1)).sum()
    return VocabTerms(numerator, jax.lax.stop_gradient(ce), jax.lax.stop_gradient(l1))
