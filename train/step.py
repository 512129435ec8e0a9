"""The programs of a run: `accumulate` one micro-step, `apply` one window. Compiled once, before the loop.

They are compiled ahead of time for exact shapes, dtypes and shardings. Calling them with anything else raises before
any donated buffer is consumed; they can not recompile.
"""

import dataclasses
import math
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from draft_jax.batch import DraftBatch, FrozenHead, abstract_batch
from draft_jax.config import DraftConfig
from draft_jax.models.dspark import abstract_params, path_name
from draft_jax.objective.config import ObjectiveConfig
from draft_jax.objective.loss import micro_step_scale, training_loss_sums, window_scale
from draft_jax.objective.metrics import zero_sums

from .fused_update import Step, Updated, can_fuse, fused_update, plain_update
from .optimizer import Optimizer, Schedule, group_norms, squares_of
from .sharding import (
    AXES,
    ROWS,
    Placed,
    Placement,
    batch_shardings,
    head_sharding,
    place,
    reduce_partials,
    replicated,
    with_shardings,
)
from .state import Accumulator, Params, TrainState, abstract_state, accumulator_shardings, zero_accumulator

#: What XLA is told by default, by platform and program. Its own Triton products instead of cuBLAS cost a micro-step
#: 0.8 of 71 ms and 0.3 GiB, and a third of the time to compile (benchmarks/NOTES.md).
COMPILER_OPTIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("gpu", "accumulate"): {"xla_gpu_enable_triton_gemm": False},
}


@dataclass(frozen=True)
class StepOptions:
    """All that shapes the two programs besides the batch.

    Attributes:
        draft: the model.
        objective: loss weights and normalization.
        optimizer: clip, moments, decay.
        schedule: learning rate of a step, and of the step it re-warms from (`make_schedule`).
        dtype: compute dtype of the draft.
        attention: name of the attention implementation.
        compiler_options: for XLA, by name, over `COMPILER_OPTIONS`; measurements try them.
        placement: what of the state is split over the mesh.
        rematerialise: compute each layer of the draft again in the backward pass: less memory, more operations.
    """

    draft: DraftConfig
    objective: ObjectiveConfig
    optimizer: Optimizer
    schedule: Schedule
    dtype: Any
    attention: str = "xla"
    compiler_options: Mapping[str, Any] = field(default_factory=dict)
    placement: Placement = field(default_factory=Placement)
    rematerialise: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepMetrics:
    """What one optimizer step reports; device scalars, read on the host one step later.

    Attributes:
        sums: numerators and denominators over the window.
        values: learning rate, norms (of the gradient before clipping) and flags by their logged names.
    """

    sums: dict[str, jax.Array]
    values: dict[str, jax.Array]


def make_accumulate(
    options: StepOptions, mesh: Mesh
) -> Callable[[Params, FrozenHead, DraftBatch, jax.Array, jax.Array, Accumulator], Accumulator]:
    """The micro-step: add a batch's gradient and sums to the accumulator.

    Every device works on its own rows and adds to its own partial sums; unless parameters or rows are split, and with
    the "window" normalization, the devices do not exchange a single number. Fully sharded they gather the parameters
    they hold parts of and share the gradients of those; with `seq` > 1 they gather each layer's context keys and
    values; "micro_step" sums one number, the micro-step's weight.

    Anchors of a row are drawn from (key, step, number of the row in the window), so they do not depend on how the
    window is cut into micro-steps, nor on the number of devices.
    """
    placed = place(abstract_params(options.draft), mesh, options.placement)
    axes = AXES if mesh.size > 1 else ()
    sequence_axis = "seq" if mesh.shape["seq"] > 1 else None
    row_groups = math.prod(mesh.shape[axis] for axis in ROWS)

    def accumulate(
        params: Params,
        frozen: FrozenHead,
        batch: DraftBatch,
        key: jax.Array,
        step: jax.Array,
        accumulator: Accumulator,
    ) -> Accumulator:
        params = jax.tree.map(lambda leaf, at: at.gather(leaf), params, placed)
        if options.placement.split_head:
            frozen = jax.tree.map(lambda part: jax.lax.all_gather(part, "fsdp", tiled=True), frozen)
        step_key = jax.random.fold_in(jax.random.wrap_key_data(key), step)
        local_rows = batch.input_ids.shape[0]
        first_row = accumulator.rows + jax.lax.axis_index(ROWS) * local_rows

        def numerator(params: Params) -> tuple[jax.Array, dict[str, jax.Array]]:
            return training_loss_sums(
                params,
                frozen,
                batch,
                step_key,
                options.draft,
                options.objective,
                dtype=options.dtype,
                attention=options.attention,
                first_row=first_row,
                rounded=accumulator.rounded,
                axes=axes,
                sequence_axis=sequence_axis,
                rematerialise=options.rematerialise,
            )

        (_, sums), grads = jax.value_and_grad(numerator, has_aux=True)(params)
        scale = micro_step_scale(sums, options.objective, axes)
        scaled = jax.tree.map(lambda g: scale * g, grads)
        return Accumulator(
            grads=jax.tree.map(lambda total, g, at: at.add(total, g), accumulator.grads, scaled, placed),
            sums=jax.tree.map(lambda total, value: total + value[None], accumulator.sums, sums),
            rows=accumulator.rows + local_rows * row_groups,
            rounded=accumulator.rounded,
        )

    def specs(tree: Any) -> Any:
        return jax.tree.map(lambda sharding: sharding.spec, tree)

    layout = specs(accumulator_shardings(abstract_params(options.draft), placed, _sums_of(options), options.dtype))
    params = jax.tree.map(lambda at: at.param, placed)
    head = head_sharding(mesh, options.placement).spec
    return jax.shard_map(
        accumulate,
        mesh=mesh,
        in_specs=(params, head, specs(batch_shardings(mesh)), P(), P(), layout),
        out_specs=layout,
        check_vma=False,  # partial sums differ from device to device by design
    )


