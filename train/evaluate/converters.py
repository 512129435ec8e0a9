"""Files of the public tasks, made from their public sources: we ship no data, and most licences forbid it.

A task file is JSONL, `{"id": "gsm8k/12", "turns": ["..."]}`, in the source's order. The words around a question
are DeepSpec's (dspark_spec 5.3): accept lengths can be compared only where the same words were asked.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


class ConvertError(ValueError):
    """A source that is not what its task publishes; the message names the row and what it lacks."""


@dataclass(frozen=True)
class Source:
    """Where a task comes from and what is asked of it.

    Attributes:
        hub: the data set on the Hugging Face hub.
        licence: as its card or repository says.
        rows: rows that DeepSpec's file of the task has.
        cap: prompts evaluated at most; of a longer file, a fixed random choice.
        turns: a row of the source -> the user's turns.
        load: arguments of `datasets.load_dataset` besides the name.
        files: files of the data set that are read as they are instead; `datasets` runs no loading script of a
            repository, and would ask all its files for one set of columns.
        keep: whether a row belongs to the task: original files may hold other splits too.
        local: the names of the original files, for people without the hub.
    """

    hub: str
    licence: str
    rows: int
    cap: int
    turns: Callable[[Row], list[str]]
    load: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    keep: Callable[[Row], bool] = lambda row: True
    local: str = ""


def _step_by_step(key: str) -> Callable[[Row], list[str]]:
    """A problem with the request that maths models are used to."""
    return lambda row: [f"{row[key]}\nPlease reason step by step, and put your final answer within \\boxed{{}}."]


def _humaneval(row: Row) -> list[str]:
    ask = "Write a solution to the following problem and make sure that it passes the tests:"
    return [f"{ask}\n```python\n{row['prompt']}\n```"]


def _livecodebench(row: Row) -> list[str]:
    """LiveCodeBench's own prompt, in one user turn; starter code takes the place of the empty frame."""
    role = (
        "You are an expert Python programmer. You will be given a question (problem specification) and will generate "
        "a correct Python program that matches the specification and passes all tests. You will NOT return anything "
        "except for the program"
    )
    starter = row["starter_code"]
    form = "Use the following code structure:" if starter else "Write your code in the following format:"
    code = starter or "# YOUR CODE HERE"
    return [
        f"{role}\n\n### Question:\n{row['question_content']}\n\n### Format: {form}\n```python\n{code}\n```\n\n"
        "### Answer: (use the provided format with backticks)"
    ]


