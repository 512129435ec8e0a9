"""Sequential temperature scaling: one temperature a slot, so that predicted survival means what it says.

Slots are fitted left to right (dspark_spec 6.4): the temperature of slot k is the one that makes the product up
to k agree best with what happened, those of the slots before it held fixed. The result is a small JSON file,
`sts.json`, that SGLang reads (`--speculative-dspark-confidence-sts-path`; field_survey 3.3) and divides the
head's logits by. It never changes what is generated, only how much of a block is verified.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from train.evaluate.bootstrap import Interval, prompt_weights, ratio_interval
from train.evaluate.confidence import (
    BINS,
    ConfidenceData,
    ConfidenceError,
    expected_calibration_error,
    sigmoid,
    survival,
)

STS_FILE = "sts.json"
#: Accepted and rejected prefixes a slot needs before its temperature means something.
MIN_COUNT = 30
Objective = Literal["nll", "ece"]

#: Temperatures searched: 10^-1.5 to 10^1.5, then finer around the best.
_COARSE = np.logspace(-1.5, 1.5, 61)
_FINE = np.logspace(-0.05, 0.05, 41)


@dataclass(frozen=True)
class StsCalibration:
    """What `sts.json` holds; the field names are SGLang's.

    Attributes:
        temperatures: [K], positive; 1 for a slot that was accepted, or rejected, fewer than `MIN_COUNT` times.
        dataset: what it was fitted on, in words.
        num_samples: rounds.
        ece_before, ece_after: [K], calibration error of the cumulative product on data the temperatures were
            not fitted on, without and with them.
        draft_digest: the draft it belongs to (`identity.draft_digest`); ours, SGLang does not look at it.
    """

    temperatures: list[float]
    dataset: str = ""
    num_samples: int = 0
    ece_before: list[float] = field(default_factory=list)
    ece_after: list[float] = field(default_factory=list)
    draft_digest: str = ""

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise ValueError("a calibration needs a temperature for every slot, it has none")
        if wrong := [t for t in self.temperatures if not 0 < t < float("inf")]:
            raise ValueError(f"temperatures must be positive numbers, got {wrong[0]}")

    def write(self, path: Path) -> None:
        """Writes the file whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
        try:
            partial.write_text(json.dumps(asdict(self), indent=1) + "\n")
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def read_sts(path: str | Path, block_size: int) -> StsCalibration:
    """Reads `sts.json`, with the checks SGLang makes when it starts.

    Raises:
        ValueError: it is not such a file, a temperature is not positive, or their number is not `block_size`.
    """
    try:
        raw: Any = json.loads(Path(path).read_text())
        found = StsCalibration(**{k: v for k, v in raw.items() if k in StsCalibration.__dataclass_fields__})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no calibration: {error}") from error
    if len(found.temperatures) != block_size:
        raise ValueError(
            f"{path} has {len(found.temperatures)} temperatures, the draft's block has {block_size} slots; "
            "fit it again with draft-jax calibrate"
        )
    return found


def calibration_of(folder: Path, draft_digest: str, block_size: int) -> tuple[StsCalibration | None, str]:
    """The calibration that lies in a run's or a draft's folder, if it belongs to this very draft.

    Args:
        folder: where `sts.json` may lie.
        draft_digest: of the draft that is to be served (`identity.draft_digest`).
        block_size: of that draft.

    Returns:
        The calibration or None, and a sentence on what was found; empty when there is no file.

    Raises:
        ValueError: there is a file, and it is no calibration for this block size.
    """
    path = folder / STS_FILE
    if not path.is_file():
        return None, ""
    found = read_sts(path, block_size)
    if found.draft_digest != draft_digest:
        whose = "another draft or step" if found.draft_digest else "a draft it does not name"
        return None, f"{path} was fitted for {whose}: left out. Evaluate this draft and run draft-jax calibrate"
    return found, f"{path}: fitted on {found.dataset}, included"


def fit_temperatures(data: ConfidenceData, objective: Objective = "nll", min_count: int = MIN_COUNT) -> list[float]:
    """Fits the temperatures of all slots, left to right.

    Args:
        data: held-out rounds.
        objective: what the temperature of a slot minimises. `ece`, the calibration error of the product, is
            the paper's (dspark_spec 6.4). `nll`, the mean negative log likelihood of the outcomes under the
            product, has the same optimum where the model is right and far less noise (docs/evaluation.md).
        min_count: a slot whose prefix was accepted, or rejected, less often keeps temperature 1.
    """
    before = np.ones(len(data.logits))
    temperatures: list[float] = []
    for slot in range(data.block_size):
        seen = data.observed[:, slot]
        chosen = 1.0
        outcomes = data.accepted[seen, slot]
        if min(outcomes.sum(), (~outcomes).sum()) >= min_count:
            logits, prefix = data.logits[seen, slot], before[seen]
            score = _SCORES[objective]
            coarse = _best(_COARSE, logits, outcomes, prefix, score)
            chosen = _best(coarse * _FINE, logits, outcomes, prefix, score)
        temperatures.append(chosen)
        before = before * sigmoid(data.logits[:, slot] / chosen)
    return temperatures


