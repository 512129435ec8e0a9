"""A run from its configuration to its end: agreeing with the other processes, putting the parts together, training."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from . import assembly, launch, resume
from .assembly import Assembled
from .checkpoint import CHECKPOINTS, Checkpoints
from .config import RunConfig
from .distributed import DistributedError, PeerLostError, World
from .evaluate.in_loop import InLoopEvaluation
from .logbook import tell
from .metrics import CompileCounter
from .signals import StopRequest
from .start import begin
from .steps import Loop, RunResult
from .stored import CheckpointError
from .topology import Topology
from .tracker import CompositeTracker, open_trackers

#: With several processes a signal may come twice, from the batch system and from the launcher, shortly after.
_PATIENCE_SECONDS = 30.0
#: After an error, longest wait for a checkpoint that is being written: of several processes one may have given up.
_SAVE_SECONDS = 30.0


def run(config: RunConfig, *, target: Any = None, world: World | None = None) -> RunResult:
    """Train as configured.

    Args:
        config: the run.
        target: a loaded target to use instead of loading `config.target` (it must have the draft's taps).
        world: the processes of the run, all of which call this; None = this one alone.

    Raises:
        ConfigError, CheckpointError, DataError, TargetError, NonFiniteError: with the thing and the remedy named.
        DistributedError: one of these on another process, named, or processes that cannot work as one.
    """
    world = world or World(Topology())
    launch.agree_on_start(world, config)
    run_dir = Path(config.run_dir)
    launch.require_shared(world, run_dir)
    start = resume.find_start(config, run_dir, world)
    folder = run_dir / CHECKPOINTS

    def check(identity: dict[str, Any]) -> None:
        if start is not None:
            for line in resume.check_same_run(config, identity, folder, start):
                if world.is_first:
                    print(f"changed since step {start}: {line}", flush=True)

    with CompileCounter() as compiles:
        parts = assembly.assemble(config, target, check, world)
        if world.is_first:
            world.attempt("writing the run's files", lambda: resume.write_run_files(config, parts.draft, run_dir))
        else:
            world.attempt("writing the run's files", lambda: None)
        checkpoints = Checkpoints(folder, replace(config.checkpoint, best_metric=config.best_metric))
        try:
            first = begin(config, parts, checkpoints, start, world)
            evaluation = None
            if config.eval.every:
                evaluation = world.attempt("reading evaluation prompts", lambda: _evaluation(config, parts, world))
                world.agree("the evaluation's prompts", evaluation.facts())
            tracker = world.attempt("opening trackers", lambda: _open_trackers(config, run_dir, start, world))
            loop = Loop(config, parts, first, checkpoints, tracker, compiles, evaluation, world)
            try:
                with StopRequest(_PATIENCE_SECONDS if world.size > 1 else 0.0) as stop:
                    result = loop.run(stop)
            finally:
                tracker.finish()
        except PeerLostError:
            raise  # to end a save properly would take the lost process; what is complete stays
        except BaseException as error:
            # A process whose part of a save has failed is gone: the others would wait for it until they are ended.
            torn = isinstance(error, DistributedError) and CheckpointError.__name__ in error.kinds
            checkpoints.close((0.0 if torn else _SAVE_SECONDS) if world.size > 1 else None)
            raise
        checkpoints.close()
        return result


def _open_trackers(config: RunConfig, run_dir: Path, start: int | None, world: World) -> CompositeTracker:
    """Those of the configuration on the first process, none on the others: all have the same numbers."""
    if not world.is_first:
        return CompositeTracker(())
    return open_trackers(
        config.logging.trackers,
        run_dir,
        last_step=start,
        project=config.logging.wandb_project,
        config=resume.settings_of(config),
    )


def _evaluation(config: RunConfig, parts: Assembled, world: World) -> InLoopEvaluation:
    def say(text: str) -> None:
        tell(text if world.size == 1 else f"{world.who}: {text}")

    # Ranks that share a target decode the same texts: each of its forwards needs all of them.
    tp = config.target.sglang.tp_size
    share = (world.rank // tp, world.size // tp)
    run_dir = Path(config.run_dir)
    return InLoopEvaluation(config.eval, parts.draft, parts.target, run_dir, say, share=share, gather=world.gather)
