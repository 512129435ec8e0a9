"""The device mesh and where each tree lives on it: rows, the tokens of a row, and the state by rules of names.

Three modes (`train.sharding`). Whatever the mode, a device adds the gradients of its own rows to a sum; the modes
differ in what it holds of parameters, moments and that sum:

    replicated       all of them whole on every device
    sharded_moments  moments and the update split over all devices, parameters and sum whole (ZeRO-1)
    fully_sharded    parameters, moments and sum split over the axis `fsdp`, gathered for each micro-step
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from draft_jax.batch import DraftBatch

#: Mesh axes, outermost first. Rows are spread over the first two, the tokens of a row over the last.
AXES = ("data", "fsdp", "seq")
ROWS = ("data", "fsdp")

Mode = Literal["replicated", "sharded_moments", "fully_sharded"]

#: In a rule: the mesh axes over which the mode splits; which they are is not the rule's business.
SPLIT = "split"

#: Layouts of a matrix, the first that divides wins. Rows first: a collective over them moves contiguous memory.
_MATRIX = (P(SPLIT, None), P(None, SPLIT))
_WHOLE = (P(),)

#: Path of a leaf (its end, see `path_of`) -> layouts. The same rules place a parameter, its moments and the sum of its
#: gradients. Small vectors stay whole: splitting them saves nothing and costs a collective each.
RULES: tuple[tuple[str, tuple[P, ...]], ...] = (
    (r"layers/\d+/self_attn/[qkvo]_proj/kernel", _MATRIX),
    (r"layers/\d+/mlp/(gate|up|down)_proj/kernel", _MATRIX),
    (r"fc/kernel", _MATRIX),
    (r"markov/markov_w[12]/embedding", _MATRIX),
    (r"markov/(gate|joint)_proj/kernel", _MATRIX),
    (r"confidence/proj/kernel", _WHOLE),
    (r"\w*norm/scale", _WHOLE),
    (r"\w*proj/bias", _WHOLE),
    (r"step|key|count|rewarm_from", _WHOLE),
)


class ShardingError(ValueError):
    """A mesh that cannot be made, or a parameter no rule places; the message names it."""


@dataclass(frozen=True)
class Placement:
    """What is split; see the module's docstring.

    Attributes:
        mode: None = `fully_sharded` on a mesh with an `fsdp` axis of more than one device, else `replicated`.
        split_accumulator: with `fully_sharded`: the sum of gradients is split too, so that every micro-step shares its
            gradients. False keeps it whole, and gradients are shared once per optimizer step.
        split_head: the frozen embedding and head are split by rows of the vocabulary over `fsdp`, and gathered for
            each micro-step.
    """

    mode: Mode | None = None
    split_accumulator: bool = True
    split_head: bool = False

    def mode_on(self, mesh: Mesh) -> Mode:
        """The mode on this mesh.

        Raises:
            ShardingError: the mesh has an `fsdp` axis that the mode would leave idle, or lacks the one it needs.
        """
        grouped = mesh.shape["fsdp"] > 1
        if self.mode is None:
            return "fully_sharded" if grouped else "replicated"
        if grouped and self.mode != "fully_sharded":
            raise ShardingError(
                f"train.sharding is {self.mode!r} and train.fsdp {mesh.shape['fsdp']}; only 'fully_sharded' splits"
                " over fsdp: set train.fsdp: 1, or the mode"
            )
        return self.mode


def make_mesh(devices: Sequence[jax.Device], fsdp: int = 1, seq: int = 1) -> Mesh:
    """A (data, fsdp, seq) mesh over `devices` in the given order.

    The order is kept (jax.make_mesh may permute it): device i then holds the i-th portion of the rows, cut into `seq`
    parts of their tokens, which is what the staging of captured states relies on. Axes are Auto: `jax.jit` propagates
    shardings by itself.

    Raises:
        ShardingError: fsdp * seq does not divide the number of devices.
    """
    if fsdp < 1 or seq < 1 or len(devices) % (fsdp * seq):
        raise ShardingError(
            f"train.fsdp is {fsdp} and train.seq {seq}; their product must divide the {len(devices)} devices"
        )
    grid = np.array(devices, dtype=object).reshape(len(devices) // (fsdp * seq), fsdp, seq)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


@dataclass(frozen=True)
class RowShare:
    """Which rows of a batch one process feeds, and which tokens of them.

    Attributes:
        index: of its portion of the rows.
        count: portions.
        part: of its part of each row's tokens.
        parts: parts a row is cut into over processes; 1 = it feeds whole rows.
    """

    index: int
    count: int
    part: int = 0
    parts: int = 1


def row_share(rank: int, size: int, devices: int, seq: int) -> RowShare:
    """The share of process `rank` of `size`, of `devices` devices each, on a mesh made by `make_mesh`.

    Raises:
        ShardingError: a group of `seq` devices begins or ends inside a process.
    """
    if devices % seq == 0:
        return RowShare(rank, size)
    if seq % devices or size * devices % seq:
        raise ShardingError(
            f"train.seq is {seq} and there are {size} processes of {devices} devices: one must be a multiple of the"
            " other, and seq must divide all devices"
        )
    parts = seq // devices
    return RowShare(rank // parts, size // parts, rank % parts, parts)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Axis 0 (rows) over the devices: what is known of every token of a row, a few integers, is whole beside it."""
    return NamedSharding(mesh, P(ROWS))


