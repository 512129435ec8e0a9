"""The page: which sections there are, in which order, and the style they share."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train.evaluate.result_file import NamedResult
from train.report.acceptance import acceptance_section
from train.report.failures import failure_section
from train.report.outputs import output_section
from train.report.speed import speed_section
from train.report.tables import html_table
from train.report.training import training_section
from train.report.trust import trust_section

STYLE = """
:root { color-scheme: light dark; --ink: #1f2937; --soft: #5b6472; --line: #d8dce3; --page: #fff; --panel: #f5f6f8;
  --accent: #2563eb; --bad-page: #fee2e2; --bad: #b91c1c;
  --series-0: #2563eb; --series-1: #c2600a; --series-2: #047857; --series-3: #8b2fd6; --series-4: #be123c;
  --series-5: #57606f;
  --kind-draft: #bfe8c9; --kind-target: #fbdca0; --kind-first: #dcdfe4; --kind-missed: #f7c4c4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e6eb; --soft: #9aa4b2; --line: #39404c; --page: #14171c;
  --panel: #1d2128; --accent: #7fabff; --bad-page: #43191c; --bad: #ff9b9b;
  --series-0: #7fabff; --series-1: #f2a65a; --series-2: #57c99b; --series-3: #c79bff; --series-4: #ff8aa3;
  --series-5: #aab3c0;
  --kind-draft: #1f5132; --kind-target: #6b4a10; --kind-first: #3b414b; --kind-missed: #6d2529; } }
* { box-sizing: border-box; }
body { font: 15px/1.55 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; max-width: 66rem;
  margin: 0 auto; padding: 1.2rem 1rem 3rem; color: var(--ink); background: var(--page); overflow-wrap: anywhere; }
h1 { font-size: 1.55rem; line-height: 1.25; margin: .3rem 0 .6rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .4rem; padding-top: .7rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
p { margin: .4rem 0; max-width: 48rem; }
.conclusion { border-left: 3px solid var(--accent); padding: .15rem 0 .15rem .75rem; }
.note { color: var(--soft); font-size: .9rem; }
.error { background: var(--bad-page); border-left: 4px solid var(--bad); padding: .5rem 1rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); gap: .6rem 1.6rem;
  align-items: start; }
.chart { min-width: 0; }
figure { margin: .7rem 0 .2rem; max-width: 34rem; }
figcaption { font-weight: 600; font-size: .95rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif !important; }
.wide { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .92rem; }
th, td { padding: .22rem .8rem .22rem 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: normal; }
th { text-align: left; font-weight: 600; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
th.number { white-space: normal; }
td:first-child { min-width: 8.5rem; } small { color: var(--soft); font-size: .82em; }
td.words { white-space: pre-wrap; overflow-wrap: anywhere; min-width: 11rem; }
.sample { white-space: pre-wrap; border: 1px solid var(--line); border-radius: 6px; padding: .6rem .7rem;
  margin: .6rem 0; }
.sample .of { display: block; color: var(--soft); font-size: .9rem; margin-bottom: .35rem; white-space: pre-wrap; }
.draft, .target, .first, .missed { border-radius: 2px; }
.draft { background: var(--kind-draft); } .target { background: var(--kind-target); }
.first { background: var(--kind-first); }
.missed { background: var(--kind-missed); text-decoration: line-through; margin: 0 .1em; }
.tokens td:first-child { min-width: 4.5rem; }
.legend span { padding: 0 .35rem; white-space: nowrap; }
code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .88em; background: var(--panel);
  padding: 0 .2em; border-radius: 3px; white-space: pre-wrap; }
pre { background: var(--panel); padding: .7rem; overflow-x: auto; font-size: .85rem; }
details > summary { cursor: pointer; }
"""

_KNOWN = ("title", "notes", "headline", "training", "evaluations", "samples", "config")


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
            training: rows as in metrics.jsonl, or {run name: rows}; rows without a step are ignored.
            evaluations: list of {"name": str, "result": EvalResult.to_json()}, e.g. untrained and trained. With
                samples in the result, figures have intervals and failures are shown.
            samples: list of {"prompt": str, "pieces": [{"text", "kind"}]} (`SampleResult.pieces`); without,
                they are made of the last evaluation that has texts.
            config: text, or anything JSON can hold.

    Raises:
        ValueError: for a key this report does not know.
    """
    if unknown := sorted(set(data) - set(_KNOWN)):
        raise ValueError(f"unknown report section(s) {', '.join(unknown)}; known: {', '.join(sorted(_KNOWN))}")
    title = html.escape(str(data.get("title", "draft-jax report")))
    evaluations = [NamedResult(str(item["name"]), item["result"]) for item in data.get("evaluations") or ()]
    body = [f"<h1>{title}</h1>"]
    body += [f"<p>{html.escape(str(note))}</p>" for note in data.get("notes", ())]
    if data.get("headline"):
        body.append(html_table([("", ""), *data["headline"]], header=False))
    body += _errors(evaluations)
    sound = [item for item in evaluations if not item.result.get("error")]
    body += acceptance_section(sound)
    body += training_section(data.get("training") or ())
    body += trust_section(sound)
    body += failure_section(sound)
    body += speed_section(sound)
    body += output_section(data.get("samples") or (), sound)
    body += _config_section(data.get("config"))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _errors(evaluations: Sequence[NamedResult]) -> list[str]:
    """Said before any figure: evaluations that are no measurement, and left out of all figures; those not finished."""
    return [
        f'<p class="error"><b>{html.escape(item.name)}: {item.result["missing"]} prompts are not decoded yet.</b> Its '
        "figures are of those that are, task after task: draft-jax eval --resume goes on.</p>"
        for item in evaluations
        if item.result.get("missing")
    ] + [
        f'<p class="error"><b>{html.escape(item.name)}: {html.escape(str(item.result["error"]))}</b></p>'
        for item in evaluations
        if item.result.get("error")
    ]


def _config_section(config: Any) -> list[str]:
    if not config:
        return []
    text = config if isinstance(config, str) else json.dumps(config, indent=2, default=str)
    return [f"<h2>Configuration</h2><details><summary>as resolved</summary><pre>{html.escape(text)}</pre></details>"]
