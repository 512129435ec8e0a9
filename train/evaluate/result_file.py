"""Results of evaluations as files: read back, named, and as arrays over prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


class ResultError(ValueError):
    """A file that is no result of an evaluation, or none that can serve; the message says why."""


@dataclass(frozen=True)
class NamedResult:
    """A result as it was written, with a name for tables.

    Attributes:
        name: short, unique among those read together.
        result: `EvalResult.to_json()`.
        path: where it was read.
    """

    name: str
    result: Mapping[str, Any]
    path: Path | None = None

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.result["settings"]

    @property
    def samples(self) -> Sequence[Mapping[str, Any]]:
        """Per prompt; empty when the result was written without."""
        return self.result.get("samples") or ()

    def sums(self) -> PromptSums:
        """Counts per prompt."""
        return prompt_sums(self.samples, int(self.settings["block_size"]))


@dataclass(frozen=True)
class PromptSums:
    """Counts per prompt, P prompts of K slots: whatever is a ratio of their sums has an interval.

    Attributes:
        ids: [P] prompt ids.
        tasks: [P] their tasks.
        committed, rounds: [P].
        proposed, reached, passed: [P, K]; rounds that proposed slot k, that proposed it and accepted all before
            it, and that accepted it too.
    """

    ids: tuple[str, ...]
    tasks: np.ndarray
    committed: np.ndarray
    rounds: np.ndarray
    proposed: np.ndarray
    reached: np.ndarray
    passed: np.ndarray


def prompt_sums(samples: Sequence[Mapping[str, Any]], block_size: int) -> PromptSums:
    """Counts of a result's samples."""
    count = len(samples)
    committed, rounds = np.zeros(count), np.zeros(count)
    proposed, reached, passed = (np.zeros((count, block_size)) for _ in range(3))
    for index, sample in enumerate(samples):
        rounds[index] = len(sample["rounds"])
        for item in sample["rounds"]:
            committed[index] += item["committed"]
            proposed[index, : item["proposed"]] += 1
            reached[index, : min(item["proposed"], item["accepted"] + 1)] += 1
            passed[index, : item["accepted"]] += 1
    return PromptSums(
        tuple(sample["prompt"] for sample in samples),
        np.array([sample.get("task") or "" for sample in samples], dtype=object),
        committed,
        rounds,
        proposed,
        reached,
        passed,
    )


def read_result(path: str | Path) -> dict[str, Any]:
    """Reads one result.

    Raises:
        ResultError: it is no JSON file written by an evaluation.
    """
    path = Path(path)
    if path.is_dir():
        held = sorted(str(p) for p in [*path.glob("*.json"), *path.glob("eval/*.json")])
        raise ResultError(f"{path} is a folder; name a result in it" + (f": {', '.join(held)}" if held else ""))
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ResultError(f"{path} cannot be read as a result: {error}") from error
    if not isinstance(result, dict) or not {"settings", "accept_length", "survival"} <= result.keys():
        raise ResultError(f"{path} is no result of draft-jax eval (no settings and accept_length in it)")
    return result


def read_results(arguments: Sequence[str]) -> list[NamedResult]:
    """Reads results named on a command line: `PATH`, or `NAME=PATH`.

    Raises:
        ResultError: see `read_result`; also when two have one name.
    """
    pairs: list[tuple[str, Path]] = []
    for argument in arguments:
        before, has_name, after = argument.partition("=")
        pairs.append((before, Path(after)) if has_name and not Path(argument).exists() else ("", Path(argument)))
    stems = [path.stem for name, path in pairs if not name]
    named = []
    for given, path in pairs:
        folder = path.resolve().parent
        if folder.name == "eval":  # every run has one; the run's name tells more
            folder = folder.parent
        name = given or (path.stem if stems.count(path.stem) == 1 else f"{folder.name}/{path.stem}")
        named.append(NamedResult(name, read_result(path), path))
    names = [item.name for item in named]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ResultError(f"two results are called {twice[0]}; name them on the command line: NAME=PATH")
    return named
