"""`draft-jax calibrate`: the confidence head's temperatures from an evaluation, and thresholds to choose from."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from train.evaluate.confidence import ConfidenceData, calibration, collect, sigmoid, survival
from train.evaluate.result_file import NamedResult, ResultError, read_results
from train.evaluate.sts import MIN_COUNT, STS_FILE, StsCalibration, StsFit, SweepPoint, fit, sweep

#: Thresholds that are tried; 0 proposes every slot.
THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def parser() -> argparse.ArgumentParser:
    """The options of `draft-jax calibrate`."""
    made = argparse.ArgumentParser(
        prog="draft-jax calibrate",
        description="Fit one temperature a slot to the confidence head (sequential temperature scaling), from results "
        "of draft-jax eval on prompts the draft was not trained on; write sts.json for SGLang.",
    )
    made.add_argument("results", nargs="+", metavar="RESULT", help="JSON of one draft's evaluations; rounds are pooled")
    made.add_argument("--output", help="file to write (default: sts.json in the run of the first result)")
    made.add_argument(
        "--objective",
        choices=("nll", "ece"),
        default="nll",
        help="what a temperature minimises: likelihood (default), or the calibration error as in the paper (noisier)",
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `draft-jax calibrate`. Returns 0.

    Raises:
        ResultError, ConfidenceError: there is nothing to fit, or the results are of different drafts.
    """
    args = parser().parse_args(argv)
    results = read_results(args.results)
    digest = one_draft(results)
    output = Path(args.output) if args.output else default_output(results[0])
    data = collect([item.result for item in results])
    dataset = " + ".join(
        f"{item.settings.get('prompts') or item.name} at temperature {item.settings.get('temperature'):g}"
        for item in results
    )
    fitted = fit(data, dataset, args.objective, draft_digest=digest)
    fitted.calibration.write(output)
    print(format_fit(data, fitted))
    print(f"\nwrote {output}")
    return 0


def one_draft(results: Sequence[NamedResult]) -> str:
    """The digest of the draft that all results are of; empty when they do not say.

    Raises:
        ResultError: they are of different drafts or targets.
    """
    for key, what in (("draft_digest", "drafts"), ("target", "targets")):
        values = {item.settings.get(key) for item in results}
        if len(values) > 1:
            raise ResultError(
                f"the results are of different {what}: "
                + ", ".join(
                    f"{item.name} of {item.settings.get('draft') or item.settings.get(key)}" for item in results
                )
            )
    return results[0].settings.get("draft_digest") or ""


def default_output(item: NamedResult) -> Path:
    """`sts.json` of the run whose eval folder holds the result.

    Raises:
        ResultError: the result lies elsewhere.
    """
    run = item.path.resolve().parent.parent if item.path else Path()
    if item.path is None or item.path.resolve().parent.name != "eval" or not (run / "draft_config.json").is_file():
        raise ResultError(f"{item.path} is not in a run's eval folder; say where to write with --output {STS_FILE}")
    return run / STS_FILE


def format_fit(data: ConfidenceData, fitted: StsFit) -> str:
    """What was fitted, what it improves, and what thresholds would do, as text."""
    from train.report import terminal_table

    before, after = calibration(data, fitted.raw), calibration(data, fitted.scaled)
    by_slot, by_survival = sweeps(data, fitted.calibration)
    rows = [
        (slot, raw.count, temperature, raw.observed, raw.predicted, scaled.predicted, raw.ece, scaled.ece, raw.auroc)
        for slot, (temperature, raw, scaled) in enumerate(zip(fitted.calibration.temperatures, before, after))
    ]
    header = (
        "slot", "rounds", "temperature", "survived", "predicted", "calibrated", "ECE", "ECE calibrated", "AUROC",
    )  # fmt: skip
    points = [
        (raw.threshold, raw.accept_length, raw.verified, raw.verify_rate,
         scaled.accept_length, scaled.verified, scaled.verify_rate)
        for raw, scaled in zip(by_slot, by_survival)
    ]  # fmt: skip
    columns = ("accept length", "verified", "used")
    return "\n".join([
        terminal_table([header, *rows]),
        f"(temperature 1: fewer than {MIN_COUNT} accepted or rejected prefixes at that slot)"
        if 1.0 in fitted.calibration.temperatures
        else "",
        verdict(fitted),
        "",
        "Thresholds, estimated from the same rounds: per round, tokens kept and tokens verified, and the share used.",
        "Left: on the head's confidence of a slot (eval --confidence-threshold); right: on calibrated survival.",
        terminal_table([("threshold", *columns, *(f"{column} (s)" for column in columns)), *points]),
        advice(by_slot),
    ])  # fmt: skip


def verdict(fitted: StsFit) -> str:
    """Whether the temperatures help on prompts they were not fitted on, beyond noise."""
    made, gain = fitted.calibration, fitted.gain
    slots = len(made.temperatures)
    before, after = sum(made.ece_before) / slots, sum(made.ece_after) / slots
    text = f"On held-out prompts the mean calibration error goes from {before:.1%} to {after:.1%}"
    if gain.excludes_zero is None:
        return f"{text}: too few prompts to tell a gain from noise. Evaluate more before serving with the file."
    span = f"log likelihood {gain.value:+.4f} nats a prediction, 95 % interval {gain.low:+.4f} to {gain.high:+.4f}"
    if not gain.excludes_zero:
        return f"{text}: no more than noise ({span}). The head may do as it is; more prompts would tell."
    if (gain.value or 0.0) < 0:
        return f"{text}: the temperatures make it worse ({span}). Serve without the file."
    return f"{text}: more than noise ({span})."


def sweeps(data: ConfidenceData, made: StsCalibration) -> tuple[list[SweepPoint], list[SweepPoint]]:
    """Thresholds on the head's own confidence of each slot, and on the calibrated survival of the prefix."""
    return (
        sweep(data, sigmoid(data.logits), THRESHOLDS),
        sweep(data, survival(data.logits, made.temperatures), THRESHOLDS),
    )


def advice(points: Sequence[SweepPoint]) -> str:
    """What a threshold can save, in one sentence: the largest that keeps 95 % of the accept length."""
    full = points[0]
    kept = [p for p in points if p.accept_length >= 0.95 * full.accept_length]
    best = max(kept, key=lambda p: p.threshold)
    if best.threshold == 0:
        return "No threshold tried keeps 95 % of the accept length: verify the whole block, unless the server is busy."
    return (
        f"Threshold {best.threshold:g} keeps {best.accept_length / full.accept_length:.0%} of the accept length and "
        f"verifies {1 - best.verified / full.verified:.0%} fewer tokens: of use to a server that is busy verifying."
    )
