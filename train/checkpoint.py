"""Checkpoints of a run: written in the background, complete or absent, rotated; read back only when all matches."""

import errno
import json
import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from draft_jax.config import DraftConfig
from draft_jax.models.dspark import abstract_params

from .background import BackgroundErrors
from .complete import complete_steps, record_files, set_aside
from .config import CheckpointConfig
from .distributed import World
from .state import Params, TrainState
from .stored import CheckpointError, check_tensors, load, metadata

CHECKPOINTS = "checkpoints"
DRAFT_CONFIG = "draft_config.json"

#: Name under which the value that ranks checkpoints is stored; higher is better whatever the metric.
_SCORE = "score"
#: Name in orbax's custom metadata of the plain values of `Saved`, as JSON text.
_RECORD = "draft_jax_run"


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds besides arrays.

    Attributes:
        step: optimizer steps done.
        position: state of the row iterator, as plain values.
        identity: the facts a resuming run must share, by dotted name.
        settings: the resolved configuration of the run that saved, as plain values.
        guard: memory of the guard against a collapse (`CollapseGuard.state`); None = it had none.
        rollbacks: how often the run had rolled back.
    """

    step: int
    position: Any
    identity: Mapping[str, Any]
    settings: Mapping[str, Any]
    guard: Mapping[str, Any] | None = None
    rollbacks: int = 0


class Checkpoints:
    """The checkpoints of one run; with several processes each writes its part, and all call each method in one order.

    Saves run in the background: `save` returns once the state is copied to the host, the files appear under their
    final name only when complete, so a kill at any moment leaves the last complete one. `poll` raises the error of
    a background save as soon as it has happened.

    Args:
        folder: made if absent, on a file system all processes share. Incomplete ones are set aside, see `set_aside`.
        config: how many are kept, and what best means.
    """

    def __init__(self, folder: Path, config: CheckpointConfig):
        folder = folder.absolute()  # orbax takes no relative path, and a later chdir must not move the checkpoints
        self.folder, self.config = folder, config
        folder.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            set_aside(folder)
        policies = ocp.training.preservation_policies
        self._checkpointer = ocp.training.Checkpointer(
            folder,
            preservation_policy=policies.AnyPreservationPolicy(
                [
                    policies.LatestN(config.keep),
                    policies.BestN(
                        get_metric_fn=lambda metrics: metrics[_SCORE],
                        n=config.keep_best,
                        keep_checkpoints_without_metrics=False,
                    ),
                ]
            ),
            cleanup_tmp_directories=True,
        )
        self._background = BackgroundErrors(self._checkpointer)
        self._pending: tuple[int, Any] | None = None
        self._failed = False

    def look_again(self) -> None:
        """Forget what has been removed from the folder by something else than this."""
        self._checkpointer.reload()

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return complete_steps(self.folder)

    def save(self, state: TrainState, saved: Saved, metrics: Mapping[str, float]) -> None:
        """Start writing a checkpoint; waits for the one before if that is still being written.

        Args:
            state: arrays; may be donated as soon as this returns.
            saved: position and facts.
            metrics: of the steps since the checkpoint before; the best one is chosen by `config.best_metric`.

        Raises:
            CheckpointError: it cannot be written, or the save before failed.
        """
        self.wait()
        value = metrics.get(self.config.best_metric, math.nan)
        ranked = None
        if math.isfinite(value):
            score = value if self.config.best_mode == "max" else -value
            ranked = {_SCORE: score, self.config.best_metric: value}
        text = json.dumps({name: value for name, value in asdict(saved).items() if name != "step"})
        parts = {"params": state.params, "optimizer": _optimizer_part(state)}
        try:
            response = self._checkpointer.save_checkpointables_async(
                saved.step, parts, force=True, metrics=ranked, custom_metadata={_RECORD: text}
            )
        except Exception as error:
            raise self._failure(saved.step, error) from error
        self._pending = (saved.step, response)

    def _writing(self) -> bool:
        """Whether the background save is neither complete nor known to have failed."""
        return self._background.error is None and self._checkpointer.is_saving_in_progress()

    def poll(self) -> None:
        """Raise the error of a background save that has ended in one; never waits."""
        if self._pending is not None and not self._writing():
            self.wait()

    def wait(self) -> None:
        """Wait until the background save is complete. Raises CheckpointError if it failed."""
        if self._pending is None:
            return
        while jax.process_count() > 1 and self._writing():
            time.sleep(0.02)
        step, response = self._pending
        self._pending = None
        try:
            if self._background.error is not None:
                raise self._background.error
            response.result()
            if jax.process_index() == 0:
                record_files(self.folder / str(step))
        except Exception as error:
            raise self._failure(step, error) from error

    def wait_together(self, world: World) -> None:
        """`wait` in step with the other processes: where one has failed, orbax would let the others wait for its part.

        Raises:
            CheckpointError: the save failed here.
            DistributedError: it failed on another process.
        """
        failure: CheckpointError | None = None
        while True:
            level = int(world.size > 1 and self._writing())
            try:
                if not level:
                    self.wait()
            except CheckpointError as error:
                failure, level = error, 2
            worst = world.worst(level, "the checkpoint that is being written")
            if worst == 0:
                return
            if worst == 2:
                break
            time.sleep(0.05)

        self._failed = True

        def again() -> None:
            if failure is not None:
                raise failure

        world.attempt("writing a checkpoint", again)

    def _failure(self, step: int, error: Exception) -> CheckpointError:
        self._failed = True
        # Of several processes the others may still be writing: orbax removes what is left when the run continues.
        for leftover in () if jax.process_count() > 1 else self.folder.glob(f"{step}.orbax-checkpoint-tmp*"):
            shutil.rmtree(leftover, ignore_errors=True)
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        reason = "no space left on the disk" if full else " ".join(str(error).split()) or type(error).__name__
        intact = ", ".join(map(str, self.steps())) or "none"
        return CheckpointError(
            f"checkpoint of step {step} could not be written to {self.folder}: {reason}. Complete checkpoints there: "
            f"{intact}. Make room or mend the folder, then continue with --resume auto"
        )

    def restore(self, step: int, abstract: TrainState) -> tuple[TrainState, Saved]:
        """Read a checkpoint into arrays of the given shapes, dtypes and shardings.

        Raises:
            CheckpointError: a tensor is missing, unknown, or of another shape or dtype; all are named.
        """
        loaded = self._read(step, {"params": abstract.params, "optimizer": _optimizer_part(abstract)})
        return TrainState(params=loaded["params"], **loaded["optimizer"]), read_saved(self.folder, step)

    def restore_params(self, step: int, abstract: TrainState) -> tuple[Params, Saved]:
        """The same for the parameters alone."""
        return self._read(step, {"params": abstract.params})["params"], read_saved(self.folder, step)

    def _read(self, step: int, wanted: dict[str, Any]) -> dict[str, Any]:
        folder = self.folder / str(step)
        check_tensors(folder, wanted)
        return load(folder, wanted)

    def close(self, patience: float | None = None) -> None:
        """Wait for the background save and free orbax's threads. Raises CheckpointError if that save failed.

        Args:
            patience: longest wait [s]; a save that takes longer, or has failed, is left alone. None = as long as it
                takes. After an error another process may never write its part, which orbax would wait for.
        """
        if patience is not None:
            end = time.monotonic() + patience
            while self._writing() and not self._failed and time.monotonic() < end:
                time.sleep(0.1)
            if self._writing() or self._failed:
                return
        try:
            self.wait()
        finally:
            try:
                self._checkpointer.close()
            except Exception:
                if not self._failed:  # orbax raises the error of a failed save again, and again
                    raise


def _optimizer_part(state: TrainState) -> dict[str, Any]:
    """All of a state that is no parameter, by the names of its fields."""
    return {field.name: getattr(state, field.name) for field in fields(state) if field.name != "params"}


def read_saved(folder: Path, step: int) -> Saved:
    """The plain values of a checkpoint, without its arrays."""
    record = (metadata(folder / str(step)).custom_metadata or {}).get(_RECORD)
    if record is None:
        raise CheckpointError(f"{folder / str(step)} was not written by draft-jax: it has no record of its run")
    return Saved(step, **json.loads(record))


def load_trained(run_dir: str | Path, step: int | Literal["latest", "best"] = "latest") -> tuple[DraftConfig, Params]:
    """Parameters of a run, for evaluation and export; moments are not read.

    Args:
        run_dir: folder of the run, with draft_config.json and checkpoints/.
        step: a step that has a checkpoint, `latest`, or `best` (by the run's checkpoint.best_metric).

    Returns:
        The draft's configuration and its float32 parameters, on the default device.

    Raises:
        CheckpointError: no run, no such checkpoint, or one that does not fit the configuration.
    """
    run_dir = Path(run_dir).absolute()
    config_file = run_dir / DRAFT_CONFIG
    if not config_file.is_file():
        raise CheckpointError(f"{run_dir} is not a run: it has no {DRAFT_CONFIG}")
    draft = DraftConfig.from_hf(json.loads(config_file.read_text()))
    folder = run_dir / CHECKPOINTS
    steps = complete_steps(folder)
    if not steps:
        raise CheckpointError(f"{folder} holds no complete checkpoint; train first")
    chosen = steps[-1] if step == "latest" else best_step(folder) if step == "best" else step
    if chosen not in steps:
        raise CheckpointError(f"{folder} holds no checkpoint of step {chosen}; it holds {', '.join(map(str, steps))}")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), abstract_params(draft, jnp.float32)
    )
    check_tensors(folder / str(chosen), {"params": wanted})
    return draft, load(folder / str(chosen), {"params": wanted})["params"]


def best_step(folder: Path) -> int:
    """Step of the best complete checkpoint; the latest one if none was ranked."""
    scores = {}
    for step in complete_steps(folder):
        metrics = folder / str(step) / "metrics" / "metrics"
        if metrics.is_file():
            scores[step] = json.loads(metrics.read_text()).get(_SCORE, -math.inf)
    return max(scores, key=lambda step: (scores[step], step)) if scores else complete_steps(folder)[-1]


def check_identity(saved: Saved, now: Mapping[str, Any], source: Path) -> None:
    """Refuse to continue a run with other data, another draft or another seed.

    Raises:
        CheckpointError: names every fact that differs, with both values.
    """
    differing = [
        f"  {name}: checkpoint {saved.identity.get(name)!r}, this run {now.get(name)!r}"
        for name in sorted({*saved.identity, *now})
        if saved.identity.get(name) != now.get(name)
    ]
    if differing:
        raise CheckpointError(
            f"{source} step {saved.step} belongs to another run:\n" + "\n".join(differing) + "\nGive the values of the"
            " checkpoint, or start in a new run_dir (its weights alone: export it and use draft.init_draft)"
        )