def _sums_of(options: StepOptions) -> dict[str, Any]:
    return jax.eval_shape(lambda: zero_sums(options.draft.block_size))


def make_apply(
    options: StepOptions, mesh: Mesh
) -> Callable[[TrainState, Accumulator], tuple[TrainState, Accumulator, StepMetrics]]:
    """The optimizer step: add up the devices, divide, clip, update; hand back the next window's empty accumulator.

    Rule for a window without any supervised token (weight 0): parameters, moments and Adam's count stay bit for bit;
    only `step` advances, and with it the schedule. The same for a gradient that is not finite, which the loop then
    reports as an error: it never reaches parameters or moments.

    Everything is computed where the moments are: on the part of a leaf that a device holds, or on all of it.
    """
    placed = place(abstract_params(options.draft), mesh, options.placement)

    def apply(state: TrainState, accumulator: Accumulator) -> tuple[TrainState, Accumulator, StepMetrics]:
        sums = jax.tree.map(lambda partials: partials.sum(axis=0), accumulator.sums)
        grads = reduce_partials(accumulator.grads, placed)
        held = jax.tree.map(_at_moments, state.params, placed)
        weight = sums["weight"]
        scale = window_scale(sums)
        values = group_norms("grad_norm", squares_of(jax.tree.map(lambda g: g * scale, grads)))
        norm = jnp.sqrt(sum(jnp.square(value) for value in values.values()))
        usable = (weight > 0) & jnp.isfinite(norm)
        rate = options.schedule(state.step, state.rewarm_from)
        count, mu, nu = (optax.tree.get(state.opt_state, name) for name in ("count", "mu", "nu"))
        step = Step(scale * options.optimizer.clip(norm), rate, usable, count)

        def update(path: Any, param: jax.Array, mu: jax.Array, nu: jax.Array, gradient: jax.Array, at: Placed) -> Any:
            if not (options.optimizer.fused and can_fuse(param, at.moment_sharding)):
                return plain_update(options.optimizer, step, param, mu, nu, gradient)
            rounded = options.dtype if path_name(path) in accumulator.rounded else None
            return fused_update(
                options.optimizer, step, param, mu, nu, gradient, sharding=at.moment_sharding, rounded=rounded,
                empty=mesh.size == 1,
            )  # fmt: skip

        updated = jax.tree_util.tree_map_with_path(update, held, mu, nu, grads, placed)

        def of(name: str) -> Any:
            return jax.tree.map(lambda leaf: getattr(leaf, name), updated)

        values |= group_norms("update_norm", of("update_square")) | group_norms("param_norm", of("param_square"))
        values |= {"lr": rate, "grad_norm": norm, "skipped_updates": (weight <= 0).astype(jnp.float32)}
        new_state = TrainState(
            step=state.step + 1,
            params=jax.tree.map(_at_moments, of("param"), placed),
            opt_state=optax.tree.set(
                state.opt_state, count=jnp.where(usable, optax.safe_increment(count), count), mu=of("mu"), nu=of("nu")
            ),
            key=state.key,
            rewarm_from=state.rewarm_from,
        )
        empty = zero_accumulator(new_state.params, placed, _sums_of(options), options.dtype)

        def emptied(leaf: Updated, partial: jax.Array) -> jax.Array:
            # Zeros made of the old sums are written in the pass that reads them; constants would be made once and then
            # copied into every buffer. No compiler knows that a step is never negative.
            return jnp.where(state.step >= 0, 0.0, partial) if leaf.emptied is None else leaf.emptied[None]

        named = {path_name(path): leaf.rounded for path, leaf in jax.tree_util.tree_leaves_with_path(updated)}
        copies = {name: empty.rounded[name] if named[name] is None else named[name] for name in empty.rounded}
        # Rounded where the parameter lives, then gathered: the other way round twice the bytes would travel.
        lives = {path_name(path): at.param_sharding for path, at in jax.tree_util.tree_leaves_with_path(placed)}
        copies = {name: jax.lax.with_sharding_constraint(copy, lives[name]) for name, copy in copies.items()}
        empty = dataclasses.replace(empty, grads=jax.tree.map(emptied, updated, accumulator.grads), rounded=copies)
        return new_state, empty, StepMetrics(sums, values)

    return apply


