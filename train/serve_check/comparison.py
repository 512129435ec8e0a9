"""The two sides against each other: accept length, slots, and outputs token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from train.serve_check.accounting import ServedStatistics, served_statistics, standard_error
from train.serve_check.offline import OfflineResult
from train.serve_check.serving import ServedPass


@dataclass(frozen=True)
class OutputDifference:
    """Where two outputs of one prompt first part; None past an end.

    `margin` is the gap of plain decoding's two largest logits there: a small one is a near tie, which rounding
    decides otherwise when other numbers of tokens share a forward; a large one is a fault.
    """

    prompt: str
    position: int
    served: int | None
    other: int | None
    margin: float | None = None


@dataclass(frozen=True)
class Identity:
    """Served outputs against others of the same prompts.

    Attributes:
        identical, compared: outputs equal token by token, of so many.
        differences: the first places of those that are not.
    """

    identical: int
    compared: int
    differences: tuple[OutputDifference, ...]

    @property
    def share(self) -> float | None:
        return self.identical / self.compared if self.compared else None


def compare_outputs(served: Mapping[str, Sequence[int]], other: Mapping[str, Sequence[int]]) -> Identity:
    """Compares outputs of the prompts both sides have."""
    names = [name for name in served if name in other]
    differences = []
    for name in names:
        ours, theirs = list(served[name]), list(other[name])
        if ours == theirs:
            continue
        place = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
        at = [tokens[place] if place < len(tokens) else None for tokens in (ours, theirs)]
        differences.append(OutputDifference(name, place, at[0], at[1]))
    return Identity(len(names) - len(differences), len(names), tuple(differences))


def with_margins(identity: Identity, margins: Mapping[str, float | None]) -> Identity:
    """The same with the margins that are known."""
    known = tuple(replace(item, margin=margins.get(item.prompt)) for item in identity.differences)
    return replace(identity, differences=known)


@dataclass(frozen=True)
class Comparison:
    """Everything at one temperature.

    Attributes:
        temperature: of both sides.
        offline: our evaluation.
        served: with the draft; `statistics` are its numbers in our definitions.
        plain: without the draft; None when not asked for.
        block_size: K.
        tolerance: see ServeConfig.
        to_plain, to_offline: served outputs against plain served and offline ones; None when sampling.
    """

    temperature: float
    offline: OfflineResult
    served: ServedPass
    plain: ServedPass | None
    block_size: int
    tolerance: float
    to_plain: Identity | None = None
    to_offline: Identity | None = None

    @property
    def statistics(self) -> ServedStatistics:
        return served_statistics(self.served.samples, self.block_size)

    @property
    def offline_accept_length(self) -> float:
        return float(self.offline.record["accept_length"])

    @property
    def offline_standard_error(self) -> float | None:
        return standard_error(list(self.offline.pairs.values()))

    @property
    def relative_difference(self) -> float | None:
        """served / offline - 1; None when nothing was verified."""
        served = self.statistics.accept_length
        return None if served is None else served / self.offline_accept_length - 1.0

    @property
    def relative_error(self) -> float | None:
        """One standard error of `relative_difference`, taking the two sides as independent."""
        served, ours, theirs = self.statistics, self.offline_standard_error, self.statistics.standard_error
        if ours is None or theirs is None or not served.accept_length:
            return None
        return ((ours / self.offline_accept_length) ** 2 + (theirs / served.accept_length) ** 2) ** 0.5

    @property
    def same_text(self) -> tuple[float, float] | None:
        """(offline, served) accept length of prompts with equal outputs: same text, so only the draft can differ."""
        if self.to_offline is None:
            return None
        differing = {item.prompt for item in self.to_offline.differences}
        ours = [pair for name, pair in self.offline.pairs.items() if name not in differing]
        theirs = [(s.committed, s.rounds) for s in self.served.samples if s.prompt not in differing]
        totals = [(sum(c for c, r in side if r), sum(r for _, r in side)) for side in (ours, theirs)]
        if not all(rounds for _, rounds in totals):
            return None
        return totals[0][0] / totals[0][1], totals[1][0] / totals[1][1]

    @property
    def problem(self) -> str | None:
        """Why this comparison fails, in a sentence; None when the two sides agree."""
        statistics, difference = self.statistics, self.relative_difference
        if difference is None:
            return "the server verified no round: every output ended with its first token"
        if not statistics.committed > statistics.rounds and self.offline_accept_length > 1.05:
            return (
                "the server accepted no draft token at all: it serves other weights than the export holds "
                "(SGLang's loader skips what it does not know), or another target"
            )
        if abs(difference) <= self.tolerance:
            return None
        text = (
            f"served accept length {statistics.accept_length:.3f} is {difference:+.1%} off the offline "
            f"{self.offline_accept_length:.3f}; {self.tolerance * 100:g} % are allowed"
        )
        noise = self.relative_error
        if noise is not None and abs(difference) <= 2 * noise:
            text += f" (within two standard errors, {2 * noise:.1%}: more prompts would tell)"
        return text

    @property
    def speedup(self) -> float | None:
        """Tokens/s served with the draft over tokens/s served without."""
        if self.plain is None or not self.plain.tokens_per_second or self.served.tokens_per_second is None:
            return None
        return self.served.tokens_per_second / self.plain.tokens_per_second

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, every request's record included."""
        offline = self.offline.record
        return {
            "temperature": self.temperature,
            "relative_difference": self.relative_difference,
            "relative_standard_error": self.relative_error,
            "tolerance": self.tolerance,
            "agrees": self.problem is None,
            "problem": self.problem,
            "speedup": self.speedup,
            "same_text_accept_length": self.same_text,
            "offline": {
                "file": str(self.offline.path),
                "standard_error": self.offline_standard_error,
                **{key: offline.get(key) for key in (
                    "accept_length", "survival", "conditional", "rounds", "tokens", "tokens_per_second_draft",
                )},
            },
            "served": {
                **asdict(self.statistics),
                "seconds": self.served.seconds,
                "tokens_per_second": self.served.tokens_per_second,
                "cached_tokens": self.served.cached_tokens,
                "past_stop": sum(sample.past_stop for sample in self.served.samples),
                "samples": [asdict(sample) for sample in self.served.samples],
            },
            "plain": None if self.plain is None else {
                "tokens": self.plain.tokens,
                "seconds": self.plain.seconds,
                "tokens_per_second": self.plain.tokens_per_second,
                "cached_tokens": self.plain.cached_tokens,
            },
            "identical_to_plain": _identity_json(self.to_plain),
            "identical_to_offline": _identity_json(self.to_offline),
        }  # fmt: skip


def _identity_json(identity: Identity | None) -> dict[str, Any] | None:
    return None if identity is None else {**asdict(identity), "share": identity.share}
