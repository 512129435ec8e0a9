"""How much is accepted: in all, by task and by slot, with intervals, and one draft against another."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from train.evaluate.bootstrap import MIN_PROMPTS, Interval, prompt_weights, ratio_interval
from train.evaluate.compare import compare
from train.evaluate.result_file import NamedResult, PromptSums, ResultError
from train.report.charts import Bars, Line, bar_chart, line_chart
from train.report.tables import html_table, with_conclusions


@dataclass(frozen=True)
class Figures:
    """The accept figures of an evaluation, with intervals where it kept its samples.

    Attributes:
        name: of the evaluation.
        accept_length: over all prompts.
        tasks: accept length by task; one entry when there is one task.
        survival, conditional: [K] by slot.
        whole: whether intervals could be made.
    """

    name: str
    accept_length: Interval
    tasks: dict[str, Interval]
    survival: tuple[Interval, ...]
    conditional: tuple[Interval, ...]
    whole: bool


def figures(item: NamedResult) -> Figures:
    """Figures of a result; without its samples they come as they were written, without intervals."""
    result = item.result
    if not item.samples:
        return Figures(
            item.name,
            Interval(result.get("accept_length")),
            {name: Interval(task.get("accept_length")) for name, task in (result.get("tasks") or {}).items()},
            tuple(map(Interval, result.get("survival") or ())),
            tuple(map(Interval, result.get("conditional") or ())),
            False,
        )
    sums = item.sums()
    weights = prompt_weights(sums.tasks)
    tasks = {}
    for name in dict.fromkeys(sums.tasks.tolist()):
        chosen = sums.tasks == name
        tasks[name] = ratio_interval(sums.committed[chosen], sums.rounds[chosen], weights[:, chosen])
    return Figures(
        item.name,
        ratio_interval(sums.committed, sums.rounds, weights),
        tasks,
        _by_slot(sums, weights, lambda s: s.proposed),
        _by_slot(sums, weights, lambda s: s.reached),
        True,
    )


def _by_slot(
    sums: PromptSums, weights: np.ndarray, denominator: Callable[[PromptSums], np.ndarray]
) -> tuple[Interval, ...]:
    bottom = denominator(sums)
    return tuple(ratio_interval(sums.passed[:, k], bottom[:, k], weights) for k in range(bottom.shape[1]))


def acceptance_section(evaluations: Sequence[NamedResult]) -> list[str]:
    """The section, empty without evaluations."""
    if not evaluations:
        return []
    made = [figures(item) for item in evaluations]
    out = ["<h2>Acceptance</h2>"]
    out += [f'<p class="conclusion">{html.escape(headline(item, f))}</p>' for item, f in zip(evaluations, made)]
    out += _against_earlier(evaluations)
    out.append(_overview(evaluations, made))
    charts = [_by_task(made)] if any(len(f.tasks) > 1 for f in made) else []
    charts += [
        _slots(made, "conditional", "Acceptance of slot k, all before it accepted", conclude_conditional),
        _slots(made, "survival", "Slots 0..k all accepted", conclude_survival),
    ]
    out += ['<div class="charts">', *charts, "</div>"]
    out.append(f'<p class="note">{_interval_note(made)}</p>')
    out.append("<details><summary>The same figures as a table</summary>")
    for key, words in (("conditional", "conditional at slot"), ("survival", "survival at slot")):
        slots = max(len(getattr(f, key)) for f in made)
        rows = [(k, *(getattr(f, key)[k] if k < len(getattr(f, key)) else None for f in made)) for k in range(slots)]
        out.append(html_table([(words, *(f.name for f in made)), *rows]))
    return [*out, "</details>"]


def headline(item: NamedResult, found: Figures) -> str:
    """The evaluation in a sentence."""
    settings, result = item.settings, item.result
    value = found.accept_length
    if value.value is None:
        return f"{item.name}: no round was run."
    span = "" if value.low is None else f" (95 % interval {value.low:.3f} to {value.high:.3f})"
    temperature = settings.get("temperature")
    at = "" if temperature is None else f" at temperature {temperature:g}"
    return (
        f"{item.name}: {value.value:.3f} tokens per round{span}, the target's own token included, on "
        f"{result.get('prompts')} prompts{at}. Plain decoding has 1; a block of {len(found.survival)} can have "
        f"{len(found.survival) + 1}."
    )


def _against_earlier(evaluations: Sequence[NamedResult]) -> list[str]:
    """Each later evaluation against the first before it of the same protocol, on the prompts both have."""
    out = []
    for index, other in enumerate(evaluations):
        texts = []
        for earlier in evaluations[:index]:
            try:
                found = compare(earlier, other, shared_only=True)
            except ResultError as error:
                texts.append(f"Not compared by prompt: {error}.")
                continue
            texts = [" ".join([found.verdict, *(f"Note: {note}." for note in found.notes)])]
            break
        out += [f'<p class="conclusion">{html.escape(text)}</p>' for text in texts[:1]]
    return out


def _overview(evaluations: Sequence[NamedResult], made: Sequence[Figures]) -> str:
    rows: list[tuple[str, list[Any]]] = [
        ("accept length (tokens per round, bonus included)", [f.accept_length for f in made]),
        ("accept length, mean over samples", [e.result.get("accept_length_sample_mean") for e in evaluations]),
        ("accept length, mean of tasks", [e.result.get("accept_length_task_mean") for e in evaluations]),
        ("rounds", [e.result.get("rounds") for e in evaluations]),
        ("proposals per round", [e.result.get("proposal_length") for e in evaluations]),
        ("share of verified positions that became output", [e.result.get("verify_rate") for e in evaluations]),
        ("tokens generated", [e.result.get("tokens") for e in evaluations]),
        ("prompts evaluated", [e.result.get("prompts") for e in evaluations]),
        ("prompts not yet evaluated", [e.result.get("missing") or 0 for e in evaluations]),
        ("prompts refused", [len(e.result.get("refusals") or ()) for e in evaluations]),
        ("equal to plain greedy decoding (prompts)", [e.result.get("identical_to_plain") for e in evaluations]),
    ]
    known = [(label, *values) for label, values in rows if any(value is not None for value in values)]
    return html_table([("", *(f.name for f in made)), *known])


def _by_task(made: Sequence[Figures]) -> str:
    names = list(dict.fromkeys(name for f in made for name in f.tasks))
    groups = [
        Bars(
            f.name,
            [f.tasks[name].value if name in f.tasks else None for name in names],
            [f.tasks[name].low if name in f.tasks else None for name in names],
            [f.tasks[name].high if name in f.tasks else None for name in names],
        )
        for f in made
    ]
    labels = [name or "(not named)" for name in names]
    chart = bar_chart("Accept length by task", "tokens per round", labels, groups)
    return with_conclusions(chart, [conclude_tasks(f) for f in made])


def conclude_tasks(found: Figures) -> str:
    """The task with the most and the least, and whether the gap is more than noise."""
    known = {name: value.value for name, value in found.tasks.items() if value.value is not None}
    if len(known) < 2:
        return f"{found.name}: one task."
    best, worst = (choose(known, key=lambda name: known[name]) for choose in (max, min))
    text = f"{found.name}: most on {best} ({known[best]:.2f}), least on {worst} ({known[worst]:.2f})"
    low, high = found.tasks[best].low, found.tasks[worst].high
    if low is None or high is None:
        return f"{text}; too few prompts a task to tell how sure that is."
    if low > high:
        return f"{text}: their intervals do not touch, so text like {worst} is where more training data would pay."
    return f"{text}; their intervals overlap, so the tasks cannot be ranked by these prompts."


def _slots(made: Sequence[Figures], key: str, title: str, conclude: Callable[[Figures], str]) -> str:
    lines = []
    for f in made:
        points = [(k, v) for k, v in enumerate(getattr(f, key)) if v.value is not None]
        lines.append(
            Line(
                f.name,
                [k for k, _ in points],
                [v.value for _, v in points],
                [v.low for _, v in points],
                [v.high for _, v in points],
            )
        )
    chart = line_chart(title, "slot k of the block", "share of rounds", lines, limits=(0.0, 1.0), markers=True)
    return with_conclusions(chart, [conclude(f) for f in made])


def conclude_conditional(found: Figures) -> str:
    """Whether acceptance falls along the block, and what another slot would bring if it went on as the last."""
    values = [v.value for v in found.conditional if v.value is not None]
    if len(values) < 2:
        return f"{found.name}: too few slots were judged."
    first, last = found.conditional[0], found.conditional[len(values) - 1]
    text = f"{found.name}: {values[0]:.0%} at slot 0, {values[-1]:.0%} at slot {len(values) - 1}"
    reach = found.survival[len(values) - 1].value or 0.0
    more = f"one more slot would bring about {reach * values[-1]:.3f} tokens per round"
    if first.low is None or first.high is None or last.low is None or last.high is None:
        return f"{text}; too few prompts get that far to tell whether that is a trend; {more}."
    if last.high < first.low:
        return f"{text}: it falls along the block; {more}."
    if last.low > first.high:
        return f"{text}: it rises along the block, since only easy text gets that far; {more}."
    return f"{text}: level within noise; {more}."


def conclude_survival(found: Figures) -> str:
    """How often whole blocks are accepted, and what the second half of the block brings."""
    values = [v.value or 0.0 for v in found.survival]
    if not values:
        return f"{found.name}: nothing was judged."
    half = len(values) // 2
    share = sum(values[half:]) / sum(values) if sum(values) else 0.0
    return (
        f"{found.name}: {values[-1]:.0%} of blocks are accepted whole; slots {half} to {len(values) - 1} bring "
        f"{share:.0%} of the accepted drafts."
    )


def _interval_note(made: Sequence[Figures]) -> str:
    if not all(f.whole for f in made):
        return "No intervals where the result was written without its samples."
    return (
        "Bars on points are 95 % intervals: prompts drawn again 2000 times, within their task. None is shown for fewer "
        f"than {MIN_PROMPTS} prompts."
    )
