"""How well the draft knows what will be accepted: calibration metrics on the cumulative product, slot by slot.

The confidence head predicts, for every slot, the chance that its token is accepted given that all before it
were. What a server uses is the product up to a slot: the chance that the prefix survives. It is compared with
what happened to the sampled tokens (dspark_spec 5.2); slots after an accepted stop token are not observed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: Bins of the calibration error and of reliability diagrams (dspark_spec 5.2).
BINS = 20


class ConfidenceError(ValueError):
    """Results that hold nothing a calibration could use; the message says what is missing."""


@dataclass(frozen=True)
class ConfidenceData:
    """What the head said and what became of it, one row a round.

    Attributes:
        logits: float64 [N, K], raw logits of the head; NaN where the slot was not observed. A round observes a
            prefix of its slots.
        accepted: bool [N, K], whether slots 0..k were all accepted; False where not observed.
        bonus: bool [N], whether the round also committed a token of the target's own.
        prompts: int [N], the prompt of each round: rounds of one prompt stay together when data is split.
    """

    logits: np.ndarray
    accepted: np.ndarray
    bonus: np.ndarray
    prompts: np.ndarray

    @property
    def observed(self) -> np.ndarray:
        """bool [N, K]: slots whose fate is known."""
        return ~np.isnan(self.logits)

    @property
    def block_size(self) -> int:
        return self.logits.shape[1]

    def rows(self, keep: np.ndarray) -> ConfidenceData:
        """The rounds that `keep` (bool [N]) names."""
        return ConfidenceData(self.logits[keep], self.accepted[keep], self.bonus[keep], self.prompts[keep])


def collect(results: Sequence[Mapping[str, Any]]) -> ConfidenceData:
    """Reads the rounds of evaluation results (`EvalResult.to_json()`).

    Args:
        results: of one draft; their samples are pooled.

    Raises:
        ConfidenceError: no rounds, no confidence logits, a confidence threshold that hid slots, or drafts of
            different block sizes.
    """
    sizes = {result["settings"]["block_size"] for result in results}
    if len(sizes) != 1:
        raise ConfidenceError(f"results of drafts with different block sizes: {sorted(sizes)}; give one draft's")
    for result in results:
        if threshold := result["settings"].get("confidence_threshold"):
            raise ConfidenceError(
                f"a result was made with confidence_threshold {threshold}: what it held back was never judged. "
                "Evaluate with --confidence-threshold 0"
            )
    (K,) = sizes
    samples = [sample for result in results for sample in result.get("samples") or ()]
    rounds = [(index, item) for index, sample in enumerate(samples) for item in sample["rounds"] if item["proposed"]]
    if not rounds:
        raise ConfidenceError("the results hold no rounds; they were written without samples, or nothing was proposed")
    if missing := sum(item.get("confidence_logits") is None for _, item in rounds):
        raise ConfidenceError(
            f"{missing} of {len(rounds)} rounds have no confidence logits: the draft has no confidence head, or the "
            "result is of an older version; evaluate again"
        )
    logits = np.full((len(rounds), K), np.nan)
    accepted = np.zeros((len(rounds), K), bool)
    for row, (_, item) in enumerate(rounds):
        logits[row, : item["proposed"]] = item["confidence_logits"]
        accepted[row, : item["accepted"]] = True
    bonus = np.array([item["committed"] > item["accepted"] for _, item in rounds])
    return ConfidenceData(logits, accepted, bonus, np.array([index for index, _ in rounds]))


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) without overflow; NaN stays NaN."""
    return 0.5 * (1.0 + np.tanh(0.5 * logits))


def survival(logits: np.ndarray, temperatures: Sequence[float] | np.ndarray | None = None) -> np.ndarray:
    """Predicted chance that slots 0..k are all accepted: the running product of sigmoid(logit / temperature).

    Args:
        logits: [N, K].
        temperatures: [K], all positive; None = 1 everywhere, the head as it is.
    """
    scale = 1.0 if temperatures is None else np.asarray(temperatures, np.float64)
    return np.cumprod(sigmoid(logits / scale), axis=1)


