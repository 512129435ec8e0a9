"""What an evaluation found, as numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from train.evaluate.accounting import AcceptStatistics, accept_statistics
from train.evaluate.sample_result import SampleResult, Seconds

#: Rows of the table whose seconds are summed over processes, so that they are the speed of one.
_RATES = ("tokens/s with the draft", "tokens/s plain", "rounds/s")


@dataclass(frozen=True)
class Difference:
    """Where the draft-assisted output first left plain greedy decoding.

    `margin` is the gap between the two largest plain logits there: a tiny one is a tie that rounding may
    break (any half-precision run), a large one is a fault.
    """

    prompt: str
    position: int
    with_draft: int | None
    plain: int | None
    margin: float | None


@dataclass(frozen=True)
class Refusal:
    """A prompt that was not evaluated: its id, and the reason in words."""

    prompt: str
    reason: str


@dataclass
class EvalResult:
    """The whole evaluation.

    `error` is a sentence when the numbers must not be read as a measurement (nothing was proposed, nothing
    was decoded); `accept_length` is then None. `missing` counts prompts not decoded yet. `token_texts` (id ->
    text) lets a report show words without a tokenizer.
    """

    statistics: AcceptStatistics
    samples: list[SampleResult]
    refusals: list[Refusal]
    differences: list[Difference]
    settings: dict[str, Any]
    compiled: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    missing: int = 0
    token_texts: dict[str, str] = field(default_factory=dict)

    @property
    def accept_length(self) -> float | None:
        """Tokens committed per round, the target's own included; None when the evaluation is in error."""
        return None if self.error else self.statistics.accept_length

    @property
    def accept_length_sample_mean(self) -> float | None:
        """Mean over samples of their own accept length, as z-lab reports it (dspark_spec 1.9)."""
        means = [sum(r.length for r in s.rounds) / len(s.rounds) for s in self.samples if s.rounds]
        return sum(means) / len(means) if means and not self.error else None

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        """The statistics of every task by itself, with its number of prompts; in the order first met."""
        by_task: dict[str, list[SampleResult]] = {}
        for sample in self.samples:
            by_task.setdefault(sample.task, []).append(sample)
        return {
            name: {
                "prompts": len(samples),
                **_listed(asdict(accept_statistics([r for s in samples for r in s.rounds], self._block_size))),
            }
            for name, samples in by_task.items()
        }

    @property
    def accept_length_task_mean(self) -> float | None:
        """Mean of the tasks' accept lengths, each counting the same: the average column of the paper's Table 1. None
        for a single task, or when a task ran no round."""
        lengths = [task["accept_length"] for task in self.tasks.values()]
        if len(lengths) < 2 or self.error or None in lengths:
            return None
        return sum(lengths) / len(lengths)

    @property
    def _block_size(self) -> int:
        return len(self.statistics.survival)

    @property
    def survival(self) -> tuple[float | None, ...]:
        return self.statistics.survival

    @property
    def conditional(self) -> tuple[float | None, ...]:
        return self.statistics.conditional

    @property
    def rounds(self) -> int:
        return self.statistics.rounds

    @property
    def tokens(self) -> int:
        """Generated tokens of all samples, first tokens included."""
        return sum(len(sample.output_tokens) for sample in self.samples)

    @property
    def seconds(self) -> Seconds:
        total = Seconds()
        for sample in self.samples:
            total.add(sample.seconds)
        return total

    @property
    def plain_seconds(self) -> Seconds | None:
        if not self._has_plain:
            return None
        total = Seconds()
        for sample in self.samples:
            assert sample.plain_seconds is not None
            total.add(sample.plain_seconds)
        return total

    @property
    def _has_plain(self) -> bool:
        return bool(self.samples) and all(sample.plain_tokens is not None for sample in self.samples)

    @property
    def tokens_per_second_draft(self) -> float | None:
        return self.tokens / self.seconds.total if self.samples and self.seconds.total > 0 else None

    @property
    def tokens_per_second_plain(self) -> float | None:
        seconds = self.plain_seconds
        if seconds is None or seconds.total <= 0:
            return None
        return sum(len(sample.plain_tokens or ()) for sample in self.samples) / seconds.total

    @property
    def speedup(self) -> float | None:
        """Tokens/s with the draft over tokens/s without, prefill included on both sides."""
        with_draft, plain = self.tokens_per_second_draft, self.tokens_per_second_plain
        return with_draft / plain if with_draft is not None and plain else None

    @property
    def rounds_per_second(self) -> float | None:
        """Rounds of all prompts together, prefill included in the time."""
        return self.rounds / self.seconds.total if self.samples and self.seconds.total > 0 else None

    @property
    def draft_share(self) -> float | None:
        """Share of the decoding time spent in the draft."""
        seconds = self.seconds
        return seconds.draft / seconds.total if seconds.total > 0 else None

    @property
    def identical_to_plain(self) -> int | None:
        """Samples whose tokens equal plain greedy decoding; None when sampling, or without a plain run."""
        if not self._has_plain or not self.settings.get("greedy"):
            return None
        return sum(sample.output_tokens == sample.plain_tokens for sample in self.samples)

    def to_json(self, samples: bool = True) -> dict[str, Any]:
        """Everything as plain JSON values; `samples=False` leaves the per-prompt records out."""
        statistics = asdict(self.statistics)
        statistics.pop("accept_length")
        seconds, plain_seconds = self.seconds, self.plain_seconds
        record = {
            "accept_length": self.accept_length,
            "accept_length_sample_mean": self.accept_length_sample_mean,
            "accept_length_task_mean": self.accept_length_task_mean,
            **_listed(statistics),
            "tokens": self.tokens,
            "prompts": len(self.samples),
            "finish": dict(Counter(sample.finish for sample in self.samples)),
            "refused": dict(Counter(refusal.reason.split(":")[0] for refusal in self.refusals)),
            "refusals": [asdict(refusal) for refusal in self.refusals],
            "tokens_per_second_draft": self.tokens_per_second_draft,
            "tokens_per_second_plain": self.tokens_per_second_plain,
            "speedup": self.speedup,
            "rounds_per_second": self.rounds_per_second,
            "draft_share": self.draft_share,
            "seconds": seconds.to_json(),
            "plain_seconds": plain_seconds.to_json() if plain_seconds else None,
            "identical_to_plain": self.identical_to_plain,
            "differences": [asdict(difference) for difference in self.differences],
            "compiled": self.compiled,
            "settings": self.settings,
            "error": self.error,
            "missing": self.missing,
            "tasks": self.tasks,
            "token_texts": self.token_texts,
        }
        if samples:
            record["samples"] = [sample.to_json() for sample in self.samples]
        return record

    def table(self) -> list[tuple[str, str]]:
        """(name, value) rows for a terminal or a report, every name saying what it counts."""
        rows = [
            ("prompts evaluated", str(len(self.samples))),
            ("prompts refused", str(len(self.refusals))),
            ("accept length (bonus included, per round)", _number(self.accept_length, 3)),
            ("accept length, mean over prompts (z-lab's)", _number(self.accept_length_sample_mean, 3)),
            ("survival per slot", _row(self.survival)),
            ("conditional acceptance per slot", _row(self.conditional)),
            ("rounds", str(self.rounds)),
            ("proposals per round", _number(self.statistics.proposal_length, 2)),
            ("tokens generated", str(self.tokens)),
            ("tokens/s with the draft", _number(self.tokens_per_second_draft, 1)),
            ("tokens/s plain", _number(self.tokens_per_second_plain, 1)),
            ("speed-up", _number(self.speedup, 2)),
            ("rounds/s", _number(self.rounds_per_second, 1)),
            ("draft's share of the time", _number(self.draft_share, 3)),
        ]
        if self.accept_length_task_mean is not None:
            rows.insert(4, ("accept length, mean of tasks (paper's average)", _number(self.accept_length_task_mean, 3)))
        if self.settings.get("processes", 1) > 1:
            rows = [(f"{name}, per process" if name in _RATES else name, value) for name, value in rows]
        if self.missing:
            rows.insert(1, ("prompts not decoded yet", str(self.missing)))
        if self.identical_to_plain is not None:
            rows.append(("equal to plain greedy decoding", f"{self.identical_to_plain} of {len(self.samples)}"))
        return rows


def _listed(values: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _row(values) -> str:
    return " ".join(_number(value, 2) for value in values)
