"""How fast it was, and where the time went."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from train.evaluate.result_file import NamedResult
from train.report.charts import Bars, bar_chart
from train.report.tables import html_table, with_conclusions

#: Parts of the time with a draft, as `Seconds` has them.
_PARTS = {
    "prefill": "prefill",
    "draft": "draft proposes",
    "target": "target verifies",
    "other": "sampling, bookkeeping",
}


def speed_section(evaluations: Sequence[NamedResult]) -> list[str]:
    """The section; empty where no time was measured."""
    timed = [item for item in evaluations if (item.result.get("seconds") or {}).get("total")]
    if not timed:
        return []
    names = [item.name for item in timed]
    rows = [
        (label, *(item.result.get(key) for item in timed))
        for label, key in (
            ("tokens/s with the draft", "tokens_per_second_draft"),
            ("tokens/s plain, same harness", "tokens_per_second_plain"),
            ("speed-up", "speedup"),
        )
    ]
    rows.append(("rounds/s", *(_rounds_per_second(item.result) for item in timed)))
    rows.append(("decoding time [s]", *(item.result["seconds"]["total"] for item in timed)))
    chart = bar_chart(
        "Where the time goes",
        "share of the decoding time [%]",
        names,
        [Bars(words, [100 * _share(item.result, part) for item in timed]) for part, words in _PARTS.items()],
        stacked=True,
    )
    return [
        "<h2>Speed</h2>",
        html_table([("", *names), *rows]),
        with_conclusions(chart, [conclude(item) for item in timed]),
        *(
            f'<p class="note">{html.escape(item.name)}: {item.settings["processes"]} processes side by side; times are '
            "summed over them, so that speeds are those of one.</p>"
            for item in timed
            if item.settings.get("processes", 1) > 1
        ),
        '<p class="note">Of this machine and harness; a server batches, schedules and overlaps differently, so only '
        "accept lengths carry over.</p>",
    ]


def conclude(item: NamedResult) -> str:
    """The speed-up, what limits it, and what the accept length would allow."""
    result = item.result
    share = {part: _share(result, part) for part in _PARTS}
    part = max(share, key=lambda name: share[name])
    limit = f"{_PARTS[part]} takes {share[part]:.0%} of the time"
    speedup, length = result.get("speedup"), result.get("accept_length")
    if speedup is None:
        return f"{item.name}: {limit}; plain decoding was not measured, so there is no speed-up."
    word = "faster" if speedup >= 1 else "slower"
    factor = speedup if speedup >= 1 else 1 / speedup
    ceiling = f" (the accept length, {length:.2f}, is the most it could be with a free draft)" if length else ""
    return f"{item.name}: {factor:.2f} times {word} than plain decoding{ceiling}; {limit}."


def _share(result: Mapping[str, Any], part: str) -> float:
    seconds = result["seconds"]
    return seconds.get(part, 0.0) / seconds["total"]


def _rounds_per_second(result: Mapping[str, Any]) -> float | None:
    if result.get("rounds_per_second") is not None:
        return result["rounds_per_second"]
    rounds = result.get("rounds")
    return None if rounds is None else rounds / result["seconds"]["total"]
