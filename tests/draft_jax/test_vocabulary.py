"""Case T19: the ids of a reduced draft vocabulary and its two tables."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_jax.vocabulary import DraftVocabulary, VocabularyError, select_vocabulary


def counts(**by_id: int) -> np.ndarray:
    table = np.zeros(10, np.int64)
    for name, count in by_id.items():
        table[int(name[1:])] = count
    return table


T19 = counts(i2=5, i7=9, i3=1, i9=4, i0=2)


def test_t19_tables():
    vocabulary = select_vocabulary(T19, 4)
    assert vocabulary.target_ids.tolist() == [0, 2, 7, 9]
    assert vocabulary.d2t.tolist() == [0, 1, 5, 6]
    assert vocabulary.d2t.dtype == np.int64
    assert np.flatnonzero(vocabulary.t2d).tolist() == [0, 2, 7, 9]
    assert (vocabulary.t2d.dtype, vocabulary.t2d.shape) == (np.dtype(bool), (10,))
    assert vocabulary.draft_ids.tolist() == [0, -1, 1, -1, -1, -1, -1, 2, -1, 3]


def test_t19_ties_and_filling():
    assert select_vocabulary(counts(i9=1, i4=1, i6=1), 2).target_ids.tolist() == [4, 6]
    assert select_vocabulary(counts(i8=3), 4).target_ids.tolist() == [0, 1, 2, 8]
    assert select_vocabulary(counts(), 3).target_ids.tolist() == [0, 1, 2]


def test_t19_no_reduction_has_no_tables():
    assert select_vocabulary(T19, 10) is None
    assert select_vocabulary(T19, 12) is None  # padded beyond the target
    with pytest.raises(VocabularyError, match="is no reduction"):
        DraftVocabulary(np.arange(10), 10)
    with pytest.raises(VocabularyError, match="is no reduction"):
        DraftVocabulary.from_d2t(np.zeros(10, np.int64), 10)


def test_stop_tokens_can_be_kept():
    assert select_vocabulary(T19, 4, always=[8, 5]).target_ids.tolist() == [2, 5, 7, 8]
    with pytest.raises(VocabularyError, match="cannot hold the 3 ids"):
        select_vocabulary(T19, 2, always=[1, 2, 3])
    with pytest.raises(VocabularyError, match=r"\[10\]; the target has 0..9"):
        select_vocabulary(T19, 2, always=[10])


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        ([0, 1, 5, 7], "holds id 10, the target has 0..9"),
        ([-1, 1], "holds id -1"),
        ([0, -1], "draft ids 0 and 1 stand for target ids 0 and 0"),
        ([3, 0], "stand for target ids 3 and 1"),
        ([0.0, 1.0], "must be integers"),
        ([[0]], "one dimension"),
    ],
)
def test_broken_tables_are_refused(d2t, message):
    with pytest.raises(VocabularyError, match=message):
        DraftVocabulary.from_d2t(np.asarray(d2t), 10)


def test_another_table_over_trained_weights_is_refused():
    vocabulary = select_vocabulary(T19, 4)
    vocabulary.require_same(DraftVocabulary.from_d2t(vocabulary.d2t, 10))
    with pytest.raises(VocabularyError, match=r"in 2 of 4 ids: draft id 1 was target id 2, would be 1"):
        vocabulary.require_same(DraftVocabulary(np.asarray([0, 1, 3, 9]), 10))
    with pytest.raises(VocabularyError, match="trained with 4 of 10 ids, the table given has 4 of 12"):
        vocabulary.require_same(DraftVocabulary(vocabulary.target_ids, 12))


@given(st.lists(st.integers(0, 5), min_size=2, max_size=40), st.data())
@settings(max_examples=100, deadline=None)
def test_selection_equals_a_sort_by_count_then_id(table, data):
    size = data.draw(st.integers(1, len(table) - 1))
    always = data.draw(st.lists(st.integers(0, len(table) - 1), unique=True, max_size=size))
    vocabulary = select_vocabulary(np.asarray(table), size, always)
    others = sorted((i for i in range(len(table)) if i not in always), key=lambda i: (-table[i], i))
    assert vocabulary.target_ids.tolist() == sorted([*always, *others[: size - len(always)]])
    drafted = np.arange(size)
    assert (drafted + vocabulary.d2t == vocabulary.target_ids).all()
    assert (vocabulary.draft_ids[vocabulary.target_ids] == drafted).all()
    assert vocabulary.t2d.sum() == size
