"""Prepared folders: the samples of plain loading, once, resumable, found again only for the same work."""

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.data import prepare as module
from train.data.config import DataConfig
from train.data.pipeline import load_dataset
from train.data.prepare import prepare
from train.data.prepared import PreparedSamples, find_prepared, is_prepared, open_prepared
from train.data.rows import RowIterator, fingerprint
from train.data.seen import SeenHashes
from train.data.summary import DataError, Summary

WORDS = "abcdefghijklmnop"


def chat(words: str, answer: str, **extra) -> dict:
    messages = [{"role": "user", "content": " ".join(words)}, {"role": "assistant", "content": " ".join(answer)}]
    return {"messages": messages, **extra}


def mixed_rows(count: int = 60) -> list:
    """Good rows, one that occurs three times, an id given twice, refusals of two kinds and answers too short."""
    rng = random.Random(5)
    rows: list = [chat(rng.choices(WORDS, k=3), rng.choices(WORDS, k=6), id=f"r{i}") for i in range(count)]
    rows[7] = rows[20] = rows[41] = chat("abc", "defghi")
    rows[9] = dict(rows[9], id="r3")
    rows[11], rows[12] = b"{no json", {"messages": [{"role": "user", "content": "a"}]}
    rows[30] = chat("abc", "d", id="short")
    return rows


@pytest.fixture
def config(write_rows, toy_template_file, tmp_path):
    def make(rows=None, **options) -> DataConfig:
        path = write_rows(mixed_rows() if rows is None else rows)
        given = {"template": toy_template_file, "min_loss_tokens": 3, "prepared": str(tmp_path / "prepared")}
        return DataConfig(path, **{**given, **options})

    return make


@pytest.fixture
def small_shards(monkeypatch):
    """A shard for every four rows, so that few rows make many."""
    monkeypatch.setattr(module, "SHARD_RECORDS", 1)
    original = module.chunks_of
    monkeypatch.setattr(module, "chunks_of", lambda records: original(records, 4))


def account(summary: Summary) -> dict:
    """What of an account does not depend on how it was made."""
    return {**summary.to_json(), "source": "", "template": summary.template.rpartition(",")[0]}


def plain(config: DataConfig, tokenizer):
    return load_dataset(dataclasses.replace(config, prepared="nowhere"), tokenizer, 31)


def assert_same_samples(ours, theirs):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs):
        assert a.id == b.id
        assert (a.input_ids.dtype, a.loss_mask.dtype) == (np.int32, np.int8)
        np.testing.assert_array_equal(a.input_ids, b.input_ids)
        np.testing.assert_array_equal(a.loss_mask, b.loss_mask)


@pytest.mark.parametrize("duplicates", ["keep", "drop"])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_samples_are_those_of_loading(config, toy_tokenizer, small_shards, workers, duplicates):
    config = config(duplicates=duplicates)
    expected = plain(config, toy_tokenizer)
    progress = []
    folder, summary = prepare(
        config, toy_tokenizer, 31, workers=workers, report=lambda summary, records: progress.append(records)
    )
    assert account(summary) == account(expected.summary)
    assert sum(progress) == summary.rows == 60
    data = load_dataset(config, toy_tokenizer, 31)  # found in data.prepared
    assert isinstance(data.samples, PreparedSamples)
    assert_same_samples(data.samples, expected.samples)
    assert_same_samples([data.samples[i] for i in range(len(data.samples))], expected.samples)
    assert data.samples[-1].id == expected.samples[-1].id
    with pytest.raises(IndexError):
        data.samples[len(data.samples)]
    # 60 rows: 2 refused, 2 copies, an answer of one token and its end.
    assert (summary.refused_rows, summary.duplicates.count, summary.zeroed_samples) == (2, 2, 1)
    assert summary.samples == (58 if duplicates == "keep" else 56)
    assert f"prepared in {folder}" in data.summary.source


def test_a_run_may_go_on_with_prepared_data(config, toy_tokenizer, small_shards):
    """The position in the stream is the same with and without, so either can continue the other."""
    config = config()
    loaded = plain(config, toy_tokenizer).samples
    prepare(config, toy_tokenizer, 31, workers=0)
    mapped = load_dataset(config, toy_tokenizer, 31).samples
    assert mapped.fingerprint == fingerprint(loaded)
    first, second = (RowIterator(samples, 4, 32, seed=3) for samples in (loaded, mapped))
    for _ in range(5):
        next(first)
    second.set_state(first.get_state())
    for _ in range(20):
        ours, theirs = next(second), next(first)
        assert ours.sample_ids == theirs.sample_ids
        np.testing.assert_array_equal(ours.loss_mask, theirs.loss_mask)


