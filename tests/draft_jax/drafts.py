"""Small drafts, batches and blocks for the tests of draft_jax."""

import jax
import jax.numpy as jnp
import numpy as np

from draft_jax.anchors import Blocks, make_blocks
from draft_jax.batch import DraftBatch, FrozenHead
from draft_jax.config import DraftConfig
from draft_jax.models.dspark import abstract_params

_make_blocks = jax.jit(make_blocks, static_argnums=(3, 4))


def tiny_config(**changes) -> DraftConfig:
    """A draft of a few thousand parameters in which no two sizes coincide (D 24, H 6, G 2, C 8, V 31, R
    5)."""
    fields = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 31,
        "num_target_layers": 6,
        "target_layer_ids": (0, 2, 3),
        "block_size": 4,
        "mask_token_id": 14,
        "rope_theta": 1e4,
        "markov_rank": 5,
        # Large enough that attention, gates and biases all matter in an fp32 comparison.
        "initializer_range": 0.2,
    }
    return DraftConfig(**{**fields, **changes})


def random_batch(config: DraftConfig, lengths: list[list[int]], width: int, seed: int = 0) -> DraftBatch:
    """Rows of packed documents, all tokens supervised, padded to `width` with zeros.

    Args:
        lengths: document lengths per row.
    """
    rng = np.random.default_rng(seed)
    rows = len(lengths)
    ids, mask, positions, start = (np.zeros((rows, width), np.int32) for _ in range(4))
    context = np.zeros((rows, width, config.num_taps * config.hidden_size), np.float32)
    last = np.zeros((rows, width, config.hidden_size), np.float32)
    for row, documents in enumerate(lengths):
        begin = 0
        for length in documents:
            piece = slice(begin, begin + length)
            ids[row, piece] = rng.integers(0, config.vocab_size, length)
            mask[row, piece] = 1
            positions[row, piece] = np.arange(length)
            start[row, piece] = begin
            context[row, piece] = rng.normal(size=(length, context.shape[2]))
            last[row, piece] = rng.normal(size=(length, last.shape[2]))
            begin += length
    fields = (ids, mask, positions, start, context, last)
    return DraftBatch(*(jnp.asarray(field) for field in fields))


def frozen_head(config: DraftConfig, extra_rows: int = 3, seed: int = 1) -> FrozenHead:
    """An untied head, padded by `extra_rows` as real targets are."""
    rng = np.random.default_rng(seed)
    embedding, head = rng.normal(size=(2, config.vocab_size + extra_rows, config.hidden_size))
    return FrozenHead(embedding=jnp.asarray(embedding, jnp.float32), lm_head=jnp.asarray(head, jnp.float32))


def blocks_at(batch: DraftBatch, anchors: list[list[int]], config: DraftConfig, keep=None) -> Blocks:
    """Blocks of given anchors (not sampled)."""
    where = jnp.asarray(anchors, jnp.int32)
    kept = jnp.ones(where.shape, bool) if keep is None else jnp.asarray(keep, bool)
    return _make_blocks(batch, where, kept, config.block_size, 4.0)


def random_params(config: DraftConfig, seed: int = 2) -> dict:
    """Parameters with every leaf random, norms and biases too (unlike `init_params`), made without
    compiling."""
    rng = np.random.default_rng(seed)

    def leaf(path, abstract):
        noise = rng.normal(size=abstract.shape) * config.initializer_range
        return jnp.asarray(noise + (path[-1].key == "scale"), jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, abstract_params(config))
