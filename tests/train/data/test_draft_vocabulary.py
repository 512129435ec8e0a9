"""Case T19 on data: what is counted, and a kept table that is never used for anything but what it was made for."""

import dataclasses
import shutil

import numpy as np
import pytest

from draft_jax.vocabulary import VocabularyError
from train.data.config import DataConfig
from train.data.draft_vocabulary import cached_vocabulary, count_supervised, vocabulary_key
from train.data.identity import dataset_key
from train.data.pipeline import load_dataset
from train.data.summary import DataError

CHAT = {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d d"}]}


@pytest.fixture
def config(write_rows, toy_template_file):
    return DataConfig(write_rows([CHAT, CHAT]), template=toy_template_file, min_loss_tokens=1)


def test_supervised_positions_are_counted(config, toy_tokenizer):
    counts = count_supervised(load_dataset(config, toy_tokenizer, 31).samples, 31)
    assert {int(i): int(counts[i]) for i in np.flatnonzero(counts)} == {3: 2, 17: 2, 18: 4}


def test_t19_keys(config, toy_tokenizer, make_toy_tokenizer, toy_template, tmp_path, write_rows):
    """Every input of the samples is part of the key; their order and place are not."""
    (tmp_path / "other.jinja").write_text(toy_template + "{# another #}")

    def key(tokenizer=toy_tokenizer, size=31, **changed):
        return dataset_key(dataclasses.replace(config, **changed), tokenizer, size)

    changed = {
        "template": key(template=str(tmp_path / "other.jinja")),
        "max_length": key(max_length=12),
        "min_loss_tokens": key(min_loss_tokens=2),
        "history": key(history="last_turn"),
        "options": key(template_options={"reasoning_effort": "high"}),
        "thinking": key(enable_thinking=True),
        "date": key(date="2026-02-02"),
        "limit": key(limit=1),
        "vocab_size": key(size=32),
        "own template": key(make_toy_tokenizer(chat_template=toy_template)),
        "tokenizer": key(make_toy_tokenizer(bos=True)),
        "data": key(path=write_rows([CHAT], "rows.jsonl.gz")),
    }
    base = key()
    assert len({base, *changed.values()}) == len(changed) + 1
    (tmp_path / "copy").mkdir()
    copy = shutil.copy(config.path, tmp_path / "copy" / "rows.jsonl")
    assert key(path=str(copy), seed=5, shuffle=False) == base
    tables = [vocabulary_key(base, 4, 31), vocabulary_key(base, 6, 31), vocabulary_key(changed["template"], 4, 31),
              vocabulary_key(changed["max_length"], 4, 31), vocabulary_key(base, 4, 32),
              vocabulary_key(base, 4, 31, [3])]  # fmt: skip
    assert len(set(tables)) == len(tables)


def test_keys_without_tokenizer_or_revision(write_rows):
    path = write_rows([{"input_ids": [1, 2], "loss_mask": [1, 1]}])
    assert dataset_key(DataConfig(path), None, 31) == dataset_key(DataConfig(path), None, 31)
    for path in ("hf://owner/name?split=train", "hf://owner/name?revision=main", "hf://owner/name?revision=abc"):
        with pytest.raises(DataError, match="add &revision=COMMIT"):
            dataset_key(DataConfig(path), None, 31)
    keys = {dataset_key(DataConfig(f"hf://owner/name?revision={digit * 40}&split=x"), None, 31) for digit in "ab"}
    assert len(keys) == 2


def test_kept_tables(tmp_path):
    made = []

    def count():
        made.append(1)
        return np.arange(10)

    first = cached_vocabulary(tmp_path, "data", 4, 10, count)
    again = cached_vocabulary(tmp_path, "data", 4, 10, count)
    assert first.target_ids.tolist() == again.target_ids.tolist() == [6, 7, 8, 9]
    assert len(made) == 1
    assert cached_vocabulary(tmp_path, "data", 6, 10, count).draft_size == 6
    assert cached_vocabulary(tmp_path, "other data", 4, 10, count).draft_size == 4
    assert cached_vocabulary(tmp_path, "data", 4, 10, count, always=[0]).target_ids.tolist() == [0, 7, 8, 9]
    assert len(made) == len(list(tmp_path.iterdir())) == 4


def test_nothing_kept_is_looked_at_without_a_reduced_vocabulary(tmp_path):
    for name in ("vocabulary-10-x.npy", "d2t.npy"):
        (tmp_path / name).write_bytes(b"stale")

    def count():
        raise AssertionError("not needed")

    assert cached_vocabulary(tmp_path, "data", 10, 10, count) is None
    assert cached_vocabulary(tmp_path, "data", 12, 10, count) is None


def test_a_kept_table_that_cannot_be_right_is_refused(tmp_path):
    cached_vocabulary(tmp_path, "data", 4, 10, lambda: np.arange(10))
    (path,) = tmp_path.iterdir()
    np.save(path, np.asarray([0, 1, 2, 99]))
    with pytest.raises(VocabularyError, match="holds id 102"):
        cached_vocabulary(tmp_path, "data", 4, 10, lambda: np.arange(10))
    with pytest.raises(ValueError, match="9 counts for a target vocabulary of 10"):
        cached_vocabulary(tmp_path, "more", 4, 10, lambda: np.arange(9))