def test_the_arrays_are_views_of_the_file(config, toy_tokenizer):
    config = config()
    prepare(config, toy_tokenizer, 31, workers=0)
    sample = load_dataset(config, toy_tokenizer, 31).samples[3]
    for array in (sample.input_ids, sample.loss_mask):
        assert not array.flags.owndata
        assert not array.flags.writeable


KILLED = """
import os, sys
from pathlib import Path
import train.data.prepare as module
from train.data.config import DataConfig
module.SHARD_RECORDS = 1
chunks_of = module.chunks_of
module.chunks_of = lambda records: chunks_of(records, 4)
close = module._Work._close_shard
def close_and_die(self, kept, read):
    if len(self._state["shards"]) == int(sys.argv[2]):
        (self._folder / "00007.arrow.part").write_bytes(b"half")
        os.kill(os.getpid(), 9)
    close(self, kept, read)
module._Work._close_shard = close_and_die
module.prepare(DataConfig(sys.argv[1], prepared=sys.argv[3], duplicates="drop", min_loss_tokens=3), None, 31, workers=0)
"""


def token_rows() -> list:
    rng = random.Random(3)
    rows = [{"id": f"s{i % 25}", "input_ids": rng.choices(range(31), k=9), "loss_mask": [1] * 9} for i in range(40)]
    rows[33] = dict(rows[2])  # a copy, and the id, of a row that an earlier process kept
    rows[5] = {"input_ids": [99], "loss_mask": [1]}
    return rows


