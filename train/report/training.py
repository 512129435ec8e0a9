"""How training went: loss, expected accept length, and the exact one where it was evaluated on the way."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from train.report.charts import Line, line_chart
from train.report.tables import with_conclusions

Rows = Sequence[Mapping[str, Any]]

#: Metric -> title, unit of the y axis, and whether more is better.
_CURVES = {
    "loss": ("Loss", "loss [nats, weighted]", False),
    "tau_probabilistic": ("Expected accept length on training text (tau)", "tokens per round", True),
    "accept_length": ("Accept length on held-out prompts, exact", "tokens per round", True),
}


def training_section(training: Rows | Mapping[str, Rows]) -> list[str]:
    """Curves of one run (its rows) or several ({name: rows}), each with what to conclude."""
    runs = {"": training} if not isinstance(training, Mapping) else training
    charts = []
    for key, (title, unit, more_is_better) in _CURVES.items():
        lines, sentences = [], []
        for name, rows in runs.items():
            points = curve(rows, key)
            if not points:
                continue
            lines.append(Line(name or "run", [step for step, _ in points], [value for _, value in points]))
            sentences.append(conclude(points, more_is_better, name))
        if lines:
            chart = line_chart(title, "optimizer step", unit, lines, markers=key == "accept_length", smooth=True)
            charts.append(with_conclusions(chart, sentences))
    return ["<h2>Training</h2>", '<div class="charts">', *charts, "</div>"] if charts else []


def curve(rows: Rows, key: str) -> list[tuple[float, float]]:
    """(step, value) of the rows that have both, finite; an evaluation's step is the one it was made at."""
    at = "eval_step" if key == "accept_length" else "step"
    found: list[tuple[Any, Any]] = [(row.get(at, row.get("step")), row.get(key)) for row in rows]
    return [(step, value) for step, value in found if finite(step) and finite(value)]


def conclude(points: Sequence[tuple[float, float]], more_is_better: bool, name: str = "") -> str:
    """What a curve says: where it began and ended, and whether it was still moving at the end.

    The last fifth of the points is compared with the fifth before it, in units of their own scatter.
    """
    begin = f"{name}: from" if name else "From"
    values = [value for _, value in points]
    if len(values) < 10:
        best = (max if more_is_better else min)(points, key=lambda point: point[1])
        return f"{begin} {values[0]:.3f} to {values[-1]:.3f}; the best value, {best[1]:.3f}, at step {best[0]:g}."
    fifth = max(2, len(values) // 5)
    last, before = values[-fifth:], values[-2 * fifth : -fifth]
    change = statistics.fmean(last) - statistics.fmean(before)
    noise = (statistics.variance(last) / fifth + statistics.variance(before) / fifth) ** 0.5
    start = statistics.fmean(values[:fifth])
    moved = f"{begin} {start:.3f} (mean of the first fifth) to {statistics.fmean(last):.3f} (of the last)"
    if abs(change) <= 2 * noise:
        return f"{moved}; level at the end: the last fifth differs from the one before by no more than noise."
    if (change > 0) == more_is_better:
        return f"{moved}; still improving at the end ({change:+.3f} over the last fifth): more steps may help."
    return (
        f"{moved}; getting worse at the end ({change:+.3f} over the last fifth): an earlier checkpoint may be better."
    )


def finite(value: Any) -> bool:
    """Whether this is a number that can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")
