"""`draft-jax quickstart`: a real target, real conversations, a trained draft, the proof and the export, in minutes."""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draft_jax.config import DraftConfig
from draft_jax.objective.config import ObjectiveConfig

from .config import CheckpointConfig, DraftSpec, LoggingConfig, OptimizerConfig, RunConfig, TargetConfig, TrainConfig
from .data import QUICKSTART_CONVERSATIONS
from .data.config import DataConfig
from .evaluate.config import EvalConfig

REPORT_JSON = "report.json"
REPORT_HTML = "report.html"
#: Outputs shown in the report.
SHOWN_SAMPLES = 6


class QuickstartError(RuntimeError):
    """The quickstart ran, but did not show what it promises."""


@dataclass(frozen=True)
class Preset:
    """What the quickstart trains, by the device found; each was chosen by measurement (docs/quickstart.md).

    Attributes:
        draft, objective, optimizer, train, data: sections of the run's configuration.
        capture_cache_gib: on a CPU the target costs more than the draft, so states are captured once and reused.
        eval_limit: held-out prompts.
        eval_tokens: tokens generated per prompt.
        baseline_limit: the first so many of them for the untrained draft too, which needs a round for every token: on a
            CPU that is the longest part of the evaluation.
    """

    draft: DraftSpec
    objective: ObjectiveConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    data: Mapping[str, Any]
    capture_cache_gib: float
    eval_limit: int
    eval_tokens: int
    baseline_limit: int


PRESETS = {
    "cpu": Preset(
        draft=DraftSpec(layers=1, num_taps=3, block_size=3, mask_token_id=4, markov_rank=64),
        objective=ObjectiveConfig(num_anchors=32),
        optimizer=OptimizerConfig(lr=3e-3),
        train=TrainConfig(steps=450, batch_rows=2),
        data={"max_length": 320, "limit": 400},
        capture_cache_gib=3.0,
        eval_limit=16,
        eval_tokens=64,
        baseline_limit=4,
    ),
    "gpu": Preset(
        draft=DraftSpec(layers=3, target_layer_ids=(1, 7, 14, 21, 27), block_size=7, mask_token_id=4, markov_rank=128),
        objective=ObjectiveConfig(num_anchors=64),
        optimizer=OptimizerConfig(lr=6e-4),
        train=TrainConfig(steps=1400, batch_rows=32),
        data={"max_length": 512},
        capture_cache_gib=0.0,
        eval_limit=48,
        eval_tokens=128,
        baseline_limit=48,
    ),
}


