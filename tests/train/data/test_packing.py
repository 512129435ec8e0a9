"""Packed rows: nothing lost, budgets kept, little padding, and the same loss and gradients as documents alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_jax.batch import DraftBatch
from draft_jax.models.dspark import init_params
from draft_jax.objective.config import ObjectiveConfig
from draft_jax.objective.loss import training_loss_sums
from tests.draft_jax.drafts import frozen_head, tiny_config
from train.data.packing import count_anchors, pack
from train.data.rows import HostBatch, RowIterator
from train.data.samples import Sample


def sample(name: str, length: int, supervised: int) -> Sample:
    mask = np.zeros(length, np.int8)
    mask[length - supervised :] = 1
    return Sample(name, np.arange(length, dtype=np.int32) % 31, mask)


def made(lengths: list[int], supervised: int = 2) -> list[Sample]:
    return [sample(f"s{i}", n, min(supervised, n)) for i, n in enumerate(lengths)]


def test_first_fit_decreasing_by_hand():
    """Lengths 7 6 4 3 2 2 in rows of 8: 7 | 6 2 | 4 3 | 2 (the first row with room, longest first)."""
    samples = made([2, 7, 3, 6, 4, 2])
    packing = pack(samples, 8)
    rows = [sorted((len(samples[i].input_ids) for i in row), reverse=True) for row in packing.rows]
    assert rows == [[7], [6, 2], [4, 3], [2]]
    assert packing.tokens == 24
    assert packing.padding_share == pytest.approx(1 - 24 / 32)
    assert "6 documents into 4 rows of 8: padding 25.0 %" in packing.describe()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=60),
    st.integers(1, 12),
    st.integers(1, 30),
    st.integers(0, 3),
)
def test_every_useful_document_is_packed_once_within_both_budgets(documents, per_document, num_anchors, seed):
    samples = [sample(f"s{i}", n, min(k, n)) for i, (n, k) in enumerate(documents)]
    useful = [i for i, s in enumerate(samples) if s.loss_mask.any()]
    if not useful:
        with pytest.raises(ValueError, match="nothing to pack"):
            pack(samples, 20)
        return
    packing = pack(samples, 20, seed=seed, num_anchors=num_anchors, per_document=per_document, window=17)
    assert sorted(i for row in packing.rows for i in row) == useful
    assert packing.left_out == len(samples) - len(useful)
    assert packing.tokens == sum(len(samples[i].input_ids) for i in useful)
    for row in packing.rows:
        assert sum(len(samples[i].input_ids) for i in row) <= 20
        assert len(row) == 1 or sum(count_anchors(samples[i], per_document) for i in row) <= num_anchors


def test_anchors_are_counted_as_the_draft_counts_them():
    from draft_jax.anchors import anchor_candidates

    rng = np.random.default_rng(0)
    for _ in range(20):
        mask = rng.integers(0, 2, 12).astype(np.int8)
        counted = count_anchors(Sample("x", np.zeros(12, np.int32), mask))
        start = jnp.zeros((1, 12), jnp.int32)
        assert counted == int(anchor_candidates(jnp.asarray(mask[None], jnp.int32), start).sum())


def test_the_order_of_packing_depends_on_the_seed_alone():
    samples = made([1 + (7 * i) % 13 for i in range(200)])
    assert pack(samples, 16, seed=1).rows == pack(samples, 16, seed=1).rows
    assert pack(samples, 16, seed=1).rows != pack(samples, 16, seed=2).rows


def test_a_document_longer_than_a_row_is_named():
    with pytest.raises(ValueError, match=r"sample s1 has 9 tokens, rows have 8.*data\.row_length"):
        pack(made([3, 9]), 8)


def test_lengths_as_real_ones_waste_little():
    """Log-normal lengths like those of conversations, rows of 2048: under 3 % padding."""
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(5.3, 0.6, 6000), 16, 512).astype(int)
    assert pack(made(lengths.tolist()), 2048).padding_share < 0.03


def test_a_packed_stream_resumes_where_it_was_and_refuses_another_packing():
    samples = made([1 + (5 * i) % 7 for i in range(40)])
    packing = pack(samples, 8)

    def stream(seed: int = 0) -> RowIterator:
        return RowIterator(samples, 3, 8, seed=4, packed=pack(samples, 8, seed=seed).rows)

    straight = stream()
    batches = [next(straight) for _ in range(12)]
    rows = len(packing.rows)
    assert straight.rows_per_epoch == rows
    assert straight.steps_per_epoch == -(-rows // 3)
    flat = [[d.sample_id for d in batch.documents if d.row == row] for batch in batches for row in range(3)]
    assert sorted(name for row in flat[:rows] for name in row) == sorted(s.id for s in samples)
    first = stream()
    for _ in range(5):
        next(first)
    second = stream()
    second.set_state(first.get_state())
    assert [next(second).sample_ids for _ in range(7)] == [batch.sample_ids for batch in batches[5:]]
    with pytest.raises(ValueError, match="packing was"):
        stream(seed=1).set_state(first.get_state())
    with pytest.raises(ValueError, match="packing was"):
        RowIterator(samples, 3, 8, seed=4).set_state(first.get_state())


def device_batch(host: HostBatch, states: dict[str, tuple[np.ndarray, np.ndarray]], config) -> DraftBatch:
    """The states a target would give each document, wherever it lies."""
    rows, length = host.input_ids.shape
    context = np.zeros((rows, length, config.num_taps * config.hidden_size), np.float32)
    last = np.zeros((rows, length, config.hidden_size), np.float32)
    for document in host.documents:
        piece = slice(document.offset, document.offset + len(document.input_ids))
        context[document.row, piece], last[document.row, piece] = states[document.sample_id]
    fields = (host.input_ids, host.loss_mask, host.positions, host.document_start, context, last)
    return DraftBatch(*map(jnp.asarray, fields))


def test_packed_and_unpacked_epochs_have_equal_losses_and_gradients():
    """All candidates are anchors either way; sums over an epoch agree to 1e-5, gradients too."""
    config = tiny_config()
    rng = np.random.default_rng(5)
    samples = [
        Sample(
            f"s{i}",
            rng.integers(0, config.vocab_size, n).astype(np.int32),
            (rng.random(n) < 0.7).astype(np.int8),
        )
        for i, n in enumerate([9, 4, 7, 5, 6, 8, 3])
    ]
    states = {
        s.id: (
            rng.standard_normal((len(s.input_ids), config.num_taps * config.hidden_size)).astype(np.float32),
            rng.standard_normal((len(s.input_ids), config.hidden_size)).astype(np.float32),
        )
        for s in samples
    }
    head = frozen_head(config)
    params = init_params(config, jax.random.key(0))
    objective = ObjectiveConfig(num_anchors=24)

    @jax.jit
    def sums(params, batch):
        return jax.value_and_grad(
            lambda p: training_loss_sums(p, head, batch, jax.random.key(1), config, objective, dtype=jnp.float32),
            has_aux=True,
        )(params)

    def epoch(length: int, packed=None):
        total = None
        for host in RowIterator(samples, 2, length, epochs=1, packed=packed):
            assert host.input_ids.shape == (2, length)
            (numerator, terms), gradients = sums(params, device_batch(host, states, config))
            part = (numerator, {n: v for n, v in terms.items() if n not in ("rows", "anchor_slots")}, gradients)
            total = part if total is None else jax.tree.map(jnp.add, total, part)
        return total

    packing = pack(samples, 24)
    assert len(packing.rows) < len(samples) / 2
    alone, together = epoch(24), epoch(24, packing.rows)
    assert float(alone[1]["sampled_anchors"]) == sum(count_anchors(s) for s in samples)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(alone), jax.tree.leaves(together)):
        if any(name in str(path) for name in ("'loss_num'", "'loss_den'", "'tokens'")):
            continue  # ratios of micro-steps, which are other ones here; tokens up to a row's last supervised one
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, err_msg=str(path))
