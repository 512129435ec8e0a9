"""Where an evaluation's result, its rows and its report go."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.evaluate.config import EvalConfig

if TYPE_CHECKING:
    from train.evaluate.draft import LoadedDraft
    from train.evaluate.result import EvalResult

#: Outputs shown in the HTML report.
SHOWN_SAMPLES = 8


def output_path(args: argparse.Namespace, draft: LoadedDraft, options: EvalConfig) -> Path | None:
    """The result's file: as asked, else in the run's folder; None for a draft's folder, which is not ours to fill."""
    if args.output:
        return Path(args.output)
    if draft.step is None:
        return None
    kind = "untrained" if args.untrained else f"step-{draft.step}"
    protocol = f"_{args.protocol}" if args.protocol else ""
    return Path(args.draft) / "eval" / f"{kind}{protocol}_t{options.temperature:g}.json"


def rows_folder(output: Path) -> Path:
    """The folder of the rows of a result."""
    return output.with_name(f"{output.name.removesuffix('.json')}.rows")


def write_result(output: Path, result: EvalResult) -> None:
    """Writes the result whole or not at all; one that misses prompts says so (`missing`)."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    try:
        partial.write_text(json.dumps(result.to_json(), indent=1) + "\n")
        os.replace(partial, output)
    finally:
        partial.unlink(missing_ok=True)


def write_report(path: str | Path, result: EvalResult, name: str, tokenizer: Any) -> Path:
    """Writes the HTML report of one evaluation; returns its path."""
    from train.report import write_report as write_page

    shown = [
        {"prompt": sample.text or sample.prompt, "pieces": sample.pieces(tokenizer)}
        for sample in result.samples[:SHOWN_SAMPLES]
    ]
    return write_page(
        path,
        {
            "title": f"Evaluation of {name}",
            "evaluations": [{"name": "draft", "result": result.to_json()}],
            "samples": shown,
            "config": result.settings,
        },
    )
