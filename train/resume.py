"""Where a run starts: step 0, or a checkpoint of the same run; and the files that say what the run is."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import draccus

from draft_jax.config import DraftConfig

from .checkpoint import CHECKPOINTS, DRAFT_CONFIG, CheckpointError, Checkpoints, check_identity, read_saved
from .config import ConfigError, RunConfig
from .config_file import dump

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


def find_start(config: RunConfig, run_dir: Path) -> int | None:
    """Step of the checkpoint to continue from, or None to start.

    Raises:
        ConfigError: the folder holds a run and `resume` is never, or holds none and it is must.
        CheckpointError: there are checkpoints but none is complete: starting anew would replace them.
    """
    used = [name for name in (CONFIG, METRICS, CHECKPOINTS) if (run_dir / name).exists()]
    if config.resume == "never":
        if used:
            raise ConfigError(
                f"run_dir {run_dir} already holds a run ({', '.join(used)}); continue it with --resume auto or give"
                " another run_dir"
            )
        return None
    folder = run_dir / CHECKPOINTS
    checkpoints = Checkpoints(folder, config.checkpoint) if folder.is_dir() else None
    steps = checkpoints.steps() if checkpoints else []
    if checkpoints:
        checkpoints.close()
    if steps:
        return steps[-1]
    damaged = sorted(entry.name for entry in folder.glob("*.incomplete")) if folder.is_dir() else []
    if damaged:
        raise CheckpointError(
            f"{folder} holds no complete checkpoint, only {', '.join(damaged)}; move them away to start anew"
        )
    if config.resume == "must":
        raise ConfigError(f"resume is 'must', but {folder} holds no checkpoint; give --resume auto to start")
    return None


def check_same_run(config: RunConfig, identity: Mapping[str, Any], folder: Path, step: int) -> list[str]:
    """Refuse a checkpoint of another run; name the settings that changed where that is allowed.

    Returns:
        Lines `key: old -> new`.
    """
    saved = read_saved(folder, step)
    check_identity(saved, identity, folder)
    before, now = _flat(saved.settings), _flat(settings_of(config))
    ignored = ("resume", "run_dir", "train.stop_at")
    return [
        f"{key}: {before.get(key)!r} -> {now.get(key)!r}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key) and key not in ignored and key not in identity
    ]


def settings_of(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain JSON values."""
    return json.loads(json.dumps(draccus.encode(config)))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def write_run_files(config: RunConfig, draft: DraftConfig, run_dir: Path) -> None:
    """Write config.yaml and draft_config.json, each whole or not at all."""
    run_dir.mkdir(parents=True, exist_ok=True)
    _write(run_dir / CONFIG, dump(config))
    _write(run_dir / DRAFT_CONFIG, json.dumps(draft.to_hf(), indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