def test_killed_and_resumed_equals_never_interrupted(write_rows, tmp_path, small_shards, monkeypatch):
    path = write_rows(token_rows())
    whole = DataConfig(path, prepared=str(tmp_path / "whole"), duplicates="drop", min_loss_tokens=3)
    straight, expected = prepare(whole, None, 31, workers=0)
    killed = dataclasses.replace(whole, prepared=str(tmp_path / "killed"))
    done = subprocess.run(
        [sys.executable, "-c", KILLED, path, "7", killed.prepared],
        cwd=Path(__file__).parents[3], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == -9, done.stderr
    (folder,) = Path(killed.prepared).iterdir()
    assert not is_prepared(folder)
    assert find_prepared(killed, None, 31) is None  # unfinished work is never trained on
    read = []
    original = module.read_chunks
    monkeypatch.setattr(
        module,
        "read_chunks",
        lambda arguments, chunks, workers: original(
            arguments, (read.append(len(records)) or (records, n) for records, n in chunks), workers
        ),
    )
    resumed, summary = prepare(killed, None, 31, workers=0)
    assert resumed == folder
    assert sum(read) == 40 - 7 * 4
    assert summary == expected
    files = sorted(file.name for file in straight.glob("*.arrow"))
    assert files == sorted(file.name for file in folder.glob("*.arrow"))
    assert all((straight / name).read_bytes() == (folder / name).read_bytes() for name in files)
    assert expected.duplicates.count == 1
    # Rows 25 to 39 bear ids of earlier ones, but row 33 is left out, and row 30 is the first s5 that is a sample.
    assert expected.notes["ids that occur twice, made unique"].count == 13


def test_nothing_old_is_used_for_other_work(config, toy_tokenizer, make_toy_tokenizer, toy_template, tmp_path):
    config = config()
    prepare(config, toy_tokenizer, 31, workers=0)
    assert find_prepared(config, toy_tokenizer, 31)
    turned = tmp_path / "turned.jinja"
    turned.write_text(toy_template.replace("<|im_end|>", "<pad>"))
    rows = Path(config.path).read_bytes()
    for change in (
        {"template": str(turned)}, {"max_length": 9}, {"min_loss_tokens": 2}, {"limit": 5}, {"duplicates": "drop"},
        {"sample_share": 0.5}, {"history": "one_row"},
    ):  # fmt: skip
        assert find_prepared(dataclasses.replace(config, **change), toy_tokenizer, 31) is None, change
    assert find_prepared(config, make_toy_tokenizer(bos=True), 31) is None
    assert find_prepared(config, toy_tokenizer, 30) is None
    Path(config.path).write_bytes(rows + b"\n")
    assert find_prepared(config, toy_tokenizer, 31) is None
    Path(config.path).write_bytes(rows)
    for same in ({"seed": 9}, {"shuffle": False}, {"packing": "first_fit"}, {"min_retention": 0.0}):
        assert find_prepared(dataclasses.replace(config, **same), toy_tokenizer, 31), same


def test_a_tokenizer_that_was_used_is_the_same_one(config, make_toy_tokenizer):
    """Truncation and padding of its last call are no part of a tokenizer."""
    config, tokenizer = config(), make_toy_tokenizer()
    prepare(config, tokenizer, 31, workers=0)
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding()
    assert find_prepared(config, tokenizer, 31)


def test_a_named_folder_as_data_path(config, toy_tokenizer, tmp_path):
    """It needs the files it was made of no more; options that would have given other samples are named."""
    config = config()
    expected = plain(config, toy_tokenizer).samples
    folder, _ = prepare(config, toy_tokenizer, 31, folder=tmp_path / "mine", workers=0)
    Path(config.path).unlink()
    named = dataclasses.replace(config, path=str(folder))
    assert_same_samples(load_dataset(named, toy_tokenizer, 31).samples, expected)
    with pytest.raises(DataError, match=r"data\.max_length was 4096, is 9; data\.min_loss_tokens was 3, is 5"):
        load_dataset(dataclasses.replace(named, max_length=9, min_loss_tokens=5), toy_tokenizer, 31)


def test_a_folder_of_other_work_is_refused(config, toy_tokenizer, tmp_path):
    config = config()
    folder, _ = prepare(config, toy_tokenizer, 31, folder=tmp_path / "mine", workers=0)
    before = (folder / "prepared.json").read_bytes()
    with pytest.raises(DataError, match=r"prepared in another way \(differing: data\.max_length\)"):
        prepare(dataclasses.replace(config, max_length=8), toy_tokenizer, 31, folder=folder, workers=0)
    assert (folder / "prepared.json").read_bytes() == before
    with pytest.raises(DataError, match="holds other things"):
        prepare(config, toy_tokenizer, 31, folder=tmp_path, workers=0)


def test_two_processes_do_not_share_a_folder(config, toy_tokenizer, tmp_path):
    with module._alone(tmp_path), pytest.raises(DataError, match="another process is preparing"):
        prepare(config(), toy_tokenizer, 31, folder=tmp_path, workers=0)


def test_low_retention_stops_and_a_lower_bound_goes_on(config, toy_tokenizer, monkeypatch):
    rows = [chat("abc", "defgh", id=f"g{i}") for i in range(4)]
    rows += [b"{no json"] * 3 + [chat("abc", "d", id="z")] * 2 + [{"messages": [{"role": "user", "content": "a"}]}]
    config = config(rows)
    with pytest.raises(DataError) as refusal:
        prepare(config, toy_tokenizer, 31, workers=0)
    lines = str(refusal.value).splitlines()
    assert lines[0].startswith("40.0 % of the rows of")
    assert "1. not" in lines[1]
    assert ": 3 (first: rows.jsonl:5" in lines[1]
    assert "2. fewer than 3 supervised tokens: 2 (first: rows.jsonl:8)" in lines[2]
    assert lines[2].endswith("lower data.min_loss_tokens or raise data.max_length")
    assert "3. no assistant turn: 1" in lines[3]
    assert lines[1].endswith("The files are no JSON lines in UTF-8; look at the line that is named")
    assert "Lower data.min_loss_tokens" not in lines[1]
    with pytest.raises(DataError, match=r"less than data\.min_retention"):
        plain(config, toy_tokenizer)
    monkeypatch.setattr(module.ChunkReader, "read", lambda *_: pytest.fail("read once more"))
    folder, summary = prepare(dataclasses.replace(config, min_retention=0.4), toy_tokenizer, 31, workers=0)
    assert is_prepared(folder)
    assert summary.kept == 4


def test_a_sample_is_chosen_by_content(write_rows, tmp_path):
    """The same rows whatever the files and their order, about as many as asked for, others for another seed."""
    rng = random.Random(1)
    rows = [{"id": f"s{i}", "input_ids": rng.choices(range(31), k=20), "loss_mask": [1] * 20} for i in range(400)]
    one = write_rows(rows)
    for part in range(4):
        shuffled = rows[part::4]
        rng.shuffle(shuffled)
        write_rows(shuffled, f"parts/{part}.jsonl")

    def chosen(path, **options):
        data = load_dataset(DataConfig(str(path), sample_share=0.3, prepared="nowhere", **options), None, 31)
        assert data.summary.rows + data.summary.not_sampled == 400
        return {sample.id for sample in data.samples}

    assert chosen(one) == chosen(tmp_path / "parts")
    assert 80 < len(chosen(one)) < 160  # 120 expected, 9 its deviation
    assert chosen(one) != chosen(one, sample_seed=1)
    larger = {s.id for s in load_dataset(DataConfig(one, sample_share=0.6, prepared="nowhere"), None, 31).samples}
    assert chosen(one) < larger


def test_chunks_and_shards_are_bounded_by_what_they_hold(config, toy_tokenizer, monkeypatch):
    """Long rows make small chunks and shards; the samples are the same."""
    records = [(None, b"x" * size) for size in (3, 3, 3, 20, 1, 1, 1, 1, 1)]
    chunks = [([len(record) for _, record in chosen], out) for chosen, out in module.chunks_of(iter(records), 4, 9)]
    assert chunks == [([3, 3, 3], 0), ([20], 0), ([1, 1, 1, 1], 0), ([1], 0)]
    sampled = [None, records[0], None, None, None, {"a": "xxxx", "b": ["xxx", {"c": "xx"}]}, None]
    sampled[5] = (None, sampled[5])
    assert [(len(chosen), out) for chosen, out in module.chunks_of(iter(sampled), 4, 9)] == [(1, 3), (1, 1), (0, 1)]

    given = config(prepared="nowhere")
    monkeypatch.setattr(module, "SHARD_TOKENS", 100)
    original = module.chunks_of
    monkeypatch.setattr(module, "chunks_of", lambda rows: original(rows, 256, 400))
    folder, _ = prepare(given, toy_tokenizer, 31, folder=Path(given.path).parent / "small", workers=0)
    sizes = [sum(len(s.input_ids) for s in PreparedSamples(folder, [(shard["name"], shard["samples"])]))
             for shard in json.loads((folder / "prepared.json").read_text())["shards"]]  # fmt: skip
    assert len(sizes) > 5
    assert all(100 <= size < 200 for size in sizes[:-1])  # a chunk of 400 bytes has some 60 tokens
    assert_same_samples(load_dataset(DataConfig(str(folder), template=given.template, min_loss_tokens=3),
                                     toy_tokenizer, 31).samples, plain(given, toy_tokenizer).samples)  # fmt: skip


def test_going_through_all_samples_maps_one_shard_at_a_time(config, toy_tokenizer, small_shards, monkeypatch):
    folder, _ = prepare(config(), toy_tokenizer, 31, workers=0)
    samples, _ = open_prepared(folder)
    mapped = set()
    for sample in samples:
        lines = Path("/proc/self/maps").read_text().splitlines()
        mapped.add(sum(str(folder) in line for line in lines))
        del sample
    assert max(mapped) <= 2  # the next one is mapped before the last one goes
    assert len(list(folder.glob("*.arrow"))) == 15


MEASURE = """
import resource, sys
from train.data.config import DataConfig
from train.data.prepare import prepare
_, summary = prepare(DataConfig(sys.argv[1]), None, 64, folder=sys.argv[2], workers=0)
print(summary.rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_data(tmp_path):
    """Twenty times the rows, nearly the same peak: the samples alone would take 50 MB more."""
    peaks = {}
    for times in (1, 20):
        folder = tmp_path / f"x{times}"
        folder.mkdir()
        for copy in range(times):
            rows = [{"input_ids": [i % 64] * 1000 + [copy], "loss_mask": [1] * 1001} for i in range(500)]
            (folder / f"{copy:02}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(folder),
             str(tmp_path / f"out{times}")],
            cwd=Path(__file__).parents[3], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
            timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        rows, peaks[times] = map(int, done.stdout.split())
        assert rows == 500 * times
    assert peaks[20] - peaks[1] < 80_000, peaks  # a shard of 8192 rows in the making takes 41 MB, twice for a moment


@given(st.lists(st.lists(st.integers(0, 40) | st.integers(2**63, 2**64 - 1), max_size=30), max_size=12))
def test_hashes_seen_as_a_set_would(batches):
    seen, known = SeenHashes(), set()
    for batch in batches:
        expected = []
        for value in batch:
            expected.append(value not in known)
            known.add(value)
        assert seen.add(np.array(batch, np.uint64)).tolist() == expected
    assert len(seen) == len(known)
    assert len(seen._runs) <= 2 + np.log2(max(1, len(known)))


def test_an_account_survives_storing(config, toy_tokenizer):
    summary = plain(config(), toy_tokenizer).summary
    assert Summary.from_json(json.loads(json.dumps(summary.to_json()))) == summary
