"""Staging slots: zero outside what was filled, refused out of order, lent to one user at a time."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
import torch

from target_bridge.fence import LeaseError
from target_bridge.handoff import to_jax
from target_bridge.staging import ALIGNMENT, StagingError, StagingRing, aligned_zeros


def make_ring(num_slots: int = 1, rows: int = 2, length: int = 6, **settings: object) -> StagingRing:
    return StagingRing(num_slots, rows, length, context_width=6, hidden=3, **settings)


def states(count: int, value: float, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((count, 6), value, dtype=dtype), torch.full((count, 3), -value, dtype=dtype)


def contents(slot) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of both buffers; the slot counts as read by JAX and is fenced."""
    copies: list[torch.Tensor] = []
    slot.hand_over(lambda context, last: copies.extend([context.clone(), last.clone()]))
    slot.fence(jnp.zeros(1))
    return copies[0], copies[1]


def test_buffers_are_aligned_contiguous_and_stay_where_they_are():
    ring = make_ring(2, rows=3, length=5, dtype=torch.bfloat16)
    pointers = []
    for _ in range(4):
        with ring.lease() as slot:
            views = []
            slot.hand_over(lambda context, last, views=views: views.extend([context, last]))
            assert [tuple(view.shape) for view in views] == [(3, 5, 6), (3, 5, 3)]
            assert all(view.is_contiguous() and view.data_ptr() % ALIGNMENT == 0 for view in views)
            assert all(view.dtype == torch.bfloat16 for view in views)
            pointers.append([view.data_ptr() for view in views])
            slot.fence(jnp.zeros(1))
    assert pointers[0] == pointers[2] != pointers[1] == pointers[3]  # two slots in turn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(3, 5), (0, 4), (1,), ()])
def test_aligned_zeros(dtype, shape):
    tensor = aligned_zeros(shape, dtype, "cpu")
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % ALIGNMENT == 0
    assert not tensor.float().any()


@pytest.mark.parametrize("before", [7.0, float("nan"), float("inf")])
def test_tails_and_gaps_are_zero_whatever_was_there(before):
    ring = make_ring()
    with ring.lease() as slot:
        slot.fill(0, 0, *states(6, before))
        slot.fill(1, 0, *states(6, before))
    with ring.lease() as slot:
        slot.fill(0, 0, *states(2, 1.0))  # packed: documents at offsets, a gap, a tail
        slot.fill(0, 3, *states(2, 2.0))
        context, last = contents(slot)
    assert context[0, :, 0].tolist() == [1, 1, 0, 2, 2, 0]
    assert last[0, :, 2].tolist() == [-1, -1, 0, -2, -2, 0]
    assert not context[1].any()
    assert not last[1].any()


def test_a_narrower_dtype_is_widened_exactly_and_a_wider_one_refused():
    values = states(2, 1.0009765625, torch.bfloat16)
    with make_ring(dtype=torch.float32).lease() as slot:
        slot.fill(0, 0, *values)
        assert torch.equal(contents(slot)[0][0, :2], values[0].float())
    with (
        make_ring(dtype=torch.bfloat16).lease() as slot,
        pytest.raises(StagingError, match=r"context states are torch.float32 .* torch.bfloat16, which would round"),
    ):
        slot.fill(0, 0, *states(2, 1.0))


@pytest.mark.parametrize(
    ("row", "offset", "context", "last", "message"),
    [
        (2, 0, (1, 6), (1, 3), "row 2 is outside the slot's 2 rows"),
        (-1, 0, (1, 6), (1, 3), "row -1 is outside"),
        (0, 4, (3, 6), (3, 3), "row 0: a document of 3 tokens at offset 4 does not fit a row of 6"),
        (0, -1, (1, 6), (1, 3), "offset -1"),
        (1, 0, (1, 5), (1, 3), r"context states for row 1 have shape (1, 5), expected [tokens, 6]"),
        (1, 0, (1, 6), (1, 4), r"last states for row 1 have shape (1, 4), expected [tokens, 3]"),
        (1, 0, (2, 6), (3, 3), "row 1: 2 context states but 3 last states"),
        (1, 0, (2, 2, 6), (2, 3), "shape (2, 2, 6)"),
        (1, 2, (2, 6), (2, 3), "row 1, tokens 2..3, overlaps the one at 1..2"),
    ],
)
def test_states_that_do_not_fit_are_named(row, offset, context, last, message):
    with make_ring().lease() as slot:
        slot.fill(1, 1, *states(2, 1.0))
        with pytest.raises(StagingError) as error:
            slot.fill(row, offset, torch.ones(context), torch.ones(last))
        assert message in str(error.value)


