"""The account of a dataset: what was kept, zeroed, cut and refused, each with an example."""

from dataclasses import dataclass, field
from typing import Any


class DataError(ValueError):
    """Data that cannot be trained on. The message names the place, the fault and the remedy."""


@dataclass
class Tally:
    """How often something happened, and where it was seen first."""

    count: int = 0
    example: str = ""

    def add(self, example: str, count: int = 1) -> None:
        self.count += count
        self.example = self.example or example


@dataclass
class Summary:
    """Counts of one pass over a dataset. `rows = refused + samples`, `samples = kept + zeroed`.

    Attributes:
        source: path of the data.
        rows: rows read; blank lines do not count.
        samples: rows that take part in training, zeroed ones included.
        tokens, supervised_tokens: over all samples, after truncation.
        longest: tokens of the longest sample, after truncation.
        truncated: samples cut at max_length (they are also kept or zeroed).
        zeroed: by reason: samples that keep their place with an all-zero mask.
        refused: by reason: rows that are no sample.
        notes: by name: things worth knowing about rows that are samples all the same.
        template: which chat template, and how it was checked.
    """

    source: str = ""
    rows: int = 0
    samples: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    longest: int = 0
    truncated: Tally = field(default_factory=Tally)
    zeroed: dict[str, Tally] = field(default_factory=dict)
    refused: dict[str, Tally] = field(default_factory=dict)
    notes: dict[str, Tally] = field(default_factory=dict)
    template: str = "none needed"

    def zero(self, reason: str, example: str) -> None:
        self.zeroed.setdefault(reason, Tally()).add(example)

    def refuse(self, reason: str, example: str) -> None:
        self.refused.setdefault(reason, Tally()).add(example)

    def note(self, name: str, example: str, count: int = 1) -> None:
        self.notes.setdefault(name, Tally()).add(example, count)

    @property
    def zeroed_samples(self) -> int:
        return sum(tally.count for tally in self.zeroed.values())

    @property
    def refused_rows(self) -> int:
        return sum(tally.count for tally in self.refused.values())

    @property
    def kept(self) -> int:
        """Samples with something to learn from."""
        return self.samples - self.zeroed_samples

    def format(self) -> str:
        """The account as a table for a terminal: most frequent reasons first."""

        def share(count: int) -> str:
            return f"{count:>9,} {100 * count / self.rows:5.1f} %" if self.rows else f"{count:>9,}        "

        lines = [
            f"data      {self.source}",
            f"template  {self.template}",
            f"rows      {self.rows:>9,}",
            f"kept      {share(self.kept)}  {self.supervised_tokens:,} of {self.tokens:,} tokens supervised, "
            f"longest {self.longest:,}",
            f"zeroed    {share(self.zeroed_samples)}  keep their place, mask all zero",
            *_reasons(self.zeroed),
            f"truncated {share(self.truncated.count)}" + _example(self.truncated),
            f"refused   {share(self.refused_rows)}",
            *_reasons(self.refused),
        ]
        if self.notes:
            lines += ["noted", *_reasons(self.notes)]
        return "\n".join(line.rstrip() for line in lines)

    def to_json(self) -> dict[str, Any]:
        """The same as a JSON-able dict."""

        def table(tallies: dict[str, Tally]) -> dict[str, Any]:
            return {name: {"count": t.count, "example": t.example} for name, t in _by_count(tallies)}

        return {
            "source": self.source,
            "template": self.template,
            "rows": self.rows,
            "samples": self.samples,
            "kept": self.kept,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "longest": self.longest,
            "truncated": {"count": self.truncated.count, "example": self.truncated.example},
            "zeroed": table(self.zeroed),
            "refused": table(self.refused),
            "notes": table(self.notes),
        }


def _by_count(tallies: dict[str, Tally]) -> list[tuple[str, Tally]]:
    return sorted(tallies.items(), key=lambda item: (-item[1].count, item[0]))


def _reasons(tallies: dict[str, Tally]) -> list[str]:
    return [f"  {tally.count:>17,}  {name}{_example(tally)}" for name, tally in _by_count(tallies)]


def _example(tally: Tally) -> str:
    return f"  (first: {tally.example})" if tally.example else ""
