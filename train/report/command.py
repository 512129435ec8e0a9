"""`draft-jax report`: one HTML page of a run, or of several drafts' evaluations."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train.evaluate.result_file import NamedResult, ResultError, read_results
from train.report.page import write_report

REPORT_HTML = "report.html"


def parser() -> argparse.ArgumentParser:
    """The options of `draft-jax report`."""
    made = argparse.ArgumentParser(prog="draft-jax report", description=__doc__)
    made.add_argument(
        "sources",
        nargs="+",
        metavar="RUN_DIR|RESULT",
        help="run folders (their training and evaluations), and JSON results of draft-jax eval, or NAME=RESULT; the "
        "first evaluation is what the others are compared with",
    )
    made.add_argument("--output", help=f"file to write (default: {REPORT_HTML} in the run, or in this folder)")
    made.add_argument("--title", help="the page's heading")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `draft-jax report`. Returns 0.

    Raises:
        ResultError: a source is neither a run nor a result, or there is nothing to show.
    """
    args = parser().parse_args(argv)
    runs = [Path(source) for source in args.sources if is_run(source)]
    results = [source for source in args.sources if not is_run(source)]
    evaluations = [item for run in runs for item in run_evaluations(run, len(runs) > 1)]
    evaluations += read_results(results) if results else []
    training = {run.resolve().name: metric_rows(run) for run in runs}
    training = {name: rows for name, rows in training.items() if rows}
    if not evaluations and not training:
        raise ResultError(f"{', '.join(args.sources)}: neither training metrics nor evaluations to report")
    output = Path(args.output) if args.output else (runs[0] if len(runs) == 1 else Path()) / REPORT_HTML
    names = ", ".join([run.resolve().name for run in runs] or [item.name for item in evaluations])
    path = write_report(
        output,
        {
            "title": args.title or f"Draft report: {names}",
            "training": training if len(training) > 1 else next(iter(training.values()), ()),
            "evaluations": [{"name": item.name, "result": item.result} for item in evaluations],
            "config": configuration(runs, evaluations),
        },
    )
    print(f"wrote {path}")
    return 0


def is_run(source: str) -> bool:
    """Whether this is a run's folder: one with metrics or a draft's definition."""
    folder = Path(source)
    return folder.is_dir() and any((folder / name).is_file() for name in ("metrics.jsonl", "draft_config.json"))


def run_evaluations(run: Path, prefix: bool) -> list[NamedResult]:
    """The results in a run's eval folder, the oldest first. Other JSON files there are left alone."""
    found = []
    for path in sorted((run / "eval").glob("*.json"), key=lambda path: (path.stat().st_mtime, path.name)):
        try:
            (item,) = read_results([str(path)])
        except ResultError:
            continue
        name = f"{run.resolve().name}/{path.stem}" if prefix else path.stem
        found.append(NamedResult(name, item.result, path))
    return found


def metric_rows(run: Path) -> list[Mapping[str, Any]]:
    """Rows of metrics.jsonl; a last line cut off by a crash is left out.

    Raises:
        ResultError: a line before the last is no JSON.
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if number == len(lines):
                break
            raise ResultError(f"{path}:{number} is not JSON: {error}") from error
    return rows


def configuration(runs: Sequence[Path], evaluations: Sequence[NamedResult]) -> str:
    """The runs' resolved configurations and the evaluations' settings, as text."""
    parts = [f"# {run}\n{(run / 'config.yaml').read_text()}" for run in runs if (run / "config.yaml").is_file()]
    parts += [f"# {item.name}\n{json.dumps(item.settings, indent=1)}" for item in evaluations]
    return "\n\n".join(parts)
