"""Which tasks there are in a folder, and their prompts: known tasks in DeepSpec's order and number, others whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from train.data import QUICKSTART_PROMPTS
from train.data.files import SUFFIXES
from train.evaluate.converters import SOURCES
from train.evaluate.tasks import PromptSet, load_prompts

#: The prompts shipped with the package, as a task.
SHIPPED = "shipped"


@dataclass(frozen=True)
class TaskFile:
    """A file of prompts with the name its results carry.

    Attributes:
        name: a known task's, or the file's without suffix.
        path: a JSONL file, possibly gzipped.
        cap: prompts asked at most; of a longer file a fixed random choice (`load_prompts`). None: all.
    """

    name: str
    path: Path
    cap: int | None = None


def find_tasks(folder: str | Path) -> list[TaskFile]:
    """All tasks of a folder: known ones in the order of the paper's table, then the others by name.

    Raises:
        ValueError: there is no such folder, no task in it, or two files of one name.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"tasks folder {folder} does not exist; draft-jax tasks get makes one")
    found: dict[str, TaskFile] = {}
    for path in sorted(folder.iterdir()):
        if not path.is_file() or not path.name.endswith(SUFFIXES) or path.name.startswith("."):
            continue
        task = _task(path)
        if task.name in found:
            raise ValueError(f"{found[task.name].path} and {path} are both the task {task.name}; remove one")
        found[task.name] = task
    if not found:
        raise ValueError(f"tasks folder {folder} holds no {' or '.join(SUFFIXES)} file; draft-jax tasks get makes them")
    known = [name for name in SOURCES if name in found]
    return [found[name] for name in [*known, *sorted(found.keys() - SOURCES.keys())]]


def resolve_tasks(names: Sequence[str] | None, folder: str | Path | None) -> list[TaskFile]:
    """Names and paths -> files.

    Args:
        names: task names in `folder`, paths of JSONL files, or `shipped`; None = every task of the folder, or
            without a folder the shipped prompts.
        folder: where names are looked up.

    Raises:
        ValueError: a name is neither, saying what there is.
    """
    if names is None:
        return find_tasks(folder) if folder is not None else [TaskFile(SHIPPED, QUICKSTART_PROMPTS)]
    there = {task.name: task for task in find_tasks(folder)} if folder is not None else {}
    chosen: dict[str, TaskFile] = {}
    absent = []
    for name in names:
        if name in there:
            task = there[name]
        elif name == SHIPPED:
            task = TaskFile(SHIPPED, QUICKSTART_PROMPTS)
        elif name.endswith(SUFFIXES) and Path(name).is_file():
            task = _task(Path(name))
        else:
            absent.append(name)
            continue
        if task.name in chosen:
            raise ValueError(f"task {task.name} is named twice")
        chosen[task.name] = task
    if absent:
        known = [name for name in absent if name in SOURCES]
        get = f" (draft-jax tasks get {' '.join(known)} makes it)" if known else ""
        hint = f"; {folder} holds {', '.join(there)}" if there else ""
        raise ValueError(f"task {', '.join(map(repr, absent))} is no file and not in the tasks folder{get}{hint}")
    return list(chosen.values())


def load_task(
    task: TaskFile, tokenizer: Any, *, limit: int | None = None, template: str = "auto", enable_thinking: bool = False
) -> PromptSet:
    """A task's prompts; see `load_prompts`. Ids are the task's own: those of two tasks never meet."""
    found = load_prompts(
        task.path,
        tokenizer,
        limit=limit,
        template=template,
        enable_thinking=enable_thinking,
        task=task.name,
        cap=task.cap,
    )
    prefix = f"{task.name}/"
    found.prompts = [p if p.id.startswith(prefix) else replace(p, id=prefix + p.id) for p in found.prompts]
    return found


def load_tasks(
    tasks: Sequence[TaskFile],
    tokenizer: Any,
    *,
    limit: int | None = None,
    template: str = "auto",
    enable_thinking: bool = False,
) -> PromptSet:
    """The prompts of several tasks as one set, task after task; `limit` is of each task."""
    whole = PromptSet()
    for task in tasks:
        found = load_task(task, tokenizer, limit=limit, template=template, enable_thinking=enable_thinking)
        whole.prompts += found.prompts
        whole.refused += [(line, f"{task.name}: {reason}") for line, reason in found.refused]
        whole.beyond_cap += found.beyond_cap
        whole.render, whole.tokenizer = found.render, found.tokenizer
    return whole


def _task(path: Path) -> TaskFile:
    name = path.name.removesuffix(".gz").removesuffix(".jsonl")
    return TaskFile(name, path, SOURCES[name].cap if name in SOURCES else None)
