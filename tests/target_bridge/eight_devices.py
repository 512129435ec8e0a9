"""Run by test_handoff in a process of its own: hand-over to eight (fake CPU) devices."""

from __future__ import annotations

from types import SimpleNamespace

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

from target_bridge.handoff import HandoffError, frozen_to_jax, to_batch, to_global  # noqa: E402
from target_bridge.staging import StagingRing  # noqa: E402


def main() -> None:
    assert jax.device_count() == 8
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    whole = NamedSharding(mesh, PartitionSpec())
    columns = NamedSharding(mesh, PartitionSpec("data", "fsdp"))
    pieces = [torch.full((2, 3), float(i)) + torch.arange(3) / 10 for i in range(8)]

    joined = to_global(pieces, rows)
    expected = torch.cat(pieces).numpy()
    assert joined.shape == (16, 3)
    assert joined.sharding == rows
    assert np.array_equal(np.asarray(joined), expected)
    assert {shard.device for shard in joined.addressable_shards} == set(jax.devices())
    assert np.allclose(np.asarray(jax.jit(lambda x: x.sum(1))(joined)), expected.sum(1))

    grid = to_global(pieces, columns)  # pieces in the order of their place: row by row
    blocks = [torch.cat([pieces[2 * i], pieces[2 * i + 1]], dim=1) for i in range(4)]
    assert grid.shape == (8, 6)
    assert np.array_equal(np.asarray(grid), torch.cat(blocks).numpy())

    # A mesh whose devices are in another order: pieces still go where their rows are.
    shuffled = jax.sharding.Mesh(np.array(jax.devices())[[3, 1, 7, 0, 2, 6, 5, 4]], ("data",))
    joined = to_global(pieces, NamedSharding(shuffled, PartitionSpec("data")))
    assert np.array_equal(np.asarray(joined), expected)

    same = to_global([pieces[0]] * 8, whole)
    assert np.array_equal(np.asarray(same), pieces[0].numpy())

    for wrong, message in (
        (pieces[:7], "7 pieces for 8 local devices"),
        ([*pieces[:7], torch.zeros(3, 3)], "differ"),
        ([*pieces[:7], pieces[7].bfloat16()], "differ"),
    ):
        with pytest.raises(HandoffError, match=message):
            to_global(wrong, rows)

    ring = StagingRing(1, rows=16, length=3, context_width=4, hidden=2)
    generator = np.random.default_rng(0)
    for _ in range(3):
        ids = generator.integers(0, 50, size=(16, 3))
        context, last = torch.randn(16, 3, 4), torch.randn(16, 3, 2)
        host = SimpleNamespace(input_ids=ids, loss_mask=ids % 2, positions=ids, document_start=ids * 0)
        with ring.lease() as slot:
            for row in range(16):
                slot.fill(row, 0, context[row], last[row])
            batch = to_batch(slot, host, rows)
            out = jax.jit(lambda b: (b.context_hidden * 1, b.last_hidden * 1, b.input_ids * 1))(batch)
            slot.fence(out)
        for array, reference in zip(out, (context.numpy(), last.numpy(), ids)):
            assert array.sharding == rows
            assert np.array_equal(np.asarray(array), reference)

    # Tokens of a row over the last axis: states in parts, integers whole.
    deep = jax.make_mesh((2, 1, 4), ("data", "fsdp", "seq"), axis_types=(AxisType.Auto,) * 3)
    parts = NamedSharding(deep, PartitionSpec(("data", "fsdp"), "seq"))
    ring4 = StagingRing(1, rows=4, length=8, context_width=4, hidden=2)
    ids = generator.integers(0, 50, size=(4, 8))
    context, last = torch.randn(4, 8, 4), torch.randn(4, 8, 2)
    host = SimpleNamespace(input_ids=ids, loss_mask=ids % 2, positions=ids, document_start=ids * 0)
    with ring4.lease() as slot:
        for row in range(4):
            slot.fill(row, 0, context[row], last[row])
        batch = to_batch(slot, host, parts)
        assert {shard.data.shape for shard in batch.context_hidden.addressable_shards} == {(2, 2, 4)}
        assert {shard.data.shape for shard in batch.input_ids.addressable_shards} == {(2, 8)}
        out = jax.jit(lambda b: (b.context_hidden * 1, b.last_hidden * 1, b.input_ids * 1))(batch)
        slot.fence(out)
    for array, reference in zip(out, (context.numpy(), last.numpy(), ids)):
        assert np.array_equal(np.asarray(array), reference)

    ids = generator.integers(0, 50, size=(16, 3))
    short = SimpleNamespace(input_ids=ids[:5], loss_mask=ids, positions=ids, document_start=ids)
    with ring.lease() as slot, pytest.raises(HandoffError, match=r"input_ids has shape \(5, 3\)"):
        to_batch(slot, short, rows)

    matrix = torch.randn(8, 4)
    frozen = frozen_to_jax(matrix, matrix, whole)
    assert frozen.lm_head is frozen.embedding
    assert frozen.embedding.is_fully_replicated
    assert np.array_equal(np.asarray(frozen.embedding), matrix.numpy())
    split = frozen_to_jax(matrix, torch.randn(16, 4), rows)
    assert np.array_equal(np.asarray(split.embedding), matrix.numpy())
    assert [shard.data.shape for shard in split.lm_head.addressable_shards] == [(2, 4)] * 8
    with pytest.raises(HandoffError, match=r"frozen matrix of \[9, 4\] cannot be split .* its 9 rows must divide"):
        frozen_to_jax(torch.randn(9, 4), torch.randn(9, 4), rows)
    print("all checks passed")


if __name__ == "__main__":
    main()
