"""Anchors and blocks: cases.md T15, T16, T18, and an independent slot-by-slot reading of dspark_spec 2."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draft_jax.anchors import anchor_candidates, make_blocks, sample_anchors, slot_decay
from draft_jax.batch import DraftBatch


def make_batch(ids, mask, document_start=None):
    """A batch of which only ids, mask and document starts matter; arguments are [B, L] lists."""
    ids, mask = np.asarray(ids), np.asarray(mask)
    start = np.zeros_like(ids) if document_start is None else np.asarray(document_start)
    states = jnp.zeros((*ids.shape, 2))
    whole = (ids, mask, np.arange(ids.shape[1]) - start, start)
    return DraftBatch(*(jnp.asarray(x, jnp.int32) for x in whole), states, states)


def ones_at(length, indices):
    return [int(i in indices) for i in range(length)]


T16 = make_batch([[100 + i for i in range(12)]], [ones_at(12, {5, 6, 7, 10, 11})])
T18 = make_batch([list(range(20, 28))], [[0, 1, 1, 1, 0, 0, 1, 1]], [[0, 0, 0, 0, 4, 4, 4, 4]])


def blocks_of(batch, anchors, block_size=4, gamma=7.0, keep=None, last_valid=None):
    anchors = jnp.asarray([anchors], jnp.int32)
    keep = jnp.ones(anchors.shape, bool) if keep is None else jnp.asarray([keep])
    return jax.jit(make_blocks, static_argnums=(3, 4))(batch, anchors, keep, block_size, gamma, last_valid)


def test_t16_labels_and_weights():
    blocks = blocks_of(T16, [5, 4])
    np.testing.assert_array_equal(blocks.tokens[0], [105, 104])
    np.testing.assert_array_equal(blocks.labels[0], [[106, 107, 108, 109], [105, 106, 107, 108]])
    np.testing.assert_array_equal(blocks.valid[0], [[1, 1, 0, 0], [1, 1, 1, 0]])
    np.testing.assert_array_equal(blocks.prev[0], [[105, 106, 107, 108], [104, 105, 106, 107]])
    np.testing.assert_array_equal(blocks.target_index[0], [[5, 6, 7, 8], [4, 5, 6, 7]])
    np.testing.assert_allclose(slot_decay(4, 7.0), [1, 0.866878, 0.751477, 0.651439], atol=1e-6)
    np.testing.assert_allclose(blocks.weight[0], [[1, 0.866878, 0, 0], [1, 0.866878, 0.751477, 0]], atol=1e-6)


def test_t16_who_may_be_an_anchor():
    candidates = anchor_candidates(T16.loss_mask, T16.document_start)[0]
    assert set(np.flatnonzero(candidates)) == {4, 5, 6, 9, 10}  # not 7: its next token is unsupervised
    deepspec = anchor_candidates(T16.loss_mask, T16.document_start, supervised_anchors_only=True)[0]
    assert set(np.flatnonzero(deepspec)) == {5, 6, 10}


def test_t18_packed_documents():
    candidates = anchor_candidates(T18.loss_mask, T18.document_start)[0]
    assert set(np.flatnonzero(candidates)) == {0, 1, 2, 5, 6}
    blocks = blocks_of(T18, [2, 5])
    np.testing.assert_array_equal(blocks.valid[0], [[1, 0, 0, 0], [1, 1, 0, 0]])
    # Context of an anchor is [start, anchor): anchor 5 sees {4} only.
    np.testing.assert_array_equal(blocks.start[0], [0, 4])
    np.testing.assert_array_equal(blocks.labels[0], [[23, 23, 23, 23], [26, 27, 27, 27]])
    assert blocks.target_index[0, 0].max() == 3
    # A supervised token at the head of the next document is no label of this one.
    greedy = make_batch([list(range(20, 28))], [[1] * 8], [[0, 0, 0, 0, 4, 4, 4, 4]])
    np.testing.assert_array_equal(blocks_of(greedy, [2]).valid[0], [[1, 0, 0, 0]])
    assert 3 not in np.flatnonzero(anchor_candidates(greedy.loss_mask, greedy.document_start)[0])


def test_swapping_the_other_document_changes_no_block():
    other = make_batch([[1, 2, 3, 4, 24, 25, 26, 27]], T18.loss_mask, T18.document_start)
    ours, theirs = blocks_of(T18, [5, 6]), blocks_of(other, [5, 6])
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        np.testing.assert_array_equal(a, b)


def test_t15_contexts_of_overlapping_blocks():
    batch = make_batch([list(range(12))], [[1] * 12])
    blocks = blocks_of(batch, [3, 5])
    contexts = [list(range(int(s), int(p))) for s, p in zip(blocks.start[0], blocks.anchors[0])]
    assert contexts == [[0, 1, 2], [0, 1, 2, 3, 4]]


def test_dummy_blocks_teach_nothing():
    blocks = blocks_of(T16, [5, 0], keep=[True, False])
    assert blocks.valid[0, 0].any()
    assert not blocks.valid[0, 1].any()
    assert float(blocks.weight[0, 1].sum()) == 0.0


@pytest.mark.parametrize("gamma", [None, 0.0, -1.0])
def test_no_decay(gamma):
    np.testing.assert_array_equal(slot_decay(3, gamma), [1, 1, 1])


def test_broken_target_state_ends_supervision():
    batch = make_batch([list(range(12))], [[1] * 12])
    last_valid = jnp.ones((1, 12), bool).at[0, 5].set(False)
    # Slot j is predicted from the state at p + j: anchor 4 loses slot 1 and all after it, anchor 5
    # everything.
    blocks = blocks_of(batch, [4, 5, 6], last_valid=last_valid)
    np.testing.assert_array_equal(blocks.valid[0], [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    candidates = anchor_candidates(batch.loss_mask, batch.document_start, last_valid)[0]
    assert 5 not in np.flatnonzero(candidates)
    assert {4, 6} <= set(np.flatnonzero(candidates))


def slot_by_slot(ids, mask, start, last_valid, anchor, kept, block_size, gamma):
    """dspark_spec 2.2 read literally, one slot after the other."""
    slots, unbroken = [], kept
    previous = ids[anchor]
    for j in range(block_size):
        t = anchor + 1 + j
        unbroken = unbroken and t < len(ids) and start[t] == start[anchor] and mask[t] and last_valid[t - 1]
        label = ids[t] if t < len(ids) and start[t] == start[anchor] else None
        slots.append((label, bool(unbroken), math.exp(-j / gamma) if unbroken else 0.0, previous, anchor + j))
        previous = label
    return slots


@pytest.mark.parametrize("seed", range(5))
def test_blocks_against_a_slot_by_slot_reading(seed):
    rng = np.random.default_rng(seed)
    B, L, N, K = 3, 17, 6, 5
    ids = rng.integers(0, 50, (B, L))
    mask = (rng.random((B, L)) < 0.8).astype(int)
    borders = np.sort(rng.choice(np.arange(1, L), (B, 2)), axis=1)
    start = np.stack([np.where(np.arange(L) >= b[1], b[1], np.where(np.arange(L) >= b[0], b[0], 0)) for b in borders])
    last_valid = rng.random((B, L)) < 0.9
    anchors, keep = rng.integers(0, L, (B, N)), rng.random((B, N)) < 0.8
    blocks = jax.jit(make_blocks, static_argnums=(3, 4))(
        make_batch(ids, mask, start),
        jnp.asarray(anchors, jnp.int32),
        jnp.asarray(keep),
        K,
        4.0,
        jnp.asarray(last_valid),
    )
    for b in range(B):
        for n in range(N):
            expected = slot_by_slot(ids[b], mask[b], start[b], last_valid[b], anchors[b, n], keep[b, n], K, 4.0)
            for j, (label, valid, weight, previous, target) in enumerate(expected):
                assert bool(blocks.valid[b, n, j]) == valid
                assert float(blocks.weight[b, n, j]) == pytest.approx(weight, abs=1e-6)
                if label is not None:
                    assert int(blocks.labels[b, n, j]) == label
                    assert int(blocks.target_index[b, n, j]) == target
                if previous is not None:
                    assert int(blocks.prev[b, n, j]) == previous


def draw(key, mask, num_anchors, start=None, **options):
    mask = jnp.asarray(mask, jnp.int32)
    start = jnp.zeros_like(mask) if start is None else jnp.asarray(start, jnp.int32)
    sample = jax.jit(sample_anchors, static_argnames=("num_anchors", "supervised_anchors_only", "per_document"))
    return tuple(np.asarray(x) for x in sample(key, mask, start, num_anchors, **options))


def test_anchors_are_distinct_candidates_kept_first_and_ascending():
    rng = np.random.default_rng(0)
    mask = rng.random((5, 40)) < [[0.9], [0.5], [0.2], [0.05], [0.0]]
    anchors, keep = draw(jax.random.key(1), mask, 12)
    candidates = np.asarray(anchor_candidates(jnp.asarray(mask, jnp.int32), jnp.zeros(mask.shape, jnp.int32)))
    for row in range(5):
        count = min(12, candidates[row].sum())
        np.testing.assert_array_equal(keep[row], np.arange(12) < count)
        kept = anchors[row][keep[row]]
        assert (np.diff(kept) > 0).all()
        assert candidates[row][kept].all()
        assert (anchors[row][~keep[row]] == 0).all()
    assert anchors.dtype == np.int32


def test_more_anchors_than_positions():
    anchors, keep = draw(jax.random.key(0), [[1, 1, 1, 1]], 9)
    np.testing.assert_array_equal(anchors, [[0, 1, 2, 0, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(keep, [[1, 1, 1, 0, 0, 0, 0, 0, 0]])


def test_sampling_is_uniform_without_replacement():
    """Every candidate, and every pair of them, is drawn equally often (chi-square at 4 to 5 sigma)."""
    candidates, picks, trials = 9, 3, 6000
    mask = np.zeros((1, 14), int)
    mask[0, [1, 2, 3, 5, 6, 8, 9, 12, 13]] = 1  # candidates are the positions before these
    draw_many = jax.jit(
        jax.vmap(lambda key: sample_anchors(key, jnp.asarray(mask), jnp.zeros((1, 14), jnp.int32), picks)[0][0])
    )
    drawn = np.asarray(draw_many(jax.random.split(jax.random.key(980406), trials)))
    singles = np.bincount(drawn.ravel(), minlength=14)
    assert set(np.flatnonzero(singles)) == {0, 1, 2, 4, 5, 7, 8, 11, 12}
    expected = trials * picks / candidates
    variance = expected * (1 - picks / candidates)
    assert ((singles[singles > 0] - expected) ** 2).sum() / variance < candidates + 5 * math.sqrt(2 * candidates)
    pairs = np.zeros((14, 14), int)
    for i in range(picks):
        for j in range(i + 1, picks):
            np.add.at(pairs, (drawn[:, i], drawn[:, j]), 1)
    pairs = pairs[pairs > 0]
    number = candidates * (candidates - 1) // 2
    assert len(pairs) == number
    chance = picks * (picks - 1) / (candidates * (candidates - 1))
    expected, variance = trials * chance, trials * chance * (1 - chance)
    assert ((pairs - expected) ** 2).sum() / variance < number + 5 * math.sqrt(2 * number)


def test_neither_padding_nor_added_rows_change_the_anchors():
    rng = np.random.default_rng(3)
    mask = (rng.random((4, 30)) < 0.7).astype(int)
    key = jax.random.key(7)
    anchors, keep = draw(key, mask, 8)
    wide = np.pad(mask, ((0, 3), (0, 17)))
    wide_anchors, wide_keep = draw(key, wide, 8)
    np.testing.assert_array_equal(wide_anchors[:4], anchors)
    np.testing.assert_array_equal(wide_keep[:4], keep)
    assert not wide_keep[4:].any()


def test_the_split_into_micro_steps_does_not_change_the_anchors():
    mask = (np.random.default_rng(4).random((6, 30)) < 0.7).astype(int)
    key = jax.random.key(7)
    whole = draw(key, mask, 8)
    parts = [draw(key, mask[i : i + 2], 8, first_row=jnp.int32(i)) for i in (0, 2, 4)]
    for whole_array, part_arrays in zip(whole, zip(*parts)):
        np.testing.assert_array_equal(whole_array, np.concatenate(part_arrays))
    assert (whole[0][0] != whole[0][1]).any()  # rows have draws of their own


def test_keys_give_different_and_repeatable_anchors():
    mask = np.ones((1, 64), int)
    first, again, other = (draw(jax.random.key(s), mask, 8)[0] for s in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    np.testing.assert_array_equal(first, draw(jax.random.PRNGKey(0), mask, 8)[0])


def test_no_anchor_is_refused():
    with pytest.raises(ValueError, match="num_anchors is 0"):
        draw(jax.random.key(0), [[1, 1]], 0)


def test_a_document_gives_at_most_its_share_of_anchors():
    """Three documents and padding: the cap binds in two of them; without it nothing changes."""
    lengths, width = (9, 4, 12), 30
    start = np.full((1, width), sum(lengths))
    start[0, : sum(lengths)] = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    mask = np.zeros((1, width), int)
    mask[0, : sum(lengths)] = 1
    mask[0, 9:12] = 0  # the second document has one candidate
    key = jax.random.key(3)
    anchors, keep = draw(key, mask, 20, start, per_document=5)
    kept = anchors[0][keep[0]]
    assert np.bincount(start[0][kept], minlength=14)[[0, 9, 13]].tolist() == [5, 1, 5]
    # Those of one document are the ones with the smallest random bits, so a smaller cap keeps a subset.
    fewer, keep = draw(key, mask, 20, start, per_document=2)
    assert set(fewer[0][keep[0]]) < set(kept)
    for cap in (None, 12, 99):
        for ours, plain in zip(draw(key, mask, 20, start, per_document=cap), draw(key, mask, 20, start)):
            np.testing.assert_array_equal(ours, plain)
    with pytest.raises(ValueError, match="per_document is 0"):
        draw(key, mask, 20, start, per_document=0)


def test_capped_anchors_of_a_document_are_uniform():
    start = np.array([[0] * 6 + [6] * 6])
    draw_many = jax.jit(
        jax.vmap(
            lambda key: sample_anchors(key, jnp.ones((1, 12), int), jnp.asarray(start), 12, per_document=2)[0][0, :4]
        )
    )
    drawn = np.asarray(draw_many(jax.random.split(jax.random.key(1), 4000)))
    counts = np.bincount(drawn.ravel(), minlength=12)
    assert set(np.flatnonzero(counts)) == {0, 1, 2, 3, 4, 6, 7, 8, 9, 10}
    expected = 4000 * 2 / 5
    assert ((counts[counts > 0] - expected) ** 2).sum() / (expected * 3 / 5) < 10 + 5 * math.sqrt(20)