@dataclass(frozen=True)
class Reliability:
    """A reliability diagram: predictions sorted into `BINS` bins of equal width; empty bins are left out.

    Attributes:
        predicted, observed: mean prediction and share of accepted prefixes of each bin.
        counts: predictions in it.
    """

    predicted: tuple[float, ...]
    observed: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class SlotCalibration:
    """Calibration of one slot; rates are None where nothing was observed, or only one outcome (auroc).

    Attributes:
        count: predictions judged.
        predicted: their mean.
        observed: share of prefixes accepted.
        ece: expected calibration error, 20 bins of equal width: the mean gap between prediction and share,
            weighted by the bins' counts.
        auroc: chance that an accepted prefix was given the higher prediction than a rejected one (ties: half).
        brier: mean squared difference of prediction and outcome.
        reliability: the bins.
    """

    count: int
    predicted: float | None
    observed: float | None
    ece: float | None
    auroc: float | None
    brier: float | None
    reliability: Reliability


def calibration(data: ConfidenceData, predictions: np.ndarray) -> list[SlotCalibration]:
    """Per slot, how predictions of survival compare with what happened.

    Args:
        data: the outcomes.
        predictions: [N, K], as `survival` makes them.
    """
    out = []
    for slot in range(data.block_size):
        seen = data.observed[:, slot]
        out.append(judge(predictions[seen, slot], data.accepted[seen, slot]))
    return out


def judge(predictions: np.ndarray, outcomes: np.ndarray) -> SlotCalibration:
    """Metrics of predicted probabilities [N] against outcomes, bool [N]."""
    if not len(predictions):
        return SlotCalibration(0, None, None, None, None, None, Reliability((), (), ()))
    reliability = reliability_bins(predictions, outcomes)
    return SlotCalibration(
        count=len(predictions),
        predicted=float(predictions.mean()),
        observed=float(outcomes.mean()),
        ece=expected_calibration_error(predictions, outcomes),
        auroc=auroc(predictions, outcomes),
        brier=float(np.mean((predictions - outcomes) ** 2)),
        reliability=reliability,
    )


def chance_error(data: ConfidenceData, draws: int = 100, seed: int = 0) -> float:
    """The mean calibration error over slots that a perfect head exceeds in 1 of 20 cases, for want of rounds.

    Outcomes are drawn from the head's own confidences, slot after slot, as many as were observed. An error below
    it says nothing against the head: the calibration error of few predictions is never zero.
    """
    random = np.random.default_rng(seed)
    chances = sigmoid(data.logits)
    predictions = np.cumprod(chances, axis=1)
    errors = []
    for _ in range(draws):
        with np.errstate(invalid="ignore"):
            outcomes = np.cumprod(random.random(chances.shape) < chances, axis=1).astype(bool)
        slots = [
            expected_calibration_error(predictions[seen, k], outcomes[seen, k])
            for k, seen in enumerate(data.observed.T)
            if seen.any()
        ]
        errors.append(np.mean(slots))
    return float(np.percentile(errors, 95))


def _bin_sums(predictions: np.ndarray, outcomes: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per bin of equal width: sum of predictions, sum of outcomes, count. A prediction of 1 is in the last bin."""
    which = np.minimum((predictions * bins).astype(np.int64), bins - 1)
    sums = (np.bincount(which, weights, bins) for weights in (predictions, outcomes.astype(np.float64)))
    return (*sums, np.bincount(which, minlength=bins))  # type: ignore[return-value]


def expected_calibration_error(predictions: np.ndarray, outcomes: np.ndarray, bins: int = BINS) -> float:
    """Mean over predictions of the gap between their bin's mean prediction and share of outcomes."""
    predicted, observed, _ = _bin_sums(predictions, outcomes, bins)
    return float(np.abs(predicted - observed).sum() / len(predictions))


def reliability_bins(predictions: np.ndarray, outcomes: np.ndarray, bins: int = BINS) -> Reliability:
    """The points of a reliability diagram."""
    predicted, observed, counts = _bin_sums(predictions, outcomes, bins)
    full = counts > 0
    return Reliability(
        tuple((predicted[full] / counts[full]).tolist()),
        tuple((observed[full] / counts[full]).tolist()),
        tuple(counts[full].tolist()),
    )


def auroc(predictions: np.ndarray, outcomes: np.ndarray) -> float | None:
    """Area under the ROC curve, exact, by the ranks of the positives (Mann and Whitney); None for one class."""
    positives = int(outcomes.sum())
    negatives = len(outcomes) - positives
    if not positives or not negatives:
        return None
    _, inverse, counts = np.unique(predictions, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks = (last - (counts - 1) / 2)[inverse]  # tied predictions share their mean rank
    return float((ranks[outcomes].sum() - positives * (positives + 1) / 2) / (positives * negatives))
