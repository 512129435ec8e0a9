"""Going back to the last good checkpoint after a collapse, and what is remembered of it.

The data are not taken again: the rows that led into the collapse lie behind the run, and it goes on with those that
come next. What was done stands in `rollbacks.jsonl`, because the checkpoint gone back to knows nothing of it: a run
that is killed before its next checkpoint goes on behind the collapse, too, and not once more into it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoints, Saved, set_aside
from .collapse import Collapse, CollapseError
from .distributed import World

ROLLBACKS = "rollbacks.jsonl"


@dataclass(frozen=True)
class Rollback:
    """One return to an earlier checkpoint.

    Attributes:
        number: 1 = the first of the run.
        found: step at which the collapse was found.
        to: step of the checkpoint the run went back to.
        kind: of the collapse.
        position: of the data behind the collapse, where training goes on.
    """

    number: int
    found: int
    to: int
    kind: str
    position: Any

    def facts(self) -> dict[str, int | str]:
        """For the first line of metrics after it."""
        return {"rollback": self.number, "rollback_from": self.found, "rollback_kind": self.kind}


def go_back(
    collapse: Collapse | None, checkpoints: Checkpoints, position: Any, run_dir: Path, limit: int, world: World
) -> Rollback:
    """Choose the checkpoint, set later ones aside and write it down; all processes together.

    Args:
        collapse: what this process has found; None = nothing, another one did.
        checkpoints: of the run; looks at its folder anew.
        position: of the data behind the last batch given.
        run_dir: of the run.
        limit: most roll-backs of a run.
        world: the processes.

    Raises:
        CollapseError: no good checkpoint is complete everywhere, or there were `limit` roll-backs already.
        DistributedError: the processes have not found the same.
    """
    world.agree("the collapse that was found", None if collapse is None else asdict(collapse))
    assert collapse is not None, "nobody found a collapse"
    made = earlier(run_dir, world)
    if len(made) >= limit:
        raise CollapseError(
            f"{collapse.text}. This run has rolled back {len(made)} time(s), to {_steps(made)}; more are not allowed"
            " (train.max_rollbacks): the same would happen again. Change what is said above, or the data, and continue"
            " with --resume auto"
        )
    checkpoints.wait_together(world)
    seen = [set(steps) for steps in world.gather(checkpoints.steps(), "complete checkpoints")]
    to = max((step for step in set.intersection(*seen) if step < collapse.good_before), default=None)
    if to is None:
        raise CollapseError(
            f"{collapse.text}. There is no checkpoint to roll back to: one before step {collapse.good_before} would be"
            f" good, there are {', '.join(map(str, sorted(set.union(*seen)))) or 'none'}. Start anew with what is said"
            " above changed, and with a smaller checkpoint.every"
        )
    rollback = Rollback(len(made) + 1, collapse.found, to, collapse.kind, position)

    def write() -> None:
        if not world.is_first:
            return
        # In this order: killed in between, the run goes back to the same checkpoint and finds the collapse again.
        later = {step for steps in seen for step in steps if step > to}
        set_aside(checkpoints.folder, later, "is not older than the collapse", "collapsed")
        lines = "".join(json.dumps(asdict(each)) + "\n" for each in (*made, rollback))
        temporary = run_dir / (ROLLBACKS + ".tmp")
        temporary.write_text(lines, encoding="utf-8")
        os.replace(temporary, run_dir / ROLLBACKS)

    world.attempt("rolling back", write)
    checkpoints.look_again()
    return rollback


def earlier(run_dir: Path, world: World) -> list[Rollback]:
    """All roll-backs of a run, in order, as its first process reads them."""

    def read() -> list[Rollback]:
        path = run_dir / ROLLBACKS
        if not world.is_first or not path.exists():
            return []
        return [Rollback(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]

    return world.first(world.attempt("reading earlier roll-backs", read), "earlier roll-backs")


def not_yet_saved(made: list[Rollback], saved: Saved) -> Rollback | None:
    """The roll-back to this very checkpoint that no later checkpoint has seen; None = there is none."""
    return next((each for each in reversed(made[saved.rollbacks :]) if each.to == saved.step), None)


def message(rollback: Rollback, collapse: Collapse, limit: int, rewarm: int) -> str:
    """What is told when it is done."""
    return (
        f"{collapse.text}. ROLLED BACK to the checkpoint of step {rollback.to} (roll-back {rollback.number} of at most"
        f" {limit}): {rollback.found - rollback.to} step(s) are done again, with the data that come after the collapse;"
        f" the learning rate re-warms over {rewarm} steps"
    )


def _steps(made: list[Rollback]) -> str:
    return ", ".join(f"step {each.to}" for each in made)