def test_integer_states_are_refused():
    with make_ring().lease() as slot, pytest.raises(StagingError, match=r"context states are torch\.int32"):
        slot.fill(0, 0, torch.ones(1, 6, dtype=torch.int32), torch.ones(1, 3))


def test_an_open_lease_is_not_lent_twice():
    ring = make_ring()
    with ring.lease(), pytest.raises(LeaseError, match=r"all 1 staging slots are in use .slot 0 is open"):
        ring.acquire()
    with ring.lease():
        pass


def test_a_slot_cannot_be_used_without_or_after_its_lease():
    ring = make_ring()
    with ring.lease() as slot:
        slot.fill(0, 0, *states(1, 1.0))
    for use in (
        lambda: slot.fill(0, 0, *states(1, 1.0)),
        lambda: slot.hand_over(lambda *_: None),
        lambda: slot.fence(jnp.zeros(1)),
        lambda: ring.release(slot),
    ):
        with pytest.raises(LeaseError, match="slot 0 is not on lease"):
            use()


def test_a_slot_cannot_be_filled_once_jax_sees_it():
    ring = make_ring()
    with ring.lease() as slot:
        slot.hand_over(lambda context, last: (to_jax(context), to_jax(last)))
        with pytest.raises(LeaseError, match="cannot fill it, its lease is handed and JAX may be reading it"):
            slot.fill(0, 0, *states(1, 1.0))
        with pytest.raises(LeaseError, match="cannot hand it to JAX"):
            slot.hand_over(lambda *_: None)
        slot.fence(jnp.zeros(1))
        with pytest.raises(LeaseError, match="its lease is fenced; take a new lease"):
            slot.fill(0, 0, *states(1, 1.0))


def test_a_lease_that_ends_unfenced_is_an_error_and_the_slot_stays_in_use():
    ring = make_ring()
    slot = ring.acquire()
    slot.hand_over(lambda context, last: (to_jax(context), to_jax(last)))
    with pytest.raises(LeaseError, match="staging slot 0 was handed to JAX and never fenced"):
        ring.release(slot)
    with pytest.raises(LeaseError, match=r"slot 0 is handed.*needs fence"):
        ring.acquire()
    slot.fence(jnp.zeros(1))
    ring.release(slot)
    with ring.lease():
        pass
    with pytest.raises(LeaseError, match="never fenced"), ring.lease() as slot:
        slot.hand_over(lambda context, last: to_jax(context))


def test_an_error_in_the_body_is_not_hidden():
    ring = make_ring(2)

    def fail(slot) -> None:
        raise ZeroDivisionError

    def hand_over_and_fail(slot) -> None:
        slot.hand_over(lambda context, last: to_jax(context))
        raise ZeroDivisionError

    for body in (fail, hand_over_and_fail):
        with pytest.raises(ZeroDivisionError), ring.lease() as slot:
            body(slot)
    free = ring.acquire()  # the first slot came back, the second may still be read
    with pytest.raises(LeaseError, match="slot 0 is open, slot 1 is handed"):
        ring.acquire()
    ring.release(free)


def test_a_failed_hand_over_leaves_the_slot_free():
    ring = make_ring()
    with pytest.raises(ZeroDivisionError), ring.lease() as slot:
        slot.hand_over(lambda *_: 1 / 0)
    with ring.lease():
        pass


def test_arrays_die_with_the_lease():
    ring = make_ring()
    with ring.lease() as slot:
        slot.fill(0, 0, *states(2, 5.0))
        context, last = slot.hand_over(lambda context, last: (to_jax(context), to_jax(last)))
        out = context + 1
        slot.fence(out)
    assert context.is_deleted()
    assert last.is_deleted()
    with pytest.raises(RuntimeError, match="deleted"):
        _ = context[0, 0, 0]
    assert out[0, 0, 0] == 6


@pytest.mark.parametrize("what", ["num_slots", "rows", "length", "context_width", "hidden"])
def test_sizes_must_be_positive(what):
    sizes = {"num_slots": 1, "rows": 1, "length": 1, "context_width": 1, "hidden": 1, what: 0}
    with pytest.raises(StagingError, match=f"{what} must be at least 1, got 0"):
        StagingRing(**sizes)
