"""What is told of the steps of a run: sums since the last line and since the last checkpoint, lines, warnings."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from draft_jax.objective.config import ObjectiveConfig

from .metrics import CompileCounter, Meter, Throughput, not_finite
from .tracker import CompositeTracker


class Logbook:
    """Takes in every optimizer step, and writes a line of metrics when it is told to.

    Args:
        objective: decides which metrics there are.
        tracker: where lines go.
        compiles: counted since the run began.
        speaks: whether this process prints warnings.

    Attributes:
        logged: the last line.
    """

    def __init__(self, objective: ObjectiveConfig, tracker: CompositeTracker, compiles: CompileCounter, speaks: bool):
        self._tracker, self._compiles, self._speaks = tracker, compiles, speaks
        self._since_line, self._since_save = Meter(objective), Meter(objective)
        self._throughput = Throughput()
        self._noted: dict[str, Any] = {}
        self._warned: set[str] = set()
        self.logged: dict[str, Any] = {}

    def add(self, sums: Mapping[str, Any], values: Mapping[str, float], throughput: Throughput) -> None:
        """Take in one optimizer step, as `metrics.read_back` gives it."""
        for meter in (self._since_line, self._since_save):
            meter.add(sums, values)
        self._throughput.add(throughput)

    def note(self, facts: Mapping[str, Any]) -> None:
        """What stands in the next line besides, once."""
        self._noted |= facts

    @property
    def unwritten(self) -> int:
        """Steps since the last line."""
        return self._since_line.steps

    def write(self, step: int, facts: Mapping[str, Any]) -> None:
        """A line of all steps since the last one."""
        metrics: dict[str, Any] = {
            **self._since_line.result(),
            **self._throughput.result(self._since_line.steps),
            **facts,
            **self._noted,
            "compiles": self._compiles.training,
        }
        for name in not_finite(metrics):
            self._warn(step, name, f"{name} is {metrics[name]} (nothing to average); logged as null")
        for name in ("nonfinite_context", "nonfinite_last"):
            if metrics.get(name):
                self._warn(step, name, f"{metrics[name]:.0f} target states are not finite ({name}), masked out")
        self._tracker.log(step, metrics)
        self.logged = {"step": step, **metrics}
        self._since_line.reset()
        self._noted = {}
        self._throughput = Throughput()

    def of_checkpoint(self) -> dict[str, float]:
        """Metrics of the steps since the checkpoint before, which this ends."""
        metrics = dict(self._since_save.result()) if self._since_save.steps else {}
        self._since_save.reset()
        return metrics

    def rewind(self, step: int) -> None:
        """Forget the steps behind `step`: the run has gone back to it."""
        self._tracker.rewind(step)
        self._since_line.reset()
        self._since_save.reset()
        self._throughput, self._noted = Throughput(), {}

    def show(self, bar: tqdm, evaluated: Mapping[str, float]) -> None:
        """The last line beside the progress bar, and the accept length of the last evaluation."""
        names = {"loss": "loss", "tau": "tau_probabilistic", "tok/s": "tokens_per_second"}
        values = {name: self.logged[key] for name, key in names.items() if key in self.logged}
        if "accept_length" in evaluated:
            values["accept"] = evaluated["accept_length"]
        bar.set_postfix({**{k: f"{v:.4g}" for k, v in values.items()}, "compiles": self._compiles.training})

    def _warn(self, step: int, name: str, text: str) -> None:
        if name not in self._warned and self._speaks:
            self._warned.add(name)
            tell(f"WARNING step {step}: {text}")


def tell(text: str) -> None:
    """A line on stderr that does not tear the progress bar."""
    tqdm.write(text, file=sys.stderr)
