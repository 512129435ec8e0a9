"""The state a run begins with: a new one, that of a checkpoint, or a checkpoint's parameters alone."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .assembly import Assembled
from .checkpoint import Checkpoints
from .config import RunConfig
from .distributed import World
from .rollback import earlier, not_yet_saved
from .state import TrainState, at_step


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        state: parameters, moments, key.
        step: optimizer steps done.
        guard: memory of the guard against a collapse; None = it has none.
        rollbacks: how often the run has rolled back.
        facts: for the first line of metrics.
    """

    state: TrainState
    step: int = 0
    guard: Mapping[str, Any] | None = None
    rollbacks: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)


def begin(config: RunConfig, parts: Assembled, checkpoints: Checkpoints, step: int | None, world: World) -> Start:
    """Make or read the state, and move the rows of `parts` to its position.

    Args:
        config: the run.
        parts: of the run.
        checkpoints: of the run.
        step: of the checkpoint to continue from; None = start anew.
        world: the processes of the run, all of which call this.

    Raises:
        CheckpointError: the checkpoint does not fit.
        DistributedError: on another process.
    """
    if step is None:
        return Start(parts.initial_state())
    run_dir = Path(config.run_dir)
    if config.resume == "weights":
        read = functools.partial(checkpoints.restore_params, step, parts.abstract_state)
        params, saved = world.attempt("reading the checkpoint's parameters", read)
        state = at_step(parts.initial_state(params), step=step, rewarm_from=step)
        how = f"from its weights alone: moments are new, the learning rate {_rewarms(config)}"
    else:
        read_all = functools.partial(checkpoints.restore, step, parts.abstract_state)
        state, saved = world.attempt("reading the checkpoint", read_all)
        how = ""
    position, rollbacks, facts = saved.position, saved.rollbacks, {}
    # Killed after a roll-back to this checkpoint and before the next one.
    last = not_yet_saved(earlier(run_dir, world), saved)
    if last is not None:
        state = at_step(state, rewarm_from=step)
        position, rollbacks, facts = last.position, last.number, last.facts()
        how += f"{'; ' if how else ''}rolled back to it from step {last.found}: the data go on behind that step"
    parts.rows.set_state(position)
    if world.is_first:
        print(
            f"resumed {run_dir} at optimizer step {step} of {parts.total_steps}{f' ({how})' if how else ''}", flush=True
        )
    return Start(state, step, saved.guard, rollbacks, facts)


def _rewarms(config: RunConfig) -> str:
    steps = config.optimizer.resume_rewarm_steps
    return f"re-warms over {steps} steps" if steps else "is the schedule's at once (resume_rewarm_steps 0)"
