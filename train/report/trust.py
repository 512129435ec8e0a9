"""Whether the draft knows what will be accepted: reliability, calibration and what a threshold would do."""

from __future__ import annotations

from collections.abc import Sequence

from train.evaluate.calibrate import THRESHOLDS, advice
from train.evaluate.confidence import (
    ConfidenceData,
    ConfidenceError,
    Reliability,
    SlotCalibration,
    calibration,
    chance_error,
    collect,
    sigmoid,
    survival,
)
from train.evaluate.result_file import NamedResult
from train.evaluate.sts import SweepPoint, sweep
from train.report.charts import Line, line_chart
from train.report.tables import html_table, with_conclusions

#: Above this mean calibration error a calibration is advised.
_POOR = 0.03
#: Bins with fewer predictions are not drawn: their share says nothing.
_MIN_BIN = 20


def trust_section(evaluations: Sequence[NamedResult]) -> list[str]:
    """The section: for every evaluation with confidence logits and no threshold."""
    out: list[str] = []
    for item in evaluations:
        try:
            data = collect([item.result])
        except (ConfidenceError, KeyError):
            continue  # no such head, or no samples: there is nothing to show, and nothing is wrong
        out += _one(item.name, data)
    if not out:
        return []
    note = (
        '<p class="note">Survival is the product of the confidences up to a slot, against what happened to the sampled '
        f"tokens; bins of fewer than {_MIN_BIN} predictions are not drawn. Thresholds are estimated from the same "
        "rounds.</p>"
    )
    return ["<h2>Confidence</h2>", *out, note]


def _one(name: str, data: ConfidenceData) -> list[str]:
    slots = calibration(data, survival(data.logits))
    shown = sorted({0, len(slots) // 2, len(slots) - 1})
    lines = [_line(f"slots 0..{k}" if k else "slot 0", slots[k].reliability) for k in shown if slots[k].count]
    reliability = line_chart(
        f"{name}: predicted and actual survival", "predicted chance that the prefix is accepted", "share accepted",
        lines, limits=(0.0, 1.0), markers=True, diagonal=True,
    )  # fmt: skip
    points = sweep(data, sigmoid(data.logits), THRESHOLDS)
    trade = line_chart(
        f"{name}: what a confidence threshold trades", "tokens verified per round", "accept length [tokens per round]",
        [Line("thresholds 0.9 (left) to 0", [p.verified for p in points], [p.accept_length for p in points])],
        markers=True,
    )  # fmt: skip
    rows = [
        (k, slot.count, slot.predicted, slot.observed, slot.ece, slot.auroc, slot.brier) for k, slot in enumerate(slots)
    ]
    return [
        '<div class="charts">',
        with_conclusions(reliability, [conclude(name, slots, chance_error(data))]),
        with_conclusions(trade, [advice(points)]),
        "</div>",
        "<details><summary>Figures by slot and by threshold</summary>",
        html_table([("survival to slot", "rounds", "predicted", "accepted", "ECE", "AUROC", "Brier"), *rows]),
        html_table([("threshold", "accept length", "verified", "share used"), *map(_row, points)]),
        "</details>",
    ]


def _line(name: str, found: Reliability) -> Line:
    """The bins with enough predictions to have a share."""
    points = [
        (predicted, observed)
        for predicted, observed, count in zip(found.predicted, found.observed, found.counts)
        if count >= _MIN_BIN
    ]
    return Line(name, [x for x, _ in points], [y for _, y in points])


def _row(point: SweepPoint) -> tuple[float, ...]:
    return point.threshold, point.accept_length, point.verified, point.verify_rate


def conclude(name: str, slots: Sequence[SlotCalibration], chance: float) -> str:
    """Whether the head says too much or too little, and whether that is worth calibrating.

    Args:
        chance: the mean calibration error that a perfect head could show of so few rounds.
    """
    judged = [slot for slot in slots if slot.count]
    bias = sum((slot.predicted or 0.0) - (slot.observed or 0.0) for slot in judged) / len(judged)
    error = sum(slot.ece or 0.0 for slot in judged) / len(judged)
    aurocs = [slot.auroc for slot in judged if slot.auroc is not None]
    ranks = f" It ranks prefixes with an AUROC of {sum(aurocs) / len(aurocs):.2f} (0.5 is a guess)." if aurocs else ""
    how = f"{abs(bias):.1%} {'too sure' if bias > 0 else 'too cautious'}" if abs(bias) >= 0.0005 else "right"
    text = f"{name}: on average {how}, mean calibration error {error:.1%}"
    if error <= chance:
        return f"{text}, no more than a perfect head may show of so few rounds ({chance:.1%}).{ranks}"
    if error > _POOR:
        return f"{text}.{ranks} A scheduler should not trust it as it is: run draft-jax calibrate."
    return f"{text}.{ranks} That is good enough to schedule by."
