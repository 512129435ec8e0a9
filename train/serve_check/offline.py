"""Our side of the comparison: an evaluation, run now or read from its file, and proof that it measured the same."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draft_jax.config import DraftConfig
from train.evaluate.config import GREEDY_BELOW
from train.evaluate.identity import prompts_digest
from train.evaluate.tasks import Prompt

ROOT = Path(__file__).resolve().parents[2]
#: The only dtype stock SGLang serves a DSpark draft in: its model runner casts a draft's input embeddings to bfloat16
#: (model_executor/model_runner.py, 0.5.16 and 0.5.23), and float32 weights then refuse them.
DTYPE = "bfloat16"


class OfflineMismatch(ValueError):
    """The offline evaluation measured something else than is to be served; every difference is named."""


@dataclass(frozen=True)
class Asked:
    """What both sides are asked: prompts with their token budgets.

    Attributes:
        prompts: in the file's order; those the evaluator refuses are left out.
        budgets: most new tokens of each.
    """

    prompts: tuple[Prompt, ...]
    budgets: tuple[int, ...]

    @property
    def digest(self) -> str:
        triples = zip(self.prompts, self.budgets)
        return prompts_digest((prompt.id, prompt.input_ids, budget) for prompt, budget in triples)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its whole budget."""
        return max(len(prompt.input_ids) + budget for prompt, budget in zip(self.prompts, self.budgets))


@dataclass(frozen=True)
class OfflineResult:
    """An evaluation's JSON.

    Attributes:
        path: where it was read.
        record: its content (train.evaluate.result).
    """

    path: Path
    record: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        return self.record["settings"]

    @property
    def temperature(self) -> float:
        return float(self.settings["temperature"])

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        """Prompt id -> generated ids."""
        return {sample["prompt"]: tuple(sample["output_tokens"]) for sample in self.record["samples"]}

    @property
    def pairs(self) -> dict[str, tuple[int, int]]:
        """Prompt id -> (tokens its rounds committed, rounds)."""
        samples = self.record["samples"]
        return {s["prompt"]: (sum(r["committed"] for r in s["rounds"]), len(s["rounds"])) for s in samples}


