"""What became of every row: answered, dropped, failed, refused, each with its reason and an example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from train.data.summary import Tally

#: Kinds of lines in the errors file, in the order they are printed.
KINDS = {
    "error": "failed in the servers (--retry-errors asks again)",
    "dropped": "left out by an option, or nothing to learn from",
    "refused": "no conversation",
}


@dataclass
class Account:
    """Counts of an output and of the run that goes on with it.

    Attributes:
        answered: rows in the output.
        turns, prompt_tokens, completion_tokens: of these rows; tokens as the servers count them.
        flags: answers that rows mark, by flag.
        left_out: kind -> reason -> tally, of the errors file.
        read: rows of the input read in this run.
        resumed: of these, rows that an earlier run had settled.
        twice: rows whose id an earlier row of the input has.
        notes, retries: by name, in this run.
        generated: tokens of every answer of this run, of rows that were left out too.
    """

    answered: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    flags: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, dict[str, Tally]] = field(default_factory=lambda: {kind: {} for kind in KINDS})
    read: int = 0
    resumed: int = 0
    twice: Tally = field(default_factory=Tally)
    notes: dict[str, Tally] = field(default_factory=dict)
    retries: dict[str, Tally] = field(default_factory=dict)
    generated: int = 0

    def count_row(self, row: Mapping[str, Any]) -> None:
        """Counts a row of the output."""
        self.answered += 1
        for turn in row["regenerated"]["turns"]:
            self.turns += 1
            self.prompt_tokens += turn.get("prompt_tokens") or 0
            self.completion_tokens += turn.get("completion_tokens") or 0
            for flag in turn.get("flags", ()):
                self.flags[flag] = self.flags.get(flag, 0) + 1

    def count_left_out(self, entry: Mapping[str, Any]) -> None:
        """Counts a line of the errors file."""
        self.left_out[entry["kind"]].setdefault(entry["reason"], Tally()).add(entry["id"])

    def note(self, name: str, example: str, count: int = 1) -> None:
        self.notes.setdefault(name, Tally()).add(example, count)

    def retry(self, reason: str, example: str) -> None:
        self.retries.setdefault(reason, Tally()).add(example)

    def number(self, kind: str) -> int:
        """Rows of one kind in the errors file."""
        return sum(tally.count for tally in self.left_out[kind].values())

    @property
    def settled(self) -> int:
        """Rows in either file."""
        return self.answered + sum(self.number(kind) for kind in KINDS)

    def format(self) -> str:
        """The account as a table."""
        lines = [
            f"answered  {self.answered:>9,}  {self.turns:,} answers, {self.completion_tokens:,} tokens written, "
            f"{self.prompt_tokens:,} read",
            *(f"  {count:>17,}  answers marked {flag!r}" for flag, count in sorted(self.flags.items())),
        ]
        for kind, meaning in KINDS.items():
            lines += [f"{kind:<9} {self.number(kind):>9,}  {meaning}", *_table(self.left_out[kind])]
        lines += [f"this run  {self.read:>9,}  rows read, {self.resumed:,} of them settled before"]
        if self.twice.count:
            lines += [f"  {self.twice.count:>17,}  left out: the id of an earlier row (first: {self.twice.example}); "
                      "--ids place tells them apart"]  # fmt: skip
        for title, table in (("noted", self.notes), ("retried", self.retries)):
            if table:
                lines += [title, *_table(table)]
        return "\n".join(line.rstrip() for line in lines)

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""

        def plain(table: Mapping[str, Tally]) -> dict[str, Any]:
            return {name: {"count": t.count, "example": t.example} for name, t in _by_count(table)}

        return {
            "answered": self.answered, "turns": self.turns, "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens, "flags": dict(sorted(self.flags.items())),
            "left_out": {kind: plain(self.left_out[kind]) for kind in KINDS},
            "this_run": {
                "read": self.read, "resumed": self.resumed, "generated_tokens": self.generated,
                "ids_twice": self.twice.count, "notes": plain(self.notes), "retries": plain(self.retries),
            },
        }  # fmt: skip


def _by_count(table: Mapping[str, Tally]) -> list[tuple[str, Tally]]:
    return sorted(table.items(), key=lambda item: (-item[1].count, item[0]))


def _table(table: Mapping[str, Tally]) -> list[str]:
    return [f"  {tally.count:>17,}  {name}  (first: {tally.example})" for name, tally in _by_count(table)]
