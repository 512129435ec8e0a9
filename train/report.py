"""A report a person can open: one self-contained HTML file, and tables for the terminal.

Pure functions of a plain dictionary, so the quickstart, `draft-jax eval` and any notebook can use them. The
file needs no network: the drawings are inline SVG, the style is in the page.
"""

from __future__ import annotations

import html
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: Colour per origin of a token; readable on light and dark pages.
KIND_COLOURS = {"draft": "#8fd19e", "target": "#f5c26b", "first": "#c9ccd1"}
KIND_WORDS = {
    "draft": "proposed by the draft and accepted",
    "target": "the target's own token (correction or bonus)",
    "first": "first token, from the prefill",
}
#: A line of a chart: its name, x and y.
Series = tuple[str, Sequence[float], Sequence[float]]
SERIES_COLOURS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626")

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1f2937;
       background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
table { border-collapse: collapse; margin: .5rem 0; } th, td { padding: .2rem .7rem; border-bottom: 1px solid #e5e7eb; }
th { text-align: left; } td.number { text-align: right; font-variant-numeric: tabular-nums; }
.error { background: #fee2e2; border-left: 4px solid #dc2626; padding: .5rem 1rem; }
.sample { white-space: pre-wrap; border: 1px solid #e5e7eb; border-radius: 6px; padding: .6rem; margin: .4rem 0; }
.prompt { color: #6b7280; white-space: pre-wrap; }
pre { background: #f3f4f6; padding: .7rem; overflow-x: auto; }
svg { max-width: 100%; height: auto; }
"""


def terminal_table(rows: Sequence[Sequence[Any]]) -> str:
    """Lines up `rows` in columns; the first row is the header. Numbers go right, words go left.

    Args:
        rows: equally long rows; floats are shown with 3 decimals, None as "-".

    Raises:
        ValueError: when the rows differ in length.
    """
    if not rows:
        return ""
    width = len(rows[0])
    for index, row in enumerate(rows):
        if len(row) != width:
            raise ValueError(f"row {index} of the table has {len(row)} cells, the header has {width}")
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(width)]
    numeric = [
        len(rows) > 1 and all(isinstance(row[column], int | float | None) for row in rows[1:])
        for column in range(width)
    ]
    lines = [
        "  ".join(
            text.rjust(size) if right else text.ljust(size) for text, size, right in zip(row, widths, numeric)
        ).rstrip()
        for row in cells
    ]
    lines.insert(1, "  ".join("-" * size for size in widths))
    return "\n".join(lines)


def write_report(path: str | Path, data: Mapping[str, Any]) -> Path:
    """Writes the HTML report atomically and returns its path. See `render_report` for `data`."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        partial.write_text(render_report(data), encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def render_report(data: Mapping[str, Any]) -> str:
    """The report as HTML text.

    Args:
        data: any of these keys; a section without data is left out.
            title: str.
            notes: list of sentences shown first.
            headline: list of (label, value).
            training: rows as in metrics.jsonl: dicts with `step`, `loss`, `tau_probabilistic`, ... (other
                keys and rows without a step are ignored).
            evaluations: list of {"name": str, "result": EvalResult.to_json()}, e.g. untrained and trained.
            samples: list of {"prompt": str, "pieces": [{"text", "kind"}]} (`SampleResult.pieces`).
            config: text, or anything JSON can hold.

    Raises:
        ValueError: for a key this report does not know.
    """
    known = {"title", "notes", "headline", "training", "evaluations", "samples", "config"}
    if unknown := sorted(set(data) - known):
        raise ValueError(f"unknown report section(s) {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    title = html.escape(str(data.get("title", "draft-jax report")))
    body = [f"<h1>{title}</h1>"]
    body += [f"<p>{html.escape(str(note))}</p>" for note in data.get("notes", ())]
    if data.get("headline"):
        body.append(_html_table([("", ""), *data["headline"]], header=False))
    body += _training_section(data.get("training") or ())
    body += _evaluation_section(data.get("evaluations") or ())
    body += _sample_section(data.get("samples") or ())
    if data.get("config"):
        config = data["config"]
        text = config if isinstance(config, str) else json.dumps(config, indent=2, default=str)
        body.append(f"<h2>Configuration</h2><pre>{html.escape(text)}</pre>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{title}</title><style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _training_section(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    curves = {"loss": "Loss", "tau_probabilistic": "Expected accept length in training (tau)"}
    charts = []
    for name, label in curves.items():
        points = [(row["step"], row[name]) for row in rows if _finite(row.get("step")) and _finite(row.get(name))]
        if points:
            charts.append(line_chart(label, "optimizer step", [_series(name, points)]))
    return ["<h2>Training</h2>", *charts] if charts else []


def _evaluation_section(evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    if not evaluations:
        return []
    names = [str(item["name"]) for item in evaluations]
    results = [item["result"] for item in evaluations]
    out = ["<h2>Evaluation</h2>"]
    for name, result in zip(names, results):
        if result.get("error"):
            out.append(f'<p class="error"><b>{html.escape(name)}: {html.escape(str(result["error"]))}</b></p>')
    figures = [
        ("accept length (bonus included, per round)", "accept_length"),
        ("accept length, mean over samples", "accept_length_sample_mean"),
        ("rounds", "rounds"),
        ("proposals per round", "proposal_length"),
        ("tokens generated", "tokens"),
        ("prompts evaluated", "prompts"),
        ("tokens/s with the draft", "tokens_per_second_draft"),
        ("tokens/s plain", "tokens_per_second_plain"),
        ("speed-up", "speedup"),
        ("draft's share of the time", "draft_share"),
        ("equal to plain greedy decoding", "identical_to_plain"),
    ]
    out.append(_html_table([("", *names), *((label, *(r.get(key) for r in results)) for label, key in figures)]))
    for key, label in (("survival", "Survival: slots 0..k all accepted"),
                       ("conditional", "Conditional acceptance of slot k")):  # fmt: skip
        series = []
        for name, result in zip(names, results):
            points = [(slot, value) for slot, value in enumerate(result.get(key) or ()) if _finite(value)]
            if points:
                series.append(_series(name, points))
        if series:
            out.append(line_chart(label, "slot k", series, limits=(0.0, 1.0), markers=True))
            slots = max(len(result.get(key) or ()) for result in results)
            rows = [
                (slot, *((r.get(key) or [])[slot] if slot < len(r.get(key) or ()) else None for r in results))
                for slot in range(slots)
            ]
            out.append(_html_table([(f"{key} at slot", *names), *rows]))
    return out


def _sample_section(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    if not samples:
        return []
    legend = " ".join(
        f'<span style="background:{colour};color:#111">&nbsp;{html.escape(KIND_WORDS[kind])}&nbsp;</span>'
        for kind, colour in KIND_COLOURS.items()
    )
    out = ["<h2>Sample outputs</h2>", f"<p>{legend}</p>"]
    for sample in samples:
        pieces = "".join(
            f'<span style="background:{KIND_COLOURS.get(str(piece["kind"]), "#fff")};color:#111">'
            f"{html.escape(str(piece['text']))}</span>"
            for piece in sample["pieces"]
        )
        out.append(f'<div class="sample"><div class="prompt">{html.escape(str(sample["prompt"]))}</div>{pieces}</div>')
    return out


def _series(name: str, points: Sequence[tuple[float, float]]) -> Series:
    return name, [x for x, _ in points], [y for _, y in points]


def line_chart(
    title: str,
    x_label: str,
    series: Sequence[Series],
    *,
    limits: tuple[float, float] | None = None,
    markers: bool = False,
) -> str:
    """One line chart as inline SVG text; `series` is (name, x, y) per line."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    # Text stays text (searchable, in the reader's font); a fixed salt makes equal data give equal bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "draft-jax"}):
        figure = Figure(figsize=(7.2, 3.0), layout="constrained")
        axes = figure.subplots()
        for index, (name, x, y) in enumerate(series):
            axes.plot(
                x, y, label=name, color=SERIES_COLOURS[index % len(SERIES_COLOURS)],
                marker="o" if markers or len(x) == 1 else None, linewidth=1.6,
            )  # fmt: skip
        axes.set_title(title, fontsize=11)
        axes.set_xlabel(x_label)
        axes.grid(alpha=0.25)
        if limits:
            axes.set_ylim(*limits)
        if markers:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(series) > 1:
            axes.legend()
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _html_table(rows: Sequence[Sequence[Any]], header: bool = True) -> str:
    out = ["<table>"]
    if header:
        out.append("<tr>" + "".join(f"<th>{html.escape(_cell(cell))}</th>" for cell in rows[0]) + "</tr>")
    for row in rows[1:]:
        cells = (
            f'<td class="number">{_cell(cell)}</td>'
            if isinstance(cell, int | float | None) and index
            else f"<td>{html.escape(_cell(cell))}</td>"
            for index, cell in enumerate(row)
        )
        out.append("<tr>" + "".join(cells) + "</tr>")
    return "".join([*out, "</table>"])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < float("inf")