def make_config(args: argparse.Namespace, preset: Preset, target: Path, device: str) -> RunConfig:
    """The run the quickstart trains; what the command line says wins over the preset."""
    train = replace(preset.train, steps=args.steps) if args.steps else preset.train
    draft = preset.draft
    if args.target is not None:  # the preset's mask row and taps are SmolLM2's; another target gets its own
        draft = replace(draft, mask_token_id=None, target_layer_ids=None)
    if args.mask_token_id is not None:
        draft = replace(draft, mask_token_id=args.mask_token_id)
    data = dict(preset.data)
    if args.min_retention is not None:
        data["min_retention"] = args.min_retention
    return RunConfig(
        target=TargetConfig(path=str(target), device=device, capture_cache_gib=preset.capture_cache_gib),
        data=DataConfig(path=str(args.data or QUICKSTART_CONVERSATIONS), **data),
        run_dir=str(args.run_dir),
        draft=draft,
        objective=preset.objective,
        optimizer=preset.optimizer,
        train=train,
        checkpoint=CheckpointConfig(every=max(1, (train.steps or 1) // 3), keep=1, keep_best=0),
        logging=LoggingConfig(every=1),
        eval=EvalConfig(prompts=args.prompts, limit=args.limit or preset.eval_limit, max_new_tokens=preset.eval_tokens),
        resume="auto",
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="draft-jax quickstart",
        description="Train a small DSpark draft on a real target, evaluate it exactly, export it and write a report.",
    )
    parser.add_argument("--run-dir", type=Path, default=Path("runs/quickstart"), help="folder it leaves behind")
    parser.add_argument("--target", help="folder of another causal LM (default: SmolLM2-135M-Instruct, fetched)")
    parser.add_argument(
        "--mask-token-id", type=int, help="unused embedding row of that model (default: past its tokens)"
    )
    parser.add_argument("--data", help="training conversations, JSONL (default: those shipped)")
    parser.add_argument(
        "--min-retention",
        type=_share,
        help="least share of those rows that must be left to learn from, 0 to 1 (default: 0.9)",
    )
    parser.add_argument("--prompts", help="held-out prompts, JSONL (default: those shipped)")
    parser.add_argument("--preset", choices=("auto", *PRESETS), default="auto", help="auto: by the device found")
    parser.add_argument("--steps", type=int, help="optimizer steps instead of the preset's")
    parser.add_argument("--limit", type=int, help="held-out prompts instead of the preset's number")
    parser.add_argument("--keep", action="store_true", help="refuse to replace the results of an earlier quickstart")
    return parser.parse_args(argv)


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share from 0 to 1")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `draft-jax quickstart`; returns the exit code."""
    begin = time.perf_counter()
    args = parse(argv)
    _make_room(args.run_dir, args.keep)
    preset_name, device = _choose(args.preset)
    preset = PRESETS[preset_name]
    print(f"Device: {device}; preset: {preset_name}", flush=True)

    from target_bridge import small_target

    folder = Path(args.target) if args.target else small_target.obtain()
    config = make_config(args, preset, folder, device)

    from . import loop, resolve, runtime

    platform, _ = runtime.start_jax(config)
    draft = resolve.resolve_draft(config, resolve.read_target_config(config.target))
    target = runtime.load_target(
        config, draft.target_layer_ids, platform, resolve.resolve_dtype(config.target.dtype, platform)
    )
    trained = loop.run(config, target=target)
    if trained.exit_code:
        print(f"Stopped after {trained.steps} of {trained.total_steps} steps; the same command continues.")
        return trained.exit_code
    print(f"Trained {trained.steps} steps in {trained.seconds:.0f} s")
    exported = _export(args.run_dir, draft, target)
    prompts = _prompts(config, target)
    results = _evaluate(config, draft, exported, target, prompts, preset.baseline_limit)
    summary = _report(args.run_dir, config, trained, results, prompts, target, time.perf_counter() - begin)
    _print(args.run_dir, results, summary)
    if not summary["accept_length_trained"] > summary["accept_length_untrained"]:
        print("FAILED: the trained draft accepts no more than an untrained one", file=sys.stderr)
        return 1
    return 0


def _choose(preset: str) -> tuple[str, str]:
    """Preset and device. JAX decides: a GPU it cannot use is no GPU here."""
    from .runtime import prepare_environment

    prepare_environment(TrainConfig(steps=1).memory_fraction)
    import jax

    if jax.default_backend() == "gpu":
        return ("gpu" if preset == "auto" else preset), "cuda"
    return ("cpu" if preset == "auto" else preset), "cpu"


def _make_room(run_dir: Path, keep: bool) -> None:
    """A finished quickstart is replaced, an interrupted one is continued, anything else is left alone."""
    if (run_dir / REPORT_JSON).is_file():
        if keep:
            raise QuickstartError(f"{run_dir} holds a finished quickstart; give another --run-dir, or leave out --keep")
        print(f"Replacing the finished quickstart in {run_dir}")
        shutil.rmtree(run_dir)
    elif run_dir.exists() and any(run_dir.iterdir()) and not (run_dir / "draft_config.json").is_file():
        raise QuickstartError(f"{run_dir} is not empty and not a quickstart's; give another --run-dir")


def _export(run_dir: Path, draft: DraftConfig, target: Any) -> Path:
    from .checkpoint import load_trained
    from .export import TargetFacts, export, verify_export

    config, params = load_trained(run_dir, "latest")
    facts = TargetFacts.from_folder(target.info.name) if Path(target.info.name).is_dir() else None
    report = export(params, config, run_dir / "export", target_info=facts, force=True)
    checks = verify_export(report.path, facts)
    if failed := [check for check in checks if not check.ok]:
        raise QuickstartError("the export fails its checks:\n" + "\n".join(map(str, failed)))
    print(f"Exported to {report.path} ({report.size / 2**20:.1f} MiB, {len(checks)} checks passed)", flush=True)
    return report.path


def _prompts(config: RunConfig, target: Any) -> Sequence[Any]:
    """The held-out prompts; what was left out of the file is printed."""
    from .evaluate.tasks import load_prompts

    found = load_prompts(config.eval.prompts, target.tokenizer, limit=config.eval.limit)
    if left_out := found.summary():
        print(left_out)
    return found.prompts


def _evaluate(
    config: RunConfig, draft: DraftConfig, exported: Path, target: Any, prompts: Sequence[Any], baseline_limit: int
) -> dict[str, Any]:
    """Untrained and trained draft on the same held-out prompts; the trained one as exported, read back."""
    from draft_jax.weights import load_folder

    from .evaluate.protocol import evaluate

    _, params, _ = load_folder(exported)
    results = {}
    # The trained draft first: who has to stop early has seen the number that counts.
    for name, weights, asked in (
        ("trained", params, prompts),
        ("untrained", None, prompts[:baseline_limit]),
    ):
        # Plain decoding is the same for both: it is measured once.
        options = replace(config.eval, plain=weights is not None)
        begin = time.perf_counter()
        results[name] = evaluate(target, draft, weights, None, asked, options, _progress(name))
        if results[name].error:
            raise QuickstartError(f"evaluation of the {name} draft: {results[name].error}")
        print(
            f"\rEvaluated the {name} draft on {len(asked)} prompts in {time.perf_counter() - begin:.0f} s: accept"
            f" length {results[name].accept_length:.3f}" + " " * 20,
            flush=True,
        )
    return results


def _progress(name: str) -> Any:
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int, accept_length: float | None) -> None:
        so_far = "-" if accept_length is None else f"{accept_length:.2f}"
        print(f"\rEvaluating the {name} draft: {done}/{total} outputs, accept length {so_far}", end="", file=sys.stderr)

    return show


def _report(
    run_dir: Path,
    config: RunConfig,
    trained: Any,
    results: Mapping[str, Any],
    prompts: Sequence[Any],
    target: Any,
    seconds: float,
) -> dict[str, Any]:
    from .config_file import dump
    from .evaluate.texts import token_texts
    from .report import write_report

    after, before = results["trained"], results["untrained"]
    summary = {
        "accept_length_trained": after.accept_length,
        "accept_length_untrained": before.accept_length,
        "survival_trained": list(after.survival),
        "survival_untrained": list(before.survival),
        "prompts": len(after.samples),
        "prompts_untrained": len(before.samples),
        "max_new_tokens": config.eval.max_new_tokens,
        "identical_to_plain": after.identical_to_plain,
        "tokens_per_second_draft": after.tokens_per_second_draft,
        "tokens_per_second_plain": after.tokens_per_second_plain,
        "steps": trained.steps,
        "train_seconds": round(trained.seconds, 1),
        "tau_probabilistic": trained.metrics.get("tau_probabilistic"),
        "compiles": dict(trained.compiles),
        "peak_memory_gib": _peak_memory_gib(),
        "seconds": round(seconds, 1),
        "target": target.info.name,
        "data": config.data.path,
    }
    for name, result in results.items():
        result.token_texts = token_texts(target.tokenizer, result)
        (run_dir / "eval").mkdir(exist_ok=True)
        (run_dir / "eval" / f"{name}.json").write_text(json.dumps(result.to_json(), indent=1))
    texts = {prompt.id: prompt.text for prompt in prompts}
    write_report(
        run_dir / REPORT_HTML,
        {
            "title": "draft-jax quickstart",
            "notes": [
                f"A DSpark draft for {target.info.name}, {trained.steps} steps, evaluated by exact rejection sampling "
                f"at temperature {config.eval.temperature:g} on {summary['prompts']} prompts it was not trained on."
            ],
            "headline": [
                ("accept length, trained", after.accept_length),
                ("accept length, untrained", before.accept_length),
                ("training time [s]", summary["train_seconds"]),
                ("whole quickstart [s]", summary["seconds"]),
            ],
            "training": [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()],
            "evaluations": [{"name": name, "result": result.to_json()} for name, result in results.items()],
            "samples": [
                {"prompt": texts.get(sample.prompt, sample.prompt), "pieces": sample.pieces(target.tokenizer)}
                for sample in after.samples[:SHOWN_SAMPLES]
            ],
            "config": dump(config),
        },
    )
    # Last: its presence says that the quickstart was finished.
    (run_dir / REPORT_JSON).write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def _peak_memory_gib() -> float:
    import resource

    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)


def _print(run_dir: Path, results: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
    from .report import terminal_table

    after, before = results["trained"], results["untrained"]
    rows: list[tuple[Any, ...]] = [
        ("", "untrained", "trained"),
        ("prompts", len(before.samples), len(after.samples)),
        ("accept length (bonus included)", before.accept_length, after.accept_length),
    ]
    rows += [(f"slots 0..{slot} all accepted", *pair) for slot, pair in enumerate(zip(before.survival, after.survival))]
    rows.append(("tokens/s with the draft", before.tokens_per_second_draft, after.tokens_per_second_draft))
    rows.append(("tokens/s of plain decoding", None, after.tokens_per_second_plain))
    print("\n" + terminal_table(rows))
    print(
        f"\n{summary['identical_to_plain']} of {summary['prompts']} outputs equal plain greedy decoding. "
        f"{summary['seconds']:.0f} s in all, peak {summary['peak_memory_gib']} GiB of host memory."
    )
    print(f"Report: {run_dir / REPORT_HTML}   Draft for SGLang: {run_dir / 'export'}")
