"""Converters on small files laid out as each source publishes them, through the hub's own client and by hand."""

import gzip
import json

import huggingface_hub
import pytest

from train.evaluate.converters import SOURCES, ConvertError, file_rows, hub_rows, prompts, write_task
from train.evaluate.tasks_command import main

STEPS = "\nPlease reason step by step, and put your final answer within \\boxed{}."
#: Per task: a row with the fields its source publishes (values invented), and what must be asked.
PUBLISHED = {
    "gsm8k": (
        {"question": "Ann has 3 pens. How many?", "answer": "She has 3.\n#### 3"},
        ["Ann has 3 pens. How many?" + STEPS],
    ),
    "math500": (
        {"problem": "Find $x$.", "solution": "...", "answer": "1", "subject": "Algebra", "level": 2,
         "unique_id": "test/algebra/1.json"},
        ["Find $x$." + STEPS],
    ),
    "aime25": (
        {"problem_idx": 1, "problem": "Sum?", "answer": "70", "problem_type": ["Number Theory"]}, ["Sum?" + STEPS]
    ),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f(a):\n    ...\n", "canonical_solution": "    return a\n",
         "test": "def check(c): ...", "entry_point": "f"},
        ["Write a solution to the following problem and make sure that it passes the tests:\n"
         "```python\ndef f(a):\n    ...\n\n```"],
    ),
    "mbpp": (
        {"source_file": "x.ipynb", "task_id": 11, "prompt": "Write a python function.", "code": "def f(): ...",
         "test_imports": [], "test_list": ["assert f()"]},
        ["Write a python function."],
    ),
    "livecodebench": (
        {"question_title": "A", "question_content": "Add two numbers.", "platform": "atcoder", "question_id": "a",
         "contest_id": "abc", "contest_date": "2023-05-01T00:00:00", "starter_code": "", "difficulty": "easy",
         "public_test_cases": "[]", "private_test_cases": "eJw=", "metadata": "{}"},
        ["You are an expert Python programmer. You will be given a question (problem specification) and will generate "
         "a correct Python program that matches the specification and passes all tests. You will NOT return anything "
         "except for the program\n\n### Question:\nAdd two numbers.\n\n"
         "### Format: Write your code in the following format:\n```python\n# YOUR CODE HERE\n```\n\n"
         "### Answer: (use the provided format with backticks)"],
    ),
    "mt-bench": (
        {"prompt": ["Write a post.", "Rewrite it."], "prompt_id": 1, "category": "writing", "reference": []},
        ["Write a post.", "Rewrite it."],
    ),
    "alpaca": ({"instruction": "Name a colour.", "input": "", "output": "Red", "text": "..."}, ["Name a colour."]),
    "arena-hard-v2": (
        {"uid": "0", "category": "hard_prompt", "subcategory": "coding", "prompt": "Fix my code."}, ["Fix my code."]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SOURCES)
def test_a_published_row_becomes_what_is_asked(name):
    row, turns = PUBLISHED[name]
    assert list(prompts(name, [row])) == [{"id": f"{name}/0", "turns": turns}]


def test_variants_of_rows():
    lcb = PUBLISHED["livecodebench"][0] | {"starter_code": "class Solution:\n    def f(self):"}
    (row,) = prompts("livecodebench", [lcb])
    assert (
        "### Format: Use the following code structure:\n```python\nclass Solution:\n    def f(self):\n```"
        in (row["turns"][0])
    )
    (row,) = prompts("alpaca", [{"instruction": "Sort.", "input": "3 1 2", "output": ""}])
    assert row["turns"] == ["Sort.\n\nInput:\n3 1 2"]
    (row,) = prompts("mt-bench", [{"question_id": 81, "category": "writing", "turns": ["a", "b"]}])
    assert row["turns"] == ["a", "b"], "the original file's name of the turns"
    mbpp = [PUBLISHED["mbpp"][0] | {"task_id": number} for number in (2, 11, 510, 511, 602)]
    assert [row["id"] for row in prompts("mbpp", mbpp)] == ["mbpp/0", "mbpp/1"], "the test split is 11 to 510"


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".parquet"])
def test_files_of_every_kind_hold_the_same_rows(tmp_path, suffix):
    rows = [PUBLISHED["aime25"][0] | {"problem_idx": i, "problem": f"Tough? {i} é"} for i in range(3)]
    path = tmp_path / f"rows{suffix}"
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_bytes(gzip.compress(lines.encode()) if suffix.endswith("gz") else lines.encode())
    assert list(file_rows([path])) == rows


def test_several_files_follow_each_other(tmp_path):
    row = PUBLISHED["livecodebench"][0]
    for number in ("", "2"):
        (tmp_path / f"test{number}.jsonl").write_text(json.dumps(row | {"question_content": f"file {number}"}) + "\n")
    path, count = write_task("livecodebench", file_rows([tmp_path / "test.jsonl", tmp_path / "test2.jsonl"]), tmp_path)
    assert count == 2
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["id"] for row in written] == ["livecodebench/0", "livecodebench/1"]
    assert "file 2" in written[1]["turns"][0]


