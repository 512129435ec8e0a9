"""Where drafts fail: which kinds of token, which words, after what, and the stretches with the least accepted."""

from __future__ import annotations

import html
from collections.abc import Sequence

from train.evaluate.bootstrap import Interval
from train.evaluate.result_file import NamedResult
from train.report.attempts import Attempt, Group, attempts, by_context, by_kind, by_token, kind_intervals, stretches
from train.report.charts import Bars, bar_chart
from train.report.outputs import legend, piece, token_kinds
from train.report.tables import with_conclusions

#: Rows of a table, stretches shown, and tokens of context before one.
_ROWS, _STRETCHES, _BEFORE = 12, 5, 40
#: Kinds of token with fewer tries are not drawn, nor said to be the worst.
_COMMON = 20


def failure_section(evaluations: Sequence[NamedResult]) -> list[str]:
    """The section, for the evaluations that kept their samples and the texts of their tokens."""
    told = [item for item in evaluations if item.samples and item.result.get("token_texts")]
    seen = {item.name: attempts(item) for item in told}
    told = [item for item in told if seen[item.name]]
    if not told:
        return []
    out = ["<h2>Where drafts fail</h2>", _kinds(told, seen)]
    for item in told:
        tries = seen[item.name]
        body = [
            _table(
                "Words the draft misses most",
                "what the target wrote",
                by_token(tries),
                "Tokens of the output with at least 5 tries, surest misses first. A try is a proposal that was "
                "reached, all before it in its block being accepted.",
            ),
            _table(
                "After what it misses most",
                "the token before",
                by_context(tries),
                "The same tries by the token that came before.",
            ),
            *_stretches(item),
        ]
        opened = " open" if item is told[-1] else ""
        out.append(f"<details{opened}><summary>{html.escape(item.name)}: words and places</summary>{''.join(body)}")
        out.append("</details>")
    return out


def _kinds(told: Sequence[NamedResult], seen: dict[str, list[Attempt]]) -> str:
    found_kinds = [group for item in told for group in by_kind(seen[item.name]) if group.tries >= _COMMON]
    names = list(dict.fromkeys(group.name for group in found_kinds))
    groups, sentences = [], []
    for item in told:
        found = kind_intervals(seen[item.name])
        values = [found.get(name, Interval(None)) for name in names]
        groups.append(Bars(item.name, [v.value for v in values], [v.low for v in values], [v.high for v in values]))
        sentences.append(conclude(item.name, by_kind(seen[item.name])))
    chart = bar_chart("Acceptance by kind of token", "share of tries accepted", names, groups) if names else ""
    return with_conclusions(chart, sentences)


def conclude(name: str, groups: Sequence[Group]) -> str:
    """Which kind of token costs the most rounds, and which is accepted least."""
    misses = sum(group.misses for group in groups)
    common = [group for group in groups if group.tries >= _COMMON]
    if not misses or not common:
        return f"{name}: too few misses to say where."
    costly = max(groups, key=lambda group: group.misses)
    least = min(common, key=lambda group: group.share)
    text = f"{name}: {costly.misses / misses:.0%} of all misses are at {costly.name}"
    if least.name == costly.name:
        return (
            f"{text}, which are also accepted least ({least.share:.0%}): that is where a better draft would gain most."
        )
    return (
        f"{text} ({costly.share:.0%} accepted); accepted least are {least.name} ({least.share:.0%} of {least.tries})."
    )


def _table(title: str, column: str, groups: Sequence[Group], note: str) -> str:
    if not groups:
        return ""
    worst = groups[0]
    said = f"“{_visible(worst.name)}”: {worst.hits} of {worst.tries} tries accepted"
    if worst.instead and worst.instead[0][1] > 1:
        said += f"; most often the draft says “{_visible(worst.instead[0][0])}”"
    rows = "".join(
        f'<tr><td><code>{html.escape(_visible(group.name))}</code></td><td class="number">{group.tries}</td>'
        f'<td class="number">{group.share:.0%}</td><td>'
        + ", ".join(f"<code>{html.escape(_visible(text))}</code> {count}x" for text, count in group.instead[:3])
        + "</td></tr>"
        for group in groups[:_ROWS]
    )
    return (
        f'<h3>{title}</h3><p class="conclusion">{html.escape(said)}.</p><div class="wide tokens"><table><thead><tr>'
        f"<th>{column}</th><th>tries</th><th>accepted</th><th>the draft said</th></tr></thead>{rows}</table></div>"
        f'<p class="note">{note}</p>'
    )


def _stretches(item: NamedResult) -> list[str]:
    every = stretches(item.samples)
    found = every[:_STRETCHES]
    if not found:
        return []
    texts = item.result["token_texts"]
    worst = found[0]
    barren = sum(place.committed == place.rounds for place in every)
    said = (
        f"In {barren} of {len(item.samples)} outputs no draft at all was accepted for {worst.rounds} rounds in a row."
        if barren
        else f"The worst {worst.rounds} rounds in a row brought {worst.committed} tokens; the mean would be "
        f"{worst.rounds * (item.result.get('accept_length') or 1.0):.0f}."
    )
    out = [
        "<h3>Stretches with the least accepted</h3>",
        f'<p class="conclusion">{said}</p>',
        legend({"missed": "proposed and rejected"}),
    ]
    for place in found:
        sample = item.samples[place.sample]
        tokens, kinds = sample["output_tokens"], token_kinds(sample)
        start = max(0, place.start - _BEFORE)
        before = "".join(texts.get(str(token), f"<{token}>") for token in tokens[start : place.start])
        shown = [("… " if start else "") + html.escape(before)]
        for position in range(place.start, place.end):
            if position in place.missed:
                rejected = place.missed[position]
                shown.append(piece(texts.get(str(rejected), f"<{rejected}>"), "missed"))
            shown.append(piece(texts.get(str(tokens[position]), f"<{tokens[position]}>"), kinds[position]))
        task = f"{sample['task']}: " if sample.get("task") else ""
        about = " ".join(str(sample.get("text") or sample["prompt"]).split())
        about = about if len(about) <= 160 else about[:159] + "…"
        out.append(
            f'<div class="sample"><span class="of">{html.escape(task + about)} '
            f"({place.committed} tokens in {place.rounds} rounds)</span>{''.join(shown)}</div>"
        )
    return out


def _visible(text: str) -> str:
    """Text with its spaces and line breaks to be seen."""
    return text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣") or "(nothing)"