def _at_moments(leaf: jax.Array, at: Placed) -> jax.Array:
    return jax.lax.with_sharding_constraint(leaf, at.moment_sharding)


@dataclass(frozen=True)
class Programs:
    """The compiled programs of a run.

    Attributes:
        start: `params -> accumulator`, that of the first window.
        accumulate: `(params, frozen, batch, key, step, accumulator) -> accumulator`; the accumulator is donated.
        apply: `(state, accumulator) -> (state, accumulator, StepMetrics)`; both are donated.
        batch: shapes, dtypes and shardings a batch must have.
        compile_seconds: wall time of compiling them, or of reading them from the persistent cache.
    """

    start: Any
    accumulate: Any
    apply: Any
    batch: DraftBatch
    compile_seconds: float

    def memory(self) -> Mapping[str, int]:
        """Bytes the compiler reserves for temporaries of each program on one device; absent where it does not say."""
        sizes = {}
        for name in ("accumulate", "apply"):
            analysis = getattr(self, name).memory_analysis()
            if analysis is not None:
                sizes[name] = int(analysis.temp_size_in_bytes)
        return sizes


def compile_programs(
    options: StepOptions,
    mesh: Mesh,
    *,
    rows: int,
    length: int,
    frozen: FrozenHead,
    hidden_dtype: Any,
    agree: Callable[[str, Any], None] = lambda what, value: None,
) -> Programs:
    """Compile the programs for one batch shape.

    Args:
        options: what to compute.
        mesh: devices; rows are spread over all of them.
        rows: [B] rows of one micro-step, over all devices.
        length: [L] tokens of a row.
        frozen: embedding and LM head, arrays or shapes with shardings.
        hidden_dtype: dtype of the captured states.
        agree: refuses checksums of the lowered programs that are not those of all processes (`World.agree`). Processes
            that compile different programs wait for each other without end (jax_conventions 2.6).
    """
    begin = time.perf_counter()
    lowered, batch = lower_programs(options, mesh, rows=rows, length=length, frozen=frozen, hidden_dtype=hidden_dtype)
    agree(
        "the lowered programs (CRC-32)",
        {name: f"{zlib.crc32(program.as_text().encode()):08x}" for name, program in lowered.items()},
    )
    platform = next(iter(mesh.devices.flat)).platform
    compiled = {
        name: program.compile({**COMPILER_OPTIONS.get((platform, name), {}), **options.compiler_options})
        for name, program in lowered.items()
    }
    return Programs(**compiled, batch=batch, compile_seconds=time.perf_counter() - begin)


def lower_programs(
    options: StepOptions, mesh: Mesh, *, rows: int, length: int, frozen: FrozenHead, hidden_dtype: Any
) -> tuple[dict[str, Any], DraftBatch]:
    """The programs before compilation, by their names in `Programs`, and the batch they take.

    Arguments as `compile_programs`; nothing is allocated, so any shape can be looked at on any machine.
    """
    draft = options.draft
    on_mesh = replicated(mesh)
    state = abstract_state(draft, options.optimizer, mesh, options.placement)
    batch = with_shardings(
        abstract_batch(rows, length, draft.hidden_size, draft.num_taps, hidden_dtype), batch_shardings(mesh)
    )
    head = with_shardings(frozen, head_sharding(mesh, options.placement))
    state_placement = jax.tree.map(lambda leaf: leaf.sharding, state)
    window = (place(state.params, mesh, options.placement), _sums_of(options), options.dtype)
    placement = accumulator_shardings(state.params, *window)

    def start(params: Params) -> Accumulator:
        return zero_accumulator(params, *window)

    accumulator = with_shardings(jax.eval_shape(start, state.params), placement)
    accumulate, apply = make_accumulate(options, mesh), make_apply(options, mesh)
    metrics = jax.tree.map(lambda _: on_mesh, jax.eval_shape(apply, state, accumulator)[2])
    return {
        "start": jax.jit(start, out_shardings=placement).lower(state.params),
        "accumulate": jax.jit(accumulate, donate_argnames="accumulator", out_shardings=placement).lower(
            state.params, head, batch, state.key, state.step, accumulator
        ),
        "apply": jax.jit(
            apply, donate_argnames=("state", "accumulator"), out_shardings=(state_placement, placement, metrics)
        ).lower(state, accumulator),
    }, batch
