"""Charts as inline SVG that take the page's colours, light or dark, and stay readable on a narrow screen."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Colours that stand for the page's own: replaced in the finished SVG by the style's variables.
_INK, _FAINT = "#010203", "#040506"
_SERIES = tuple(f"#a0a0a{index}" for index in range(6))
_MARKERS = "os^Dv*"
#: Inches; small, so that text keeps its size when the drawing shrinks to a telephone's width.
_SIZE = (5.2, 3.1)


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        name: for the legend.
        x, y: equally long.
        low, high: ends of the intervals of `y`; None where there is none.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


@dataclass(frozen=True)
class Bars:
    """A group of horizontal bars: a value per label, None where there is none."""

    name: str
    values: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    lines: Sequence[Line],
    *,
    limits: tuple[float, float] | None = None,
    markers: bool = False,
    diagonal: bool = False,
    smooth: bool = False,
) -> str:
    """Lines over a common axis.

    Args:
        diagonal: draw where y equals x, both axes from 0 to 1.
        smooth: of lines with many points, draw the running mean, and the points faintly behind it.
    """

    def draw(axes: Axes) -> None:
        if diagonal:
            axes.plot([0, 1], [0, 1], color=_INK, linewidth=0.8, linestyle=":", label="ideal")
        for index, line in enumerate(lines):
            colour = _SERIES[index % len(_SERIES)]
            window = len(line.y) // 60 if smooth else 0
            y = list(line.y)
            if window:
                axes.plot(line.x, y, color=colour, linewidth=0.6, alpha=0.35)
                y = _running_mean(y, window)
            axes.plot(
                line.x, y, label=line.name, color=colour, linewidth=1.6, markersize=4,
                marker=_MARKERS[index % len(_MARKERS)] if markers or len(line.x) == 1 else None,
            )  # fmt: skip
            spans = [
                (x, y - low, high - y)
                for x, y, low, high in zip(line.x, line.y, line.low, line.high)
                if low is not None and high is not None
            ]
            if spans:
                at, below, above = zip(*spans)
                middle = [y for x, y in zip(line.x, line.y) if x in at]
                axes.errorbar(
                    at, middle, (_not_negative(below), _not_negative(above)), fmt="none", ecolor=colour, capsize=2.5,
                    linewidth=1,
                )  # fmt: skip
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        if limits:
            axes.set_ylim(*limits)
        if diagonal:
            axes.set_xlim(0.0, 1.0)
        if markers and not diagonal:
            from matplotlib.ticker import MaxNLocator

            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if len(lines) > 1 or diagonal:
            _legend(axes)

    return _svg(title, draw)


def bar_chart(title: str, x_label: str, labels: Sequence[str], groups: Sequence[Bars], *, stacked: bool = False) -> str:
    """Horizontal bars, a label a row from the top; groups side by side, or stacked."""
    height = 0.9 if stacked else 0.8 / max(1, len(groups))

    def draw(axes: Axes) -> None:
        left = [0.0] * len(labels)
        for index, group in enumerate(groups):
            values = [value or 0.0 for value in group.values]
            at = [row if stacked else row + (index - (len(groups) - 1) / 2) * height for row in range(len(labels))]
            colour = _SERIES[index % len(_SERIES)]
            axes.barh(
                at, values, height * (0.6 if stacked else 0.9), left=left if stacked else None, color=colour,
                label=group.name,
            )  # fmt: skip
            for row, (value, low, high) in enumerate(zip(values, group.low, group.high)):
                if low is not None and high is not None:
                    axes.errorbar(
                        [value], [at[row]], xerr=([max(0.0, value - low)], [max(0.0, high - value)]), fmt="none",
                        ecolor=_INK, capsize=2.5, linewidth=1,
                    )  # fmt: skip
            if stacked:
                left = [a + b for a, b in zip(left, values)]
        axes.set_yticks(range(len(labels)), [_short(label) for label in labels])
        axes.invert_yaxis()
        axes.set_xlabel(x_label)
        axes.grid(axis="y", visible=False)
        if len(groups) > 1:
            _legend(axes)

    rows = len(labels) * (1 if stacked else max(1, 0.6 * len(groups)))
    return _svg(title, draw, height=max(1.6, 1.1 + 0.3 * rows + (0.25 if len(groups) > 1 else 0)))


def _legend(axes: Axes) -> None:
    """Above the drawing, where it hides nothing."""
    names = axes.get_legend_handles_labels()[1]
    columns = len(names) if sum(map(len, names)) + 5 * len(names) <= 60 else 2
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, fontsize=8.5, borderaxespad=0.2,
        handlelength=1.4, columnspacing=1.0,
    )  # fmt: skip


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and its neighbours, `window` before and after at most, as many on both sides."""
    means = []
    for index in range(len(values)):
        reach = min(window, index, len(values) - 1 - index)
        means.append(sum(values[index - reach : index + reach + 1]) / (2 * reach + 1))
    return means


def _not_negative(values: Sequence[float]) -> list[float]:
    return [max(0.0, value) for value in values]


def _short(label: str, length: int = 22) -> str:
    return label if len(label) <= length else label[: length - 1] + "…"


def _svg(title: str, draw: Any, height: float = _SIZE[1]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    # Text stays text (searchable, in the reader's font); a fixed salt makes equal data give equal bytes.
    style: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": "draft-jax", "font.size": 10, "font.family": "sans-serif",
        "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _INK, "xtick.color": _INK, "ytick.color": _INK,
        "axes.grid": True, "grid.color": _FAINT, "grid.linewidth": 0.6, "axes.axisbelow": True, "axes.linewidth": 0.6,
        "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(_SIZE[0], height), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' id="\w+_\d+"', "", svg)  # groups' names: they would stand in the page once per chart
    svg = svg.replace(_INK, "var(--ink)").replace(_FAINT, "var(--line)")
    for index, colour in enumerate(_SERIES):
        svg = svg.replace(colour, f"var(--series-{index})")
    # The width is the page's to choose; the drawing says only its proportions.
    svg = re.sub(
        r'<svg ([^>]*?)width="[^"]*" ', r"<svg \1", re.sub(r'(<svg [^>]*?)height="[^"]*" ', r"\1", svg, count=1)
    )
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(title, quote=True)}" ', 1)
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{svg}</figure>"
