"""The fence: a fenced run equals a run that copies everything; without it the same overwrite does harm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from target_bridge import fence
from target_bridge.fence import Lease, LeaseError, jax_done, torch_done
from target_bridge.handoff import to_jax
from target_bridge.staging import StagingRing, aligned_zeros

pytestmark = pytest.mark.gpu_too
DEVICE = "cuda" if torch.cuda.is_available() and jax.default_backend() == "gpu" else "cpu"
STEPS = 10
SHAPE = (1, 64, 32)
WORK = 256 if DEVICE == "cpu" else 4096


@jax.jit
def slow_step(total: jax.Array, context: jax.Array, work: jax.Array) -> jax.Array:
    """A stand-in for a training step: it reads `context` only after a long computation it depends on."""
    work = jax.lax.fori_loop(0, 40, lambda _, m: jnp.tanh(m @ m), work)
    # The shift is always 0, but the compiler cannot know: the reads below must wait for the loop.
    shift = jnp.isnan(work[0, 0]).astype(jnp.int32)
    late = context[:, (jnp.arange(context.shape[1]) + shift) % context.shape[1]]
    return total * 0.5 + (late * jnp.float32(1.25)).sum(axis=1)


@pytest.fixture(scope="module")
def work() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (WORK, WORK)) * 0.1


@pytest.fixture
def data() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(SHAPE[1:], generator=generator) for _ in range(STEPS)]


def zero_total() -> jax.Array:
    return jnp.zeros((SHAPE[0], SHAPE[2]))


def deep_copied(data: list[torch.Tensor], work: jax.Array) -> list[np.ndarray]:
    """The reference: every hand-over is a private copy, nothing is ever overwritten."""
    total, results = zero_total(), []
    for states in data:
        total = slow_step(total, jnp.array(states[None].numpy(), copy=True), work)
        results.append(np.asarray(total))
    return results


def fenced(data: list[torch.Tensor], work: jax.Array, num_slots: int) -> list[np.ndarray]:
    """The bridge's way: one buffer (or two) for all steps, overwritten as soon as its lease has ended."""
    ring = StagingRing(num_slots, SHAPE[0], SHAPE[1], SHAPE[2], 4, device=DEVICE)
    total, totals = zero_total(), []
    for states in data:
        with ring.lease() as slot:
            slot.fill(0, 0, states, torch.zeros(SHAPE[1], 4))
            context = slot.hand_over(lambda context, last: to_jax(context, zero_copy=True))
            total = slow_step(total, context, work)
            slot.fence(total)
        slot._context.fill_(float("nan"))  # whoever still read it would show it
        totals.append(total)
    return [np.asarray(total) for total in totals]


def unfenced(data: list[torch.Tensor], work: jax.Array) -> list[np.ndarray]:
    """The mistake: the buffer is overwritten right after the step was dispatched."""
    buffer = aligned_zeros(SHAPE, torch.float32, DEVICE)
    total, totals = zero_total(), []
    for states in data:
        buffer[0].copy_(states)
        torch_done(DEVICE)
        context = jax.dlpack.from_dlpack(buffer, copy=False)
        total = slow_step(total, context, work)
        buffer.fill_(7.0)
        totals.append(total)
    return [np.asarray(total) for total in totals]


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_fenced_run_equals_a_deep_copied_run_bit_for_bit(data, work, num_slots):
    expected = deep_copied(data, work)
    for result, reference in zip(fenced(data, work, num_slots), expected):
        assert np.array_equal(result, reference)  # ten of ten


def test_the_unfenced_control_fails(data, work):
    """Without this, the test above would prove nothing: the overwrite must be able to do harm."""
    expected = deep_copied(data, work)
    for _ in range(10):
        if any(not np.array_equal(a, b) for a, b in zip(unfenced(data, work), expected)):
            return
    pytest.fail("overwriting the buffer of a running step never changed its result; the fence test tests nothing")


def test_t25g_a_pool_is_released_only_when_jax_is_done(data, work):
    """A fake engine pool that reuses its one buffer the moment it is released."""

    class Pool:
        def __init__(self) -> None:
            self.buffer = aligned_zeros(SHAPE, torch.float32, DEVICE)
            self.releases = 0
            self.reader: jax.Array | None = None

        def release(self) -> None:
            assert self.reader is not None
            assert self.reader.is_ready()
            self.buffer.fill_(float("nan"))
            self.releases += 1

    pool, total, results = Pool(), zero_total(), []
    for states in data:
        with Lease("fake pool", DEVICE, on_release=pool.release) as lease:
            pool.buffer[0].copy_(states)
            context = lease.hand_over(lambda: to_jax(pool.buffer, zero_copy=True))
            total = pool.reader = slow_step(total, context, work)
            assert pool.releases == len(results)  # not before the fence
            lease.fence(total)
        results.append(np.asarray(total))
    assert pool.releases == STEPS
    for result, reference in zip(results, deep_copied(data, work)):
        assert np.array_equal(result, reference)


def test_a_lease_never_releases_what_was_not_fenced():
    released = []
    with (
        pytest.raises(LeaseError, match="kv pool was handed to JAX and never fenced"),
        Lease("kv pool", "cpu", on_release=lambda: released.append(1)) as lease,
    ):
        lease.hand_over(lambda: jnp.zeros(2))
    assert released == []
    assert lease.state == "handed"
    lease.fence(jnp.zeros(1))
    lease.close()
    lease.close()
    assert released == [1]
    for use in (lambda: lease.fence(jnp.zeros(1)), lambda: lease.hand_over(lambda: None)):
        with pytest.raises(LeaseError, match="its lease is closed"):
            use()


def test_an_open_lease_may_end_without_a_fence():
    released = []
    with (
        Lease("kv pool", "cpu", on_release=lambda: released.append(1)) as lease,
        pytest.raises(LeaseError, match="nothing to fence, its lease is open"),
    ):
        lease.fence(jnp.zeros(1))
    assert released == [1]


def test_the_first_fence_comes_before_jax_sees_the_memory(monkeypatch):
    order = []
    monkeypatch.setattr(fence, "torch_done", lambda device: order.append(f"torch_done {device}"))
    lease = Lease("slot", "cpu")
    lease.hand_over(lambda: order.append("views"))
    assert order == ["torch_done cpu", "views"]


def test_fence_b_waits_and_refuses_what_proves_nothing(work):
    out = slow_step(zero_total(), jnp.ones(SHAPE), work)
    jax_done({"total": out, "step": 3})
    assert out.is_ready()
    for nothing in ((), None, [1, 2.0], np.zeros(2)):
        with pytest.raises(LeaseError, match="fence on nothing"):
            jax_done(nothing)
    donated = jnp.zeros(3)
    donated.delete()
    with pytest.raises(LeaseError, match=r"float32\[3\] array that was donated or deleted"):
        jax_done([out, donated])


def test_fence_a_knows_cpu_and_cuda(monkeypatch):
    torch_done("cpu")
    with pytest.raises(LeaseError, match="no fence is known for torch device meta"):
        torch_done("meta")
    seen = []
    monkeypatch.setattr(torch.cuda, "synchronize", seen.append)
    torch_done(torch.device("cuda", 0))
    assert seen == [torch.device("cuda", 0)]
