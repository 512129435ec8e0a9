"""Case T25: what crosses from torch to JAX, how, and what is refused. (The lease is in test_fence.)"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from target_bridge.handoff import HandoffError, frozen_to_jax, to_batch, to_global, to_jax, to_torch
from target_bridge.hf import HFTarget, load_hf_target
from target_bridge.staging import StagingRing, aligned_zeros
from target_bridge.target import TargetError

ROOT = Path(__file__).resolve().parents[2]


def one_device(*names: str) -> NamedSharding:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    return NamedSharding(mesh, PartitionSpec(*names))


def bits(array: jax.Array | torch.Tensor) -> list[int]:
    if isinstance(array, torch.Tensor):
        return array.view(torch.int16).tolist()
    return np.asarray(array).view(np.int16).tolist()


# --- T25 a) to c)


def test_t25a_bfloat16_bits_both_ways():
    tensor = torch.tensor([1, -0.0, 3.140625, 1e-3, 65504, float("inf")], dtype=torch.bfloat16)
    array = to_jax(tensor)
    assert array.dtype == jnp.bfloat16
    assert bits(array) == bits(tensor)
    back = to_torch(array)
    assert back.dtype == torch.bfloat16
    assert bits(back) == bits(tensor)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :2],
        lambda x: x[:, ::2],
        lambda x: x[:, :1].expand(2, 3),
        lambda x: x.t(),
        lambda x: x[1:],
    ],
    ids=["columns", "strided", "expanded", "transposed", "unaligned row"],
)
def test_t25b_views_have_torchs_values(view):
    tensor = view(torch.arange(6, dtype=torch.float32).reshape(2, 3))
    array = to_jax(tensor)
    assert array.shape == tuple(tensor.shape)
    assert np.array_equal(np.asarray(array), tensor.numpy())
    assert array.format.layout.major_to_minor == (0, 1)  # another layout would be another compiled program
    with pytest.raises(HandoffError, match="cannot be viewed without a copy"):
        to_jax(tensor, zero_copy=True)


def test_raw_handover_refuses_these_views():
    """The control of the test above: DLPack alone does not take them."""
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    for view in (tensor[:, :2], tensor[:, ::2], tensor[:, :1].expand(2, 3)):
        with pytest.raises(Exception, match=r"compact.? striding"):
            jax.dlpack.from_dlpack(view, copy=False)


def test_dimensions_of_size_one_do_not_change_the_layout():
    program = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((3, 1, 16), jnp.float32)).compile()
    for tensor in (
        torch.zeros(3, 1, 16),
        torch.zeros(3, 16, 1).transpose(1, 2),
        torch.zeros(1, 3, 16).transpose(0, 1),
    ):
        assert program(to_jax(tensor)).shape == (3, 1, 16)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([[True, False], [False, True]]),
        torch.zeros(0, 4),
        torch.zeros(0, 4, dtype=torch.bfloat16),
        torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
        torch.tensor([1.5, -2.0]).to(torch.float8_e5m2),
        torch.tensor([1.5, 2.0], requires_grad=True),
        torch.tensor([1.5, 2.0], requires_grad=True) * 2,
        torch.tensor(3.0),
        torch.tensor([1, 2], dtype=torch.uint8),
        torch.tensor([1.5], dtype=torch.float16),
    ],
    ids=lambda tensor: f"{str(tensor.dtype)[6:]}{list(tensor.shape)}{'grad' * tensor.requires_grad}",
)
def test_t25c_kinds_that_cross(tensor):
    array = to_jax(tensor)
    assert array.shape == tuple(tensor.shape)
    assert str(array.dtype) == str(tensor.dtype).removeprefix("torch.")
    assert np.array_equal(np.asarray(array.astype(jnp.float32)), tensor.detach().float().numpy())
    assert torch.equal(to_torch(array).float(), tensor.detach().float())


def test_inference_tensors_cross():
    with torch.inference_mode():
        tensor = torch.ones(4, 16)[:, 3:7] * 2
    assert np.asarray(to_jax(tensor)).sum() == 32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.zeros(2, dtype=torch.float64), r"a float64\[2\] tensor cannot cross: .* narrow"),
        (lambda: torch.zeros(2, dtype=torch.complex64), "complex"),
        (lambda: torch.zeros(2, 2).to_sparse(), "only dense tensors"),
        (lambda: torch.zeros(2, device="meta"), "is on meta"),
        (lambda: np.zeros(2), "expected a torch tensor, got ndarray"),
    ],
)
def test_t25c_kinds_that_do_not(make, message):
    with pytest.raises(HandoffError, match=message):
        to_jax(make())


def test_aligned_contiguous_memory_is_viewed_not_copied():
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        tensor = aligned_zeros((4, 8), dtype, "cpu")
        array = to_jax(tensor, zero_copy=True)
        assert array.unsafe_buffer_pointer() == tensor.data_ptr()
        tensor += 3
        assert np.asarray(array.astype(jnp.float32)).sum() == 96


# --- T25 d) and h): ids


def test_t25d_int64_ids():
    array = to_jax(torch.tensor([[5, 49151], [-1, 2**31 - 1]]))
    assert array.dtype == jnp.int32
    assert array.tolist() == [[5, 49151], [-1, 2**31 - 1]]
    for value in (2**40 + 5, 2**31, -(2**31) - 1):
        with pytest.raises(HandoffError, match=rf"holds {value} at \[1, 0\], which int32 cannot"):
            to_jax(torch.tensor([[1, 2], [value, 3]]))


def test_t25h_ids_beyond_the_vocabulary_are_refused_on_the_host(make_marker):
    target = HFTarget(make_marker(4), [0], name="marker")
    with pytest.raises(TargetError, match="document 0 holds id 8"):
        target.capture([np.array([8])])
    with (
        StagingRing(1, 2, 3, 4, 2).lease() as slot,
        pytest.raises(HandoffError, match=r"input_ids\[1, 2\] = 8 is outside the vocabulary 0..7"),
    ):
        to_batch(slot, host_rows(input_ids=[[0, 1, 2], [3, 4, 8]]), one_device("data"), vocab_size=8)


# --- T25 e), f): lifetime


def test_t25e_values_survive_the_tensor():
    rng = np.random.default_rng(0)
    expected = [rng.standard_normal(1000).astype(np.float32) for _ in range(20)]
    arrays = []
    for values in expected:
        tensor = aligned_zeros((1000,), torch.float32, "cpu").copy_(torch.from_numpy(values))
        arrays.append(to_jax(tensor))
        del tensor
    gc.collect()
    churn = [torch.full((1000,), float("nan")) for _ in range(200)]
    for array, values in zip(arrays, expected):
        assert np.array_equal(np.asarray(array), values)
    assert len(churn) == 200


def test_t25f_torch_writes_do_not_reach_jax():
    array = jnp.arange(32.0)
    tensor = to_torch(array)
    tensor.fill_(-1)
    assert array.tolist() == list(range(32))


# --- batches


def host_rows(rows: int = 2, length: int = 3, **changes: object) -> SimpleNamespace:
    zero = np.zeros((rows, length), np.int32)
    values = {"input_ids": zero, "loss_mask": zero, "positions": zero, "document_start": zero, **changes}
    return SimpleNamespace(**{name: np.asarray(value) for name, value in values.items()})


def test_to_batch_views_the_slot_and_fits_a_program_compiled_ahead():
    from draft_jax.batch import abstract_batch

    sharding = one_device("data")
    shape = abstract_batch(2, 3, hidden_size=2, num_taps=2, dtype=jnp.float32)
    program = (
        jax.jit(lambda batch: (batch.context_hidden.sum(-1), batch.input_ids + batch.loss_mask))
        .lower(jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shape))
        .compile()
    )
    ring = StagingRing(1, 2, 3, context_width=4, hidden=2)
    for value in (1.0, 2.0, 3.0):
        with ring.lease() as slot:
            slot.fill(0, 0, torch.full((2, 4), value), torch.ones(2, 2))
            rows = host_rows(input_ids=np.array([[7, 7, 0], [0, 0, 0]]), loss_mask=np.eye(2, 3, dtype=np.int8))
            batch = to_batch(slot, rows, sharding, vocab_size=8)
            rows.input_ids[:] = 99  # the iterator may reuse its memory
            sums, ids = program(batch)
            slot.fence((sums, ids))
        assert sums.tolist() == [[4 * value, 4 * value, 0], [0, 0, 0]]
        assert ids.tolist() == [[8, 7, 0], [0, 1, 0]]
        assert batch.context_hidden.is_deleted()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"positions": np.zeros((2, 4), int)},
            r"positions has shape \(2, 4\), the staging slot holds rows of \(2, 3\)",
        ),
        ({"loss_mask": np.zeros((2, 3))}, "loss_mask has dtype float64"),
        ({"input_ids": np.full((2, 3), 2**40)}, "input_ids holds values from .* which int32 cannot"),
        ({"input_ids": np.full((2, 3), -1)}, r"input_ids\[0, 0\] = -1"),
    ],
)
def test_to_batch_refuses_rows_that_do_not_fit(changes, message):
    with StagingRing(1, 2, 3, 4, 2).lease() as slot, pytest.raises(HandoffError, match=message):
        to_batch(slot, host_rows(**changes), one_device("data"), vocab_size=8)


def test_to_global_on_one_device_is_zero_copy():
    tensor = aligned_zeros((2, 16), torch.float32, "cpu")
    array = to_global([tensor], one_device("data"), zero_copy=True)
    assert array.sharding == one_device("data")
    assert array.addressable_shards[0].data.unsafe_buffer_pointer() == tensor.data_ptr()
    with pytest.raises(HandoffError, match="2 pieces for 1 local devices"):
        to_global([tensor, tensor], one_device("data"))


# --- the frozen head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_frozen_head_is_the_targets_own_memory(dtype):
    embedding = torch.nn.Parameter(aligned_zeros((8, 16), dtype, "cpu").normal_())
    head = torch.nn.Parameter(aligned_zeros((8, 16), dtype, "cpu").normal_())
    frozen = frozen_to_jax(embedding, head)
    assert frozen.embedding.unsafe_buffer_pointer() == embedding.data_ptr()
    assert frozen.lm_head.unsafe_buffer_pointer() == head.data_ptr()
    assert bits(frozen.lm_head) == bits(head.detach()) or dtype == torch.float32
    tied = frozen_to_jax(embedding, embedding)
    assert tied.lm_head is tied.embedding
    assert frozen_to_jax(embedding, embedding.detach()).lm_head is not None
    placed = frozen_to_jax(embedding, embedding.detach(), one_device())
    assert placed.lm_head is placed.embedding
    assert placed.embedding.sharding == one_device()
    shard = placed.embedding.addressable_shards[0].data
    assert shard.unsafe_buffer_pointer() == embedding.data_ptr()


def test_an_unaligned_frozen_head_is_copied_once_with_equal_bits():
    memory = torch.randn(8 * 16 + 1)
    embedding = memory[1:].view(8, 16)
    assert embedding.data_ptr() % 64
    frozen = frozen_to_jax(embedding, embedding)
    assert np.array_equal(np.asarray(frozen.embedding), embedding.numpy())
    assert frozen.lm_head is frozen.embedding


def test_the_frozen_head_outlives_its_target(llama_folder):
    target = load_hf_target(str(llama_folder), [1])
    ids = [np.arange(20)]
    last = target.capture(ids).last_hidden[0].numpy().copy()
    with torch.no_grad():
        logits = target._model(torch.arange(20)[None]).logits[0].numpy().copy()
    frozen = frozen_to_jax(*target.frozen_head())
    assert frozen.lm_head is frozen.embedding
    del target
    gc.collect()
    assert np.allclose(np.asarray(frozen.lm_head) @ last.T, logits.T, atol=1e-4)


def test_the_frozen_head_must_fit_together_and_be_replicated():
    with pytest.raises(HandoffError, match="one D"):
        frozen_to_jax(torch.zeros(4, 8), torch.zeros(4, 6))
    with pytest.raises(HandoffError, match="one D"):
        frozen_to_jax(torch.zeros(4), torch.zeros(4))


# --- T25 i): several devices, in a process of their own


def test_t25i_eight_devices():
    program = Path(__file__).with_name("eight_devices.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith("all checks passed")
