"""`draft-jax eval`: accept length and speed of a draft on prompts."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.evaluate.config import EvalConfig

if TYPE_CHECKING:
    from target_bridge.target import Target
    from train.evaluate.draft import LoadedDraft
    from train.evaluate.protocol import Progress
    from train.evaluate.result import EvalResult
    from train.evaluate.tasks import Prompt

#: Fields of EvalConfig that are options of the same name.
_FIELDS = (
    "prompts", "limit", "max_new_tokens", "temperature", "confidence_threshold", "seed", "dtype",
    "max_context", "template",
)  # fmt: skip
#: Above this, the gap between the two best plain logits is no tie that rounding in float32 could break.
TIE = 1e-3
#: Outputs shown in the HTML report.
SHOWN_SAMPLES = 8


def parser() -> argparse.ArgumentParser:
    """The options of `draft-jax eval`."""
    made = argparse.ArgumentParser(
        prog="draft-jax eval",
        description="Accept length and speed of a draft, by exact rejection sampling against its target.",
    )
    add = made.add_argument
    add(
        "--draft",
        required=True,
        help="a run directory, or any DSpark folder (DeepSpec's, SpecForge's or ours)",
    )
    add("--target", help="folder or hub name of the target (default: the one the draft was trained for)")
    add("--step", default="latest", help="checkpoint of a run: latest, best or a number (default: latest)")
    add(
        "--untrained",
        action="store_true",
        help="evaluate a freshly initialised draft of the same shape instead",
    )
    add(
        "--prompts",
        help="JSONL file: turns, messages or conversations (default: prompts shipped with the package)",
    )
    add("--limit", type=int, help="at most this many prompts")
    add("--max-new-tokens", type=int, help="tokens generated per prompt (default: 128)")
    add("--temperature", type=float, help="0 = greedy (default: 0)")
    add(
        "--confidence-threshold",
        type=float,
        help="propose up to the first slot predicted below this (default: 0)",
    )
    add("--seed", type=int, help="randomness of a prompt = this and the prompt's id (default: 980406)")
    add("--dtype", choices=("auto", "float32", "bfloat16"), help="auto: bfloat16 on a GPU, float32 on a CPU")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    add("--bridge", choices=("hf", "sglang"), help="what runs the target (default: as the run did, else hf)")
    add(
        "--engine",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the SGLang engine, e.g. page_size=16; may be repeated (docs/sglang.md)",
    )
    add("--max-context", type=int, help="refuse prompts, and stop outputs, beyond so many tokens")
    add("--template", help="chat template: auto (the tokenizer's own), or as data.template")
    add(
        "--no-plain",
        action="store_true",
        help="skip plain decoding: no speed to compare with, no identity check",
    )
    add("--output", help="write all results as JSON (default for a run: RUN_DIR/eval/...)")
    add("--report", help="write an HTML report")
    add("--trust-remote-code", action="store_true", help="run Python code that comes with the target")
    add("--memory-fraction", type=float, default=0.4, help="share of the GPU for JAX (default: 0.4)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `draft-jax eval`.

    Returns:
        Exit code: 0, or 1 when the evaluation is no measurement (nothing proposed, nothing decoded).

    Raises:
        ValueError, RuntimeError: it could not be done; the message says why.
    """
    args = parser().parse_args(argv)
    _prepare(args.device, args.memory_fraction)
    from train.evaluate.draft import load_draft

    draft = load_draft(args.draft, args.step)
    options = eval_options(args, draft.run_config)
    from train.evaluate.target import close_target, load_eval_target

    target = load_eval_target(
        draft,
        options,
        name=args.target,
        bridge=args.bridge,
        engine=args.engine,
        device=args.device,
        trust_remote_code=args.trust_remote_code,
    )
    try:
        return _evaluate(args, draft, options, target)
    finally:
        close_target(target)


def _evaluate(args: argparse.Namespace, draft: LoadedDraft, options: EvalConfig, target: Target) -> int:
    _check_stored_head(draft, target, Path(args.draft))

    from train.evaluate.identity import draft_digest
    from train.evaluate.protocol import evaluate
    from train.evaluate.tasks import load_prompts

    prompts = load_prompts(options.prompts, target.tokenizer, limit=options.limit, template=options.template)
    if left_out := prompts.summary():
        print(left_out, file=sys.stderr)
    params = None if args.untrained else draft.params
    with _Bar(len(prompts.prompts)) as progress:
        result = evaluate(target, draft.config, params, None, prompts.prompts, options, progress)
    name = f"untrained draft shaped as {draft.origin}" if args.untrained else draft.origin
    result.settings |= {
        "draft": name,
        "draft_digest": None if args.untrained else draft_digest(draft.config, draft.params),
        "prompts": options.prompts or "shipped with the package",
    }
    print(format_result(result, name))
    _write(args, draft, result, name, prompts.prompts, target)
    return 1 if result.error else 0


