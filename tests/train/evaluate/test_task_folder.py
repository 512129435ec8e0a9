"""Tasks of a folder: found by name, asked in DeepSpec's order, small sets prefixes of the full ones."""

import json
import random

import pytest

from tests.train.evaluate.test_tasks import make_tokenizer
from train.evaluate.task_folder import find_tasks, load_task, load_tasks, resolve_tasks
from train.evaluate.tasks import load_prompts


@pytest.fixture
def folder(tmp_path):
    def rows(name, count):
        lines = (json.dumps({"id": f"{name}/{i}", "turns": [f"a {i}"]}) for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")

    rows("zebra", 3)
    rows("mbpp", 257)
    rows("gsm8k", 4)
    (tmp_path / "README.md").write_text("not a task")
    return tmp_path


def test_known_tasks_come_first_then_others_by_name(folder):
    assert [(task.name, task.cap) for task in find_tasks(folder)] == [("gsm8k", 500), ("mbpp", 256), ("zebra", None)]
    assert [task.name for task in resolve_tasks(None, folder)] == ["gsm8k", "mbpp", "zebra"]
    assert [task.name for task in resolve_tasks(["zebra", "gsm8k"], folder)] == ["zebra", "gsm8k"]


def test_a_task_longer_than_its_cap_is_asked_in_deepspecs_order(folder):
    order = [f"mbpp/{i}" for i in range(257)]
    random.Random(980406).shuffle(order)  # dspark_spec 5.2, on rows instead of numbers
    (task,) = resolve_tasks(["mbpp"], folder)
    full = load_task(task, make_tokenizer()).prompts
    assert [prompt.id for prompt in full] == order[:256]
    assert [prompt.index for prompt in full] == list(range(256))
    assert {prompt.task for prompt in full} == {"mbpp"}


def test_the_file_itself_is_asked_in_the_same_order(folder):
    """As in-loop evaluation names it: a path, and a limit."""
    (task,) = resolve_tasks(["mbpp"], folder)
    small = load_prompts(folder / "mbpp.jsonl", make_tokenizer(), limit=5)
    assert [p.id for p in small.prompts] == [p.id for p in load_task(task, make_tokenizer()).prompts[:5]]
    assert "1 row(s) beyond what DeepSpec asks" in small.summary()
    assert load_prompts(folder / "zebra.jsonl", make_tokenizer()).summary() == ""


@pytest.mark.parametrize("name", ["mbpp", "gsm8k", "zebra"])
def test_small_sets_are_prefixes(folder, name):
    (task,) = resolve_tasks([name], folder)
    full = load_task(task, make_tokenizer()).prompts
    small = load_task(task, make_tokenizer(), limit=3).prompts
    assert [(p.id, p.index) for p in small] == [(p.id, p.index) for p in full[:3]]


def test_files_and_shipped_prompts_by_name(folder, tmp_path):
    own = tmp_path / "deep" / "own.jsonl"
    own.parent.mkdir()
    own.write_text('{"turns": ["b"]}\n{"task": "french", "turns": ["c"]}\n')
    shipped, mine = resolve_tasks(["shipped", str(own)], None)
    prompts = load_task(mine, make_tokenizer()).prompts
    assert [(p.id, p.task) for p in prompts] == [("own/own.jsonl:1", "own"), ("own/own.jsonl:2", "french")]
    tasks = [p.task for p in load_task(shipped, make_tokenizer()).prompts]
    assert {name: tasks.count(name) for name in tasks} == {"math": 22, "code": 21, "chat": 21}
    assert resolve_tasks(None, None) == [shipped]


def test_what_is_not_there_is_said(folder, tmp_path):
    with pytest.raises(
        ValueError, match=r"'alpaca' is no file .*draft-jax tasks get alpaca.* holds gsm8k, mbpp, zebra"
    ):
        resolve_tasks(["alpaca"], folder)
    with pytest.raises(ValueError, match="gsm8k is named twice"):
        resolve_tasks(["gsm8k", "gsm8k"], folder)
    with pytest.raises(ValueError, match="does not exist"):
        find_tasks(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no \.jsonl"):
        find_tasks(tmp_path / "empty")
    (folder / "zebra.jsonl.gz").write_bytes(b"")
    with pytest.raises(ValueError, match="both the task zebra"):
        find_tasks(folder)


def test_several_tasks_are_one_set(folder):
    (folder / "zebra.jsonl").write_text('{"turns": ["a", "b"]}\n{"turns": []}\n')
    whole = load_tasks(resolve_tasks(["gsm8k", "zebra"], folder), make_tokenizer(), limit=2)
    assert [p.id for p in whole.prompts] == ["gsm8k/0", "gsm8k/1", "zebra/zebra.jsonl:1"]
    assert whole.refused == [(2, "zebra: turns are not a list of strings")]
    (later,) = whole.next_turn({p.id: "c" for p in whole.prompts}).prompts
    assert (later.task, later.text) == ("zebra", "b")
