"""The whole loop with a real target: tokens and rows a second, and where the time goes.

    python -m benchmarks.loop --config configs/smollm2-135m.yaml --train.steps=60 --run_dir=/tmp/loop

Takes the options of `draft-jax train`, trains as it does, and prints one JSON line about the steps behind the first
`--skip` (default 10): a window's first steps fill caches.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import measure


def summarize(lines: Sequence[dict[str, Any]], rows_per_step: int) -> dict[str, Any]:
    """Averages over logged steps, each weighed by its wall time.

    Args:
        lines: of metrics.jsonl, one per step.
        rows_per_step: rows of one optimizer step.

    Returns:
        Tokens and rows per second, and the shares of wall time: target with staging, hand-over and the draft's
        programs, and neither of the two ("idle": the host's own work, during which no new work is given).
    """
    seconds = sum(line["seconds_per_step"] for line in lines)

    def share(name: str) -> float:
        return sum(line[name] * line["seconds_per_step"] for line in lines) / seconds

    target, draft = share("capture_share"), share("draft_share")
    return {
        "steps": len(lines),
        "seconds_per_step": seconds / len(lines),
        "tokens_per_second": sum(line["tokens_per_second"] * line["seconds_per_step"] for line in lines) / seconds,
        "rows_per_second": rows_per_step * len(lines) / seconds,
        "target_share": target,
        "draft_share": draft,
        "idle_share": max(0.0, 1.0 - target - draft),
    }


def main(argv: Sequence[str]) -> None:
    """Train, then summarize what was logged."""
    from train.cli import parse_train
    from train.config_file import load_config
    from train.loop import run
    from train.resume import METRICS

    skips = [a for a in argv if a.startswith("--skip=")]
    skip = int(skips[-1].partition("=")[2]) if skips else 10
    path, overrides, _ = parse_train([a for a in argv if a not in skips])
    config = load_config(path, [*overrides, ("logging.every", "1")])
    result = run(config)
    text = (Path(config.run_dir) / METRICS).read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()][skip:]
    if not lines:
        raise SystemExit(f"{config.run_dir} logged no step behind the first {skip}; give more train.steps")
    summary = summarize(lines, config.train.batch_rows * config.train.accumulation)
    print(json.dumps(measure.rounded(summary | {"device": measure.describe_device(), "compiles": result.compiles})))


if __name__ == "__main__":
    main(sys.argv[1:])