def eval_options(args: argparse.Namespace, run_config: Mapping[str, Any] | None) -> EvalConfig:
    """What to evaluate: the run's own `eval` section where there is one, then what the command line says."""
    base = EvalConfig()
    if run_config and run_config.get("eval"):
        from train.config_file import build

        base = build(run_config["eval"], EvalConfig)
    given: dict[str, Any] = {name: getattr(args, name) for name in _FIELDS if getattr(args, name) is not None}
    if args.no_plain:
        given["plain"] = False
    return replace(base, **given)


def format_result(result: EvalResult, name: str) -> str:
    """The result as text for a terminal: an error first, then tables, refusals and differences."""
    from train.report import terminal_table

    lines = [f"Evaluation of {name} for target {result.settings.get('target')}"]
    if result.error:
        lines += ["", f"ERROR: {result.error}"]
    lines += ["", terminal_table([("", "value"), *result.table()])]
    slots = zip(result.survival, result.conditional, result.statistics.slot_rounds)
    rows = [(slot, survival, conditional, rounds) for slot, (survival, conditional, rounds) in enumerate(slots)]
    lines += ["", terminal_table([("slot", "survival", "conditional", "rounds"), *rows])]
    if result.refusals:
        lines += ["", f"{len(result.refusals)} prompt(s) refused:"]
        lines += [f"  {refusal.prompt}: {refusal.reason}" for refusal in result.refusals[:10]]
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


def _prepare(device: str, memory_fraction: float) -> None:
    """What JAX reads when its backend starts: the memory it reserves, and the platform for `--device cpu`."""
    from train.runtime import prepare_environment

    prepare_environment(memory_fraction)
    if device == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


def _check_stored_head(draft: LoadedDraft, target: Target, folder: Path) -> None:
    """A folder that carries an embedding or a head must carry the target's, which is what is used."""
    from train.evaluate.protocol import check_match

    check_match(target.info, draft.config)
    if draft.run_config is None and draft.step is None:
        from draft_jax.weights import check_frozen
        from target_bridge.handoff import frozen_to_jax

        compared = check_frozen(folder, frozen_to_jax(*target.frozen_head()))
        if compared:
            print(f"{', '.join(compared)} in {folder}: equal to the target's", file=sys.stderr)


def _write(
    args: argparse.Namespace,
    draft: LoadedDraft,
    result: EvalResult,
    name: str,
    prompts: Sequence[Prompt],
    target: Target,
) -> None:
    output = Path(args.output) if args.output else None
    if output is None and draft.step is not None:
        kind = "untrained" if args.untrained else f"step-{draft.step}"
        output = Path(args.draft) / "eval" / f"{kind}_t{result.settings['temperature']:g}.json"
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
        partial.write_text(json.dumps(result.to_json(), indent=1) + "\n")
        os.replace(partial, output)
        print(f"\nwrote {output}")
    if args.report:
        from train.report import write_report

        texts = {prompt.id: prompt.text for prompt in prompts}
        shown = [
            {"prompt": texts[sample.prompt], "pieces": sample.pieces(target.tokenizer)}
            for sample in result.samples[:SHOWN_SAMPLES]
        ]
        path = write_report(
            args.report,
            {
                "title": f"Evaluation of {name}",
                "evaluations": [{"name": "draft", "result": result.to_json(samples=False)}],
                "samples": shown,
                "config": result.settings,
            },
        )
        print(f"wrote {path}")


class _Bar:
    """Progress on stderr when that is a terminal; hands out the callback `evaluate` takes."""

    def __init__(self, total: int):
        from tqdm import tqdm

        self._bar = tqdm(total=total, desc="prompts", disable=None, file=sys.stderr)

    def __enter__(self) -> Progress:
        return self._update

    def __exit__(self, *exc: object) -> None:
        self._bar.close()

    def _update(self, done: int, total: int, accept_length: float | None) -> None:
        self._bar.total = total
        if accept_length is not None:
            self._bar.set_postfix_str(f"accept length {accept_length:.2f}", refresh=False)
        self._bar.update(done - self._bar.n)
