"""The training step alone: one micro-step and one optimizer step on random data, no target.

    python -m benchmarks.step --shape qwen3-8b --length 4096 2048 1024

Prints one JSON line per length and number of anchors. `accumulate_ms` and `apply_ms` wait for the device after each
call; `window_ms` is a micro-step among many enqueued back to back, as a window of the training loop enqueues them.
Needs jax, flax, optax, numpy and jaxtyping only.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import measure, shapes
from draft_jax.attention import choose_implementation
from draft_jax.batch import DraftBatch, FrozenHead
from draft_jax.cost import Shape, step_flops, step_memory
from draft_jax.objective.config import ObjectiveConfig
from train.config import OptimizerConfig
from train.optimizer import make_optimizer, make_schedule
from train.sharding import make_mesh, replicated
from train.state import TrainState, new_state
from train.step import Programs, StepOptions, compile_programs

#: What `--fast-compile` sets: algorithms of products are guessed instead of timed.
FAST_COMPILE = "--xla_gpu_autotune_level=0"


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes.add_arguments(parser)
    parser.add_argument("--length", type=int, nargs="+", default=[4096, 2048, 1024], help="tokens of a row")
    parser.add_argument("--anchors", type=int, nargs="+", default=[512], help="anchors of a row")
    parser.add_argument("--rows", type=int, default=1, help="rows of a micro-step, over all devices")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--attention", default="auto", help="attention implementation, as train.attention")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--chunk-rows", type=int, help="rows of a chunk of the objective; default: chosen by it")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--fast-compile", action="store_true", help="compile quickly, run perhaps slower")
    parser.add_argument("--xla", nargs="*", default=[], metavar="NAME=VALUE", help="compiler options to try")
    parser.add_argument("--rematerialise", action="store_true", help="layers computed again, as train.rematerialise")
    parser.add_argument("--fused", action="store_true", help="the optimizer step in our kernel, as optimizer.fused")
    parser.add_argument("--compile-only", action="store_true", help="fill JAX_COMPILATION_CACHE_DIR, measure nothing")
    parser.add_argument("--profile", help="folder for a trace of two micro-steps of each length")
    return parser.parse_args()


def _value(text: str) -> bool | str:
    """A compiler option's value: XLA wants flags as flags."""
    return {"true": True, "false": False}.get(text.lower(), text)


def random_batch(like: DraftBatch, vocab: int) -> DraftBatch:
    """Random rows, every token supervised, one document a row, on the devices of `like`."""
    rng = np.random.default_rng(0)
    rows, length = like.input_ids.shape
    positions = np.tile(np.arange(length, dtype=np.int32), (rows, 1))

    def hidden(leaf: Any, seed: int) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), leaf.shape, jnp.bfloat16).astype(leaf.dtype)

    batch = DraftBatch(
        input_ids=rng.integers(0, vocab - 1, (rows, length)).astype(np.int32),
        loss_mask=np.ones((rows, length), np.int32),
        positions=positions,
        document_start=np.zeros_like(positions),
        context_hidden=hidden(like.context_hidden, 2),
        last_hidden=hidden(like.last_hidden, 3),
    )
    return jax.tree.map(lambda x, leaf: jax.device_put(x, leaf.sharding), batch, like)