@pytest.mark.parametrize(
    ("name", "config", "split"),
    [
        ("gsm8k", "main", "test"), ("math500", None, "test"), ("aime25", None, "train"), ("humaneval", None, "test"),
        ("mbpp", "sanitized", "test"), ("mt-bench", None, "train"), ("alpaca", None, "train"),
    ],
)  # fmt: skip
def test_the_hubs_client_reads_a_repository_of_that_layout(name, config, split, tmp_path, monkeypatch):
    """The real `datasets`, on a folder laid out as the hub's repository: its name, configuration and split are asked
    for."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / SOURCES[name].hub
    folder.mkdir(parents=True)
    row, turns = PUBLISHED[name]
    for held, content in ((split, row), ("validation", dict.fromkeys(row))):
        (folder / f"{held}.jsonl").write_text(json.dumps(content) + "\n")
    files = "".join(f"  - split: {held}\n    path: {held}.jsonl\n" for held in (split, "validation"))
    (folder / "README.md").write_text(
        f"---\nconfigs:\n- config_name: {config or 'default'}\n  data_files:\n{files}"
        "- config_name: other\n  data_files: validation.jsonl\n---\n"
    )
    assert [item["turns"] for item in prompts(name, hub_rows(name))] == [turns]


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("arena-hard-v2", ["data/arena-hard-v2.0/question.jsonl"]),
        ("livecodebench", ["test.jsonl", "test2.jsonl", "test3.jsonl", "test4.jsonl", "test5.jsonl", "test6.jsonl"]),
    ],
)
def test_plain_files_of_a_repository_are_fetched_from_the_hub(name, files, tmp_path, monkeypatch):
    """The real client, on a cache that holds the repository: by its name and kind, the files in their order."""
    commit = "0" * 40
    repository = tmp_path / f"datasets--{SOURCES[name].hub.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    key = "prompt" if name == "arena-hard-v2" else "question_content"
    for number, file in enumerate(files):
        path = repository / "snapshots" / commit / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(PUBLISHED[name][0] | {key: f"question {number}"}) + "\n")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    rows = list(prompts(name, hub_rows(name)))
    assert [f"question {number}" in row["turns"][0] for number, row in enumerate(rows)] == [True] * len(files)


@pytest.mark.parametrize("name", ["gsm8k", "arena-hard-v2"])
def test_without_the_hub_the_original_files_are_named(name, tmp_path, monkeypatch, capsys):
    """Nothing fetched, no network: the command goes on with the next task, and says how to do without."""
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    wanted = rf"{name}: .* cannot be had from the hub .*original file\(s\) .*draft-jax tasks convert {name} FILE"
    with pytest.raises(ConvertError, match=wanted):
        hub_rows(name)
    assert main(["get", name, "aime25"]) == 1
    assert [line.split(":")[1].strip() for line in capsys.readouterr().err.splitlines()] == [name, "aime25"]


def test_rows_of_something_else_are_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ConvertError, match=r"row 1 is none of gsm8k's \(KeyError: 'question'\); it holds answer, q"):
        write_task("gsm8k", [PUBLISHED["gsm8k"][0], {"q": "", "answer": ""}], tmp_path)
    with pytest.raises(ConvertError, match="row 0 of mbpp asks nothing"):
        write_task("mbpp", [{"task_id": 11, "prompt": " "}], tmp_path)
    with pytest.raises(ConvertError, match="holds no row of the task"):
        write_task("mbpp", [{"task_id": 1, "prompt": "x"}], tmp_path)
    with pytest.raises(ConvertError, match=r"no \.jsonl"):
        list(file_rows([tmp_path / "a.csv"]))
    with pytest.raises(ConvertError, match="cannot be read"):
        list(file_rows([tmp_path / "absent.jsonl"]))
    assert list(tmp_path.iterdir()) == []


def test_command_converts_lists_and_warns(tmp_path, capsys):
    (tmp_path / "question.jsonl").write_text(json.dumps(PUBLISHED["arena-hard-v2"][0]) + "\n")
    folder = str(tmp_path / "tasks")
    assert main(["convert", "arena-hard-v2", str(tmp_path / "question.jsonl"), "--folder", folder]) == 0
    printed = capsys.readouterr()
    assert "arena-hard-v2.jsonl: 1 prompts from lmarena-ai/arena-hard-auto (licence: Apache-2.0)" in printed.out
    assert "DeepSpec's arena-hard-v2 has 750 rows, this source 1" in printed.err
    (tmp_path / "tasks" / "mine.jsonl").write_text('{"turns": ["a"]}\n')
    assert main(["list", "--folder", folder]) == 0
    listed = capsys.readouterr().out
    assert {line.split()[0]: line.split()[-1] for line in listed.splitlines()[2:11]} == {
        name: "yes" if name == "arena-hard-v2" else "no" for name in SOURCES
    }
    assert "Also in" in listed
    assert "mine" in listed
    with pytest.raises(ValueError, match=r"unknown task\(s\) gsm9k; known: gsm8k"):
        main(["get", "gsm9k", "--folder", folder])
