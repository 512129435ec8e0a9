"""The options of `draft-jax eval`, and what they make of an evaluation's settings."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from train.evaluate.config import EvalConfig

#: Fields of EvalConfig that are options of the same name.
_FIELDS = (
    "prompts", "limit", "max_new_tokens", "temperature", "confidence_threshold", "seed", "dtype",
    "max_context", "template", "batch_size", "draft_sampling",
)  # fmt: skip

#: Protocols by name: settings that the numbers of others were measured with (dspark_spec 5.1). Its two inexactnesses
#: (8.2, defects 2 and 6) are options of their own: `--draft-sampling bfloat16` and `--count-overshoot`. `dtype` stays
#: auto, which is DeepSpec's bfloat16 on a GPU; another one is noted.
PROTOCOLS: dict[str, EvalConfig] = {
    "deepspec": EvalConfig(
        max_new_tokens=2048, temperature=1.0, confidence_threshold=0.0, seed=980406, seed_by="index", template="auto"
    )
}


def parser() -> argparse.ArgumentParser:
    """The options of `draft-jax eval`."""
    made = argparse.ArgumentParser(
        prog="draft-jax eval",
        description="Accept length and speed of a draft, by exact rejection sampling against its target.",
    )
    _draft_options(made.add_argument_group("draft and target").add_argument)
    _prompt_options(made.add_argument_group("prompts").add_argument)
    _decoding_options(made.add_argument_group("decoding").add_argument)
    _run_options(made.add_argument_group("running and results").add_argument)
    return made


def _draft_options(add: Any) -> None:
    add("--draft", required=True, help="a run directory, or any DSpark folder (DeepSpec's, SpecForge's or ours)")
    add("--target", help="folder or hub name of the target (default: the one the draft was trained for)")
    add("--step", default="latest", help="checkpoint of a run: latest, best or a number (default: latest)")
    add("--untrained", action="store_true", help="evaluate a freshly initialised draft of the same shape instead")
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
    add("--trust-remote-code", action="store_true", help="run Python code that comes with the target")
    add("--memory-fraction", type=float, default=0.4, help="share of the GPU for JAX (default: 0.4)")


def _prompt_options(add: Any) -> None:
    add("--prompts", help="JSONL file: turns, messages or conversations (default: prompts shipped with the package)")
    add("--tasks", help="comma-separated task names of --tasks-folder, or JSONL files; instead of --prompts")
    add("--tasks-folder", help="folder of task files (draft-jax tasks get); without --tasks all of them")
    add("--all-turns", action="store_true", help="ask every user turn, each after the draft-decoded answer before it")
    add("--limit", type=int, help="at most this many prompts, of each task")
    add("--template", help="chat template: auto (the tokenizer's own), or as data.template")


def _decoding_options(add: Any) -> None:
    add(
        "--protocol",
        choices=sorted(PROTOCOLS),
        help="settings of others, to be compared with their numbers: deepspec = temperature 1, 2048 new tokens, its "
        "nine tasks, caps and seeds. What is given besides wins, and is noted in the result",
    )
    add("--max-new-tokens", type=int, help="tokens generated per prompt (default: 128)")
    add("--temperature", type=float, help="0 = greedy (default: 0)")
    add("--confidence-threshold", type=float, help="propose up to the first slot predicted below this (default: 0)")
    add("--seed", type=int, help="randomness of a prompt = this and the prompt's id (default: 980406)")
    add("--max-context", type=int, help="refuse prompts, and stop outputs, beyond so many tokens")
    add(
        "--draft-sampling",
        choices=("float32", "bfloat16"),
        help="bfloat16 draws draft tokens as DeepSpec does, which is not lossless (default: float32)",
    )
    add(
        "--count-overshoot",
        action="store_true",
        help="count tokens past --max-new-tokens in the last round, as DeepSpec does",
    )
    add("--batch-size", type=int, help="prompts decoded side by side; changes the speed only (default: by device)")
    add("--no-plain", action="store_true", help="skip plain decoding: no speed to compare with, no identity check")


def _run_options(add: Any) -> None:
    add("--output", help="write all results as JSON (default for a run: RUN_DIR/eval/...); rows go beside it")
    add("--report", help="write an HTML report")
    add("--resume", action="store_true", help="go on with the rows of an evaluation that was not finished")
    add("--processes", type=int, default=1, help="processes that share the prompts; on GPUs one each (default: 1)")
    add("--share", type=share, default=(0, 1), metavar="I/N", help="decode only the I-th of N shares (other hosts)")


def share(text: str) -> tuple[int, int]:
    """ "2/4" -> (1, 4)."""
    part, _, parts = text.partition("/")
    if not part.isdigit() or not parts.isdigit() or not 1 <= int(part) <= int(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no share: give I/N with 1 <= I <= N, for example 1/2")
    return int(part) - 1, int(parts)


def eval_options(args: argparse.Namespace, run_config: Mapping[str, Any] | None) -> EvalConfig:
    """What to evaluate: the protocol asked for, or the run's own `eval` section where there is one; then what the
    command line says. Tasks named there take the place of the run's prompts and of their limit."""
    base = EvalConfig()
    if args.protocol:
        base = PROTOCOLS[args.protocol]
    elif run_config and run_config.get("eval"):
        from train.config_file import build

        base = build(run_config["eval"], EvalConfig)
        if args.tasks or args.tasks_folder:  # these are the prompts, not the run's own few
            base = replace(base, prompts=None, limit=None)
    given: dict[str, Any] = {name: getattr(args, name) for name in _FIELDS if getattr(args, name) is not None}
    if args.no_plain:
        given["plain"] = False
    if args.count_overshoot:
        given["count_overshoot"] = True
    return replace(base, **given)


def deviations(args: argparse.Namespace, options: EvalConfig, target_dtype: str) -> dict[str, Any]:
    """Where an evaluation under a protocol leaves it, by the names of the settings; empty when it does not.

    The inexactnesses that are corrected by default are none: what is measured is what the protocol means.

    Args:
        args: what the command line said.
        options: what came of it.
        target_dtype: what the target computes in; DeepSpec's evaluator knows bfloat16 only.
    """
    if not args.protocol:
        return {}
    named = PROTOCOLS[args.protocol]
    names = ("max_new_tokens", "temperature", "confidence_threshold", "seed", "seed_by", "template", "limit",
             "max_context")  # fmt: skip
    found = {name: getattr(options, name) for name in names if getattr(options, name) != getattr(named, name)}
    if args.prompts or args.tasks:
        found["tasks"] = args.tasks or args.prompts
    if args.all_turns:
        found["all_turns"] = True
    if target_dtype != "bfloat16":
        found["target_dtype"] = target_dtype
    return found
