"""From device scalars to logged numbers: sums over steps, throughput, compile counts, the guard against NaN."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from draft_jax.objective.config import ObjectiveConfig
from draft_jax.objective.metrics import finalize

from .step import StepMetrics

#: Fires once for each program the backend compiles, ahead-of-time compilation included (jax_conventions 2.6).
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"

#: Sums that are looked at first: when one of them is not finite, the others follow from it.
_CAUSES = ("ce", "l1", "confidence", "loss_num")


class NonFiniteError(RuntimeError):
    """A sum or norm that is NaN or infinite; the message names the first one and its step."""


class CompileCounter:
    """Counts compilations by program name while it is entered: `{"accumulate": 1, "apply": 1, ...}`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Self:
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event == _COMPILE_EVENT:
            name = str(details.get("fun_name", "unknown"))
            self.counts[name.removeprefix("jit(").removesuffix(")")] += 1

    @property
    def training(self) -> int:
        """Compilations of the two training programs."""
        return self.counts["accumulate"] + self.counts["apply"]


class Meter:
    """Sums numerators and denominators over optimizer steps; the ratio is taken once, at the end.

    Args:
        objective: decides which metrics there are.
    """

    def __init__(self, objective: ObjectiveConfig):
        self._objective = objective
        self.reset()

    def reset(self) -> None:
        """Forget all steps."""
        self.steps = 0
        self._sums: dict[str, np.ndarray] = {}
        self._last: dict[str, float] = {}
        self._skipped = 0.0

    def add(self, sums: Mapping[str, np.ndarray], values: Mapping[str, float]) -> None:
        """Add one optimizer step."""
        self.steps += 1
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + np.asarray(value, np.float64)
        self._last = {k: v for k, v in values.items() if k != "skipped_updates"}
        self._skipped += values.get("skipped_updates", 0.0)

    def result(self) -> dict[str, float]:
        """Metrics of all steps since the reset; norms and learning rate are those of the last one."""
        return {**finalize(self._sums, self._objective), **self._last, "skipped_updates": self._skipped}


def read_back(step: int, metrics: StepMetrics) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Fetch one step's metrics to the host and refuse those that are not finite.

    Args:
        step: number of the optimizer step (1-based), for the message.
        metrics: device scalars.

    Raises:
        NonFiniteError: names the first sum or norm that is not finite. Parameters are still those of the step
            before, because `apply` does not apply such a gradient.
    """
    host = jax.device_get(metrics)
    sums = {name: np.asarray(value) for name, value in host.sums.items()}
    values = {name: float(value) for name, value in host.values.items()}
    causes: list[tuple[str, Any]] = [(name, sums[name]) for name in _CAUSES if name in sums]
    found: list[tuple[str, Any]] = [*causes, *sums.items(), *values.items()]
    for name, value in found:
        if not np.all(np.isfinite(value)):
            raise NonFiniteError(
                f"step {step}: {name} is {_show(value)}, the first value that is not finite; its update was not"
                " applied and nothing was saved. Look at the rows of this step, lower optimizer.lr, or resume from"
                " the checkpoint before"
            )
    return sums, values


def _show(value: Any) -> str:
    flat = np.ravel(value)
    return str(float(flat[0])) if flat.size == 1 else str(flat.tolist())


@dataclass
class Throughput:
    """Tokens, and where the wall time went, over optimizer steps. Padding is not counted.

    Attributes:
        tokens: of the documents of the steps.
        seconds: wall time of the steps.
        capture_seconds: of it, in the target and the staging.
        draft_seconds: of it, waiting for the draft's programs.
    """

    tokens: int = 0
    seconds: float = 0.0
    capture_seconds: float = 0.0
    draft_seconds: float = 0.0

    def add(self, other: "Throughput") -> None:
        """Add another reading to this one."""
        for f in fields(self):
            setattr(self, f.name, getattr(self, f.name) + getattr(other, f.name))

    def result(self, steps: int) -> dict[str, float]:
        """Tokens per second, seconds per optimizer step, and the shares of target and draft."""
        seconds = max(self.seconds, 1e-9)
        return {
            "tokens_per_second": self.tokens / seconds,
            "seconds_per_step": self.seconds / max(steps, 1),
            "capture_share": self.capture_seconds / seconds,
            "draft_share": self.draft_seconds / seconds,
        }


def not_finite(metrics: Mapping[str, Any]) -> list[str]:
    """Names of metrics without a finite value, such as a ratio over nothing."""
    return [k for k, v in metrics.items() if isinstance(v, float) and not math.isfinite(v)]
