"""The optimizer step of one leaf: update, moments, the norms that are logged, and what the next window needs.

`plain_update` leaves it to XLA, which stores the update and reads it again for its norm. `fused_update` is one kernel
for NVIDIA GPUs that reads parameter, moments and gradient once and writes parameter, moments, the rounded copy and the
emptied sum. Both take the arithmetic from the same `Optimizer`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from .optimizer import Optimizer

#: Numbers one program of the kernel works on, and its warps (H200, benchmarks/NOTES.md).
BLOCK, WARPS = 2048, 4
#: Leaves with fewer numbers are not worth a kernel of their own.
MIN_ELEMENTS = 2**16


class Step(NamedTuple):
    """What all leaves of a step share; scalars.

    Attributes:
        scale: factor on the window's sum of gradients: its divisor and the clip, float32.
        rate: learning rate, float32.
        usable: whether to update at all; if not, parameters and moments stay bit for bit.
        taken: updates made before this one, int32.
    """

    scale: jax.Array
    rate: jax.Array
    usable: jax.Array
    taken: jax.Array


@dataclass(frozen=True)
class Updated:
    """A leaf after the step.

    Attributes:
        param: float32, as both moments.
        mu: first moment.
        nu: second moment.
        update_square: sum of squares of what was added to the parameter, float32 scalar.
        param_square: sum of squares of the new parameter, float32 scalar.
        rounded: the new parameter in the compute dtype; None from `plain_update` or if not asked for.
        emptied: zeros in the memory of the gradient; None from `plain_update` or if not asked for.
    """

    param: jax.Array
    mu: jax.Array
    nu: jax.Array
    update_square: jax.Array
    param_square: jax.Array
    rounded: jax.Array | None = None
    emptied: jax.Array | None = None


def _update(
    optimizer: Optimizer, decays: bool, step: Step, param: jax.Array, mu: jax.Array, nu: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """New parameter and moments, and the update; of whole leaves or parts of them."""
    direction, new_mu, new_nu = optimizer.direction(gradient * step.scale, step.taken, param, mu, nu, decays)
    update = jnp.where(step.usable, -step.rate * direction, 0.0)
    # Adding an update of 0 would turn -0 into 0.
    new = (jnp.where(step.usable, a, b) for a, b in ((param + update, param), (new_mu, mu), (new_nu, nu)))
    return (*new, update)  # type: ignore[return-value]


def plain_update(
    optimizer: Optimizer, step: Step, param: jax.Array, mu: jax.Array, nu: jax.Array, gradient: jax.Array
) -> Updated:
    """The step of a leaf as XLA compiles it; any device, sharding and size.

    Args:
        optimizer: its arithmetic.
        step: see there.
        param: float32, as the other arrays, all of one shape.
        mu: first moment.
        nu: second moment.
        gradient: summed over the window.
    """
    param, mu, nu, update = _update(optimizer, param.ndim >= 2, step, param, mu, nu, gradient)
    return Updated(param, mu, nu, jnp.sum(jnp.square(update)), jnp.sum(jnp.square(param)))


def can_fuse(leaf: Any, sharding: NamedSharding) -> bool:
    """Whether `fused_update` can take a leaf: on NVIDIA GPUs, large, and whole blocks on each device."""
    device = next(iter(sharding.mesh.devices.flat))
    size = math.prod(sharding.shard_shape(leaf.shape))
    nvidia = device.platform == "gpu" and device.device_kind.startswith("NVIDIA")
    return nvidia and size >= MIN_ELEMENTS and size % BLOCK == 0


def fused_update(
    optimizer: Optimizer,
    step: Step,
    param: jax.Array,
    mu: jax.Array,
    nu: jax.Array,
    gradient: jax.Array,
    *,
    sharding: NamedSharding,
    rounded: DTypeLike | None = None,
    empty: bool = False,
    interpret: bool = False,
) -> Updated:
    """The step of a leaf in one kernel.

    Args:
        optimizer: see `plain_update`, like the arguments not listed here.
        step: see there.
        param: see there.
        mu: see there.
        nu: see there.
        gradient: see there.
        sharding: of the leaf and its moments; each device updates the part it holds.
        rounded: dtype of a copy of the new parameter; None: no copy.
        empty: whether to write zeros where the gradient was.
        interpret: run with Pallas' interpreter, on any device.
    """
    split = [(names,) if isinstance(names, str) else names for names in sharding.spec if names is not None]
    squares = P(sum(split, ())) if split else P()  # one number per part of the leaf
    specs = [sharding.spec] * 3 + [squares] * 2 + [sharding.spec] * ((rounded is not None) + empty)
    run = functools.partial(_run, optimizer, param.ndim >= 2, rounded, empty, interpret)
    floats = jnp.stack([step.scale, step.rate, step.usable.astype(jnp.float32)])
    new = jax.shard_map(
        run,
        mesh=sharding.mesh,
        in_specs=(P(), P(), *(sharding.spec,) * 4),
        out_specs=tuple(specs),
        check_vma=False,  # a kernel does not say what varies over devices
    )(floats, step.taken[None], param, mu, nu, gradient)
    param, mu, nu, update_square, param_square, *rest = new
    return Updated(
        param,
        mu,
        nu,
        update_square.sum(),
        param_square.sum(),
        rounded=rest[0] if rounded is not None else None,
        emptied=rest[-1] if empty else None,
    )


def _run(
    optimizer: Optimizer, decays: bool, rounded: DTypeLike | None, empty: bool, interpret: bool, floats: jax.Array,
    count: jax.Array, *leaves: jax.Array,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """The kernel on one device's part of a leaf; sums of squares come back as [1]."""
    shape, size = leaves[0].shape, leaves[0].size
    programs = size // BLOCK
    block = pl.BlockSpec((BLOCK,), lambda i: (i,))
    one = pl.BlockSpec((None,), lambda i: (i,))
    whole = pl.BlockSpec(memory_space=pl.ANY)
    numbers = jax.ShapeDtypeStruct((size,), jnp.float32)
    sums = jax.ShapeDtypeStruct((programs,), jnp.float32)
    outputs = [(numbers, block)] * 3 + [(sums, one)] * 2
    aliases = {2: 0, 3: 1, 4: 2}  # parameter and moments are written where they were
    if rounded is not None:
        outputs.append((jax.ShapeDtypeStruct((size,), rounded), block))
    if empty:
        aliases[5] = len(outputs)
        outputs.append((numbers, block))
    new = pl.pallas_call(
        functools.partial(_kernel, optimizer, decays),
        grid=(programs,),
        in_specs=[whole, whole, *[block] * 4],
        out_specs=[spec for _, spec in outputs],
        out_shape=[form for form, _ in outputs],
        input_output_aliases=aliases,
        interpret=interpret,
        compiler_params=None if interpret else plgpu.CompilerParams(num_warps=WARPS),
        name="fused_update",
    )(floats, count, *(leaf.reshape(size) for leaf in leaves))
    return tuple(x.sum()[None] if x.size == programs else x.reshape(shape) for x in new)


def _kernel(optimizer: Optimizer, decays: bool, floats_ref: Any, count_ref: Any, *refs: Any) -> None:
    param_ref, mu_ref, nu_ref, gradient_ref, *outputs = refs
    step = Step(floats_ref[0], floats_ref[1], floats_ref[2] != 0, count_ref[0])
    param, mu, nu, update = _update(
        optimizer, decays, step, param_ref[...], mu_ref[...], nu_ref[...], gradient_ref[...]
    )
    squares = jnp.sum(jnp.square(update)), jnp.sum(jnp.square(param))
    for ref, value in zip(outputs[:5], (param, mu, nu, *squares), strict=True):
        ref[...] = value
    # The rounded copy and the zeros, each if asked for: a copy in float32 there is none.
    for ref in outputs[5:]:
        ref[...] = jnp.zeros_like(param) if ref.dtype == jnp.float32 else param.astype(ref.dtype)
