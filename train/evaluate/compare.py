"""`draft-jax compare`: evaluations side by side, paired by prompt, and whether a difference is more than noise."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from train.evaluate.bootstrap import MIN_PROMPTS, Interval, interval, prompt_weights, ratio
from train.evaluate.result_file import NamedResult, PromptSums, ResultError, read_results

#: Settings that two evaluations must share: with another one, other text is decoded or other rounds are counted.
PROTOCOL = (
    "target", "temperature", "max_new_tokens", "protocol", "template", "enable_thinking", "eos_token_ids",
    "all_turns", "draft_sampling", "count_overshoot",
)  # fmt: skip
#: Settings that may differ, but are said.
NOTED = {
    "seed": "other random numbers",
    "seed_by": "other random numbers",
    "target_dtype": "the target computes in another precision",
    "draft_dtype": "the draft computes in another precision",
    "confidence_threshold": "other parts of the blocks are verified: an accept length is bought with other work",
    "block_size": "other block sizes: more is proposed, and verified, per round",
}
#: What results say that were written before these settings existed.
_UNSAID = {
    "template": "auto", "all_turns": False, "seed_by": "prompt", "draft_sampling": "float32", "count_overshoot": False,
}  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """How a result differs from the baseline on some prompts.

    Attributes:
        what: a task, "all prompts" or "mean of tasks".
        prompts: pairs.
        baseline, other: accept lengths.
        difference: other - baseline, with its interval.
    """

    what: str
    prompts: int
    baseline: float
    other: float
    difference: Interval


@dataclass(frozen=True)
class Comparison:
    """A result against the baseline.

    Attributes:
        baseline, other: their names.
        overall: on all prompts: tokens over rounds.
        tasks: each task by itself, then the mean of tasks; empty when there is one task.
        notes: what differs besides the draft, in sentences.
    """

    baseline: str
    other: str
    overall: Difference
    tasks: tuple[Difference, ...]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """What to conclude, in a sentence."""
        return verdict(self)


def compare(baseline: NamedResult, other: NamedResult, shared_only: bool = False) -> Comparison:
    """Pairs two results by prompt and bootstraps the difference of their accept lengths.

    Args:
        baseline, other: results with their samples.
        shared_only: compare on the prompts both have, instead of refusing when each has others.

    Raises:
        ResultError: naming the first thing in which the protocols differ, or why a result is no measurement.
    """
    check_protocol(baseline, other)
    a, b, left_out = _paired(baseline, other, shared_only)
    weights = prompt_weights(a.tasks)
    overall = _difference("all prompts", a, b, np.ones(len(a.ids), bool), weights)
    names = list(dict.fromkeys(a.tasks.tolist()))
    tasks: list[Difference] = []
    if len(names) > 1:
        tasks = [_difference(name, a, b, a.tasks == name, weights) for name in names]
        tasks.append(_mean_of_tasks(tasks, a, b, weights))
    notes = [
        f"{key} differs ({_said(baseline, key)} and {_said(other, key)}): {meaning}"
        for key, meaning in NOTED.items()
        if _said(baseline, key) != _said(other, key)
    ]
    if left_out:
        notes.append(f"{left_out} prompt(s) that only one of the two has were left out")
    return Comparison(baseline.name, other.name, overall, tuple(tasks), tuple(notes))


def check_protocol(baseline: NamedResult, other: NamedResult) -> None:
    """Refuses results whose figures do not mean the same.

    Raises:
        ResultError: naming the setting and both values.
    """
    for item in (baseline, other):
        if item.result.get("error"):
            raise ResultError(f"{item.name} is no measurement: {item.result['error']}")
        if not item.samples:
            raise ResultError(f"{item.name} was written without samples; prompts cannot be paired")
    for key in PROTOCOL:
        ours, theirs = (_said(item, key) for item in (baseline, other))
        if key == "target":  # a folder may lie elsewhere on another machine
            ours, theirs = Path(str(ours)).name.lower(), Path(str(theirs)).name.lower()
        if ours != theirs:
            raise ResultError(
                f"{baseline.name} and {other.name} are of different protocols: {key} is {ours} and {theirs}. "
                "Evaluate both the same way"
            )


def _said(item: NamedResult, key: str) -> Any:
    return item.settings.get(key, _UNSAID.get(key))


def _paired(baseline: NamedResult, other: NamedResult, shared_only: bool) -> tuple[PromptSums, PromptSums, int]:
    """Counts of the shared prompts in one order, and how many prompts are not shared."""
    ours = {sample["prompt"]: sample for sample in baseline.samples}
    theirs = {sample["prompt"]: sample for sample in other.samples}
    shared = [name for name in ours if name in theirs]
    left_out = len(ours) + len(theirs) - 2 * len(shared)
    if not shared:
        raise ResultError(f"{baseline.name} and {other.name} share no prompt")
    if left_out and not shared_only:
        lone = next(name for name in [*ours, *theirs] if name not in ours or name not in theirs)
        raise ResultError(
            f"{baseline.name} and {other.name} are of different prompts: {len(ours)} and {len(theirs)}, {len(shared)} "
            f"shared (one not shared: {lone}). Evaluate both on the same, or compare the shared: --shared-only"
        )
    for name in shared:
        for key, what in (("prompt_tokens", "tokens"), ("text", "text")):
            if ours[name].get(key) != theirs[name].get(key):
                raise ResultError(
                    f"{baseline.name} and {other.name} asked different prompts under the id {name}: its {what} is "
                    f"{ours[name].get(key)!r} and {theirs[name].get(key)!r} (another file or chat template)"
                )
    digests = {item.settings.get("prompts_digest") for item in (baseline, other)}
    if not left_out and len(digests - {None}) > 1:
        raise ResultError(
            f"{baseline.name} and {other.name} asked different prompts under the same ids (their prompts_digest "
            "differs: another file, chat template or context limit)"
        )
    sums = [
        NamedResult(item.name, {**item.result, "samples": [samples[name] for name in shared]}).sums()
        for item, samples in ((baseline, ours), (other, theirs))
    ]
    return sums[0], sums[1], left_out


def _difference(what: str, a: PromptSums, b: PromptSums, chosen: np.ndarray, weights: np.ndarray) -> Difference:
    values = [float(ratio(s.committed[chosen], s.rounds[chosen])) for s in (a, b)]
    draws = [ratio(s.committed[chosen], s.rounds[chosen], weights[:, chosen]) for s in (a, b)]
    count = int(chosen.sum())
    if not all(np.isfinite(values)):
        raise ResultError(f"{what}: no round was run in one of the results")
    found = interval(values[1] - values[0], draws[1] - draws[0], count)
    return Difference(what, count, values[0], values[1], found)


def _mean_of_tasks(tasks: Sequence[Difference], a: PromptSums, b: PromptSums, weights: np.ndarray) -> Difference:
    """Every task counts the same, as in the average of the paper's table."""
    draws = np.zeros(len(weights))
    for task in tasks:
        chosen = a.tasks == task.what
        ours, theirs = (ratio(s.committed[chosen], s.rounds[chosen], weights[:, chosen]) for s in (a, b))
        draws += (theirs - ours) / len(tasks)
    values = [sum(getattr(task, side) for task in tasks) / len(tasks) for side in ("baseline", "other")]
    found = interval(values[1] - values[0], draws, min(task.prompts for task in tasks))
    return Difference("mean of tasks", len(a.ids), values[0], values[1], found)


