"""Every proposal that was reached, and whether it was accepted: what failures are counted on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from train.evaluate.bootstrap import Interval, prompt_weights, ratio_interval
from train.evaluate.result_file import NamedResult

#: Groups with fewer tries are not ranked, and rounds that make a stretch.
MIN_TRIES, STRETCH = 5, 5


@dataclass(frozen=True)
class Attempt:
    """A proposal of which all before it in the block were accepted.

    Attributes:
        sample: index of its sample.
        task: of the sample.
        slot: in the block.
        before: text of the token before it.
        wrote: text of the token that stands in the output.
        instead: text of the rejected proposal; None when it was accepted (or not kept).
        hit: whether it was accepted.
    """

    sample: int
    task: str
    slot: int
    before: str
    wrote: str
    instead: str | None
    hit: bool


@dataclass
class Group:
    """Attempts that have something in common.

    Attributes:
        name: what.
        tries, hits: how many, and how many of them were accepted.
        instead: rejected proposals with their counts, the commonest first.
    """

    name: str
    tries: int = 0
    hits: int = 0
    proposals: Counter[str] = field(default_factory=Counter)

    @property
    def misses(self) -> int:
        return self.tries - self.hits

    @property
    def share(self) -> float:
        """Accepted of the tries."""
        return self.hits / self.tries

    @property
    def instead(self) -> list[tuple[str, int]]:
        return self.proposals.most_common()


def attempts(item: NamedResult) -> list[Attempt]:
    """All attempts of an evaluation, in order; empty when it kept no drafts."""
    texts: Mapping[str, str] = item.result.get("token_texts") or {}

    def text(token: int) -> str:
        return texts.get(str(token), f"<{token}>")

    out = []
    for index, sample in enumerate(item.samples):
        tokens, task = sample["output_tokens"], sample.get("task") or ""
        for start, record in _rounds(sample):
            drafts = record.get("drafts")
            if not drafts:
                continue
            for slot in range(min(record["proposed"], record["accepted"] + 1)):
                position, hit = start + slot, slot < record["accepted"]
                instead = None if hit else text(drafts[slot])
                out.append(Attempt(index, task, slot, text(tokens[position - 1]), text(tokens[position]), instead, hit))
    return out


def _rounds(sample: Mapping[str, Any]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(index in the output of its first token, record) of every round; the first token is the prefill's."""
    start = 1
    for record in sample["rounds"]:
        yield start, record
        start += record["committed"]


def kind_of(attempt: Attempt) -> str:
    """The kind of token the target wrote, in the plural."""
    text = attempt.wrote
    if text.startswith("<") and text.endswith(">") and len(text) > 2:
        return "special tokens"
    if not text.strip():
        return "line breaks" if "\n" in text else "spaces"
    if any(character.isdigit() for character in text):
        return "digits"
    if not any(character.isalpha() for character in text):
        return "punctuation and signs"
    begins = text[0].isspace() or not attempt.before or attempt.before[-1].isspace()
    return "starts of words" if begins else "insides of words"


def _grouped(tries: Iterable[Attempt], key: Callable[[Attempt], str]) -> list[Group]:
    groups: dict[str, Group] = {}
    for attempt in tries:
        group = groups.setdefault(key(attempt), Group(key(attempt)))
        group.tries += 1
        group.hits += attempt.hit
        if attempt.instead is not None:
            group.proposals[attempt.instead] += 1
    return list(groups.values())


def by_kind(tries: Sequence[Attempt]) -> list[Group]:
    """By kind of the token written, the kind with the most misses first."""
    return sorted(_grouped(tries, kind_of), key=lambda group: (-group.misses, group.name))


def kind_intervals(tries: Sequence[Attempt]) -> dict[str, Interval]:
    """Acceptance of every kind, its interval over prompts."""
    samples = sorted({attempt.sample for attempt in tries})
    place = {sample: index for index, sample in enumerate(samples)}
    strata = np.array([""] * len(samples), dtype=object)
    counts: dict[str, np.ndarray] = defaultdict(lambda: np.zeros((2, len(samples))))
    for attempt in tries:
        strata[place[attempt.sample]] = attempt.task
        counts[kind_of(attempt)][:, place[attempt.sample]] += (attempt.hit, 1)
    weights = prompt_weights(strata)
    return {kind: ratio_interval(hits, total, weights) for kind, (hits, total) in counts.items()}


def by_token(tries: Sequence[Attempt]) -> list[Group]:
    """By the token written, surest misses first."""
    return _ranked(_grouped(tries, lambda attempt: attempt.wrote))


def by_context(tries: Sequence[Attempt]) -> list[Group]:
    """By the token before, surest misses first."""
    return _ranked(_grouped(tries, lambda attempt: attempt.before))


def _ranked(groups: Sequence[Group]) -> list[Group]:
    """Groups with enough tries by the upper end of Wilson's 95 % interval: few tries cannot lead the list."""

    def upper(group: Group) -> float:
        n, share, z = group.tries, group.share, 1.96
        middle, spread = share + z * z / (2 * n), z * ((share * (1 - share) + z * z / (4 * n)) / n) ** 0.5
        return (middle + spread) / (1 + z * z / n)

    return sorted((g for g in groups if g.tries >= MIN_TRIES and g.misses), key=lambda g: (upper(g), g.name))


@dataclass(frozen=True)
class Stretch:
    """Rounds in a row of one sample.

    Attributes:
        sample: index of the sample.
        rounds: how many rounds.
        committed: tokens they brought.
        start, end: positions in the output.
        missed: position -> the proposal that was rejected there.
    """

    sample: int
    rounds: int
    committed: int
    start: int
    end: int
    missed: Mapping[int, int]


def stretches(samples: Sequence[Mapping[str, Any]], length: int = STRETCH) -> list[Stretch]:
    """The worst stretch of every sample that has so many rounds, the worst of all first."""
    found = []
    for index, sample in enumerate(samples):
        rounds = list(_rounds(sample))
        if len(rounds) < length or not any(record.get("drafts") for _, record in rounds):
            continue
        windows = [rounds[i : i + length] for i in range(len(rounds) - length + 1)]
        worst = min(windows, key=lambda window: sum(record["committed"] for _, record in window))
        committed = sum(record["committed"] for _, record in worst)
        missed = {
            start + record["accepted"]: record["drafts"][record["accepted"]]
            for start, record in worst
            if record.get("drafts") and record["accepted"] < record["proposed"]
        }
        found.append(Stretch(index, length, committed, worst[0][0], worst[0][0] + committed, missed))
    return sorted(found, key=lambda stretch: (stretch.committed, stretch.sample))
