"""A converged draft can fall from tau 4 to 1 within five optimizer steps: noticing it, and saying of which kind."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from statistics import median
from typing import Any, Literal, Self

#: Steps in a row that must look fallen: one alone is a batch of hard rows.
PATIENCE = 3
#: Steps before a fall that the medians are taken over, and the fewest of them that say anything.
MEMORY, ENOUGH = 64, 16
#: tau - 1, the tokens accepted beyond the one that is free, below this share of the best so far is a fall.
TAU_SHARE = 0.5
#: Below this best tau a draft has learned too little to lose it.
TAU_LEARNED = 1.5
#: Loss above this multiple of its median is a fall.
LOSS_FACTOR = 2.0
#: A gradient norm above this multiple of its median has exploded.
NORM_FACTOR = 10.0
#: A collapse found at step d began after step d - SPAN: the steps that look fallen, and as many before them.
SPAN = 2 * PATIENCE


class CollapseError(RuntimeError):
    """The draft has collapsed and the run ends; the message says when, how far, of which kind, and what is good."""


@dataclass(frozen=True)
class Step:
    """What the guard looks at: the metrics of one optimizer step, before clipping."""

    number: int
    loss: float
    tau: float
    grad_norm: float


@dataclass(frozen=True)
class Collapse:
    """What the guard has found.

    Attributes:
        first: first step that looks fallen.
        found: the step it was said at, `PATIENCE` - 1 later.
        good_before: checkpoints of earlier steps are good.
        kind: `gradient norm` = it exploded; `step size` = it stayed flat, so that the steps are too large.
        text: all of it in a sentence or two, without what becomes of the run.
    """

    first: int
    found: int
    good_before: int
    kind: Literal["gradient norm", "step size"]
    text: str


class CollapseGuard:
    """Watches every step's metrics. They are the same on all processes, hence so is what it says.

    Its memory goes into each checkpoint: a run that continues, or goes back, is compared with what was good before.
    """

    def __init__(self) -> None:
        self._before: deque[Step] = deque(maxlen=MEMORY)  # steps that are no part of a fall
        self._falling: list[Step] = []
        self._best_tau = 0.0

    @classmethod
    def from_state(cls, state: Mapping[str, Any] | None) -> Self:
        """The guard whose `state` was saved; None = a new one."""
        guard = cls()
        if state is not None:
            guard._before.extend(Step(*values) for values in state["before"])
            guard._falling = [Step(*values) for values in state["falling"]]
            guard._best_tau = state["best_tau"]
        return guard

    def state(self) -> dict[str, Any]:
        """Its memory as JSON-able values."""
        return {
            "before": [list(astuple(step)) for step in self._before],
            "falling": [list(astuple(step)) for step in self._falling],
            "best_tau": self._best_tau,
        }

    def add(self, step: Step) -> Collapse | None:
        """Take in the next step; says when the draft has collapsed, once for each collapse."""
        if not self._fallen(step):
            for each in (*self._falling, step):
                self._before.append(each)
            self._falling = []
            # The median of some steps: one lucky batch must not set a mark that all later ones miss.
            if len(self._before) >= PATIENCE:
                self._best_tau = max(self._best_tau, median(s.tau for s in list(self._before)[-PATIENCE:]))
            return None
        self._falling.append(step)
        return self._found() if len(self._falling) == PATIENCE else None

    def _fallen(self, step: Step) -> bool:
        if len(self._before) < ENOUGH:
            return False
        by_tau = self._best_tau >= TAU_LEARNED and step.tau - 1 < TAU_SHARE * (self._best_tau - 1)
        return by_tau or step.loss > LOSS_FACTOR * median(s.loss for s in self._before)

    def _found(self) -> Collapse:
        first, last = self._falling[0], self._falling[-1]
        # The step that did the damage is one before its effect is seen.
        suspects = [*list(self._before)[-PATIENCE:], *self._falling]
        earlier = list(self._before)[:-PATIENCE]
        usual = median(s.grad_norm for s in earlier)
        worst = max(suspects, key=lambda s: s.grad_norm)
        kind: Literal["gradient norm", "step size"]
        if worst.grad_norm > NORM_FACTOR * usual:
            kind = "gradient norm"
            reason = (
                f"The gradient norm exploded: {worst.grad_norm:.3g} at step {worst.number}, usually {usual:.3g}. Look"
                " at the rows of that step; a smaller optimizer.max_grad_norm bounds what one step can do"
            )
        else:
            kind = "step size"
            reason = (
                f"The gradient norm stayed flat (at most {worst.grad_norm:.3g}, usually {usual:.3g}), so that the steps"
                " are too large for where the draft is: lower optimizer.lr_scale"
            )
        loss = f"loss {last.loss:.4g} (median {median(s.loss for s in self._before):.4g})"
        text = (
            f"the draft has collapsed from step {first.number} on: tau {last.tau:.3g} at step {last.number} (best"
            f" {self._best_tau:.3g}), {loss}. {reason}"
        )
        return Collapse(first.number, last.number, first.number - PATIENCE, kind, text)
