"""Checkpoints of a run: written in the background, complete or absent, rotated; read back only when all matches."""

import errno
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from draft_jax.config import DraftConfig
from draft_jax.models.dspark import abstract_params

from .complete import complete_steps, damage, record_files, set_aside
from .config import CheckpointConfig
from .state import Params, TrainState

CHECKPOINTS = "checkpoints"
DRAFT_CONFIG = "draft_config.json"

#: Name under which the value that ranks checkpoints is stored; higher is better whatever the metric.
_SCORE = "score"
#: Name in orbax's custom metadata of the plain values of `Saved`, as JSON text.
_RECORD = "draft_jax_run"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or does not belong to this run; the message names what differs."""


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

    def poll(self) -> None:
        """Raise the error of a background save that has ended in one; never waits."""
        if self._pending is not None and not self._checkpointer.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Wait until the background save is complete. Raises CheckpointError if it failed."""
        if self._pending is None:
            return
        step, response = self._pending
        self._pending = None
        try:
            response.result()
            if jax.process_index() == 0:
                record_files(self.folder / str(step))
        except Exception as error:
            raise self._failure(step, error) from error

    def _failure(self, step: int, error: Exception) -> CheckpointError:
        self._failed = True
        for leftover in self.folder.glob(f"{step}.orbax-checkpoint-tmp*"):
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
        _check_tensors(folder, wanted)
        return _load(folder, wanted)

    def close(self) -> None:
        """Wait for the background save and free orbax's threads. Raises CheckpointError if that save failed."""
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
    record = (_metadata(folder / str(step)).custom_metadata or {}).get(_RECORD)
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
    _check_tensors(folder / str(chosen), {"params": wanted})
    return draft, _load(folder / str(chosen), {"params": wanted})["params"]


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


def _load(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    try:
        return ocp.load_checkpointables(folder, wanted)
    except Exception as error:
        raise CheckpointError(f"{folder} cannot be read: {' '.join(str(error).split())[:500]}") from error


def _metadata(folder: Path) -> Any:
    try:
        return ocp.checkpointables_metadata(folder.absolute())
    except Exception as error:
        raise CheckpointError(f"{folder} cannot be read: {' '.join(str(error).split())[:500]}") from error


def _check_tensors(folder: Path, wanted: dict[str, Any]) -> None:
    """Compare names, shapes and dtypes before reading: orbax would cast another dtype without a word."""
    if harm := damage(folder):
        raise CheckpointError(f"{folder} is not a complete checkpoint: it {harm}")
    metadata = _metadata(folder).metadata
    problems = []
    for part, tree in wanted.items():
        if metadata.get(part) is None:  # orbax only warns
            raise CheckpointError(f"{folder} cannot be read: the files of its {part} are damaged")
        expected, found = _tensors(tree), _tensors(metadata[part])
        problems += [f"{part}.{name} is missing" for name in expected if name not in found]
        problems += [f"{part}.{name} is unknown to this draft" for name in found if name not in expected]
        for name in expected.keys() & found.keys():
            for what, has, needs in zip(("shape", "dtype"), found[name], expected[name]):
                if has != needs:
                    problems.append(f"{part}.{name} has {what} {has}, this run needs {needs}")
    if problems:
        shown = "\n  ".join(sorted(problems)[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise CheckpointError(f"{folder} does not fit:\n  {shown}{more}")


def _tensors(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Dotted name -> (shape, dtype) of every leaf that has a shape."""
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: hasattr(node, "dtype"))[0]
    return {
        ".".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path): (
            tuple(leaf.shape),
            str(jnp.dtype(leaf.dtype)),
        )
        for path, leaf in leaves
        if hasattr(leaf, "dtype")
    }
