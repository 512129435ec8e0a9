"""From files to samples: case T07, the account of what was kept and dropped, one result everywhere."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import draccus
import numpy as np
import pytest

from train.data import row_reader
from train.data.config import DataConfig
from train.data.pipeline import load_dataset
from train.data.samples import make_sample
from train.data.summary import DataError
from train.data.templates import TemplateError

T01 = {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]}
T01_IDS = [2, 6, 4, 15, 16, 3, 4, 2, 7, 4, 17, 18, 3, 4]
T01_TOKENS = {"input_ids": T01_IDS, "loss_mask": [0] * 10 + [1, 1, 1, 0]}


@pytest.fixture
def load(toy_tokenizer, toy_template_file):
    def run(path, tokenizer=toy_tokenizer, vocab_size=31, **options):
        config = DataConfig(
            str(path), **{"template": toy_template_file, "min_loss_tokens": 1, "min_retention": 0.0, **options}
        )
        return load_dataset(config, tokenizer, vocab_size)

    return run


@pytest.mark.parametrize("row", [T01, T01_TOKENS], ids=["conversation", "ids"])
class TestT07:
    @pytest.mark.parametrize(("max_length", "supervised"), [(14, 3), (12, 2)])
    def test_kept(self, load, write_rows, row, max_length, supervised):
        data = load(write_rows([row]), max_length=max_length)
        (sample,) = data.samples
        assert sample.input_ids.tolist() == T01_IDS[:max_length]
        assert len(sample.loss_mask) == max_length
        assert sample.loss_mask.sum() == supervised
        assert data.summary.truncated.count == int(max_length < 14)
        assert data.summary.kept == 1

    def test_no_supervised_token_keeps_its_place_with_a_zero_mask(self, load, write_rows, row):
        data = load(write_rows([row, {**T01_TOKENS, "loss_mask": [1] * 14}]), max_length=10)
        assert [sample.loss_mask.sum() for sample in data.samples] == [0, 10]
        assert [len(sample.input_ids) for sample in data.samples] == [10, 10]
        assert data.summary.zeroed["no supervised token"].count == 1
        assert (data.summary.samples, data.summary.kept, data.summary.truncated.count) == (2, 1, 2)

    def test_all_dropped_is_an_error_with_the_account(self, load, write_rows, row):
        with pytest.raises(
            DataError, match=r"(?s)nothing to train on.*2  no supervised token  \(first: rows.jsonl:1\)"
        ):
            load(write_rows([row, row]), max_length=10)


def test_too_few_and_no_pair(load, write_rows):
    def masked(*ones):
        return {"input_ids": [1] * 8, "loss_mask": [int(i in ones) for i in range(8)]}

    data = load(write_rows([masked(0, 2, 4, 6), masked(0, 1), masked(0, 1, 2), masked()]), min_loss_tokens=3)
    assert [int(sample.loss_mask.sum()) for sample in data.samples] == [0, 0, 3, 0]
    assert {name: tally.count for name, tally in data.summary.zeroed.items()} == {
        "no two adjacent supervised tokens": 1,
        "fewer than 3 supervised tokens": 1,
        "no supervised token": 1,
    }


def test_truncation_can_take_the_pair_away():
    judged = make_sample("x", np.arange(6), np.array([0, 1, 0, 0, 1, 1]), max_length=5, min_loss_tokens=1)
    assert judged.truncated
    assert judged.zeroed == "no two adjacent supervised tokens"
    with pytest.raises(ValueError, match="sample x: 6 ids but 5"):
        make_sample("x", np.arange(6), np.zeros(5), max_length=9, min_loss_tokens=1)


def test_account(load, write_rows, capsys):
    leading = {"conversations": [{"from": f, "value": v} for f, v in [("gpt", "p"), ("human", "a"), ("gpt", "b")]]}
    rows = [
        {**T01, "id": "x"},
        b"{",
        {"messages": [{"role": "user", "content": "a"}]},
        leading,
        {"messages": [{"role": "boss", "content": "a"}]},
        {"input_ids": [1, 31], "loss_mask": [1, 1]},
        {**T01, "id": "x"},
        {"messages": [{"role": "boss", "content": "a"}]},
        {"input_ids": list(range(20)), "loss_mask": [1] * 20},
    ]
    path = write_rows(rows, "in/rows.jsonl")
    write_rows([], "in/readme.md")
    data = load(Path(path).parent, max_length=14)
    summary = data.summary
    assert (summary.rows, summary.samples, summary.kept, summary.refused_rows) == (9, 4, 4, 5)
    assert [sample.id for sample in data.samples] == ["x", "rows.jsonl:4", "x@rows.jsonl:7", "rows.jsonl:9"]
    assert {name: (tally.count, tally.example) for name, tally in summary.refused.items()} == {
        "not JSON": (1, summary.refused["not JSON"].example),
        "no assistant turn": (1, "rows.jsonl:3"),
        "unknown role": (2, "rows.jsonl:5, 'boss'"),
        "id beyond the vocabulary": (1, "rows.jsonl:6, id 31, vocabulary 31"),
    }
    assert summary.refused["not JSON"].example.startswith("rows.jsonl:2, ")
    assert {name: tally.count for name, tally in summary.notes.items()} == {
        "leading turns dropped before the first user turn": 1,
        "ids that occur twice, made unique": 1,
        "files of other kinds, not read": 1,
    }
    assert summary.truncated.example == "rows.jsonl:9, 20 tokens"
    assert (summary.tokens, summary.supervised_tokens, summary.longest) == (
        14 + 12 + 14 + 14,
        3 + 2 + 3 + 14,
        14,
    )
    text = summary.format()
    for piece in (
        "rows              9",
        "2  unknown role  (first: rows.jsonl:5, 'boss')",
        "kept              4  44.4 %",
    ):
        assert piece in text
    record = json.loads(json.dumps(summary.to_json()))
    assert record["refused"]["unknown role"] == {"count": 2, "example": "rows.jsonl:5, 'boss'"}
    assert (record["kept"], record["rows"]) == (4, 9)


def test_a_text_that_would_fill_the_memory_is_refused(load, write_rows, monkeypatch):
    """All but its beginning would be cut off; tokenising it whole takes hundreds of bytes a character."""
    monkeypatch.setattr(row_reader, "LONGEST_TEXT", 100)
    endless = "a " * 450
    long = {"messages": [{"role": "user", "content": endless}, {"role": "assistant", "content": "a b"}]}
    data = load(write_rows([T01, long, {"text": endless}, {"text": "a b c"}]), max_length=14, min_retention=0.0)
    assert data.summary.refused["text is too long"].count == 2
    assert data.summary.refused["text is too long"].example.endswith("characters, a row may have 896")
    assert data.summary.kept == 2
    assert load(write_rows([T01, long]), max_length=20).summary.samples == 2


def test_ids_that_the_tokenizer_makes_are_checked_too(load, write_rows):
    row = {"messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "a b"}]}
    data = load(write_rows([row, T01]), vocab_size=30)
    assert data.summary.refused["id beyond the vocabulary"].example == "rows.jsonl:1, id 30, vocabulary 30"
    assert len(data.samples) == 1


def test_nothing_in_the_files(load, write_rows):
    with pytest.raises(DataError, match=r"holds no rows; empty: rows.jsonl"):
        load(write_rows([]))
    with pytest.raises(DataError, match=r"holds no rows; empty: rows.jsonl.gz"):
        load(write_rows([b"", b" "], "rows.jsonl.gz"))
    with pytest.raises(DataError, match=r"(?s)nothing to train on.*refused .* 1 100.0 %"):
        load(write_rows([b"x"]))


def test_rows_of_ids_need_no_tokenizer(load, write_rows):
    assert len(load(write_rows([T01_TOKENS]), tokenizer=None).samples) == 1
    with pytest.raises(DataError, match="there is no tokenizer"):
        load(write_rows([T01]), tokenizer=None)


def test_slow_tokenizer_is_refused(load, write_rows):
    class Slow:
        is_fast = False
        special_tokens_map: dict = {}  # noqa: RUF012
        chat_template = None

    with pytest.raises(DataError, match="Slow tells no character offsets"):
        load(write_rows([T01]), tokenizer=Slow())


def test_template_is_verified_unless_switched_off(load, write_rows, make_toy_tokenizer, toy_template):
    own = toy_template.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    data = load(write_rows([T01, T01]), tokenizer=make_toy_tokenizer(chat_template=own))
    assert "text equal to the tokenizer's own on 2 rows, ids on one row of each kind, 1" in data.summary.template
    other = make_toy_tokenizer(chat_template=own.replace("<|im_end|>", "<mask>"))
    with pytest.raises(TemplateError, match=r"rows.jsonl:1: chat template .*toy.jinja does not render"):
        load(write_rows([T01]), tokenizer=other)
    data = load(write_rows([T01]), tokenizer=other, verify_template=False)
    assert "verify_template=false" in data.summary.template


def test_limit_and_mixed_files(load, write_rows, tmp_path):
    write_rows([T01, T01_TOKENS, T01], "in/a.jsonl")
    write_rows([T01_TOKENS, T01], "in/b.jsonl.gz")
    data = load(tmp_path / "in")
    assert [sample.id for sample in data.samples] == [
        "a.jsonl:1",
        "a.jsonl:2",
        "a.jsonl:3",
        "b.jsonl.gz:1",
        "b.jsonl.gz:2",
    ]
    assert all(sample.input_ids.tolist() == T01_IDS for sample in data.samples)
    assert [s.id for s in load(tmp_path / "in", limit=4).samples] == [s.id for s in data.samples[:4]]


def test_more_rows_than_one_batch_stay_in_order(load, write_rows):
    rows = [[T01, T01_TOKENS, b"{"][i % 3] for i in range(700)]
    data = load(write_rows(rows))
    assert [sample.id for sample in data.samples] == [f"rows.jsonl:{i + 1}" for i in range(700) if i % 3 != 2]


def test_enable_thinking_reaches_the_template(load, write_rows, make_toy_tokenizer):
    from train.data.templates import shipped_source

    own = shipped_source("qwen3").replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    tokenizer = make_toy_tokenizer(chat_template=own)
    path = write_rows([T01])
    on, off = (load(path, tokenizer=tokenizer, template="auto", enable_thinking=value) for value in (True, False))
    assert on.summary.template.startswith("qwen3 (text equal")
    assert on.samples[0].input_ids.tolist() == off.samples[0].input_ids.tolist()
    answer = off.samples[0].input_ids[off.samples[0].loss_mask == 1]
    assert answer.tolist() == [17, 18, 3]
    assert on.samples[0].input_ids[on.samples[0].loss_mask == 1].tolist()[:1] == [9]


def test_options_reach_the_template(load, write_rows, toy_template, tmp_path):
    (tmp_path / "spy.jinja").write_text("{{- 'e' if reasoning_effort == 'high' else 'f' -}}" + toy_template)
    (tmp_path / "clock.jinja").write_text("{{- 'e' if strftime_now('%d') == '07' else 'f' -}}" + toy_template)
    path = write_rows([T01])
    for options, first in (({}, 20), ({"template_options": {"reasoning_effort": "high"}}, 19)):
        (sample,) = load(path, template=str(tmp_path / "spy.jinja"), **options).samples
        assert sample.input_ids.tolist() == [first, *T01_IDS]
    for date, first in (("2026-01-01", 20), ("2026-03-07", 19)):
        (sample,) = load(path, template=str(tmp_path / "clock.jinja"), date=date).samples
        assert sample.input_ids.tolist() == [first, *T01_IDS]


def test_turns_fan_out_into_samples(load, write_rows, make_toy_tokenizer):
    """Each with an id of its own; the account says how many were made of how many rows."""
    from train.data.templates import shipped_source

    own = shipped_source("qwen3").replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    chat = {"id": "x", "messages": [*T01["messages"], *T01["messages"]]}
    path = write_rows([chat, T01_TOKENS])
    tokenizer = make_toy_tokenizer(chat_template=own)
    data = load(path, tokenizer=tokenizer, template="auto")
    assert [sample.id for sample in data.samples] == ["x#turn1", "x", "rows.jsonl:2"]
    summary = data.summary
    assert (summary.rows, summary.fanned_out, summary.samples, summary.kept) == (2, 1, 3, 3)
    assert "rows              2  made 3 samples" in summary.format()
    assert summary.to_json()["fanned_out"] == 1
    data = load(path, tokenizer=tokenizer, template="auto", history="last_turn")
    assert [sample.id for sample in data.samples] == ["x", "rows.jsonl:2"]
    assert data.summary.notes["assistant turns not supervised (data.history=last_turn)"].count == 1


def test_a_reader_reads_any_part_in_any_order(write_rows, toy_tokenizer, toy_template_file):
    """What becomes of a record depends on it and the options alone, so workers may share the data out."""
    from train.data.row_reader import RowReader
    from train.data.sources import open_source

    rows = [T01, T01_TOKENS, b"{", {"text": "a b"}, {**T01, "id": "x"}, {"messages": []}] * 3
    config = DataConfig(write_rows(rows), template=toy_template_file, min_loss_tokens=1, min_retention=0.0)
    records = list(open_source(config.path).records())

    def told(row):
        encoded = [(e.input_ids.tolist(), e.loss_mask.tolist(), e.notes, e.turn) for e in row.rows]
        return str(row.place), row.id, encoded, row.refused and (row.refused.reason, row.refused.detail)

    together = [told(row) for row in RowReader(config, toy_tokenizer, 31).read(records)]
    reader = RowReader(config, toy_tokenizer, 31)
    apart = [told(row) for record in reversed(records) for row in reader.read([record])]
    assert apart[::-1] == together
    assert [row[3] and row[3][0] for row in together[:6]] == [None, None, "not JSON", None, None, "'messages' is empty"]


def test_another_process_makes_the_same_samples(write_rows, toy_template_file):
    """Hash seeds differ between processes; samples must not."""
    rows = [{**T01_TOKENS, "input_ids": [i % 31] * 14, "id": f"r{i}"} for i in range(50)]
    path = write_rows(rows)
    code = (
        "import sys; from train.data.config import DataConfig; from train.data.pipeline import load_dataset;"
        "from train.data.rows import fingerprint, RowIterator;"
        "data = load_dataset(DataConfig(sys.argv[1], min_loss_tokens=1), None, 31);"
        "rows = RowIterator(data.samples, 4, 16, seed=3);"
        "print(fingerprint(data.samples), [next(rows).sample_ids for _ in range(20)])"
    )
    root = Path(__file__).resolve().parents[3]
    outputs = {
        subprocess.run([sys.executable, "-c", code, path], cwd=root, env={**os.environ, "PYTHONHASHSEED": seed},
                       capture_output=True, text=True, check=True).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(outputs) == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("path", ""), ("format", "csv"), ("template", ""), ("max_length", 1), ("min_loss_tokens", 0),
        ("leading_assistant", "keep"), ("limit", 0), ("seed", -1), ("seed", 2**32), ("markers", "phi"),
        ("history", "all"), ("marker_text", "keep"), ("date", "today"), ("template_options", {"tools": []}),
    ],
)  # fmt: skip
def test_options_that_cannot_be_meant(option, value):
    with pytest.raises(ValueError, match=re.escape(f"data.{option} is {value!r}")):
        DataConfig(**{"path": "x", option: value})


def test_config_survives_yaml():
    options = {"reasoning_effort": "high", "clear_thinking": True}
    config = DataConfig("x.jsonl", enable_thinking=False, limit=3, template="qwen3", template_options=options)
    assert draccus.decode(DataConfig, draccus.encode(config)) == config
    assert all(field.name in DataConfig.__doc__ for field in dataclasses.fields(DataConfig))
