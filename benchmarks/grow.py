"""How the cost of a micro-step grows: one plot each over tokens, anchors and vocabulary.

    python -m benchmarks.grow --out growth.png            # measures
    python -m benchmarks.grow --out growth.png --from growth.jsonl

Every point is one compilation. All are made at once, one process per point, into a cache; then the points are measured
one after the other. Options not listed are those of `benchmarks.step` and passed on. Points that do not fit are left
out and named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

AXES: dict[str, tuple[int, ...]] = {
    "length": (1024, 2048, 4096, 8192, 16384, 32768),
    "anchors": (128, 256, 512, 1024, 2048),
    "vocab": (32_768, 65_536, 131_072, 262_144),
}
#: Where the other axes stand while one grows; the vocabulary is the shape's.
FIXED = {"length": 4096, "anchors": 512}


def point_options(axis: str, value: int, fixed: Mapping[str, int]) -> list[str]:
    """Options of `benchmarks.step` for one point."""
    return [text for name, number in {**fixed, axis: value}.items() for text in (f"--{name}", str(number))]


def _run(options: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.step", *options]
    return subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)


def measure_points(
    axes: Mapping[str, Sequence[int]], fixed: Mapping[str, int], extra: Sequence[str], jobs: int
) -> list[dict[str, Any]]:
    """Lines of `benchmarks.step` for every value of every axis, with that axis and value.

    A point that several axes share is measured once.

    Args:
        axes: values by axis.
        fixed: see `FIXED`.
        extra: more options of `benchmarks.step`.
        jobs: processes that compile at once.
    """
    points = [(axis, value, point_options(axis, value, fixed)) for axis, values in axes.items() for value in values]
    distinct = list(dict.fromkeys(tuple(sorted(zip(o[::2], o[1::2]))) for _, _, o in points))
    lines: dict[Any, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as cache:
        environment = {"JAX_COMPILATION_CACHE_DIR": cache, **os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        with ThreadPoolExecutor(jobs) as pool:
            texts = [[text for pair in point for text in pair] for point in distinct]
            list(pool.map(lambda options: _run([*extra, *options, "--compile-only"], environment), texts))
        for point, options in zip(distinct, texts):
            done = _run([*extra, *options], environment)
            found = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
            if done.returncode or not found:
                reason = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
                print(f"left out: {' '.join(options)}: {reason[:200]}", file=sys.stderr)
            else:
                lines[point] = found[0]
    found = []
    for axis, value, o in points:
        line = lines.get(tuple(sorted(zip(o[::2], o[1::2]))))
        if line is not None:
            found.append(line | {"axis": axis, "value": value})
    return found


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Milliseconds and temporary GiB over each axis, and what the formula of operations predicts at the rate of the
    first point."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    axes_present = [axis for axis in AXES if any(line["axis"] == axis for line in lines)]
    figure, plots = plt.subplots(1, len(axes_present), figsize=(5 * len(axes_present), 4), squeeze=False)
    for axis, left in zip(axes_present, plots[0], strict=True):
        points = sorted((line for line in lines if line["axis"] == axis), key=lambda line: line["value"])
        values = [point["value"] for point in points]
        first = points[0]
        predicted = [first["accumulate_ms"] * point["tflop"] / first["tflop"] for point in points]
        left.plot(values, [point["accumulate_ms"] for point in points], "o-", label="measured, ms")
        left.plot(values, predicted, ":", label="operations at the first point's rate, ms")
        left.set(xlabel=axis, ylabel="ms per micro-step", xscale="log", ylim=(0, None))
        right = left.twinx()
        right.plot(values, [point["temporary_gib"] for point in points], "s--", color="gray", label="temporaries, GiB")
        right.set(ylabel="GiB", ylim=(0, None))
        left.legend(loc="upper left")
    figure.suptitle(f"{lines[0]['shape']} draft, {lines[0]['device']}, {lines[0]['dtype']}")
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def table(lines: list[dict[str, Any]]) -> str:
    """The points as a Markdown table."""
    rows = [
        f"| {line['axis']} {line['value']:,} | {line['accumulate_ms']:.1f} | {line['tflop']:.1f}"
        f" | {line['tflop_per_s']:.0f} | {line['temporary_gib']:.1f} |"
        for line in lines
    ]
    return "\n".join(["| | ms | TFLOP | TFLOP/s | temporaries, GiB |", "|---|---|---|---|---|", *rows])


def _points(text: str) -> tuple[str, tuple[int, ...]]:
    axis, _, values = text.partition("=")
    if axis not in AXES or not values:
        raise argparse.ArgumentTypeError(
            f"{text!r}: give one of {', '.join(AXES)}, '=' and numbers, as length=512,1024"
        )
    return axis, tuple(int(value) for value in values.split(","))


def main() -> None:
    """Measure or read, then plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--points", nargs="+", type=_points, default=list(AXES.items()), metavar="AXIS=N,N", help="instead of all"
    )
    parser.add_argument("--length", type=int, default=FIXED["length"], help="tokens while another axis grows")
    parser.add_argument("--anchors", type=int, default=FIXED["anchors"], help="anchors while another axis grows")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile at once")
    parser.add_argument("--out", type=Path, default=Path("growth.png"))
    parser.add_argument("--from", dest="source", type=Path, help="lines measured before, instead of measuring")
    given, extra = parser.parse_known_args()
    if given.source:
        lines = [json.loads(line) for line in given.source.read_text(encoding="utf-8").splitlines()]
    else:
        fixed = {"length": given.length, "anchors": given.anchors}
        lines = measure_points(dict(given.points), fixed, extra, given.jobs)
        given.out.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    if not lines:
        raise SystemExit("no point was measured")
    plot(lines, given.out)
    print(table(lines))
    print(f"{given.out}: {len(lines)} points")


if __name__ == "__main__":
    main()