def measure_step(
    programs: Programs, state: TrainState, frozen: FrozenHead, batch: DraftBatch, repeats: int, profile: str | None
) -> tuple[TrainState, dict[str, float]]:
    """Median milliseconds of both programs; the state is passed on because `apply` consumes it."""
    accumulator = programs.start(state.params)

    def accumulate() -> Any:
        nonlocal accumulator
        accumulator = programs.accumulate(state.params, frozen, batch, state.key, state.step, accumulator)
        return accumulator.rows

    def apply() -> Any:
        nonlocal state, accumulator
        state, accumulator, metrics = programs.apply(state, accumulator)
        return metrics

    times = {"accumulate": measure.median_ms(accumulate, repeats=repeats)}
    times["window"] = measure.pipelined_ms(accumulate, few=2, many=2 + repeats, repeats=3)
    if profile:
        with jax.profiler.trace(profile):
            accumulate()
            jax.block_until_ready(accumulate())
    times["apply"] = measure.median_ms(apply, repeats=max(3, repeats // 3), warm_up=1)
    return state, times


def main() -> None:
    """Measure what the command line asks for."""
    given = arguments()
    draft = shapes.sizes_of(given).draft()
    dtype = jnp.dtype(given.dtype)
    if given.fast_compile:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FAST_COMPILE}"  # read when the backend starts
    mesh = make_mesh(jax.devices()[: given.devices])
    device = jax.devices()[0]
    attention = choose_implementation(given.attention, device.platform, device.device_kind, dtype, draft.head_dim)
    compiler_options = {name: _value(text) for name, text in (option.split("=", 1) for option in given.xla)}
    optimizer_config = OptimizerConfig(fused=given.fused)
    optimizer = make_optimizer(optimizer_config)
    shape_of_head = jax.ShapeDtypeStruct((draft.vocab_size, draft.hidden_size), dtype)
    frozen, state, rate = FrozenHead(shape_of_head, shape_of_head), None, 0.0
    if not given.compile_only:
        head = 0.02 * jax.random.normal(jax.random.key(0), shape_of_head.shape, dtype)
        frozen = jax.device_put(FrozenHead(head, head), replicated(mesh))
        state = new_state(draft, optimizer, 0, mesh)
        rate = measure.product_rate(dtype)
    for length in given.length:
        for anchors in given.anchors:
            objective = ObjectiveConfig(num_anchors=anchors, chunk_rows=given.chunk_rows)
            schedule = make_schedule(optimizer_config, 1000)
            options = StepOptions(
                draft, objective, optimizer, schedule, dtype, attention, compiler_options,
                rematerialise=given.rematerialise,
            )  # fmt: skip
            programs = compile_programs(
                options, mesh, rows=given.rows, length=length, frozen=frozen, hidden_dtype=dtype
            )
            if state is None:
                continue
            batch = random_batch(programs.batch, draft.vocab_size)
            state, times = measure_step(programs, state, frozen, batch, given.repeats, given.profile)
            shape = Shape(
                given.rows // given.devices, length, anchors, dtype.itemsize, jax.default_backend(), given.chunk_rows,
                given.rematerialise,
            )  # fmt: skip
            flops = sum(step_flops(draft, shape).values())
            seconds = times["accumulate"] / 1e3
            result = {
                "shape": given.shape,
                "length": length,
                "vocab": draft.vocab_size,
                "anchors": anchors,
                "rows": given.rows,
                "xla": given.xla,
                "rematerialise": given.rematerialise,
                "fused": given.fused,
                "attention": attention,
                "dtype": given.dtype,
                "accumulate_ms": 1e3 * seconds,
                "window_ms": times["window"],
                "apply_ms": times["apply"],
                "tflop": flops / 1e12,
                "tflop_per_s": flops / seconds / 1e12,
                "product_tflop_per_s": rate,
                "share_of_product_rate": flops / seconds / 1e12 / rate,
                "formula_gib": sum(step_memory(draft, shape, attention).values()) / 2**30,
                "temporary_gib": programs.memory().get("accumulate", 0) / 2**30,
                "apply_temporary_gib": programs.memory().get("apply", 0) / 2**30,
                "peak_gib": measure.peak_gib(),
                "chunk_rows": shape.chunk(draft),
                "compile_s": programs.compile_seconds,
                "device": measure.describe_device(),
                "devices": given.devices,
                "jax": jax.__version__,
                "date": time.strftime("%Y-%m-%d"),
            }
            print(json.dumps(measure.rounded(result)), flush=True)


if __name__ == "__main__":
    main()
