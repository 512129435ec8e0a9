"""How the cost of a micro-step grows: one plot each over tokens, anchors and vocabulary.

    python -m benchmarks.grow --out growth.png            # measures, in one process per axis
    python -m benchmarks.grow --out growth.png --from growth.jsonl

Every point is one compilation; `--fast-compile` is passed on. Points that do not fit are left out and named.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

AXES = {
    "length": [1024, 2048, 4096, 8192, 16384, 32768],
    "anchors": [128, 256, 512, 1024, 2048],
    "vocab": [32_768, 65_536, 131_072, 262_144],
}


def measure_axis(axis: str, values: list[int], extra: list[str]) -> list[dict[str, Any]]:
    """Lines of `benchmarks.step` along one axis; parameters are shared where their shapes do not change."""
    command = [sys.executable, "-m", "benchmarks.step", *extra]
    runs = [["--vocab", str(v), "--length", "4096"] for v in values]
    if axis == "length":
        runs = [["--length", *map(str, values)]]
    elif axis == "anchors":
        runs = [["--length", "4096", "--anchors", *map(str, values)]]
    lines = []
    for options in runs:
        done = subprocess.run([*command, *options], stdout=subprocess.PIPE, text=True, check=False)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        lines += [line | {"axis": axis, "value": line[axis]} for line in found]
        if done.returncode:
            print(f"{axis}: stopped behind {[line[axis] for line in found]} of {options}", file=sys.stderr)
    return lines


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
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure or read, then plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axes", nargs="+", choices=list(AXES), default=list(AXES))
    parser.add_argument("--out", type=Path, default=Path("growth.png"))
    parser.add_argument("--from", dest="source", type=Path, help="lines measured before, instead of measuring")
    given, extra = parser.parse_known_args()
    if given.source:
        lines = [json.loads(line) for line in given.source.read_text(encoding="utf-8").splitlines()]
    else:
        lines = [line for axis in given.axes for line in measure_axis(axis, AXES[axis], extra)]
        given.out.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    if not lines:
        raise SystemExit("no point was measured")
    plot(lines, given.out)
    print(f"{given.out}: {len(lines)} points")


if __name__ == "__main__":
    main()
