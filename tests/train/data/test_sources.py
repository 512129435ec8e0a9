"""Records from JSON lines, Parquet and the datasets library; plain text; content in parts; flat memory."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from train.data.config import DataConfig
from train.data.formats import PlainText, RowRefused, parse_row
from train.data.pipeline import load_dataset
from train.data.sources import open_source
from train.data.summary import DataError

pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow: pip install draft-jax[data]")

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
ROWS = [
    {"id": "r1", "messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]},
    {
        "id": "r2",
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "t", "tool_call_id": "c1"},
            {"role": "assistant", "content": "b"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": None}}],
    },
    {"id": "r3", "messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]},
]


def write_parquet(path: Path, rows: list[dict], **options) -> None:
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    keys = dict.fromkeys(key for row in rows for key in row)
    table = pyarrow.Table.from_pylist([{key: row.get(key) for key in keys} for row in rows])
    pyarrow.parquet.write_table(table, path, **options)


def parsed(path) -> list:
    return [parse_row(record, place, vocab_size=31) for place, record in open_source(str(path)).records()]


def test_parquet_rows_equal_json_lines(tmp_path):
    """Columns give every row the fields of all of them, filled with nulls; what is read must be the same."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    write_parquet(tmp_path / "rows.parquet", ROWS, row_group_size=2)
    lines, columns = parsed(tmp_path / "rows.jsonl"), parsed(tmp_path / "rows.parquet")
    assert [row.messages for row in lines] == [row.messages for row in columns]
    assert [row.id for row in columns] == ["r1", "r2", "r3"]
    assert [str(row.place) for row in columns] == ["rows.parquet:1", "rows.parquet:2", "rows.parquet:3"]
    assert columns[1].tools == [{"type": "function", "function": {"name": "f"}}]
    assert (lines[0].tools, columns[0].tools) == (None, None)


def test_parquet_sharegpt_and_ids(tmp_path):
    write_parquet(
        tmp_path / "a.parquet", [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]
    )
    write_parquet(tmp_path / "b.parquet", [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}])
    chat, ids = parsed(tmp_path)
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]
    assert (ids.input_ids.tolist(), ids.loss_mask.tolist()) == ([1, 2, 3], [0, 1, 1])


