"""Time and error of the attention op alone: `python -m benchmarks.attention --shape qwen3-8b`.

Prints one JSON line per case. The arithmetic counted is the exact one: every query row with every key it may see,
4 operations per pair and channel forward, 2.5 times that backward (dspark_spec 8.1); what a kernel computes besides
(the rest of a tile, scores twice) lowers its rate. Errors are relative norms against the XLA form in fp32.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import shapes
from benchmarks.measure import describe_device, peak_gib, pipelined_ms, product_rate, relative_error
from draft_jax.attention import IMPLEMENTATIONS, block_attention

NAMES = ("output", "q", "k_context", "v_context", "k_block", "v_block")


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape: letters as in CONTRIBUTING.md, `documents` packed into each row."""

    B: int
    L: int
    N: int
    K: int
    H: int
    G: int
    C: int
    documents: int = 1

    def arrays(self, dtype: Any, seed: int = 0) -> tuple[list[jax.Array], tuple[jax.Array, ...], jax.Array]:
        """Random tensors, the anchors' side inputs (sorted uniform anchors, all kept), and an output gradient."""
        B, L, N, K, H, G, C = self.B, self.L, self.N, self.K, self.H, self.G, self.C
        shapes = [(B, N, K, H, C), (B, L, G, C), (B, L, G, C), (B, N, K, G, C), (B, N, K, G, C), (B, N, K, H, C)]
        keys = jax.random.split(jax.random.key(seed), len(shapes))
        *tensors, probe = (jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))
        anchors, starts = self.anchors(seed)
        sides = (jnp.asarray(anchors), jnp.asarray(starts), jnp.ones((B, N), bool), jnp.ones((B, L), bool))
        return tensors, sides, probe

    def anchors(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Anchors and the starts of their documents, int32 [B, N]."""
        rng = np.random.default_rng(seed)
        replace = self.N > self.L
        drawn = [np.sort(rng.choice(self.L, self.N, replace=replace)) for _ in range(self.B)]
        anchors = np.stack(drawn).astype(np.int32)
        width = -(-self.L // self.documents)
        return anchors, anchors // width * width

    def tflop(self, backward: bool) -> float:
        """Exact arithmetic of a call, TFLOP."""
        anchors, starts = self.anchors()
        pairs = self.K * float((anchors - starts + self.K).sum())
        return 4 * self.H * self.C * pairs * (3.5 if backward else 1.0) / 1e12


def step(implementation: str, tensors: Any, sides: Any, probe: jax.Array) -> tuple[jax.Array, ...]:
    """Output and all gradients."""
    run = functools.partial(block_attention, implementation=implementation)
    output, back = jax.vjp(lambda *t: run(*t, *sides), *tensors)
    return (output, *back(probe))


def measure(case: Case, implementation: str, dtype: Any, rate: float, check: bool) -> dict[str, Any]:
    """One line of results."""
    tensors, sides, probe = case.arrays(dtype)
    both = jax.jit(functools.partial(step, implementation)).lower(tensors, sides, probe).compile()
    alone = jax.jit(lambda t, s: block_attention(*t, *s, implementation=implementation))
    forward, total = pipelined_ms(alone, tensors, sides), pipelined_ms(both, tensors, sides, probe)
    tflops = case.tflop(True) / total * 1e3
    result = {
        "date": datetime.date.today().isoformat(),
        "device": describe_device(),
        "jax": jax.__version__,
        "implementation": implementation,
        "dtype": jnp.dtype(dtype).name,
        "shape": dataclasses.asdict(case),
        "forward_ms": round(forward, 4),
        "forward_backward_ms": round(total, 4),
        "exact_tflop": round(case.tflop(True), 4),
        "tflops": round(tflops, 1),
        "product_tflops": round(rate, 1),
        "share_of_product_rate": round(tflops / rate, 4),
        "temporary_gib": round(both.memory_analysis().temp_size_in_bytes / 2**30, 3),
        "peak_gib": peak_gib(),
    }
    if check:
        reference = _reference(tensors, sides, probe)
        values = both(tensors, sides, probe)
        result["error"] = {
            name: float(f"{relative_error(a, b):.3g}") for name, a, b in zip(NAMES, values, reference, strict=True)
        }
    return result


def _reference(tensors: Any, sides: Any, probe: jax.Array) -> tuple[jax.Array, ...]:
    """The XLA form on the same values in fp32, with full-precision products."""
    exact = [x.astype(jnp.float32) for x in tensors]
    with jax.default_matmul_precision("highest"):
        return jax.jit(functools.partial(step, "xla"))(exact, sides, probe.astype(jnp.float32))


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """The shapes asked for."""
    sizes = shapes.sizes_of(options)
    H, G, C = sizes.heads, sizes.kv_heads, sizes.head_dim
    for length in options.length:
        for anchors in options.anchors:
            yield Case(options.rows, length, anchors, sizes.block, H, G, C, options.documents)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    shapes.add_arguments(parser)
    parser.add_argument("--implementation", nargs="+", default=["triton"], choices=sorted(IMPLEMENTATIONS))
    parser.add_argument("--rows", type=int, default=1, help="rows B of a batch")
    parser.add_argument("--length", type=int, nargs="+", default=[4096], help="tokens L of a row")
    parser.add_argument("--anchors", type=int, nargs="+", default=[512], help="anchors N of a row")
    parser.add_argument("--documents", type=int, default=1, help="documents packed into a row")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--rate", type=float, help="TFLOP/s of a bf16 product; measured when left out")
    parser.add_argument("--no-check", action="store_true", help="skip the comparison with the fp32 reference")
    options = parser.parse_args()
    rate = options.rate or product_rate()
    for case in cases(options):
        for implementation in options.implementation:
            line = measure(case, implementation, jnp.dtype(options.dtype), rate, not options.no_check)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
