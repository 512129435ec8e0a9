"""Time each attention kernel alone over candidate tiles: how the tiles in `draft_jax/attention/triton.py` were chosen.

`python -m benchmarks.attention_tiles --shape qwen3-8b forward=128,128,8,3 dkv=64,128,8,3,2 ...`: kernel =
rows, keys, warps, stages[, splits]. Prints a table; a tile that does not fit the device is reported and skipped.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.attention import Case
from benchmarks.measure import pipelined_ms
from benchmarks.shapes import TARGETS
from draft_jax.attention.context_kernels import context_dkv, context_dq, context_forward
from draft_jax.attention.tiles import Tile

#: Products each kernel makes, of the two of a forward pass; the exact backward pass has 5, these two kernels make 7.
PRODUCTS = {"forward": 2, "dq": 3, "dkv": 4}


def kernel_inputs(case: Case) -> dict[str, tuple[Any, ...]]:
    """Arguments of each kernel, packed; `M` and `L` must be multiples of every tile tried."""
    tensors, (anchors, starts, _, valid), probe = case.arrays(jnp.bfloat16)
    R = case.H // case.G

    def pack(x: jax.Array) -> jax.Array:
        x = x.reshape(case.B, case.N, case.K, case.G, R, case.C).transpose(0, 3, 1, 2, 4, 5)
        return x.reshape(case.B, case.G, -1, case.C)

    q, do = pack(tensors[0]), pack(probe)
    low, high = (jnp.repeat(x, case.K * R, axis=1) for x in (starts, anchors))
    inputs = (q, tensors[1], tensors[2], low, high, valid)
    lse, delta = jnp.full(q.shape[:3], 12.0), jnp.zeros(q.shape[:3])
    return {"forward": inputs, "dq": (*inputs, lse, do, delta, q), "dkv": (*inputs, lse, do, delta)}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(TARGETS), default="qwen3-8b")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("candidates", nargs="+", metavar="KERNEL=ROWS,KEYS,WARPS,STAGES[,SPLITS]")
    options = parser.parse_args()
    sizes = TARGETS[options.shape]
    heads = (sizes["heads"], sizes["kv_heads"], sizes["head_dim"])
    case = Case(options.rows, options.length, options.anchors, 7, *heads)
    inputs = kernel_inputs(case)
    kernels = {"forward": context_forward, "dq": context_dq, "dkv": context_dkv}
    for candidate in options.candidates:
        name, numbers = candidate.split("=")
        tile = Tile(*map(int, numbers.split(",")))
        try:
            run = jax.jit(lambda *a, name=name, tile=tile: kernels[name](*a, tile=tile)).lower(*inputs[name]).compile()
        except jax.errors.JaxRuntimeError as error:
            print(f"{candidate:28} does not compile: {str(error).splitlines()[0][:100]}", flush=True)
            continue
        ms = pipelined_ms(run, *inputs[name])
        tflops = case.tflop(False) * PRODUCTS[name] / 2 / ms * 1e3
        print(f"{candidate:28} {ms:8.3f} ms  {tflops:6.1f} TFLOP/s of its exact products", flush=True)


if __name__ == "__main__":
    main()
