"""Intervals of figures that are sums over sums, by resampling prompts.

Rounds of one prompt resemble each other, so the prompt is what is drawn again, with all its rounds; drawn within
its task, since how many prompts a task has is chosen, not observed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
RESAMPLES = 2000
#: With fewer prompts an interval would promise what a bootstrap cannot hold.
MIN_PROMPTS = 10


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % interval; `low` and `high` are None for fewer than `MIN_PROMPTS` prompts."""

    value: float | None
    low: float | None = None
    high: float | None = None

    @property
    def excludes_zero(self) -> bool | None:
        """Whether zero lies outside; None without an interval."""
        if self.low is None or self.high is None:
            return None
        return self.low > 0 or self.high < 0


def prompt_weights(strata: np.ndarray, resamples: int = RESAMPLES, seed: int = 0) -> np.ndarray:
    """float64 [resamples, P]: how often each prompt is drawn, prompts drawn within their stratum.

    Args:
        strata: [P], the task of each prompt.
        resamples: sets drawn.
        seed: the same numbers for every figure of a report, so that figures of the same prompts move together.
    """
    random = np.random.default_rng(seed)
    weights = np.zeros((resamples, len(strata)))
    for name in np.unique(strata):
        members = np.flatnonzero(strata == name)
        weights[:, members] = random.multinomial(len(members), np.full(len(members), 1 / len(members)), resamples)
    return weights


def interval(value: float | None, draws: np.ndarray, prompts: int) -> Interval:
    """The percentile interval of `draws`, one figure a resample; NaN where a resample has no such figure."""
    known = draws[np.isfinite(draws)]
    if value is None or prompts < MIN_PROMPTS or not known.size:
        return Interval(value)
    low, high = np.percentile(known, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
    return Interval(value, float(low), float(high))


def ratio(numerators: np.ndarray, denominators: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Sum over prompts / sum over prompts; NaN where the denominator is 0.

    Args:
        numerators, denominators: [P].
        weights: [R, P] gives [R]; None gives a scalar of the prompts as they are.
    """
    top, bottom = (a.sum() if weights is None else weights @ a for a in (numerators, denominators))
    return np.divide(top, bottom, out=np.full(np.shape(bottom), np.nan), where=np.asarray(bottom) > 0)


def ratio_interval(numerators: np.ndarray, denominators: np.ndarray, weights: np.ndarray) -> Interval:
    """The ratio with its interval; the prompts that count are those with a denominator."""
    counted = int((denominators > 0).sum())
    if not counted:
        return Interval(None)
    value = float(ratio(numerators, denominators))
    return interval(value, ratio(numerators, denominators, weights), counted)
