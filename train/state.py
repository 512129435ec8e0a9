"""What a run carries from step to step: parameters, moments, step and key; and what lives for one window."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from draft_jax.config import DraftConfig
from draft_jax.models.dspark import init_params, rounded_kernels

from .optimizer import NEVER, Optimizer
from .sharding import Placed, Placement, per_device, replicated, state_shardings

Params = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that training changes. The frozen target is not in it, hence never in a checkpoint.

    Attributes:
        step: optimizer steps done, int32 scalar.
        params: the draft's parameters, float32.
        opt_state: optax state, moments float32.
        key: raw uint32 data of the random key anchors are drawn from; constant over the run, the step is folded in.
        rewarm_from: step from which the learning rate rises anew (`optimizer.make_schedule`), int32 scalar.
    """

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    key: jax.Array
    rewarm_from: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Accumulator:
    """What lives for one optimizer step (one window): sums over its micro-steps, and copies of the parameters.

    Every device adds its own rows to its own partial sums; only the optimizer step adds those up. The sums of the
    window are the sums over the leading axes.

    Attributes:
        grads: float32, shaped as `Placed.partial_shape` says: gradients of the micro-steps' numerators, each times
            its `micro_step_scale`.
        sums: unreduced numerators and denominators of loss and metrics, by name; a leading axis of devices.
        rows: rows seen, int32: the number of the next row in the window, from which its anchors are drawn.
        rounded: kernels of the window's parameters in the compute dtype (`models.dspark.rounded_kernels`), whole on
            every device; empty if that is float32.
    """

    grads: Params
    sums: dict[str, jax.Array]
    rows: jax.Array
    rounded: dict[str, jax.Array]


def keys_of_seed(seed: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two independent typed keys of a run's seed: for the initial parameters and for the anchors."""
    init_key, anchor_key = jax.random.split(jax.random.key(seed))
    return init_key, anchor_key


def new_state(
    draft: DraftConfig,
    optimizer: Optimizer,
    seed: int,
    mesh: Mesh,
    params: Params | None = None,
    placement: Placement | None = None,
) -> TrainState:
    """The state of step 0, laid out on the mesh.

    Args:
        draft: what to initialise.
        optimizer: its `init` makes the moments.
        seed: of parameters and anchors.
        mesh: where to put it.
        params: float32 parameters to start from instead of random ones.
        placement: what is split; None = by the mesh.
    """

    def build(seed: jax.Array, params: Params | None) -> TrainState:
        init_key, anchor_key = keys_of_seed(seed)
        params = init_params(draft, init_key, jnp.float32) if params is None else params
        key, never = jax.random.key_data(anchor_key), jnp.full((), NEVER, jnp.int32)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), key, never)

    shardings = state_shardings(jax.eval_shape(build, jnp.uint32(seed), params), mesh, placement)
    # Without out_shardings the moments would be whole on every device: zeros have no operand to take a sharding from.
    return jax.jit(build, out_shardings=shardings)(jnp.uint32(seed), params)


def at_step(state: TrainState, *, step: int | None = None, rewarm_from: int | None = None) -> TrainState:
    """The state with other numbers of steps; every process of the run must give the same."""

    def scalar(old: jax.Array, new: int | None) -> jax.Array:
        if new is None:
            return old
        return jax.make_array_from_callback((), old.sharding, lambda _: np.asarray(new, np.int32))

    return replace(state, step=scalar(state.step, step), rewarm_from=scalar(state.rewarm_from, rewarm_from))


def abstract_state(
    draft: DraftConfig, optimizer: Optimizer, mesh: Mesh, placement: Placement | None = None
) -> TrainState:
    """Shapes, dtypes and shardings of a state, without making one; arguments as `new_state`."""

    def build(seed: jax.Array) -> TrainState:
        init_key, anchor_key = keys_of_seed(seed)
        params = init_params(draft, init_key, jnp.float32)
        key, never = jax.random.key_data(anchor_key), jnp.full((), NEVER, jnp.int32)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), key, never)

    shapes = jax.eval_shape(build, jnp.uint32(0))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        state_shardings(shapes, mesh, placement),
    )


def zero_accumulator(params: Params, placed: Any, sums: dict[str, Any], dtype: Any) -> Accumulator:
    """An empty accumulator for the window of given parameters. Traceable.

    Args:
        params: float32 parameters; where the copies come from.
        placed: where they live (`sharding.place`).
        sums: shapes of the sums of one device.
        dtype: compute dtype.
    """
    mesh = _mesh_of(placed)
    partials = jax.tree.map(lambda leaf, place: place.partial_shape(leaf), params, placed)
    return Accumulator(
        grads=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), partials),
        sums=jax.tree.map(lambda leaf: jnp.zeros((mesh.size, *leaf.shape), jnp.float32), sums),
        rows=jnp.zeros((), jnp.int32),
        rounded=rounded_kernels(params, dtype),
    )


def accumulator_shardings(params: Params, placed: Any, sums: dict[str, Any], dtype: Any) -> Accumulator:
    """The sharding of each leaf of `zero_accumulator`, whose arguments these are."""
    mesh = _mesh_of(placed)
    everywhere: Any = replicated(mesh)
    return Accumulator(
        grads=jax.tree.map(lambda leaf, place: place.partial_shape(leaf).sharding, params, placed),
        sums=jax.tree.map(lambda _: per_device(mesh), sums),
        rows=everywhere,
        rounded=jax.tree.map(lambda _: everywhere, jax.eval_shape(lambda p: rounded_kernels(p, dtype), params)),
    )


def _mesh_of(placed: Any) -> Mesh:
    leaves: list[Placed] = jax.tree.leaves(placed)
    return leaves[0].mesh
