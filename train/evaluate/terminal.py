"""An evaluation's result as text for a terminal, and its progress."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from train.evaluate.protocol import Progress
    from train.evaluate.result import EvalResult

#: Above this, the gap between the two best plain logits is no tie that rounding in float32 could break.
TIE = 1e-3


def format_result(result: EvalResult, name: str) -> str:
    """The result as text for a terminal: an error first, then tables, refusals and differences."""
    from train.report import terminal_table

    lines = [f"Evaluation of {name} for target {result.settings.get('target')}"]
    if result.error:
        lines += ["", f"ERROR: {result.error}"]
    if result.settings.get("draft_sampling") == "bfloat16":
        lines += ["", "NOT LOSSLESS: draft tokens were drawn in bfloat16, as DeepSpec's evaluator does"]
    lines += ["", terminal_table([("", "value"), *result.table()])]
    if len(tasks := result.tasks) > 1:
        rows = [
            (task, found["prompts"], found["rounds"], found["accept_length"], found["proposal_length"])
            for task, found in tasks.items()
        ]
        lines += ["", terminal_table([("task", "prompts", "rounds", "accept length", "proposed"), *rows])]
    slots = zip(result.survival, result.conditional, result.statistics.slot_rounds)
    by_slot = [(slot, survival, conditional, rounds) for slot, (survival, conditional, rounds) in enumerate(slots)]
    lines += ["", terminal_table([("slot", "survival", "conditional", "rounds"), *by_slot])]
    if result.refusals:
        lines += ["", f"{len(result.refusals)} prompt(s) refused:"]
        lines += [f"  {refusal.prompt}: {refusal.reason}" for refusal in result.refusals[:10]]
    if shortened := result.settings.get("shortened_to_context"):
        lines += ["", f"{shortened} prompt(s) had less room than max_new_tokens: their context ends before"]
    if result.differences:
        lines += ["", *_describe_differences(result)]
    return "\n".join(lines)


def _describe_differences(result: EvalResult) -> list[str]:
    exact = result.settings.get("draft_dtype") == result.settings.get("target_dtype") == "float32"
    lines = [f"{len(result.differences)} output(s) differ from plain greedy decoding; where they first part:"]
    for item in result.differences[:10]:
        margin = "" if item.margin is None else f", plain logits {item.margin:.2g} apart"
        lines.append(
            f"  {item.prompt}: token {item.position} is {item.with_draft}, plain decoding has {item.plain}{margin}"
        )
    if not exact:
        lines.append("  (expected to happen in half precision, where rounding depends on the number of tokens at once)")
    elif any(item.margin is not None and item.margin > TIE for item in result.differences):
        lines.append("  (in float32 a gap this large is no rounding: please report it)")
    return lines


class ProgressBar:
    """Progress on stderr when that is a terminal; hands out the callback `evaluate` takes."""

    def __init__(self) -> None:
        from tqdm import tqdm

        self._bar = tqdm(desc="decodings", disable=None, file=sys.stderr)

    def __enter__(self) -> Progress:
        return self._update

    def __exit__(self, *exc: object) -> None:
        self._bar.close()

    def _update(self, done: int, total: int, accept_length: float | None) -> None:
        self._bar.total = total
        if accept_length is not None:
            self._bar.set_postfix_str(f"accept length {accept_length:.2f}", refresh=False)
        self._bar.update(done - self._bar.n)