def verdict(comparison: Comparison) -> str:
    """A sentence: better, worse, equal, or not to be told apart, and what it would take to tell."""
    overall = comparison.overall
    found = overall.difference
    assert found.value is not None
    if found.low is None or found.high is None:
        return (
            f"{comparison.other} against {comparison.baseline}: {overall.prompts} prompt(s) are too few to tell a "
            f"difference from noise; evaluate {MIN_PROMPTS} or more."
        )
    size = f"{abs(found.value):.3f} tokens per round ({abs(found.value) / overall.baseline:.1%})"
    span = f"95 % interval {found.low:+.3f} to {found.high:+.3f}, {overall.prompts} prompts"
    if found.low == found.high == 0:
        return f"{comparison.other} and {comparison.baseline} accept exactly the same."
    if found.excludes_zero:
        word = "more" if found.value > 0 else "fewer"
        return f"{comparison.other} accepts {size} {word} than {comparison.baseline}: more than noise ({span})."
    half = (found.high - found.low) / 2
    needed = ""
    if abs(found.value) > 0.005:
        times = (half / abs(found.value)) ** 2
        needed = f" If it is real, about {round(overall.prompts * times, -1):.0f} prompts would show it."
    return f"{comparison.other} and {comparison.baseline} differ by {size}: that is within noise ({span}).{needed}"


