"""torch -> DLPack -> `jax.Array` -> global array, and back. The one module where tensors become arrays.

What DLPack alone would get wrong, silently or with an unhelpful message (reference: jax_conventions 2.5), is
settled here before it is asked: views that are not compact, memory that is not aligned, 64-bit types that
JAX would narrow, tensors that require gradients. `copy=True` of `jax.dlpack.from_dlpack` is never used: it
does not copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec

from draft_jax.batch import DraftBatch, FrozenHead
from target_bridge.staging import ALIGNMENT, aligned_zeros

if TYPE_CHECKING:
    from target_bridge.staging import Slot

_REFUSED = {
    torch.float64: "JAX would silently narrow it to float32; convert it yourself",
    torch.complex64: "the bridge carries states, ids and masks, never complex numbers",
    torch.complex128: "the bridge carries states, ids and masks, never complex numbers",
}
_INT32 = torch.iinfo(torch.int32)


class HandoffError(ValueError):
    """A tensor that cannot cross as it is. The message says why and what to do."""


class HostRows(Protocol):
    """The integers of a batch on the host, int [B, L] each; rows of this process only."""

    @property
    def input_ids(self) -> np.ndarray: ...

    @property
    def loss_mask(self) -> np.ndarray: ...

    @property
    def positions(self) -> np.ndarray: ...

    @property
    def document_start(self) -> np.ndarray: ...


def to_jax(tensor: torch.Tensor, *, zero_copy: bool = False) -> jax.Array:
    """A torch tensor as a JAX array on the same device, without copying where memory allows it.

    A compact, aligned tensor is *viewed*: writing to it later changes the array, see `target_bridge.fence`.
    Anything else is copied first, and that copy belongs to JAX: strided, expanded and transposed views,
    memory on a CPU that is not 64-byte aligned, and int64 (made int32 after a range check). Gradients are
    detached.

    Args:
        tensor: Dense, on a CPU or CUDA device.
        zero_copy: Refuse instead of copying.

    Raises:
        HandoffError: not a dense tensor, float64 or complex, an int64 value that int32 cannot hold, a device
        JAX has
            not, or a copy that `zero_copy` forbids.
    """
    if not isinstance(tensor, torch.Tensor):
        raise HandoffError(f"expected a torch tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise HandoffError(f"{_say(tensor)} is {tensor.layout}; only dense tensors can cross")
    if tensor.dtype in _REFUSED:
        raise HandoffError(f"{_say(tensor)} cannot cross: {_REFUSED[tensor.dtype]}")
    if tensor.device.type not in ("cpu", "cuda"):
        raise HandoffError(f"{_say(tensor)} is on {tensor.device}; only cpu and cuda tensors can cross")
    original = tensor = tensor.detach()
    if tensor.dtype == torch.int64:
        tensor = _narrow(tensor)
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    # A dimension of size 1 may carry any stride, and JAX takes an odd one for another layout: a second
    # program.
    tensor = tensor.as_strided(tensor.shape, _row_major(tensor.shape), tensor.storage_offset())
    if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
        tensor = aligned_zeros(tuple(tensor.shape), tensor.dtype, "cpu").copy_(tensor)
    if zero_copy and tensor.data_ptr() != original.data_ptr():
        raise HandoffError(
            f"{_say(original)} with strides {original.stride()} at address {original.data_ptr():#x} cannot "
            f"be viewed without a copy: it must be contiguous, {ALIGNMENT}-byte aligned and not int64"
        )
    try:
        return jax.dlpack.from_dlpack(tensor, copy=False)
    except Exception as error:
        raise HandoffError(
            f"JAX ({jax.default_backend()}, {jax.local_device_count()} devices) cannot view {_say(tensor)} "
            f"on {tensor.device}: {error}. Both frameworks must see the same devices"
        ) from error


def to_torch(array: jax.Array) -> torch.Tensor:
    """A JAX array as a torch tensor that owns its memory: writing to it does not reach JAX.

    Args:
        array: On one device.
    """
    if len(array.devices()) != 1:
        raise HandoffError(
            f"a {array.dtype}{list(array.shape)} array on {len(array.devices())} devices has no torch "
            "counterpart; gather it first"
        )
    jax.block_until_ready(array)
    return torch.from_dlpack(array).clone()


def to_global(tensors: Sequence[torch.Tensor], sharding: NamedSharding, *, zero_copy: bool = False) -> jax.Array:
    """Join this process's pieces, one per local device, into one global array.

    Args:
        tensors: One per addressable device, in the order of the pieces in the global array (pieces that are
            equal by replication in the order of device ids). All of one shape and dtype, each ideally on its
            device already; on another (fake CPU devices) it is copied there.
        sharding: Of the result. The global shape follows from it and the shape of a piece.
        zero_copy: Refuse any copy.

    Raises:
        HandoffError: wrong number of pieces, or pieces that differ in shape or dtype.
    """
    local = sharding.addressable_devices
    if len(tensors) != len(local):
        raise HandoffError(f"{len(tensors)} pieces for {len(local)} local devices of {sharding}; give one per device")
    shapes = {(tuple(tensor.shape), tensor.dtype) for tensor in tensors}
    if len(shapes) != 1:
        raise HandoffError(f"pieces of one global array differ: {sorted(map(str, shapes))}")
    shape = _global_shape(tuple(tensors[0].shape), sharding)
    where = sharding.addressable_devices_indices_map(shape)

    def place(device: Any) -> tuple[list[int], int]:
        return [part.start or 0 for part in where[device] or ()], device.id

    order = sorted(local, key=place)
    pieces = []
    for tensor, device in zip(tensors, order):
        piece = to_jax(tensor, zero_copy=zero_copy)
        if piece.device != device:
            if zero_copy:
                raise HandoffError(f"{_say(tensor)} is on {piece.device}, its place is {device}: that needs a copy")
            piece = jax.device_put(piece, device)
        pieces.append(piece)
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def to_batch(slot: Slot, rows: HostRows, sharding: NamedSharding, *, vocab_size: int | None = None) -> DraftBatch:
    """Hand a filled staging slot and its integers to JAX as a global batch. Fence A happens in here.

    Args:
        slot: On lease and filled; afterwards it owes `slot.fence(outputs)`.
        rows: Host integers of the same rows, [B, L] each: of whole rows, also where the slot holds a part of their
            tokens.
        sharding: Of the states: rows over devices, tokens perhaps over more. What this process holds is split evenly
            over its local devices, in order. Integers lie where the rows do, whole.
        vocab_size: If given, ids outside it are refused.

    Returns:
        Arrays of [rows of all processes, L, ...]; its two hidden-state arrays view the slot and die with its lease.

    Raises:
        HandoffError: shapes that differ from the slot's, an id outside the vocabulary, rows that do not
        divide.
    """
    portions, parts, all_portions, all_parts = _grid(sharding)
    if slot.rows % portions:
        raise HandoffError(f"{slot.rows} rows do not divide over {portions} local devices")
    if slot.length % parts:
        raise HandoffError(f"rows of {slot.length} tokens do not divide over {parts} local devices")
    length = slot.length // parts * all_parts
    integers = {
        name: _host_integers(name, getattr(rows, name), (slot.rows, length))
        for name in ("input_ids", "loss_mask", "positions", "document_start")
    }
    ids = integers["input_ids"]
    if vocab_size is not None and ((ids < 0) | (ids >= vocab_size)).any():
        row, column = np.argwhere((ids < 0) | (ids >= vocab_size))[0]
        raise HandoffError(
            f"input_ids[{row}, {column}] = {ids[row, column]} is outside the vocabulary 0..{vocab_size - 1}"
        )
    each, tokens = slot.rows // portions, slot.length // parts
    whole = each * all_portions, length

    def views(context: torch.Tensor, last: torch.Tensor) -> tuple[jax.Array, jax.Array]:
        context_global, last_global = (
            to_global(
                [
                    states[i * each : (i + 1) * each, j * tokens : (j + 1) * tokens]
                    for i in range(portions)
                    for j in range(parts)
                ],
                sharding,
                zero_copy=portions * parts == 1,
            )
            for states in (context, last)
        )
        return context_global, last_global

    context_hidden, last_hidden = slot.hand_over(views)
    by_rows = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    return DraftBatch(
        **{name: jax.make_array_from_process_local_data(by_rows, array, whole) for name, array in integers.items()},
        context_hidden=context_hidden,
        last_hidden=last_hidden,
    )


def frozen_to_jax(embedding: torch.Tensor, lm_head: torch.Tensor, sharding: NamedSharding | None = None) -> FrozenHead:
    """The target's embedding and LM head as JAX arrays: its own memory on a GPU, not a second copy.

    On a CPU weights that were read from a file may lie unaligned; those are copied once. The weights are
    frozen, so a view and a copy cannot be told apart later. JAX keeps the memory alive, whatever becomes of
    the target.

    Args:
        embedding: [V, D].
        lm_head: [V, D]; the same tensor if the target ties them, which gives the same array.
        sharding: Replicated, or rows of the vocabulary over devices; without it the arrays are on the tensors' device.

    Raises:
        HandoffError: matrices that do not fit together, or rows that do not divide over the devices.
    """
    if embedding.ndim != 2 or lm_head.ndim != 2 or embedding.shape[1] != lm_head.shape[1]:
        raise HandoffError(
            f"embedding {tuple(embedding.shape)} and LM head {tuple(lm_head.shape)} must be [V, D] with one D"
        )
    tied = lm_head is embedding or (
        lm_head.data_ptr() == embedding.data_ptr()
        and lm_head.shape == embedding.shape
        and lm_head.stride() == embedding.stride()
    )
    embedding_array = _placed(embedding, sharding)
    return FrozenHead(
        embedding=embedding_array,
        lm_head=embedding_array if tied else _placed(lm_head, sharding),
    )


def _placed(matrix: torch.Tensor, sharding: NamedSharding | None) -> jax.Array:
    if sharding is None:
        return to_jax(matrix)
    shape = tuple(matrix.shape)
    try:
        where = sharding.addressable_devices_indices_map(shape)
    except ValueError as error:
        raise HandoffError(
            f"a frozen matrix of {list(shape)} cannot be split as {sharding.spec}: its {shape[0]} rows must divide over"
            f" the devices ({str(error).splitlines()[0]}); leave train.split_head out"
        ) from error
    views: dict[int, jax.Array] = {}
    pieces = []
    for device, index in where.items():
        rows = index[0] if index else slice(None)
        piece = views.setdefault(rows.start or 0, to_jax(matrix[rows]))
        pieces.append(piece if piece.device == device else jax.device_put(piece, device))
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces)


def _grid(sharding: NamedSharding) -> tuple[int, int, int, int]:
    """Into how many portions of rows and parts of tokens a batch is cut: on this process's devices, and on all."""
    shape = _global_shape((1, 1), sharding)
    where = sharding.addressable_devices_indices_map(shape)
    local = [{index[axis].start or 0 for index in where.values() if index is not None} for axis in (0, 1)]
    return len(local[0]), len(local[1]), shape[0], shape[1]


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    outside = (tensor < _INT32.min) | (tensor > _INT32.max)
    if bool(outside.any()):
        position = [int(i) for i in outside.nonzero()[0]]
        raise HandoffError(
            f"{_say(tensor)} holds {int(tensor[tuple(position)])} at {position}, which int32 cannot; JAX would cut it"
        )
    return tensor.to(torch.int32)


def _host_integers(name: str, array: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    array = np.asarray(array)
    if array.shape != shape:
        raise HandoffError(f"{name} has shape {array.shape}, the staging slot holds rows of {shape}")
    if array.dtype.kind not in "iub":
        raise HandoffError(f"{name} has dtype {array.dtype}, expected integers")
    if array.size and (array.min() < _INT32.min or array.max() > _INT32.max):
        raise HandoffError(f"{name} holds values from {array.min()} to {array.max()}, which int32 cannot")
    return np.array(array, dtype=np.int32, order="C")  # own memory: JAX on a CPU may view it


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))


def _global_shape(piece: tuple[int, ...], sharding: NamedSharding) -> tuple[int, ...]:
    shape = list(piece)
    for axis, names in enumerate(sharding.spec):
        for name in (names,) if isinstance(names, str) else names or ():
            shape[axis] *= sharding.mesh.shape[name]
    return tuple(shape)


def _say(tensor: Any) -> str:
    return f"a {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} tensor"