def run_evaluation(arguments: Sequence[str], temperature: float, output: Path, timeout: float) -> OfflineResult:
    """Runs `draft-jax eval` in a process of its own, whose end frees the GPU for the server.

    Args:
        arguments: options of `draft-jax eval` but temperature and output.
        temperature: to evaluate at.
        output: where the JSON goes; its standard output goes beside it, with suffix .log.
        timeout: seconds.

    Raises:
        RuntimeError: it failed or took too long; the message ends with its last lines.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)
    log = output.with_suffix(".log")
    command = [
        sys.executable, "-m", "train.cli", "eval", *arguments, "--no-plain",
        "--temperature", f"{temperature!r}", "--output", str(output),
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(
            f"the offline evaluation at temperature {temperature:g} took longer than {timeout:g} s "
            f"(--eval-timeout); its output is in {log}"
        ) from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code or not output.is_file():
        tail = log.read_text(errors="replace").strip().splitlines()[-15:]
        raise RuntimeError(
            f"the offline evaluation at temperature {temperature:g} failed (exit code {code}):\n"
            + "\n".join(f"  | {line}" for line in tail)
        )
    return read_evaluation(output)


def read_evaluation(path: str | Path) -> OfflineResult:
    """Reads an evaluation's JSON file.

    Raises:
        ValueError: it is no such file, or lacks what a comparison needs.
    """
    path = Path(path)
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--offline {path} cannot be read as JSON: {error}") from error
    needed = ("settings", "samples", "accept_length", "survival")
    if not isinstance(record, dict) or (missing := [key for key in needed if key not in record]):
        lacks = "" if not isinstance(record, dict) else f": it lacks {', '.join(missing)}"
        raise ValueError(f"{path} is not the JSON of a `draft-jax eval`{lacks}")
    if missing := [key for key in ("prompts_digest", "draft_digest", "context_limit") if key not in record["settings"]]:
        raise ValueError(f"{path} was written by an older draft-jax (no {', '.join(missing)}): evaluate again")
    if record.get("error"):
        raise ValueError(f"{path} is no measurement: {record['error']}")
    return OfflineResult(path, record)


def ask(prompts: Sequence[Prompt], max_new_tokens: int, limit: int, vocab_size: int) -> Asked:
    """The prompts an evaluation admits, with their budgets, by the rules of train.evaluate.protocol.admit.

    Args:
        prompts: as loaded.
        max_new_tokens: per prompt.
        limit: the evaluation's `context_limit`.
        vocab_size: ids must be below it.

    Raises:
        ValueError: no prompt is left.
    """
    kept, budgets = [], []
    for prompt in prompts:
        ids = np.asarray(prompt.input_ids)
        if ids.size and ids.min() >= 0 and ids.max() < vocab_size and ids.size + 1 <= limit:
            kept.append(prompt)
            budgets.append(min(max_new_tokens, limit - ids.size))
    if not kept:
        raise ValueError(f"none of the {len(prompts)} prompts fits into {limit} tokens and {vocab_size} ids")
    return Asked(tuple(kept), tuple(budgets))


def check_same(
    result: OfflineResult,
    asked: Asked,
    config: DraftConfig,
    digest: str,
    max_new_tokens: int,
    target: str,
) -> None:
    """Raises OfflineMismatch unless `result` measured this draft for this target on what is asked here."""
    settings = result.settings
    wrong = []
    if settings["draft_digest"] != digest:
        wrong.append(f"another draft: its content is {_short(settings['draft_digest'])}, here it is {_short(digest)}")
    if settings["max_new_tokens"] != max_new_tokens:
        wrong.append(f"max_new_tokens {settings['max_new_tokens']}, here {max_new_tokens}")
    if settings["prompts_digest"] != asked.digest:
        count = len(result.record["samples"])
        wrong.append(
            f"other prompts: {count} of them with digest {_short(settings['prompts_digest'])}, here "
            f"{len(asked.prompts)} with {_short(asked.digest)} (token ids, ids and budgets count)"
        )
    if settings.get("confidence_threshold"):
        wrong.append(
            f"confidence_threshold {settings['confidence_threshold']}: the server proposes whole blocks, give 0"
        )
    for key, ours in (("draft_sampling", "float32"), ("count_overshoot", False)):
        if settings.get(key, ours) != ours:
            wrong.append(f"{key} {settings[key]}: another project's protocol, which no server follows")
    if settings["target_dtype"] != DTYPE or settings["draft_dtype"] != DTYPE:
        wrong.append(
            f"target in {settings['target_dtype']}, draft in {settings['draft_dtype']}: SGLang serves DSpark drafts in "
            f"{DTYPE} only, evaluate with --dtype {DTYPE}"
        )
    if settings["block_size"] != config.block_size:
        wrong.append(f"block_size {settings['block_size']}, the draft has {config.block_size}")
    if not _same_target(settings["target"], target):
        wrong.append(f"target {settings['target']}, here {target}")
    if wrong:
        raise OfflineMismatch(
            f"{result.path} is not comparable with what is to be served:\n"
            + "\n".join(f"  - {item}" for item in wrong)
            + "\nGive the same --prompts, --limit, --max-new-tokens, --draft and --target, or leave --offline out to "
            "evaluate now"
        )


def pick(results: Sequence[OfflineResult], temperature: float) -> OfflineResult | None:
    """The one measured at `temperature`; all greedy ones are the same.

    Raises:
        ValueError: two were.
    """
    found = [r for r in results if _effective(r.temperature) == _effective(temperature)]
    if len(found) > 1:
        names = " and ".join(str(item.path) for item in found)
        raise ValueError(f"--offline {names} are both of temperature {temperature:g}; give one")
    return found[0] if found else None


def _effective(temperature: float) -> float:
    return 0.0 if temperature < GREEDY_BELOW else temperature


def _same_target(one: str, other: str) -> bool:
    """Equal names, or the same folder; a folder copied to another machine keeps its last component."""
    if Path(one).is_dir() and Path(other).is_dir():
        return os.path.realpath(one) == os.path.realpath(other) or Path(one).name == Path(other).name
    return one == other or Path(one).name == Path(other).name


def _short(digest: str | None) -> str:
    return "unknown (an untrained draft)" if digest is None else digest[:12]
