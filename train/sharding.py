"""The device mesh and where each tree lives on it: rows over all devices, state replicated or split over `fsdp`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

#: Mesh axes, outermost first. The batch axis is spread over both.
AXES = ("data", "fsdp")

#: Leaves with fewer elements stay whole: splitting them saves nothing and costs a collective each.
MIN_ELEMENTS_TO_SPLIT = 2**16


def make_mesh(devices: Sequence[jax.Device], fsdp: int = 1) -> Mesh:
    """A (data, fsdp) mesh over `devices` in the given order.

    The order is kept (jax.make_mesh may permute it): device i then holds the i-th portion of the rows, which is what
    the staging of captured states relies on. Axes are Auto: `jax.jit` propagates shardings by itself.

    Raises:
        ValueError: fsdp does not divide the number of devices.
    """
    if fsdp < 1 or len(devices) % fsdp:
        raise ValueError(f"fsdp is {fsdp}; it must divide the {len(devices)} devices of the mesh")
    grid = np.array(devices, dtype=object).reshape(len(devices) // fsdp, fsdp)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 2)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Axis 0 (rows) over every device."""
    return NamedSharding(mesh, P(AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """A whole copy on every device."""
    return NamedSharding(mesh, P())


def state_shardings(tree: Any, mesh: Mesh) -> Any:
    """Sharding of each leaf of a state tree: the largest axis that `fsdp` divides is split, the rest replicated.

    The rule looks at shapes only, so parameters, moments and the gradient accumulator, which have the same shapes,
    land on the same devices.
    """
    parts = mesh.shape["fsdp"]

    def leaf_sharding(leaf: Any) -> NamedSharding:
        axes = [axis for axis, size in enumerate(leaf.shape) if size % parts == 0]
        if parts == 1 or not axes or int(np.prod(leaf.shape)) < MIN_ELEMENTS_TO_SPLIT:
            return replicated(mesh)
        largest = max(axes, key=lambda axis: leaf.shape[axis])
        return NamedSharding(mesh, P(*("fsdp" if axis == largest else None for axis in range(len(leaf.shape)))))

    return jax.tree.map(leaf_sharding, tree)


def with_shardings(abstract: Any, shardings: Any) -> Any:
    """Attach shardings to a tree of shapes; `shardings` is a tree of the same structure or one for all leaves."""
    if isinstance(shardings, NamedSharding):
        shardings = jax.tree.map(lambda _: shardings, abstract)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, shardings
    )


def partial_shape(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    """Where the sum of a leaf's gradients grows: fp32, a leading axis of one partial sum per holder of the leaf.

    A leaf that is whole everywhere has one partial sum per device. One that is split over `fsdp` has one per `data`
    index, split in the same way: the devices of an `fsdp` group hold different parts, so they have to share their
    gradients at once.

    Args:
        leaf: array or shape of a parameter.
        sharding: its own.
    """
    mesh, split = sharding.mesh, split_axis(sharding)
    holders, spec = (mesh.size, P(AXES)) if split is None else (mesh.shape["data"], P("data", *sharding.spec))
    return jax.ShapeDtypeStruct((holders, *leaf.shape), jnp.float32, sharding=NamedSharding(mesh, spec))


def split_axis(sharding: NamedSharding) -> int | None:
    """Axis of a leaf that is split over `fsdp`; None if it is whole on every device."""
    return next((axis for axis, names in enumerate(sharding.spec) if names == "fsdp"), None)


def gather_leaf(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Inside `shard_map`: the whole of a leaf of which this device holds a part."""
    axis = split_axis(sharding)
    return leaf if axis is None else jax.lax.all_gather(leaf, "fsdp", axis=axis, tiled=True)


def add_partial(total: jax.Array, gradient: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Inside `shard_map`: add this device's gradient of a whole leaf to the partial sum it holds.

    Args:
        total: [1, ...] this device's part of `partial_shape`.
        gradient: of the whole leaf, from this device's rows.
        sharding: the leaf's own.
    """
    axis = split_axis(sharding)
    if axis is not None:
        gradient = jax.lax.psum_scatter(gradient, "fsdp", scatter_dimension=axis, tiled=True)
    return total + gradient.astype(jnp.float32)[None]
