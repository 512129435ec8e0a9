"""Inspected records as one HTML page that needs nothing else."""

import html
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .inspect_text import describe, verdict, visible
from .inspection import RecordView, ServedTurn, TokenView

#: Tokens of a row that are shown; the account tells all of them.
SHOWN_TOKENS = 4000

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2937; --soft: #5b6472; --line: #d8dce3; --page: #fff; --panel: #f5f6f8;
  --taught: #bfe8c9; --edge: #8fcea0; --special: #8a5a00; --bad: #b91c1c; --bad-page: #fee2e2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e6eb; --soft: #9aa4b2; --line: #39404c; --page: #14171c;
  --panel: #1d2128; --taught: #1f5132; --edge: #357a4f; --special: #f2b866; --bad: #ff9b9b; --bad-page: #43191c; } }
* { box-sizing: border-box; }
body { font: 15px/1.55 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; max-width: 66rem; margin: 0 auto;
  padding: 1.2rem 1rem 3rem; color: var(--ink); background: var(--page); overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .3rem 0 .6rem; }
h2 { font-size: 1.05rem; margin: 1.8rem 0 .3rem; padding-top: .7rem; border-top: 1px solid var(--line); }
p, ul { margin: .4rem 0; } .soft { color: var(--soft); font-size: .9rem; } ul { padding-left: 1.2rem; }
.row { font: 13px/1.6 ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre-wrap; background: var(--panel);
  color: var(--ink); border-radius: 6px; padding: .6rem .7rem; margin: .4rem 0; }
.row b { font-weight: normal; background: var(--taught); border-left: 1px solid var(--edge); }
.row i { font-style: normal; color: var(--special); } .row b i { color: inherit; text-decoration: underline dotted; }
.row u { text-decoration: none; color: var(--soft); }
.bad { color: var(--bad); } .box { background: var(--bad-page); padding: .3rem .7rem; border-radius: 6px; }
details > summary { cursor: pointer; }
"""


def write_page(path: Path, records: Sequence[RecordView], facts: Sequence[str]) -> None:
    """Writes the page, whole or not at all.

    Args:
        path: the file.
        records: in the order they are shown.
        facts: sentences put on top: what the rows are, and how they were read.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        partial.write_text(page(records, facts), encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def page(records: Sequence[RecordView], facts: Sequence[str]) -> str:
    """The page as text; see `write_page`."""
    body = ["<h1>Training rows as the model sees them</h1>"]
    body += [f"<p>{html.escape(fact)}</p>" for fact in facts]
    body += _overview(records)
    body.append(
        '<p class="soft">Legend: <span class="row" style="padding:0 .3rem"><b>supervised token</b></span>,'
        ' <span class="row" style="padding:0 .3rem"><i>&lt;special token&gt;</i></span>, ⏎ a newline.'
        " Hover over a token for its id.</p>"
    )
    for record in records:
        body += _record(record)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>draft-jax inspect</title><style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _overview(records: Sequence[RecordView]) -> list[str]:
    samples = [sample.judged for record in records for sample in record.samples]
    tokens = sum(len(judged.sample.input_ids) for judged in samples)
    supervised = sum(int(judged.sample.loss_mask.sum()) for judged in samples)
    turns = [turn for record in records for turn in record.served]
    matched = sum(turn.row is not None for turn in turns)
    refused = Counter(record.refused.partition(":")[0] for record in records if record.refused)
    zeroed = Counter(judged.zeroed for judged in samples if judged.zeroed)
    share = f" ({100 * supervised / tokens:.1f} %)" if tokens else ""
    lines = [
        f"{len(records)} records, {len(samples)} training rows, {supervised:,} of {tokens:,} tokens supervised{share}"
    ]
    if turns:
        lines.append(f"{matched} of {len(turns)} answers stand behind exactly the prompt that a server would send")
    lines += [f"refused: {count} ({reason})" for reason, count in refused.most_common()]
    lines += [f"mask zeroed: {count} ({reason})" for reason, count in zeroed.most_common()]
    cut = sum(judged.truncated for judged in samples)
    lines += [f"cut at data.max_length: {cut}"] if cut else []
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    odd = [record.place for record in records if any(turn.row is None for turn in record.served)]
    links = ", ".join(f'<a href="#{html.escape(place)}">{html.escape(place)}</a>' for place in odd)
    return [f"<ul>{items}</ul>", f'<p class="bad">Not as served: {links}</p>' if odd else ""]


def _record(record: RecordView) -> list[str]:
    place = html.escape(record.place)
    parts = [f'<h2 id="{place}">{place}</h2>']
    if record.refused:
        return [*parts, f'<p class="box">Refused: {html.escape(visible(record.refused))}</p>']
    for sample in record.samples:
        parts.append(f'<p class="soft">{html.escape(describe(sample))}</p>')
        more = len(sample.tokens) - SHOWN_TOKENS
        rest = f"<u> … {more:,} more</u>" if more > 0 else ""
        parts.append(f'<div class="row">{"".join(map(_token, sample.tokens[:SHOWN_TOKENS]))}{rest}</div>')
    parts += [_turn(turn, len(record.samples)) for turn in record.served]
    return parts


def _token(token: TokenView) -> str:
    text = html.escape(visible(token.text)).replace("\n", "<u>⏎</u>\n")
    if token.special:
        text = f"<i>{text}</i>"
    tag = "b" if token.supervised else "span"
    return f'<{tag} title="{" ".join(map(str, token.ids))}">{text}</{tag}>'


def _turn(turn: ServedTurn, rows: int) -> str:
    words = html.escape(f"Answer {turn.turn}: {verdict(turn, rows)}")
    summary = f'<span class="bad">{words}</span>' if turn.row is None else words
    if not turn.prompt:
        return f'<p class="soft">{summary}</p>'
    sent = html.escape(visible(turn.prompt)).replace("\n", "<u>⏎</u>\n")
    return (
        f'<details class="soft"><summary>{summary}. A server sends {turn.prompt_tokens:,} tokens</summary>'
        f'<div class="row">{sent}</div></details>'
    )