def test_folder_of_all_kinds(tmp_path, toy_tokenizer, toy_template_file):
    write_parquet(tmp_path / "in/b.parquet", [ROWS[0]])
    (tmp_path / "in/a.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    (tmp_path / "in/c.jsonl.gz").write_bytes(gzip.compress(json.dumps(ROWS[2]).encode() + b"\n"))
    config = DataConfig(str(tmp_path / "in"), template=toy_template_file, min_loss_tokens=1)
    data = load_dataset(config, toy_tokenizer, 31)
    assert [sample.id for sample in data.samples] == ["r1", "r1@b.parquet:1", "r3"]
    assert data.samples[0].input_ids.tolist() == data.samples[1].input_ids.tolist()


def test_a_broken_parquet_file_is_named(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(DataError, match=r"x\.parquet cannot be read past row 0"):
        parsed(tmp_path / "x.parquet")


def test_datasets_library_streams(tmp_path):
    """A folder in the layout of a hub dataset, read by the library's own streaming code."""
    pytest.importorskip("datasets")
    write_parquet(tmp_path / "set/train.parquet", ROWS)
    write_parquet(tmp_path / "set/test.parquet", ROWS[:1])
    rows = parsed(f"hf://{tmp_path / 'set'}")
    assert [row.messages for row in rows] == [row.messages for row in parsed(tmp_path / "set/train.parquet")]
    assert str(rows[2].place) == f"hf://{tmp_path / 'set'}:3"
    assert [row.id for row in parsed(f"hf://{tmp_path / 'set'}?split=test")] == ["r1"]
    with pytest.raises(DataError, match=r"cannot be read past row 0: .*absent"):
        parsed(f"hf://{tmp_path / 'set'}?split=absent")


OFFLINE = """
import json, shutil, sys
from pathlib import Path
import datasets
from train.data.sources import open_source
home, rows = map(Path, sys.argv[1:])
# What the library keeps of a hub dataset that it read before, made from a file.
datasets.load_dataset("parquet", data_files=str(rows), split="train")
(made,) = (path.parent for path in home.glob("datasets/parquet/default-*/0.0.0/*/dataset_info.json"))
kept = home / "datasets/owner___chats/default/0.0.0" / ("a" * 40)
shutil.copytree(made, kept)
(kept / "parquet-train.arrow").rename(kept / "chats-train.arrow")
info = json.loads((kept / "dataset_info.json").read_text())
(kept / "dataset_info.json").write_text(json.dumps({**info, "dataset_name": "chats"}))
for path in ("owner/chats", f"owner/chats?revision={'a' * 40}", f"owner/chats?revision={'b' * 40}", "owner/unknown"):
    try:
        print("READ", sum(1 for _ in open_source("hf://" + path).records()))
    except ValueError as error:
        print("ERROR", error)
"""


def test_hub_datasets_without_network(tmp_path):
    """The library's cache is read, but never another revision than the one that was asked for."""
    pytest.importorskip("datasets")
    write_parquet(tmp_path / "rows.parquet", ROWS)
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(tmp_path / "home"), str(tmp_path / "rows.parquet")],
        cwd=Path(__file__).resolve().parents[3], capture_output=True, text=True, check=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    cached, same, other, unknown = [line for line in done.stdout.splitlines() if line.startswith(("READ", "ERROR"))]
    assert cached == same == f"READ {len(ROWS)}"
    assert f"the cached copy is of revision {'a' * 40}" in other
    assert "Couldn't reach 'owner/unknown'" in unknown
    for refusal in (other, unknown):
        assert "hf download owner/" in refusal


@pytest.mark.parametrize("path", ["hf://", "hf://a/b?splt=train", "hf://a/b?split="])
def test_hub_names_that_cannot_be_meant(path):
    with pytest.raises(DataError, match=r"names no dataset|splt; options are split, name, revision|an option is empty"):
        open_source(path)


def test_plain_text(write_rows):
    path = write_rows([{"text": "a b c"}, {"text": ""}, {"text": "d", "messages": ROWS[0]["messages"]}])
    first, empty, chat = parsed(path)
    assert first == PlainText("rows.jsonl:1", first.place, "a b c")
    assert empty.text == ""
    assert chat.messages  # a rendered text beside the chat it was made from


def test_plain_text_masks(make_toy_tokenizer, write_rows):
    """Every token is supervised but the one the tokenizer puts in front."""
    config = DataConfig(
        write_rows([{"text": "a b c"}, {"text": ""}, {"text": "p"}]), min_loss_tokens=1, min_retention=0.0
    )
    for bos, ids, mask in ((True, [1, 15, 16, 17], [0, 1, 1, 1]), (False, [15, 16, 17], [1, 1, 1])):
        data = load_dataset(config, make_toy_tokenizer(bos=bos), 30)  # a tokenizer without any template
        assert (data.samples[0].input_ids.tolist(), data.samples[0].loss_mask.tolist()) == (ids, mask)
        assert data.summary.notes["rows of plain text, all supervised"].count == 1
        assert set(data.summary.refused) == {"text is empty", "id beyond the vocabulary"}


def test_content_in_parts(write_rows):
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    (row,) = parsed(
        write_rows([{"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": []}]}])
    )
    assert [message["content"] for message in row.messages] == ["a b", ""]
    (row,) = parsed(write_rows([{"messages": [{"role": "developer", "content": "s"}, *ROWS[0]["messages"]]}]))
    assert row.messages[0] == {"role": "system", "content": "s"}


def test_nulls_that_were_written_in_json_stay():
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "f", "arguments": {"x": None}}}]}]}  # fmt: skip
    line = parse_row(json.dumps(row).encode(), "p", vocab_size=31)
    column = parse_row(row, "p", vocab_size=31)
    assert line.messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": None}
    assert column.messages[1]["tool_calls"][0]["function"]["arguments"] == {}
    with pytest.raises(RowRefused, match="malformed tool call"):
        parse_row(
            {"messages": [row["messages"][0], {"role": "assistant", "tool_calls": [{"name": "f"}]}]}, "p", vocab_size=31
        )


MEASURE = """
import resource, sys
from train.data.config import DataConfig
from train.data.pipeline import stream_samples
from train.data.summary import Summary
summary = Summary()
config = DataConfig(sys.argv[1], min_loss_tokens=1)
count = sum(1 for _ in stream_samples(config, None, 64, summary))
print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_data(tmp_path):
    """Twenty times the rows, the same peak: kept, they would take 50 MB more."""
    rows = [{"id": f"r{i}", "input_ids": [i % 64] * 500, "loss_mask": [1] * 500} for i in range(500)]
    peaks = {}
    for times in (1, 20):
        folder = tmp_path / f"x{times}"
        folder.mkdir()
        for copy in range(times):
            (folder / f"{copy:02}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            write_parquet(folder / f"{copy:02}.parquet", rows, row_group_size=500)
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(folder)],
            cwd=Path(__file__).resolve().parents[3], env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        count, peaks[times] = map(int, done.stdout.split())
        assert count == 1000 * times
    assert peaks[20] < peaks[1] + 15_000  # kB
