"""The account of a dataset: what was kept, zeroed, cut and refused, each with an example."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .samples import Judged


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
    """Counts of one pass over a dataset.

    `rows + fanned_out = refused + dropped duplicates + samples`, `samples = kept + zeroed`.

    Attributes:
        source: path of the data.
        rows: rows read; blank lines do not count, nor do rows that were not sampled.
        not_sampled: rows that data.sample_share left out, unread.
        samples: rows that take part in training, zeroed ones included.
        fanned_out: samples beyond the first of their row: turns that the template rewrites in later history.
        tokens, supervised_tokens: over all samples, after truncation.
        longest: tokens of the longest sample, after truncation.
        duplicates: samples equal to an earlier one in ids and mask.
        duplicates_dropped: whether they were left out; else they are counted as samples too.
        truncated: samples cut at max_length (they are also kept or zeroed).
        zeroed: by reason: samples that keep their place with an all-zero mask.
        refused: by reason: rows that are no sample.
        notes: by name: things worth knowing about rows that are samples all the same.
        template: which chat template, and how it was checked.
    """

    source: str = ""
    rows: int = 0
    not_sampled: int = 0
    samples: int = 0
    fanned_out: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    longest: int = 0
    duplicates: Tally = field(default_factory=Tally)
    duplicates_dropped: bool = False
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

    def count_sample(self, judged: "Judged", place: str, length: int) -> None:
        """Counts a sample that was `length` tokens long before it was cut."""
        if judged.truncated:
            self.truncated.add(f"{place}, {length:,} tokens")
        if judged.zeroed:
            self.zero(judged.zeroed, place)
        self.samples += 1
        self.tokens += len(judged.sample.input_ids)
        self.supervised_tokens += int(judged.sample.loss_mask.sum())
        self.longest = max(self.longest, len(judged.sample.input_ids))

    def merge(self, other: "Summary") -> None:
        """Adds the counts of what was read behind this; source and template stay."""
        self.rows += other.rows
        self.not_sampled += other.not_sampled
        self.samples += other.samples
        self.fanned_out += other.fanned_out
        self.tokens += other.tokens
        self.supervised_tokens += other.supervised_tokens
        self.longest = max(self.longest, other.longest)
        for ours, theirs in ((self.duplicates, other.duplicates), (self.truncated, other.truncated)):
            ours.add(theirs.example, theirs.count)
        tables = ((self.zeroed, other.zeroed), (self.refused, other.refused), (self.notes, other.notes))
        for mine, its in tables:
            for name, tally in its.items():
                mine.setdefault(name, Tally()).add(tally.example, tally.count)

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

        whole = self.rows + self.fanned_out

        def share(count: int) -> str:
            return f"{count:>9,} {100 * count / whole:5.1f} %" if whole else f"{count:>9,}        "

        lines = [
            f"data      {self.source}",
            f"template  {self.template}",
            f"rows      {self.rows:>9,}"
            + (f"  made {self.samples:,} samples" if self.fanned_out else "")
            + (f"  {self.not_sampled:,} more were not sampled" if self.not_sampled else ""),
            f"kept      {share(self.kept)}  {self.supervised_tokens:,} of {self.tokens:,} tokens supervised, "
            f"longest {self.longest:,}",
            f"zeroed    {share(self.zeroed_samples)}  keep their place, mask all zero",
            *_reasons(self.zeroed),
            f"truncated {share(self.truncated.count)}" + _example(self.truncated),
            f"refused   {share(self.refused_rows)}",
            *_reasons(self.refused),
        ]
        if self.duplicates.count:
            fate = "left out" if self.duplicates_dropped else "kept, data.duplicates: drop leaves them out"
            lines.append(f"twice     {share(self.duplicates.count)}  {fate}" + _example(self.duplicates))
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
            "not_sampled": self.not_sampled,
            "samples": self.samples,
            "fanned_out": self.fanned_out,
            "kept": self.kept,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "longest": self.longest,
            "duplicates": {"count": self.duplicates.count, "example": self.duplicates.example},
            "duplicates_dropped": self.duplicates_dropped,
            "truncated": {"count": self.truncated.count, "example": self.truncated.example},
            "zeroed": table(self.zeroed),
            "refused": table(self.refused),
            "notes": table(self.notes),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Summary":
        """The inverse of `to_json`."""

        def tally(value: Mapping[str, Any]) -> Tally:
            return Tally(value["count"], value["example"])

        made: dict[str, Any] = {}
        for item in dataclasses.fields(cls):
            value = values[item.name]
            if item.name in ("duplicates", "truncated"):
                value = tally(value)
            elif item.name in ("zeroed", "refused", "notes"):
                value = {name: tally(entry) for name, entry in value.items()}
            made[item.name] = value
        return cls(**made)


def _by_count(tallies: dict[str, Tally]) -> list[tuple[str, Tally]]:
    return sorted(tallies.items(), key=lambda item: (-item[1].count, item[0]))


def _reasons(tallies: dict[str, Tally]) -> list[str]:
    return [f"  {tally.count:>17,}  {name}{_example(tally)}" for name, tally in _by_count(tallies)]


def _example(tally: Tally) -> str:
    return f"  (first: {tally.example})" if tally.example else ""
