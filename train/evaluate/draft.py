"""Where a draft comes from: our run directory, or any DSpark folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draft_jax.config import DraftConfig


@dataclass(frozen=True)
class LoadedDraft:
    """A draft ready to be evaluated or exported.

    Attributes:
        config: its definition.
        params: fp32 parameters.
        origin: what was read, in words, for reports.
        target: name or folder of the target it belongs to, when the source says so.
        run_config: the run's resolved configuration (config.yaml as plain values); None for a folder.
        step: the optimizer step of a run's checkpoint; None for a folder.
    """

    config: DraftConfig
    params: Any
    origin: str
    target: str | None
    run_config: dict[str, Any] | None = None
    step: int | None = None


def load_draft(source: str | Path, step: str | int = "latest") -> LoadedDraft:
    """Reads a draft from a run directory of ours or from a DSpark folder (DeepSpec, SpecForge, ours).

    Args:
        source: the folder.
        step: which checkpoint of a run: "latest", "best" or a number. Only "latest" makes sense for a folder.

    Raises:
        ValueError: the folder is neither, naming what was looked for.
    """
    folder = Path(source)
    if not folder.is_dir():
        raise ValueError(f"--draft {folder}: no such folder")
    if (folder / "draft_config.json").is_file():
        from train.checkpoint import load_trained

        chosen = _resolve_step(folder, step)
        config, params = load_trained(folder, chosen)
        run_config = _run_config(folder)
        target = ((run_config or {}).get("target") or {}).get("path") or config.target_name
        return LoadedDraft(config, params, f"run {folder} at step {chosen}", target, run_config, chosen)
    if (folder / "config.json").is_file():
        if step != "latest":
            raise ValueError(
                f"--step {step} is for run directories; {folder} is a draft's folder with one set of weights"
            )
        from draft_jax.weights import load_folder

        config, params, _ = load_folder(folder)
        return LoadedDraft(config, params, f"folder {folder}", config.target_name)
    raise ValueError(
        f"{folder} is neither a run directory (no draft_config.json) nor a draft's folder (no config.json)"
    )


def _resolve_step(run_dir: Path, step: str | int) -> int:
    from train.checkpoint import CHECKPOINTS, CheckpointError, best_step, complete_steps

    if str(step).isdigit():
        return int(step)
    steps = complete_steps(run_dir / CHECKPOINTS)
    if not steps:
        raise CheckpointError(f"{run_dir / CHECKPOINTS} holds no complete checkpoint; train first")
    if step == "latest":
        return steps[-1]
    if step == "best":
        return best_step(run_dir / CHECKPOINTS)
    raise ValueError(f"--step {step!r} is neither latest, best nor a number")


def _run_config(folder: Path) -> dict[str, Any] | None:
    path = folder / "config.yaml"
    if not path.is_file():
        return None
    import yaml

    loaded = yaml.safe_load(path.read_text())
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} does not hold a run's configuration: {json.dumps(loaded)[:80]}")
    return loaded