def _best(grid: np.ndarray, logits: np.ndarray, outcomes: np.ndarray, prefix: np.ndarray, score: Any) -> float:
    """The temperature of the grid with the least score; of equals, the one nearest to 1."""
    scores = np.array([score(prefix * sigmoid(logits / t), outcomes) for t in grid])
    least = grid[scores <= scores.min()]
    return float(least[np.argmin(np.abs(np.log(least)))])


def _log_likelihood(predictions: np.ndarray, outcomes: np.ndarray) -> np.ndarray:
    sure = np.clip(predictions, 1e-7, 1 - 1e-7)
    return np.where(outcomes, np.log(sure), np.log1p(-sure))


def _negative_log_likelihood(predictions: np.ndarray, outcomes: np.ndarray) -> float:
    return float(-np.mean(_log_likelihood(predictions, outcomes)))


_SCORES = {"ece": expected_calibration_error, "nll": _negative_log_likelihood}


@dataclass(frozen=True)
class StsFit:
    """A fit and how it does on data it has not seen.

    Attributes:
        calibration: fitted on all rounds; its calibration errors are cross-fitted.
        raw, scaled: [N, K] predicted survival without temperatures, and with those fitted on the other prompts.
        gain: nats per prediction by which the log likelihood of the outcomes rises from raw to scaled.
    """

    calibration: StsCalibration
    raw: np.ndarray
    scaled: np.ndarray
    gain: Interval


def fit(
    data: ConfidenceData, dataset: str, objective: Objective = "nll", *, draft_digest: str = "", folds: int = 5
) -> StsFit:
    """Fits `sts.json`, and measures it by cross-fitting over prompts.

    Every fold of prompts is predicted with temperatures fitted on the others, so `ece_after` is what fresh
    text of the same kind will show; the temperatures written are fitted on everything.

    Raises:
        ConfidenceError: fewer prompts than two folds need.
    """
    names = np.unique(data.prompts)
    if len(names) < 2:
        raise ConfidenceError(
            "calibration needs rounds of at least two prompts: one is always held out; evaluate more prompts"
        )
    folds = min(folds, len(names))
    raw = survival(data.logits)
    scaled = np.full_like(raw, np.nan)
    place = np.searchsorted(names, data.prompts) % folds
    for fold in range(folds):
        held = place == fold
        scaled[held] = survival(data.logits[held], fit_temperatures(data.rows(~held), objective))
    made = StsCalibration(
        temperatures=[round(t, 4) for t in fit_temperatures(data, objective)],
        dataset=dataset,
        num_samples=len(data.logits),
        ece_before=_errors(data, raw),
        ece_after=_errors(data, scaled),
        draft_digest=draft_digest,
    )
    return StsFit(made, raw, scaled, _gain(data, raw, scaled))


def _gain(data: ConfidenceData, raw: np.ndarray, scaled: np.ndarray) -> Interval:
    """The rise of the log likelihood, its interval over prompts."""
    seen = data.observed
    rise = np.where(seen, _log_likelihood(scaled, data.accepted) - _log_likelihood(raw, data.accepted), 0.0)
    _, prompt = np.unique(data.prompts, return_inverse=True)
    sums, counts = (np.bincount(prompt, values.sum(1)) for values in (rise, seen))
    return ratio_interval(sums, counts, prompt_weights(np.zeros(len(sums))))


def _errors(data: ConfidenceData, predictions: np.ndarray) -> list[float]:
    """[K] calibration errors; 0 for a slot never observed, since SGLang's file holds numbers only."""
    errors = []
    for slot in range(data.block_size):
        seen = data.observed[:, slot]
        errors.append(
            round(expected_calibration_error(predictions[seen, slot], data.accepted[seen, slot], BINS), 6)
            if seen.any()
            else 0.0
        )
    return errors


@dataclass(frozen=True)
class SweepPoint:
    """What a threshold would have cost and brought.

    Attributes:
        threshold: proposals end before the first slot predicted below it.
        accept_length: tokens committed per round, the target's own included.
        verified: tokens verified per round, the target's own position included.
        verify_rate: accept_length / verified: of the positions verified, the share that became output.
    """

    threshold: float
    accept_length: float
    verified: float
    verify_rate: float


def sweep(data: ConfidenceData, predictions: np.ndarray, thresholds: Sequence[float]) -> list[SweepPoint]:
    """Estimates, from rounds that proposed everything, what thresholds would have done.

    A round cut at length L commits min(accepted, L) drafts and the target's own token. It is an estimate: with
    shorter blocks the anchors of later rounds fall on other tokens.

    Args:
        data: rounds without a threshold.
        predictions: [N, K]: what is compared with the threshold (per-slot confidence, or survival).
        thresholds: in [0, 1].
    """
    proposed = data.observed.sum(1)
    accepted = data.accepted.sum(1)
    points = []
    for threshold in thresholds:
        low = (predictions < threshold) & data.observed
        length = np.where(low.any(1), low.argmax(1), proposed)
        kept = np.minimum(accepted, length)
        # A round that was cut ends with the target's own token, even where a stop token was to follow.
        committed = kept + np.where(length < accepted, True, data.bonus)
        verified = length + 1
        total = verified.sum()
        points.append(
            SweepPoint(
                float(threshold),
                float(committed.mean()),
                float(verified.mean()),
                float(committed.sum() / total),
            )
        )
    return points
