"""Timing, errors and the machine's own ceiling; shared by all benchmarks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def wall_ms(call: Callable[..., Any], *arguments: Any, repeats: int = 12, warm_up: int = 3) -> list[float]:
    """Wall milliseconds of each of `repeats` calls, waiting for the device after each."""
    times = []
    for i in range(warm_up + repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        if i >= warm_up:
            times.append(1e3 * (time.perf_counter() - begin))
    return times


def median_ms(call: Callable[..., Any], *arguments: Any, repeats: int = 12, warm_up: int = 3) -> float:
    """Median of `wall_ms`."""
    return statistics.median(wall_ms(call, *arguments, repeats=repeats, warm_up=warm_up))


def pipelined_ms(call: Callable[..., Any], *arguments: Any, few: int = 5, many: int = 25, repeats: int = 9) -> float:
    """Milliseconds the device needs for one of many calls enqueued back to back, as kernels are inside a step.

    The median over `repeats` of (time of `many` calls - time of `few`) / (many - few): what a single wait costs the
    host, some tenths of a millisecond, drops out.
    """

    def seconds(calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            result = call(*arguments)
        jax.block_until_ready(result)
        return time.perf_counter() - begin

    seconds(few)
    return 1e3 * statistics.median((seconds(many) - seconds(few)) / (many - few) for _ in range(repeats))


def product_rate(dtype: Any = jnp.bfloat16, size: int | None = None, repeats: int = 10) -> float:
    """TFLOP/s of a large square matrix product on random data: the ceiling of everything else.

    Args:
        dtype: of the operands.
        size: of the matrices; None: 8192 on an accelerator, 1024 on a CPU.
        repeats: products timed together.
    """
    size = size or (1024 if jax.default_backend() == "cpu" else 8192)
    a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.float32).astype(dtype) for i in range(2))
    product = jax.jit(jnp.matmul)
    jax.block_until_ready([product(a, b) for _ in range(3)])
    begin = time.perf_counter()
    jax.block_until_ready([product(a, b) for _ in range(repeats)])
    return 2.0 * size**3 * repeats / (time.perf_counter() - begin) / 1e12


def relative_error(value: Any, reference: Any) -> float:
    """`|value - reference| / |reference|`, Euclidean norms in fp64."""
    value, reference = (np.asarray(x, np.float64) for x in (value, reference))
    return float(np.linalg.norm(value - reference) / np.linalg.norm(reference))


def describe_device() -> str:
    """What the measurement ran on."""
    return jax.devices()[0].device_kind


def peak_gib() -> float | None:
    """Most device memory in use so far, GiB; None where the device does not count it."""
    stats = jax.devices()[0].memory_stats()
    return round(stats["peak_bytes_in_use"] / 2**30, 2) if stats and "peak_bytes_in_use" in stats else None


def rounded(values: dict[str, Any], digits: int = 4) -> dict[str, Any]:
    """The same with floats cut to significant digits, for printing."""
    return {k: float(f"{v:.{digits}g}") if isinstance(v, float) else v for k, v in values.items()}
