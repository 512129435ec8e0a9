"""The bridge where it matters: both frameworks on one GPU. Run with `DRAFT_JAX_TEST_GPU=1 pytest`."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from target_bridge.fence import torch_done
from target_bridge.handoff import frozen_to_jax, to_batch, to_jax, to_torch
from target_bridge.hf import load_hf_target
from target_bridge.staging import StagingRing

pytestmark = pytest.mark.gpu

TAPS = [0, 2]


@pytest.fixture(autouse=True, scope="module")
def _both_frameworks_see_the_gpu():
    # Not a skip: whoever asks for the GPU tests must not be told "passed" on a machine that ran none.
    assert torch.cuda.is_available()
    assert jax.default_backend() == "gpu"


def on_the_gpu(*names: str) -> NamedSharding:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    return NamedSharding(mesh, PartitionSpec(*names))


def pointer(array: jax.Array) -> int:
    return array.addressable_shards[0].data.unsafe_buffer_pointer()


def test_a_tensor_is_viewed_not_copied():
    tensor = torch.arange(64, device="cuda", dtype=torch.float32).bfloat16().reshape(4, 16)
    torch_done("cuda")
    array = to_jax(tensor, zero_copy=True)
    assert pointer(array) == tensor.data_ptr()
    assert np.array_equal(np.asarray(array.astype(jnp.float32)), tensor.float().cpu().numpy())
    back = to_torch(array)
    assert back.device == tensor.device
    assert back.data_ptr() != tensor.data_ptr()
    assert torch.equal(back, tensor)


def test_a_batch_views_its_staging_slot():
    ring = StagingRing(2, 2, 8, context_width=16, hidden=8, dtype=torch.bfloat16, device="cuda")
    zero = np.zeros((2, 8), np.int32)
    rows = SimpleNamespace(input_ids=zero, loss_mask=zero, positions=zero, document_start=zero)
    seen = set()
    for value in (1.0, 2.0, 3.0, 4.0):
        with ring.lease() as slot:
            slot.fill(1, 2, torch.full((5, 16), value).bfloat16(), torch.full((5, 8), -value).bfloat16())
            batch = to_batch(slot, rows, on_the_gpu("data"), vocab_size=4)
            assert pointer(batch.context_hidden) == slot._context.data_ptr()
            assert pointer(batch.last_hidden) == slot._last.data_ptr()
            seen.add(pointer(batch.context_hidden))
            sums = jax.jit(lambda batch: (batch.context_hidden.sum(), batch.last_hidden.sum()))(batch)
            slot.fence(sums)
        assert [float(x) for x in sums] == [5 * 16 * value, -5 * 8 * value]
    assert len(seen) == 2  # the ring's two slots, again and again: no allocation per step


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_frozen_head_is_the_targets_own_memory(llama_folder, qwen3_folder, dtype):
    tied = load_hf_target(str(llama_folder), TAPS, dtype=dtype, device="cuda")
    frozen = frozen_to_jax(*tied.frozen_head(), on_the_gpu())
    assert frozen.lm_head is frozen.embedding
    assert pointer(frozen.embedding) == tied.frozen_head()[0].data_ptr()
    separate = load_hf_target(str(qwen3_folder), TAPS, dtype=dtype, device="cuda")
    frozen = frozen_to_jax(*separate.frozen_head(), on_the_gpu())
    assert [pointer(frozen.embedding), pointer(frozen.lm_head)] == [m.data_ptr() for m in separate.frozen_head()]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 3e-2)])
def test_captured_states_equal_a_cpu_target_in_float32(llama_folder, qwen3_folder, documents, dtype, tolerance):
    for folder in (llama_folder, qwen3_folder):
        truth = load_hf_target(str(folder), TAPS, dtype="float32", device="cpu").capture(documents)
        captured = load_hf_target(str(folder), TAPS, dtype=dtype, device="cuda").capture(documents)
        for ours, theirs in zip(
            captured.context_hidden + captured.last_hidden, truth.context_hidden + truth.last_hidden
        ):
            assert ours.device.type == "cuda"
            difference = ours.float().cpu() - theirs
            assert float(difference.norm() / theirs.norm()) < tolerance


def test_a_producer_on_another_stream_is_waited_for():
    """Fence A: JAX waits by itself only for torch's current stream; engines work on streams of their own."""
    side = torch.cuda.Stream()
    heavy = torch.randn(6144, 6144, device="cuda", dtype=torch.bfloat16)
    source = torch.zeros(1 << 20, device="cuda")

    def produce(value: float) -> None:
        with torch.cuda.stream(side):
            product = heavy
            for _ in range(12):
                product = torch.tanh(product @ heavy)
            source.fill_(value)
            source.add_(product[0, 0].float() * 0)

    read = jax.jit(lambda x: x.max())
    read(to_jax(source, zero_copy=True)).block_until_ready()
    stale = 0
    for value in range(1, 6):
        produce(float(value))
        stale += float(read(jax.dlpack.from_dlpack(source, copy=False))) != value
        torch_done("cuda")
    assert stale, "reading without the fence was never stale; the test below would prove nothing"
    for value in range(6, 16):
        produce(float(value))
        torch_done("cuda")
        assert float(read(to_jax(source, zero_copy=True))) == value
