"""Where a run starts: step 0, or a checkpoint of the same run; and the files that say what the run is."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import draccus

from draft_jax.config import DraftConfig

from .checkpoint import (
    CHECKPOINTS,
    DRAFT_CONFIG,
    CheckpointError,
    check_identity,
    complete_steps,
    read_saved,
    set_aside,
)
from .config import ConfigError, RunConfig
from .config_file import dump
from .distributed import World
from .topology import Topology

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"

#: DraftConfig fields that are recorded only; a run may continue when they change.
_RECORDED = ("num_anchors", "bos_token_id", "eos_token_id", "pad_token_id", "target_name", "max_position_embeddings")


def run_identity(config: RunConfig, draft: DraftConfig, stream: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that make a continued run the same run, by dotted name; JSON values.

    Args:
        config: the run.
        draft: its draft.
        stream: what the row iterator says of its data (its state without the position).
    """
    shape = {k: v for k, v in dataclasses.asdict(draft).items() if k not in _RECORDED}
    facts = {f"draft.{name}": value for name, value in shape.items()}
    facts |= {f"data.{name}": value for name, value in stream.items()}
    facts |= {
        "train.seed": config.train.seed,
        "train.batch_rows": config.train.batch_rows,
        "train.accumulation": config.train.accumulation,
        "objective.normalization": config.objective.normalization,
    }
    return json.loads(json.dumps(facts))  # tuples as lists, as a checkpoint gives them back


def find_start(config: RunConfig, run_dir: Path, world: World | None = None) -> int | None:
    """Step of the checkpoint to continue from, or None to start; the same on all processes.

    Raises:
        ConfigError: the folder holds a run and `resume` is never, or holds none and it is must.
        CheckpointError: there are checkpoints but none is complete everywhere: starting anew would replace them.
        DistributedError: one of these on another process.
    """
    world = world or World(Topology())
    folder = run_dir / CHECKPOINTS
    if config.resume != "never" and world.is_first:
        set_aside(folder)
    world.barrier("setting incomplete checkpoints aside")
    steps = world.attempt("looking for a run to continue", lambda: _look(config, run_dir))
    return _newest_everywhere(folder, steps, world)


def _newest_everywhere(folder: Path, steps: list[int], world: World) -> int | None:
    """The newest checkpoint that all processes see complete. Newer ones that only some see are set aside, loudly."""
    found = world.gather((world.topology.host, steps), "complete checkpoints")
    seen = {step for _, theirs in found for step in theirs}
    common = seen.intersection(*(theirs for _, theirs in found))
    start = max(common, default=None)
    newer = {step for step in seen if start is None or step > start}
    if not newer:
        return start
    lines = "\n".join(
        f"  rank {rank} on {host}: {', '.join(map(str, theirs)) or 'none'}" for rank, (host, theirs) in enumerate(found)
    )
    if start is None:
        raise CheckpointError(
            f"the processes see no common complete checkpoint in {folder}:\n{lines}\nIs it one folder for all hosts?"
        )
    if world.is_first:
        print(
            f"WARNING: the processes do not see the same complete checkpoints in {folder}:\n{lines}\nAll continue from"
            f" step {start}, the newest that is complete everywhere; {max(newer) - start} step(s) are done again",
            flush=True,
        )
        set_aside(folder, newer, "is not complete on every process")
    world.barrier("setting checkpoints aside")
    return start


def _look(config: RunConfig, run_dir: Path) -> list[int]:
    """Steps of the complete checkpoints that `resume` allows to continue from."""
    used = [name for name in (CONFIG, METRICS, CHECKPOINTS) if (run_dir / name).exists()]
    if config.resume == "never":
        if used:
            raise ConfigError(
                f"run_dir {run_dir} already holds a run ({', '.join(used)}); continue it with --resume auto or give"
                " another run_dir"
            )
        return []
    folder = run_dir / CHECKPOINTS
    if steps := complete_steps(folder):
        return steps
    damaged = sorted(entry.name for entry in folder.glob("*.incomplete")) if folder.is_dir() else []
    if damaged:
        raise CheckpointError(
            f"{folder} holds no complete checkpoint, only {', '.join(damaged)}; move them away to start anew"
        )
    if config.resume in ("must", "weights"):
        raise ConfigError(f"resume is {config.resume!r}, but {folder} holds no checkpoint; give --resume auto to start")
    return []


def check_same_run(config: RunConfig, identity: Mapping[str, Any], folder: Path, step: int) -> list[str]:
    """Refuse a checkpoint of another run; name the settings that changed where that is allowed.

    Returns:
        Lines `key: old -> new`.
    """
    saved = read_saved(folder, step)
    check_identity(saved, identity, folder)
    before, now = flat(saved.settings), flat(settings_of(config))
    ignored = ("resume", "run_dir", "train.stop_at")
    return [
        f"{key}: {before.get(key)!r} -> {now.get(key)!r}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key) and key not in ignored and key not in identity
    ]


def settings_of(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain JSON values."""
    return json.loads(json.dumps(draccus.encode(config)))


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested plain values by dotted key."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[prefix + key] = value
    return values


def write_run_files(config: RunConfig, draft: DraftConfig, run_dir: Path) -> None:
    """Write config.yaml and draft_config.json, each whole or not at all."""
    run_dir.mkdir(parents=True, exist_ok=True)
    _write(run_dir / CONFIG, dump(config))
    _write(run_dir / DRAFT_CONFIG, json.dumps(draft.to_hf(), indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
