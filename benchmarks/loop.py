"""The whole loop with a real target: tokens and rows a second, and where the time goes.

    python -m benchmarks.loop --config configs/smollm2-135m.yaml --train.steps=60 --run_dir=/tmp/loop

Takes the options of `draft-jax train`, trains as it does, and prints one JSON line about the steps behind the first
`--skip` (default 10): a run's first steps fill caches. `--profile FOLDER` records the last optimizer step with JAX's
profiler and adds how the GPU's time splits in it (timeline.py); that step is not part of the averages. No
checkpoint is written.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from benchmarks import measure, timeline


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


@contextlib.contextmanager
def measured(folder: str | None) -> Iterator[list[float]]:
    """Runs of the trainer save nothing, and record their last optimizer step into `folder`.

    Yields:
        A list that gets the wall seconds of the recorded step.
    """
    from train import loop

    seconds: list[float] = []
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # a record of every Python call would slow the host
    options.host_tracer_level = 1

    class Measured(loop.Loop):
        """The trainer's loop without its checkpoint: of a large draft that takes longer than the measurement."""

        def _save(self) -> None:
            self._read_pending()

        def _window(self, stop: Any) -> int:
            if folder is None or self.step + 1 < (self.config.train.stop_at or self.parts.total_steps):
                return super()._window(stop)
            jax.block_until_ready(self.state)
            with jax.profiler.trace(folder, profiler_options=options):
                begin = time.perf_counter()
                worst = super()._window(stop)
                jax.block_until_ready(self.state)
                seconds.append(time.perf_counter() - begin)
            return worst

    with mock.patch.object(loop, "Loop", Measured):
        yield seconds


def main(argv: Sequence[str]) -> None:
    """Train, then summarize what was logged."""
    from train.cli import parse_train
    from train.config_file import load_config
    from train.loop import run
    from train.resume import METRICS

    own = {name: [a for a in argv if a.startswith(f"--{name}=")] for name in ("skip", "profile")}
    skip, folder = (values[-1].partition("=")[2] if values else None for values in own.values())
    path, overrides, _ = parse_train([a for a in argv if not any(a in values for values in own.values())])
    config = load_config(path, [*overrides, ("logging.every", "1")])
    with measured(folder) as seconds:
        result = run(config)
    text = (Path(config.run_dir) / METRICS).read_text(encoding="utf-8")
    logged = [json.loads(line) for line in text.splitlines()]
    lines = logged[int(skip or 10) : len(logged) - len(seconds)]
    if not lines:
        raise SystemExit(f"{config.run_dir} logged no step behind the first {skip or 10}; give more train.steps")
    rows = config.train.batch_rows * config.train.accumulation
    facts: dict[str, Any] = {"device": measure.describe_device(), "compiles": result.compiles}
    print(json.dumps(measure.rounded(summarize(lines, rows) | facts)), flush=True)
    if folder:
        events = timeline.read_trace(folder)
        found = {"recorded_seconds": seconds[0], "recorded_rows": rows} | timeline.split(events, seconds[0])
        found["longest"] = {name: timeline.longest(events, name) for name in ("target", "draft")}
        print(json.dumps(measure.rounded(found)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
