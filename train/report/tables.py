"""Tables, as text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from train.evaluate.bootstrap import Interval

_NUMBER = ' class="number"'


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
    cells = [[cell(value) for value in row] for row in rows]
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


def html_table(rows: Sequence[Sequence[Any]], header: bool = True) -> str:
    """Rows as an HTML table that scrolls by itself where it is too wide; what others wrote is escaped."""
    numeric = [
        column > 0 and all(isinstance(row[column], int | float | Interval | None) for row in rows[1:])
        for column in range(len(rows[0]))
    ]

    def line(kind: str, values: Sequence[Any]) -> str:
        cells = (
            f"<{kind}{_NUMBER if right else ''}>{_html_cell(value)}</{kind}>" for value, right in zip(values, numeric)
        )
        return f"<tr>{''.join(cells)}</tr>"

    head = f"<thead>{line('th', rows[0])}</thead>" if header else ""
    return f'<div class="wide"><table>{head}{"".join(line("td", row) for row in rows[1:])}</table></div>'


def _html_cell(value: Any) -> str:
    if isinstance(value, Interval) and value.low is not None:
        return f"{cell(value.value)}<br><small>{value.low:.3f} to {value.high:.3f}</small>"
    return html.escape(cell(value))


def cell(value: Any) -> str:
    """A value as text: floats with 3 decimals, "-" for nothing, intervals with their ends."""
    if value is None:
        return "-"
    if isinstance(value, Interval):
        return cell(value.value) + ("" if value.low is None else f" [{value.low:.3f}, {value.high:.3f}]")
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def with_conclusions(chart: str, sentences: Sequence[str]) -> str:
    """A chart and what to conclude from it, a paragraph a sentence."""
    said = "".join(f'<p class="conclusion">{html.escape(sentence)}</p>' for sentence in sentences)
    return f'<div class="chart">{chart}{said}</div>'