def states_sharding(mesh: Mesh) -> NamedSharding:
    """Of captured states [B, L, ...]: rows over devices, and the tokens of a row over `seq`."""
    return NamedSharding(mesh, P(ROWS) if mesh.shape["seq"] == 1 else P(ROWS, "seq"))


def batch_shardings(mesh: Mesh) -> DraftBatch:
    """The sharding of every array of a batch."""
    rows: Any = batch_sharding(mesh)
    states: Any = states_sharding(mesh)
    return DraftBatch(
        input_ids=rows,
        loss_mask=rows,
        positions=rows,
        document_start=rows,
        context_hidden=states,
        last_hidden=states,
    )


def head_sharding(mesh: Mesh, placement: Placement) -> NamedSharding:
    """Of the frozen embedding and head [V, D]."""
    return NamedSharding(mesh, P("fsdp") if placement.split_head else P())


def per_device(mesh: Mesh) -> NamedSharding:
    """Axis 0 has one entry for every device."""
    return NamedSharding(mesh, P(AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device."""
    return NamedSharding(mesh, P())


def path_of(path: tuple[Any, ...]) -> str:
    """A key path as text: `opt_state/1/mu/layers/0/mlp/up_proj/kernel`."""
    return "/".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)


def splits(path: str) -> bool:
    """Whether the rule for a leaf splits it at all, where its size allows it; `layout_of` says how.

    Raises:
        ShardingError: no rule for that path.
    """
    return any(SPLIT in spec for spec in _rule(path))


def _rule(path: str) -> tuple[P, ...]:
    rule = next((specs for pattern, specs in RULES if re.search(rf"(^|/)({pattern})$", path)), None)
    if rule is None:
        raise ShardingError(f"no rule says where parameter {path} lives; add one to RULES in train/sharding.py")
    return rule


def layout_of(path: str, shape: tuple[int, ...], axes: tuple[str, ...], mesh: Mesh) -> P:
    """The layout of one leaf: the first of its rule's that the number of devices divides, else whole.

    Args:
        path: from `path_of`; its end decides.
        shape: of the leaf.
        axes: mesh axes that stand for `SPLIT`; none: whole.
        mesh: their sizes.

    Raises:
        ShardingError: no rule for that path.
    """
    rule = _rule(path)
    parts = int(np.prod([mesh.shape[axis] for axis in axes]))
    if parts == 1:
        return P()
    for spec in rule:
        split = spec.index(SPLIT) if SPLIT in spec else None
        if split is not None and split < len(shape) and shape[split] % parts == 0:
            names = axes if len(axes) > 1 else axes[0]
            return P(*(names if name == SPLIT else None for name in spec))
    return P()


@dataclass(frozen=True)
class Placed:
    """Where one parameter lives, with its moments and the sum of its gradients.

    Attributes:
        mesh: the devices.
        param: layout of the parameter.
        moment: layout of its moments, and of its update.
        total: layout of the sum of its gradients, without the axis of partial sums.
    """

    mesh: Mesh
    param: P
    moment: P
    total: P

    @property
    def param_sharding(self) -> NamedSharding:
        """Of the parameter."""
        return NamedSharding(self.mesh, self.param)

    @property
    def moment_sharding(self) -> NamedSharding:
        """Of its moments."""
        return NamedSharding(self.mesh, self.moment)

    @property
    def _holders(self) -> tuple[str, ...]:
        """Mesh axes along which devices hold sums of different rows."""
        _, split = split_of(self.total)
        return tuple(axis for axis in AXES if axis not in split)

    @property
    def partial_spec(self) -> P:
        """Layout of `partial_shape`."""
        return P(self._holders, *self.total)

    def partial_shape(self, leaf: Any) -> jax.ShapeDtypeStruct:
        """Where the sum of the gradients grows: fp32, a leading axis of one partial sum per holder of the leaf.

        A sum that is whole everywhere has one partial sum per device. One that is split over `fsdp` has one per group:
        its devices hold different parts, so they share their gradients at once.
        """
        holders = int(np.prod([self.mesh.shape[axis] for axis in self._holders]))
        sharding = NamedSharding(self.mesh, self.partial_spec)
        return jax.ShapeDtypeStruct((holders, *leaf.shape), jnp.float32, sharding=sharding)

    def gather(self, leaf: jax.Array) -> jax.Array:
        """Inside `shard_map`: the whole of a parameter of which this device holds a part."""
        dimension, axes = split_of(self.param)
        return jax.lax.all_gather(leaf, axes, axis=dimension, tiled=True) if axes else leaf

    def add(self, total: jax.Array, gradient: jax.Array) -> jax.Array:
        """Inside `shard_map`: add this device's gradient of the whole leaf to the partial sum it holds.

        Args:
            total: [1, ...] this device's part of `partial_shape`.
            gradient: of the whole leaf, from this device's rows.
        """
        dimension, axes = split_of(self.total)
        if axes:
            gradient = jax.lax.psum_scatter(gradient, axes, scatter_dimension=dimension, tiled=True)
        return total + gradient.astype(jnp.float32)[None]

    def reduce(self, partial: jax.Array) -> jax.Array:
        """Inside `shard_map`: the sum over all devices, as far as this device holds the moments of the leaf.

        Args:
            partial: [1, ...] this device's part of `partial_shape`.
        """
        total = partial[0]
        _, done = split_of(self.total)
        dimension, axes = split_of(self.moment)
        if axes and not done:
            total = jax.lax.psum_scatter(total, axes, scatter_dimension=dimension, tiled=True)
            done = axes
        rest = tuple(axis for axis in AXES if axis not in done and self.mesh.shape[axis] > 1)
        return jax.lax.psum(total, rest) if rest else total


def reduce_partials(partials: Any, placed: Any) -> Any:
    """The sums over all devices of a tree of `Placed.partial_shape` arrays, each laid out as its moments. Traceable."""
    mesh = jax.tree.leaves(placed)[0].mesh
    if mesh.size == 1:
        return jax.tree.map(lambda partial: partial[0], partials)
    return jax.shard_map(
        lambda tree: jax.tree.map(lambda partial, at: at.reduce(partial), tree, placed),
        mesh=mesh,
        in_specs=(jax.tree.map(lambda at: at.partial_spec, placed),),
        out_specs=jax.tree.map(lambda at: at.moment, placed),
        check_vma=False,
    )(partials)


def split_of(spec: P) -> tuple[int, tuple[str, ...]]:
    """Which dimension of a leaf is split, and over which mesh axes; (0, ()) if it is whole."""
    for dimension, names in enumerate(spec):
        if names is not None:
            return dimension, (names,) if isinstance(names, str) else tuple(names)
    return 0, ()


def place(params: Any, mesh: Mesh, placement: Placement | None = None) -> Any:
    """A tree of `Placed` for a tree of parameters (arrays or shapes).

    Raises:
        ShardingError: a parameter without a rule, or a mode that does not fit the mesh.
    """
    placement = placement or Placement()
    mode = placement.mode_on(mesh)
    param_axes = ("fsdp",) if mode == "fully_sharded" else ()
    moment_axes = AXES if mode == "sharded_moments" else param_axes
    total_axes = param_axes if placement.split_accumulator else ()

    def leaf(path: tuple[Any, ...], value: Any) -> Placed:
        name = path_of(path)
        param, moment, total = (
            layout_of(name, value.shape, axes, mesh) for axes in (param_axes, moment_axes, total_axes)
        )
        return Placed(mesh, param, moment, total)

    return jax.tree_util.tree_map_with_path(leaf, params)


def state_shardings(state: Any, mesh: Mesh, placement: Placement | None = None) -> Any:
    """Sharding of each leaf of a `TrainState` (arrays or shapes): parameters and moments by the same rules.

    Raises:
        ShardingError: see `place`.
    """
    mode = (placement or Placement()).mode_on(mesh)

    def leaf(path: tuple[Any, ...], value: Any) -> NamedSharding:
        name = path_of(path)
        axes: tuple[str, ...] = ("fsdp",) if mode == "fully_sharded" else ()
        if mode == "sharded_moments" and name.startswith("opt_state"):
            axes = AXES
        return NamedSharding(mesh, layout_of(name, value.shape, axes, mesh))

    return jax.tree_util.tree_map_with_path(leaf, state)


def with_shardings(abstract: Any, shardings: Any) -> Any:
    """Attach shardings to a tree of shapes; `shardings` is a tree of the same structure or one for all leaves."""
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, abstract)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, shardings
    )
