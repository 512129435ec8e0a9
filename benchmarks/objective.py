"""The vocabulary terms of the objective alone, forward and gradient, on random data.

    python -m benchmarks.objective --shape qwen3-8b --length 4096 2048 1024

Prints one JSON line per length and chunk size.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import measure, shapes
from draft_jax.cost import Shape, step_flops
from draft_jax.objective.config import chunk_rows_for
from draft_jax.objective.terms import vocab_terms

#: Parts of `step_flops` that this program computes.
PARTS = ("vocabulary, draft", "vocabulary, target", "Markov head")


def inputs(draft: Any, length: int, anchors: int, dtype: Any) -> tuple[jax.Array | None, ...]:
    """Arguments of `vocab_terms` for one full row: anchors uniform, all slots but those past the row supervised."""
    rng = np.random.default_rng(0)
    d, v, r, rows = draft.hidden_size, draft.vocab_size, draft.markov_rank, anchors * draft.block_size
    chosen = np.sort(rng.choice(length - 1, anchors, replace=anchors > length - 1))
    index = (chosen[:, None] + np.arange(draft.block_size)).reshape(1, rows)
    valid = index + 1 < length
    normal = [
        jax.random.normal(jax.random.key(i), shape, dtype)
        for i, shape in enumerate([(1, rows, d), (1, rows, r), (v, r), (v, d), (1, length, d)])
    ]
    hidden, z, w2, head, last = normal
    return (
        hidden,
        z if r else None,
        0.02 * w2.astype(jnp.float32) if r else None,
        0.02 * head,
        last,
        jnp.asarray(np.minimum(index, length - 1), jnp.int32),
        jnp.asarray(rng.integers(0, v, (1, rows)), jnp.int32),
        jnp.asarray(valid, jnp.float32),
        jnp.asarray(valid),
    )


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes.add_arguments(parser)
    parser.add_argument("--length", type=int, nargs="+", default=[4096, 2048, 1024])
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--chunk-rows", type=int, nargs="*", help="default: chosen as in training")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--repeats", type=int, default=12)
    given = parser.parse_args()
    draft, dtype = shapes.sizes_of(given).draft(), jnp.dtype(given.dtype)
    rows, rate = given.anchors * draft.block_size, measure.product_rate(jnp.dtype(given.dtype))
    for length in given.length:
        arguments = inputs(draft, length, given.anchors, dtype)
        for chunk in given.chunk_rows or [chunk_rows_for(rows, draft.vocab_size)]:
            terms = functools.partial(
                vocab_terms, vocab_size=draft.vocab_size, ce_alpha=0.1, l1_alpha=0.9, chunk_rows=chunk
            )
            argnums = (0, 1, 2) if draft.markov_rank else (0,)
            gradient = jax.value_and_grad(lambda *a, terms=terms: terms(*a).numerator, argnums=argnums)
            begin = time.perf_counter()
            compiled = jax.jit(gradient).lower(*arguments).compile()
            compile_seconds = time.perf_counter() - begin
            seconds = measure.median_ms(compiled, *arguments, repeats=given.repeats) / 1e3
            parts = step_flops(draft, Shape(1, length, given.anchors, dtype.itemsize))
            flops = sum(parts[name] for name in PARTS)
            result = {
                "shape": given.shape,
                "length": length,
                "anchors": given.anchors,
                "chunk_rows": chunk,
                "dtype": given.dtype,
                "ms": 1e3 * seconds,
                "tflop": flops / 1e12,
                "tflop_per_s": flops / seconds / 1e12,
                "share_of_product_rate": flops / seconds / 1e12 / rate,
                "temporary_gib": compiled.memory_analysis().temp_size_in_bytes / 2**30,
                "compile_s": compile_seconds,
                "device": measure.describe_device(),
            }
            print(json.dumps(measure.rounded(result)), flush=True)


if __name__ == "__main__":
    main()
