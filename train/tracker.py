"""Where metrics go: metrics.jsonl always, TensorBoard and wandb when asked for (and imported only then)."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

Metrics = Mapping[str, float | int | str | None]


class TrackerError(RuntimeError):
    """A tracker that cannot be used: not installed, or reached from a forked process."""


class Tracker(Protocol):
    """One sink of metrics."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the metrics of optimizer step `step` (1-based: the number of steps done)."""

    def rewind(self, step: int) -> None:
        """The run has gone back to optimizer step `step`: later ones will be logged once more."""

    def finish(self) -> None:
        """Flush and close."""


class _Owned:
    """Refuses use from a process that inherited the tracker by fork: two writers would interleave their lines."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def _check_owner(self) -> None:
        if os.getpid() != self._pid:
            raise TrackerError(
                f"tracker of process {self._pid} used in forked process {os.getpid()}; workers must not log"
            )


def strict_json(metrics: Metrics) -> str:
    """One line of standard JSON: numbers that are not finite become null and are listed under `nonfinite`."""
    bad = [k for k, v in metrics.items() if isinstance(v, float) and not math.isfinite(v)]
    clean: dict[str, Any] = {k: None if k in bad else v for k, v in metrics.items()}
    if bad:
        clean["nonfinite"] = bad
    return json.dumps(clean, allow_nan=False)


class JsonlTracker(_Owned):
    """Appends one JSON object per logged step to a file; every line is complete on disk when `log` returns.

    Args:
        path: the file.
        last_step: when resuming, the step of the checkpoint: lines of later steps (the lost end of the run before)
            and a torn last line are taken out, so that the file is one curve. None = a new file.
    """

    def __init__(self, path: Path, last_step: int | None = None):
        super().__init__()
        self._path, self.dropped_lines = path, 0
        if last_step is not None and path.exists():
            self.dropped_lines = len(_cut(path, last_step))
        self._open("a" if last_step is not None else "w")

    def _open(self, mode: str) -> None:
        self._file = open(self._path, mode, encoding="utf-8", buffering=1)  # noqa: SIM115

    def log(self, step: int, metrics: Metrics) -> None:
        self._check_owner()
        self._file.write(strict_json({"step": step, **metrics}) + "\n")

    def rewind(self, step: int) -> None:
        """Lines of later steps move to `metrics.rolled_back.jsonl`: the file stays one curve, and nothing is lost."""
        self._check_owner()
        self._file.close()
        lost = _cut(self._path, step)
        with open(self._path.with_suffix(".rolled_back.jsonl"), "a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lost)
        self._open("a")

    def finish(self) -> None:
        self._file.close()


def last_line(path: Path) -> dict[str, Any]:
    """The last complete line of a metrics file; empty if there is none."""
    for line in reversed(path.read_text(encoding="utf-8").splitlines() if path.exists() else []):
        if _step_of(line) < math.inf:
            return json.loads(line)
    return {}


def _cut(path: Path, last_step: int) -> list[str]:
    """Take the lines of later steps, and a torn one, out of a file; returns them."""
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if _step_of(line) <= last_step]
    if len(kept) != len(lines):
        temporary = path.with_suffix(".jsonl.tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        temporary.replace(path)
    return [line for line in lines if not _step_of(line) <= last_step]


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


class TensorBoardTracker(_Owned):
    """Scalars to a TensorBoard event folder, through tensorboardX (no TensorFlow)."""

    def __init__(self, folder: Path, last_step: int | None = None):
        super().__init__()
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise TrackerError("tracker tensorboard needs tensorboardX: pip install tensorboardX") from error
        self._make, self._folder = SummaryWriter, str(folder)
        self._writer = SummaryWriter(self._folder, purge_step=None if last_step is None else last_step + 1)

    def log(self, step: int, metrics: Metrics) -> None:
        self._check_owner()
        for name, value in metrics.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def rewind(self, step: int) -> None:
        self._check_owner()
        self._writer.close()
        # TensorBoard hides what was there. The name of a file has the time in seconds only.
        self._writer = self._make(self._folder, purge_step=step + 1, filename_suffix=f".from{step}")

    def finish(self) -> None:
        self._writer.close()


class WandbTracker(_Owned):
    """Scalars to a wandb run; the run's id lives in the run folder, so a resumed run continues it."""

    def __init__(self, run_dir: Path, project: str, config: Mapping[str, Any]):
        super().__init__()
        try:
            import wandb
        except ImportError as error:
            raise TrackerError("tracker wandb needs wandb: pip install wandb") from error
        id_file = run_dir / "wandb_id"
        run_id = id_file.read_text().strip() if id_file.exists() else None
        self._run = wandb.init(
            project=project, dir=str(run_dir), id=run_id, resume="allow", name=run_dir.name, config=dict(config)
        )
        id_file.write_text(self._run.id)

    def log(self, step: int, metrics: Metrics) -> None:
        self._check_owner()
        self._run.log({k: v for k, v in metrics.items() if isinstance(v, int | float)}, step=step)

    def rewind(self, step: int) -> None:
        print(f"wandb takes no step twice: what follows step {step} anew is in metrics.jsonl only", flush=True)

    def finish(self) -> None:
        self._run.finish()


class CompositeTracker:
    """Several trackers as one."""

    def __init__(self, trackers: Iterable[Tracker]):
        self.trackers = tuple(trackers)

    def log(self, step: int, metrics: Metrics) -> None:
        for tracker in self.trackers:
            tracker.log(step, metrics)

    def rewind(self, step: int) -> None:
        for tracker in self.trackers:
            tracker.rewind(step)

    def finish(self) -> None:
        for tracker in self.trackers:
            tracker.finish()


def open_trackers(
    names: Iterable[str],
    run_dir: Path,
    *,
    last_step: int | None = None,
    project: str = "draft-jax",
    config: Mapping[str, Any] | None = None,
) -> CompositeTracker:
    """Open metrics.jsonl and the named trackers of a run.

    Call it after every worker process has been started: what does not exist yet cannot be inherited.

    Args:
        names: any of `tensorboard`, `wandb`.
        run_dir: the run's folder.
        last_step: step the run resumes from; None = it starts.
        project: wandb project.
        config: the resolved configuration, for wandb.
    """
    trackers: list[Tracker] = [JsonlTracker(run_dir / "metrics.jsonl", last_step)]
    for name in names:
        if name == "tensorboard":
            trackers.append(TensorBoardTracker(run_dir / "tensorboard", last_step))
        elif name == "wandb":
            trackers.append(WandbTracker(run_dir, project, config or {}))
        else:
            raise TrackerError(f"unknown tracker {name!r}; known: tensorboard, wandb")
    return CompositeTracker(trackers)