def format_comparison(comparison: Comparison) -> str:
    """The comparison as text: the sentence first, then figures by task, then what else differs."""
    from train.report import terminal_table

    rows = [
        (d.what, d.prompts, d.baseline, d.other, d.difference.value, _span(d.difference), _word(d.difference))
        for d in (*comparison.tasks, comparison.overall)
    ]
    header = ("accept length", "prompts", comparison.baseline, comparison.other, "difference", "95 % interval", "")
    lines = [comparison.verdict, "", terminal_table([header, *rows])]
    if len(comparison.tasks) > 1:
        lines.append(
            f"Of {len(comparison.tasks) - 1} intervals by task, about one in 20 leaves 0 out by chance: judge by the "
            "last lines."
        )
    return "\n".join([*lines, *(f"note: {note}" for note in comparison.notes)])


def _span(found: Interval) -> str:
    return "-" if found.low is None else f"{found.low:+.3f} to {found.high:+.3f}"


def _word(found: Interval) -> str:
    if found.excludes_zero is None:
        return "too few prompts"
    return "more than noise" if found.excludes_zero else "noise"


def speed_table(results: Sequence[NamedResult]) -> str:
    """Speeds as measured: of one machine and moment each, therefore without intervals."""
    from train.report import terminal_table

    def row(label: str, key: str) -> tuple[Any, ...]:
        return (label, *(item.result.get(key) for item in results))

    return terminal_table([
        ("speed, as measured", *(item.name for item in results)),
        row("tokens/s with the draft", "tokens_per_second_draft"),
        row("tokens/s plain", "tokens_per_second_plain"),
        row("speed-up", "speedup"),
        row("draft's share of the time", "draft_share"),
    ])  # fmt: skip


def to_json(comparisons: Sequence[Comparison]) -> list[Mapping[str, Any]]:
    """Plain values, the verdicts with them."""
    return [{**asdict(comparison), "verdict": comparison.verdict} for comparison in comparisons]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `draft-jax compare`. Returns 0.

    Raises:
        ResultError: the results cannot be compared; the message says in what they differ.
    """
    parser = argparse.ArgumentParser(
        prog="draft-jax compare",
        description="Set evaluations side by side: accept lengths paired by prompt, with bootstrap intervals.",
    )
    parser.add_argument("results", nargs="+", metavar="RESULT", help="JSON of draft-jax eval, or NAME=FILE; the first "
                        "is the baseline")  # fmt: skip
    parser.add_argument("--shared-only", action="store_true", help="compare on the prompts that both results have")
    parser.add_argument("--json", metavar="FILE", help="write the comparison as JSON too")
    args = parser.parse_args(argv)
    if len(args.results) < 2:
        parser.error("name at least two results")
    baseline, *others = results = read_results(args.results)
    comparisons = [compare(baseline, other, args.shared_only) for other in others]
    print("\n\n".join(format_comparison(comparison) for comparison in comparisons))
    print("\n" + speed_table(results))
    if args.json:
        Path(args.json).write_text(json.dumps(to_json(comparisons), indent=1) + "\n")
        print(f"\nwrote {args.json}")
    return 0
