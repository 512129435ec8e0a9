"""The two programs of a run: `accumulate` one micro-step, `apply` one window. Compiled once, before the loop.

Both are compiled ahead of time for exact shapes, dtypes and shardings. Calling them with anything else raises before
any donated buffer is consumed; they can not recompile.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from draft_jax.batch import DraftBatch, FrozenHead, abstract_batch
from draft_jax.config import DraftConfig
from draft_jax.objective.config import ObjectiveConfig
from draft_jax.objective.loss import micro_step_scale, training_loss_sums, window_scale
from draft_jax.objective.metrics import zero_sums

from .optimizer import Schedule, group_norms
from .sharding import batch_sharding, replicated, state_shardings, with_shardings
from .state import Accumulator, Params, TrainState, abstract_state, zero_accumulator


@dataclass(frozen=True)
class StepOptions:
    """All that shapes the two programs besides the batch.

    Attributes:
        draft: the model.
        objective: loss weights and normalization.
        optimizer: clip, moments, decay.
        schedule: learning rate of a step.
        dtype: compute dtype of the draft.
        attention: name of the attention implementation.
        batch_shards: devices the rows are spread over.
    """

    draft: DraftConfig
    objective: ObjectiveConfig
    optimizer: optax.GradientTransformation
    schedule: Schedule
    dtype: Any
    attention: str = "xla"
    batch_shards: int = 1


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
    options: StepOptions,
) -> Callable[[Params, FrozenHead, DraftBatch, jax.Array, jax.Array, Accumulator], Accumulator]:
    """The micro-step: add a batch's gradient and sums to the accumulator.

    Anchors of a row are drawn from (key, step, number of the row in the window), so they do not depend on how the
    window is cut into micro-steps, nor on the number of devices.
    """

    def accumulate(
        params: Params,
        frozen: FrozenHead,
        batch: DraftBatch,
        key: jax.Array,
        step: jax.Array,
        accumulator: Accumulator,
    ) -> Accumulator:
        step_key = jax.random.fold_in(jax.random.wrap_key_data(key), step)

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
                first_row=accumulator.rows,
                batch_shards=options.batch_shards,
            )

        (_, sums), grads = jax.value_and_grad(numerator, has_aux=True)(params)
        scale = micro_step_scale(sums, options.objective)
        return Accumulator(
            grads=jax.tree.map(lambda total, g: total + scale * g.astype(jnp.float32), accumulator.grads, grads),
            sums=jax.tree.map(jnp.add, accumulator.sums, sums),
            rows=accumulator.rows + batch.input_ids.shape[0],
        )

    return accumulate


def make_apply(
    options: StepOptions,
) -> Callable[[TrainState, Accumulator], tuple[TrainState, Accumulator, StepMetrics]]:
    """The optimizer step: divide, clip, update; hand back an empty accumulator in the old one's memory.

    Rule for a window without any supervised token (weight 0): parameters, moments and Adam's count stay bit for bit;
    only `step` advances, and with it the schedule. The same for a gradient that is not finite, which the loop then
    reports as an error: it never reaches parameters or moments.
    """

    def apply(state: TrainState, accumulator: Accumulator) -> tuple[TrainState, Accumulator, StepMetrics]:
        weight = accumulator.sums["weight"]
        scale = window_scale(accumulator.sums)
        grads = jax.tree.map(lambda g: g * scale, accumulator.grads)
        norm = optax.global_norm(grads)
        usable = (weight > 0) & jnp.isfinite(norm)
        rate = options.schedule(state.step)
        directions, opt_state = options.optimizer.update(grads, state.opt_state, state.params)
        updates = jax.tree.map(lambda d: jnp.where(usable, -rate * d, 0.0), directions)
        params = optax.apply_updates(state.params, updates)

        values = {"lr": rate, "grad_norm": norm, "skipped_updates": (weight <= 0).astype(jnp.float32)}
        for name, tree in (("grad_norm", grads), ("update_norm", updates), ("param_norm", params)):
            values |= {f"{name}/{group}": value for group, value in group_norms(tree).items()}
        new_state = TrainState(
            step=state.step + 1,
            params=_select(usable, params, state.params),
            opt_state=_select(usable, opt_state, state.opt_state),
            key=state.key,
        )
        empty = zero_accumulator(accumulator.grads, accumulator.sums)
        return new_state, empty, StepMetrics(accumulator.sums, values)

    return apply


def _select(condition: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


@dataclass(frozen=True)
class Programs:
    """The compiled programs and the empty accumulator of the first window.

    Attributes:
        accumulate: `(params, frozen, batch, key, step, accumulator) -> accumulator`; the accumulator is donated.
        apply: `(state, accumulator) -> (state, accumulator, StepMetrics)`; both are donated.
        accumulator: the accumulator to start with.
        batch: shapes, dtypes and shardings a batch must have.
    """

    accumulate: Any
    apply: Any
    accumulator: Accumulator
    batch: DraftBatch

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
) -> Programs:
    """Compile both programs for one batch shape.

    Args:
        options: what to compute.
        mesh: devices; rows are spread over all of them.
        rows: [B] rows of one micro-step, over all devices.
        length: [L] tokens of a row.
        frozen: embedding and LM head, arrays or shapes with shardings.
        hidden_dtype: dtype of the captured states.
    """
    draft = options.draft
    on_mesh = replicated(mesh)
    state = abstract_state(draft, options.optimizer, mesh)
    batch = with_shardings(
        abstract_batch(rows, length, draft.hidden_size, draft.num_taps, hidden_dtype), batch_sharding(mesh)
    )
    head = with_shardings(frozen, on_mesh)
    accumulate, apply = make_accumulate(options), make_apply(options)

    sums = zero_sums(draft.block_size)
    shapes = jax.eval_shape(lambda: zero_accumulator(state.params, sums))
    placement = state_shardings(shapes, mesh)
    accumulator = with_shardings(shapes, placement)
    compiled_accumulate = (
        jax.jit(accumulate, donate_argnames="accumulator", out_shardings=placement)
        .lower(state.params, head, batch, state.key, state.step, accumulator)
        .compile()
    )
    state_placement = jax.tree.map(lambda leaf: leaf.sharding, state)
    metrics = jax.eval_shape(apply, state, accumulator)[2]
    compiled_apply = (
        jax.jit(
            apply,
            donate_argnames=("state", "accumulator"),
            out_shardings=(state_placement, placement, jax.tree.map(lambda _: on_mesh, metrics)),
        )
        .lower(state, accumulator)
        .compile()
    )
    empty = jax.jit(lambda: zero_accumulator(state.params, sums), out_shardings=placement)()
    return Programs(compiled_accumulate, compiled_apply, empty, batch)
