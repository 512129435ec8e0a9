"""The compiled objective at 3584 rows x 151,936 words: no array of rows x V, no collective in its loops.

Programs are compiled from shapes alone and never run; D is small because only the vocabulary matters here.
"""

import functools
import math
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from draft_jax.batch import FrozenHead, abstract_batch
from draft_jax.models.dspark import abstract_params
from draft_jax.objective.config import CHUNK_BYTES, ObjectiveConfig, chunk_rows_for
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


def test_memory_follows_the_chunk():
    small, large = (
        compiled_gradient("chunked", jnp.float32, chunk_rows=rows).memory_analysis().temp_size_in_bytes
        for rows in (32, 128)
    )
    # At most about four fp32 buffers of [chunk, V], as `chunk_rows_for` promises.
    assert 4 * 96 * VOCAB < large - small < 4.5 * 4 * 96 * VOCAB


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("vocab", [256, 49_152, 151_936, 262_144])
@pytest.mark.parametrize("rows", [1, 7, 64, 3584, 28_672])
def test_chunk_rows(rows, vocab, platform):
    chunk = chunk_rows_for(rows, vocab, platform=platform)
    assert 1 <= chunk <= max(8, -(-rows // 8) * 8)
    assert 4 * chunk * vocab <= CHUNK_BYTES[platform]
    # Chunks are even: one more row per chunk than needed at most, but for the multiple of 8.
    chunks = math.ceil(rows / chunk)
    assert chunk * chunks - rows < 8 * chunks


def test_chunk_rows_of_a_huge_vocabulary_and_of_the_running_platform():
    assert chunk_rows_for(100, 10**9, platform="cpu") == 1
    assert chunk_rows_for(3584, VOCAB) == chunk_rows_for(3584, VOCAB, platform=jax.default_backend())
    assert chunk_rows_for(3584, 1000, limit_bytes=4 * 1000 * 30) == 24
    assert chunk_rows_for(3584, VOCAB, platform="tpu") == chunk_rows_for(3584, VOCAB, platform="gpu")


DEVICES = """
import re
import jax
jax.config.update("jax_num_cpu_devices", 4)
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from draft_jax.objective.terms import vocab_terms

rng = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
integers = lambda high, *shape: jnp.asarray(rng.integers(0, high, shape), jnp.int32)
B, S, L, D, R, V = 8, 24, 20, 8, 4, 64
valid = jnp.asarray(rng.random((B, S)) < 0.7)
states = (normal(B, S, D), normal(B, S, R), normal(V, R), normal(V, D), normal(B, L, D))
inputs = (*states, integers(L, B, S), integers(V, B, S), jnp.where(valid, 0.5, 0.0), valid)
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
placement = (rows, rows, everywhere, everywhere, rows, rows, rows, rows, rows)

def gradient(shards):
    def numerator(*inputs):
        alphas = {"ce_alpha": 0.1, "l1_alpha": 0.9}
        terms = vocab_terms(*inputs, vocab_size=V, chunk_rows=7, shards=shards, **alphas)
        return terms.numerator, terms
    return jax.value_and_grad(numerator, argnums=(0, 1, 2), has_aux=True)

compiled = jax.jit(gradient(4), in_shardings=placement).lower(*inputs).compile()
collective = r"(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(-start)?\\("
for computation in re.split(r"\\n(?=%|ENTRY)", compiled.as_text()):
    found = {match[0] for match in re.findall(collective, computation)}
    where = computation.split("(")[0].strip()
    assert not found or (where.startswith("ENTRY") and found == {"all-reduce"}), (where, found)
single = jax.jit(gradient(1))(*inputs)
split = compiled(*(jax.device_put(x, s) for x, s in zip(inputs, placement)))
for a, b in zip(jax.tree.leaves(single), jax.tree.leaves(split)):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)
print("as one device")
"""


def test_four_devices_never_talk_inside_the_loop():
    """Rows stay where they are; every device has its own chunks; w2's gradient is summed once, at the end."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DEVICES)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "as one device" in result.stdout
