"""The compiled objective at 3584 rows x 151,936 words: no array of rows x V, and few of a chunk x V.

Programs are compiled from shapes alone and never run; D is small because only the vocabulary matters here.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from draft_jax.batch import FrozenHead, abstract_batch
from draft_jax.models.dspark import abstract_params
from draft_jax.objective.config import CHUNK_BYTES, ObjectiveConfig, chunk_rows_for, target_sizes_for
from draft_jax.objective.loss import training_loss_sums

from .drafts import tiny_config

ANCHORS, BLOCK, LENGTH, VOCAB, D = 512, 7, 4096, 151_936, 64
ROWS = ANCHORS * BLOCK
CONFIG = tiny_config(
    hidden_size=D,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    block_size=BLOCK,
    vocab_size=VOCAB,
)


def compiled_gradient(implementation, dtype, **options):
    """The program a training step differentiates, for one row of 4096 tokens."""
    function = functools.partial(
        training_loss_sums,
        config=CONFIG,
        objective=ObjectiveConfig(num_anchors=ANCHORS, **options),
        dtype=dtype,
        implementation=implementation,
    )
    matrix = jax.ShapeDtypeStruct((VOCAB, D), dtype)
    return (
        jax.jit(jax.grad(lambda *arguments: function(*arguments)[0]))
        .lower(
            abstract_params(CONFIG),
            FrozenHead(embedding=matrix, lm_head=matrix),
            abstract_batch(1, LENGTH, D, CONFIG.num_taps, dtype),
            jax.eval_shape(lambda: jax.random.key(0)),
        )
        .compile()
    )


def array_sizes(compiled):
    """Elements of every array any instruction of the program makes, fused or not: shape text -> count."""
    shapes = set(re.findall(r"\b[a-z]+\d*\[([\d,]+)\]", compiled.as_text()))
    return {shape: math.prod(int(n) for n in shape.split(",")) for shape in shapes}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_array_of_rows_by_vocabulary(dtype):
    compiled = compiled_gradient("chunked", dtype)
    chunk = chunk_rows_for(ROWS, VOCAB)
    largest = max(array_sizes(compiled).values())
    assert chunk * VOCAB <= largest <= chunk * VOCAB * 1.01, "the chunk's logits are the largest array"
    assert chunk < ROWS / 8
    one_buffer = 4 * ROWS * VOCAB  # 2.18 GB
    assert compiled.memory_analysis().temp_size_in_bytes < one_buffer / 3


def test_the_check_sees_plain_autodiff():
    """The control: the reference does hold [rows, V] arrays, several of them, and both measures say so."""
    compiled = compiled_gradient("reference", jnp.float32)
    assert max(array_sizes(compiled).values()) >= ROWS * VOCAB
    assert compiled.memory_analysis().temp_size_in_bytes > 3 * 4 * ROWS * VOCAB


def test_a_chunk_stores_three_arrays():
    """Draft logits, target logits, gradient; probabilities, signs and the like exist only inside passes."""
    small, large = (
        compiled_gradient("chunked", jnp.float32, chunk_rows=rows).memory_analysis().temp_size_in_bytes
        for rows in (128, 256)
    )
    assert (large - small) / (4 * 128 * VOCAB) == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("vocab", [256, 49_152, 151_936, 262_144])
@pytest.mark.parametrize("rows", [1, 7, 64, 3584, 28_672])
def test_chunk_rows(rows, vocab, platform):
    chunk = chunk_rows_for(rows, vocab, platform=platform)
    assert 1 <= chunk <= max(8, -(-rows // 8) * 8)
    assert 4 * chunk * vocab <= CHUNK_BYTES[platform]
    # Chunks are even, but for the multiple of 8.
    chunks = math.ceil(rows / chunk)
    assert chunk * chunks - rows < 8 * chunks


@pytest.mark.parametrize("chunk", [1, 5, 104, 160, 448, 896, 1200])
def test_target_sizes(chunk):
    """Ascending, up to the chunk, few, and none so small that reading the head is all it costs."""
    sizes = target_sizes_for(chunk)
    assert sizes[-1] == chunk
    assert list(sizes) == sorted(set(sizes))
    assert len(sizes) <= 5
    assert all(size >= 160 for size in sizes[:-1])
    assert len(sizes) > 2 or chunk < 448


def test_chunk_rows_of_a_huge_vocabulary_and_of_the_running_platform():
    assert chunk_rows_for(100, 10**9, platform="cpu") == 1
    assert chunk_rows_for(3584, VOCAB) == chunk_rows_for(3584, VOCAB, platform=jax.default_backend())
    assert chunk_rows_for(3584, 1000, limit_bytes=4 * 1000 * 30) == 24
    assert chunk_rows_for(3584, VOCAB, platform="tpu") == chunk_rows_for(3584, VOCAB, platform="gpu")
