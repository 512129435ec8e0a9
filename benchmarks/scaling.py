"""What several GPUs of one host cost one another: whole optimizer steps on 1 and on n devices, random data, no target.

    python -m benchmarks.scaling --devices 2 --updates 200 --limit 150
    JAX_NUM_CPU_DEVICES=2 JAX_PLATFORMS=cpu python -m benchmarks.scaling --hidden 64 --mlp 128 --heads 4 --kv-heads 2 \\
        --head-dim 16 --vocab 512 --layers 1 --taps 2 --markov-rank 8 --length 64 --anchors 8 --dtype float32

Every device has `--rows` rows of its own in each of `--micro-steps` micro-steps, whatever their number: efficiency is
the rows a second of n devices over n times those of one. Prints a JSON line per mode as soon as it is measured, with
the bytes a device sends, read off the compiled programs. Modes that `--limit` seconds leave no time for are named.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import measure, shapes
from benchmarks.step import FAST_COMPILE, random_batch
from draft_jax.attention import choose_implementation
from draft_jax.batch import FrozenHead
from draft_jax.config import DraftConfig
from draft_jax.objective.config import ObjectiveConfig
from train.config import OptimizerConfig
from train.optimizer import make_optimizer, make_schedule
from train.sharding import Placement, head_sharding, make_mesh
from train.state import new_state
from train.step import StepOptions, compile_programs

#: Seconds kept back for what comes after the last update of a mode.
_RESERVE = 3.0


_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "pred": 1, "s8": 1, "u8": 1}


@dataclass(frozen=True)
class Mode:
    """A way to split the state over n devices.

    Attributes:
        name: on the command line and in the result.
        placement: what is split.
        grouped: over one group of all devices (`fsdp`).
    """

    name: str
    placement: Placement
    grouped: bool = False


ALONE = Mode("one", Placement())
MODES = {
    mode.name: mode
    for mode in (
        ALONE,
        Mode("replicated", Placement()),
        Mode("sharded_moments", Placement("sharded_moments")),
        Mode("fully_sharded", Placement("fully_sharded"), grouped=True),
        Mode("whole_sums", Placement("fully_sharded", split_accumulator=False), grouped=True),
    )
}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes.add_arguments(parser)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--modes", nargs="+", default=["one", "replicated", "fully_sharded"], choices=list(MODES))
    parser.add_argument("--updates", type=int, default=200, help="optimizer steps of each mode, at most")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for all of it, compilation included")
    parser.add_argument("--micro-steps", type=int, default=16)
    parser.add_argument("--rows", type=int, default=1, help="rows of a micro-step on each device")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--fast-compile", action="store_true", help="compile quickly, run perhaps slower")
    parser.add_argument("--xla", nargs="*", default=[], metavar="NAME=VALUE", help="compiler options to try")
    given = parser.parse_args(argv)
    given.modes = ["one", *(mode for mode in dict.fromkeys(given.modes) if mode != "one")]  # the measure of the others
    return given


def sent_bytes(program: str, devices: int) -> float:
    """Bytes each device sends in the collectives of a compiled program, all of which span all devices.

    With rings: a reduce-scatter or an all-gather sends (n-1)/n of the whole, an all-reduce twice that.

    Args:
        program: its text. Collectives inside a loop would count once; ours are in none.
        devices: n.
    """
    total = 0.0
    # Of a pair that starts and ends, the end has the plain result. Long tuples hold comments.
    program = re.sub(r"/\*.*?\*/", "", program)
    found = re.findall(r" = ([^=]*?) (all-reduce|all-gather|reduce-scatter|all-to-all)(?:-done)?\(", program)
    for result, kind in found:
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", re.sub(r"\{[^{}]*\}", "", result))
        size = sum(_BYTES[of] * math.prod(int(n) for n in extents.split(",") if n) for of, extents in shapes)
        whole = size * devices if kind == "reduce-scatter" else size
        total += (2 if kind == "all-reduce" else 1) * (devices - 1) / devices * whole
    return total


def run(mode: Mode, draft: DraftConfig, given: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Measure one mode in so many seconds, compilation included; at least two updates are timed."""
    begin = time.perf_counter()
    count = 1 if mode is ALONE else given.devices
    mesh = make_mesh(jax.devices()[:count], count if mode.grouped else 1)
    dtype = jnp.dtype(given.dtype)
    device = jax.devices()[0]
    config = OptimizerConfig()
    options = StepOptions(
        draft,
        ObjectiveConfig(num_anchors=given.anchors),
        make_optimizer(config),
        make_schedule(config, 1000),
        dtype,
        choose_implementation(given.attention, device.platform, device.device_kind, dtype, draft.head_dim),
        {name: value == "true" for name, value in (option.split("=", 1) for option in given.xla)},
        mode.placement,
    )
    place = head_sharding(mesh, mode.placement)
    matrix = (draft.vocab_size, draft.hidden_size)
    head = jax.jit(lambda: 0.02 * jax.random.normal(jax.random.key(0), matrix, dtype), out_shardings=place)()
    frozen = FrozenHead(head, head)
    programs = compile_programs(
        options, mesh, rows=given.rows * count, length=given.length, frozen=frozen, hidden_dtype=dtype
    )
    batch = random_batch(programs.batch, draft.vocab_size)
    state = new_state(draft, options.optimizer, 0, mesh, placement=mode.placement)
    accumulator = programs.start(state.params)
    times: list[float] = []
    loss = float("nan")
    for number in range(given.updates + 1):  # the first one is not timed
        start = time.perf_counter()
        for _ in range(given.micro_steps):
            accumulator = programs.accumulate(state.params, frozen, batch, state.key, state.step, accumulator)
        state, accumulator, metrics = programs.apply(state, accumulator)
        loss = float(metrics.sums["loss_num"] / metrics.sums["loss_den"])  # waits
        if number:
            times.append(time.perf_counter() - start)
        if len(times) >= 2 and time.perf_counter() - begin + 2 * times[-1] + _RESERVE > seconds:
            break
    update = statistics.median(times)
    each, once = (sent_bytes(program.as_text(), count) for program in (programs.accumulate, programs.apply))
    return {
        "mode": mode.name,
        "devices": count,
        "updates": len(times),
        "update_s": update,
        "update_s_worst": max(times),
        "rows_per_s": count * given.rows * given.micro_steps / update,
        "micro_steps": given.micro_steps,
        "sent_gb_per_micro_step": each / 1e9,
        "sent_gb_per_update": (given.micro_steps * each + once) / 1e9,
        "loss": loss,
        "temporary_gib": programs.memory().get("accumulate", 0) / 2**30,
        "state_gib": sum(_local(leaf) for leaf in jax.tree.leaves((state, accumulator))) / 2**30,
        "peak_gib": measure.peak_gib(),
        "compile_s": programs.compile_seconds,
        "wall_s": time.perf_counter() - begin,
        "shape": given.shape,
        "length": given.length,
        "anchors": given.anchors,
        "dtype": given.dtype,
        "xla": given.xla,
        "device": measure.describe_device(),
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def _local(array: jax.Array) -> int:
    """Bytes of an array on one device."""
    return array.addressable_shards[0].data.nbytes


def main(argv: list[str] | None = None) -> int:
    """Measure what the command line asks for. Returns 1 if a mode was left out."""
    begin = time.perf_counter()
    given = arguments(argv)
    if given.fast_compile:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FAST_COMPILE}"  # read when the backend starts
    if len(jax.devices()) < given.devices:
        raise SystemExit(f"--devices is {given.devices}; JAX sees {len(jax.devices())}")
    draft = shapes.sizes_of(given).draft()
    alone, left_out = 0.0, []
    for index, name in enumerate(given.modes):
        left = given.limit - (time.perf_counter() - begin)
        if left < 2 * _RESERVE:
            left_out.append(name)
            continue
        result = run(MODES[name], draft, given, left / (len(given.modes) - index))
        if name == "one":
            alone = result["rows_per_s"]
        result["efficiency"] = result["rows_per_s"] / (result["devices"] * alone)
        print(json.dumps(measure.rounded(result)), flush=True)
    if left_out:
        print(f"no time was left of --limit {given.limit:g} s for: {', '.join(left_out)}", file=sys.stderr)
    return int(bool(left_out))


if __name__ == "__main__":
    sys.exit(main())