def _alpaca(row: Row) -> list[str]:
    return [f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"]]


def _mt_bench(row: Row) -> list[str]:
    """The hub's copy calls the turns `prompt`, the original file `turns`."""
    return list(row["turns"] if "turns" in row else row["prompt"])


SOURCES: dict[str, Source] = {
    "gsm8k": Source(
        "openai/gsm8k", "MIT", 1319, 500, _step_by_step("question"), {"name": "main", "split": "test"},
        local="test.jsonl",
    ),
    "math500": Source(
        "HuggingFaceH4/MATH-500", "none stated (PRM800K's split of MATH, both MIT)", 500, 500, _step_by_step("problem"),
        {"split": "test"}, local="test.jsonl",
    ),
    "aime25": Source(
        "MathArena/aime_2025", "CC BY-NC-SA 4.0", 30, 30, _step_by_step("problem"), {"split": "train"},
        local="train-*.parquet",
    ),
    "humaneval": Source(
        "openai/openai_humaneval", "MIT", 164, 164, _humaneval, {"split": "test"}, local="HumanEval.jsonl.gz"
    ),
    "mbpp": Source(
        "google-research-datasets/mbpp", "CC BY 4.0", 257, 256, lambda row: [row["prompt"]],
        {"name": "sanitized", "split": "test"},
        keep=lambda row: 11 <= row["task_id"] <= 510,  # the test split of the original file of all splits
        local="sanitized-mbpp.json",
    ),
    "livecodebench": Source(
        "livecodebench/code_generation_lite", "CC (variant not stated)", 1055, 500, _livecodebench,
        files=tuple(f"test{n}.jsonl" for n in ("", 2, 3, 4, 5, 6)),
        local="test.jsonl test2.jsonl ... test6.jsonl",
    ),
    "mt-bench": Source(
        "HuggingFaceH4/mt_bench_prompts", "Apache-2.0", 80, 80, _mt_bench, {"split": "train"}, local="question.jsonl"
    ),
    "alpaca": Source(
        "tatsu-lab/alpaca", "CC BY-NC 4.0", 52002, 500, _alpaca, {"split": "train"}, local="alpaca_data.json"
    ),
    "arena-hard-v2": Source(
        "lmarena-ai/arena-hard-auto", "Apache-2.0", 750, 500, lambda row: [row["prompt"]],
        files=("data/arena-hard-v2.0/question.jsonl",),
        local="question.jsonl",
    ),
}  # fmt: skip


def hub_rows(name: str) -> Iterable[Row]:
    """A task's rows from the Hugging Face hub, all of them fetched when this returns.

    Raises:
        ConvertError: the `datasets` package is missing, or the hub's copy cannot be read.
    """
    source = SOURCES[name]
    try:
        if source.files:
            from huggingface_hub import hf_hub_download

            return file_rows([hf_hub_download(source.hub, file, repo_type="dataset") for file in source.files])
        import datasets

        return datasets.load_dataset(source.hub, **source.load)
    except ImportError as error:
        raise ConvertError(
            "getting tasks from the hub needs the datasets package: pip install 'draft-jax[tasks]', or convert the "
            "original files: draft-jax tasks convert"
        ) from error
    except Exception as error:  # whatever the hub's client raises, it is its refusal
        raise ConvertError(
            f"{name}: {source.hub} cannot be had from the hub ({type(error).__name__}: {error}). Without network, "
            f"convert its original file(s) ({source.local}): draft-jax tasks convert {name} FILE..."
        ) from error


def file_rows(paths: Sequence[str | Path]) -> Iterator[Row]:
    """Rows of local files, in the given order: .jsonl, .jsonl.gz, .json (a list) or .parquet.

    Raises:
        ConvertError: a file of another kind, or one that cannot be read.
    """
    for path in map(Path, paths):
        try:
            if path.name.endswith((".jsonl", ".jsonl.gz")):
                with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
                    yield from (json.loads(line) for line in file if line.strip())
            elif path.suffix == ".json":
                yield from json.loads(path.read_text(encoding="utf-8"))
            elif path.suffix == ".parquet":
                import pyarrow.parquet

                yield from pyarrow.parquet.read_table(path).to_pylist()
            else:
                raise ConvertError(f"{path} is no .jsonl, .jsonl.gz, .json or .parquet file")
        except ImportError as error:
            raise ConvertError(f"{path}: reading Parquet needs pyarrow: pip install 'draft-jax[tasks]'") from error
        except (OSError, EOFError, json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConvertError(f"{path} cannot be read: {error}") from error


def prompts(name: str, rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """Rows of a task's source -> rows of its file.

    Raises:
        ConvertError: a row lacks a field, or asks nothing. It is not left out: the rows after it would move.
    """
    source = SOURCES[name]
    index = 0
    for number, row in enumerate(rows):
        try:
            if not source.keep(row):
                continue
            turns = source.turns(row)
        except (KeyError, TypeError) as error:
            held = ", ".join(sorted(row)) if isinstance(row, Mapping) else f"a {type(row).__name__}"
            raise ConvertError(
                f"row {number} is none of {name}'s ({type(error).__name__}: {error}); it holds {held}"
            ) from error
        if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
            raise ConvertError(f"row {number} of {name} asks nothing")
        yield {"id": f"{name}/{index}", "turns": turns}
        index += 1


def write_task(name: str, rows: Iterable[Row], folder: str | Path) -> tuple[Path, int]:
    """Writes a task's file into `folder`, whole or not at all; returns its path and number of prompts.

    Raises:
        ConvertError: see `prompts`; also when there are no rows.
    """
    path = Path(folder) / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    count = 0
    try:
        with partial.open("w", encoding="utf-8") as file:
            for row in prompts(name, rows):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += 1
        if not count:
            raise ConvertError(f"the source of {name} holds no row of the task")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path, count
