"""`draft-jax serve-check`: the accept length in stock SGLang beside the offline one, on the same prompts."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.serve_check.config import ServeConfig

if TYPE_CHECKING:
    from train.serve_check.check import Check
    from train.serve_check.comparison import Comparison
    from train.serve_check.offline import Asked, OfflineResult

RESULT = "result.json"


def parser() -> argparse.ArgumentParser:
    """The options of `draft-jax serve-check`."""
    made = argparse.ArgumentParser(
        prog="draft-jax serve-check",
        description="Serves a draft with stock SGLang and compares what it accepts with the offline evaluation.",
        epilog="Exit code 0: the accept lengths agree. 1: they do not, or it could not be measured.",
    )
    add = made.add_argument
    add("--draft", required=True, help="an exported draft's folder, or a run directory (exported first)")
    add("--step", default="latest", help="checkpoint of a run: latest, best or a number (default: latest)")
    add("--target", help="folder or hub name of the target (default: the one the draft was trained for)")
    add("--prompts", help="JSONL file of prompts (default: those shipped with the package)")
    add("--limit", type=int, help="at most this many prompts")
    add("--max-new-tokens", type=int, default=128, help="tokens generated per prompt (default: 128)")
    add("--max-context", type=int, help="as in draft-jax eval")
    add("--template", default="auto", help="chat template, as in draft-jax eval (default: auto)")
    add("--temperature", type=float, nargs="+", default=[0.0, 1.0], help="compare at these (default: 0 1)")
    add("--tolerance", type=float, default=0.03, help="largest relative difference that passes (default: 0.03)")
    add("--offline", nargs="+", default=[], metavar="JSON", help="results of draft-jax eval, instead of running it")
    add("--bridge", help="target of the offline evaluation, as in draft-jax eval")
    add("--device", default="auto", help="of the offline evaluation: auto, cpu, cuda (default: auto)")
    add(
        "--eval-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="one more argument for draft-jax eval; repeatable",
    )
    add("--eval-timeout", type=float, default=3600.0, help="seconds for one offline evaluation (default: 3600)")
    add("--seed", type=int, default=980406, help="of both sides (default: 980406)")
    add("--concurrency", type=int, default=16, help="requests in flight in the server (default: 16)")
    add("--no-plain", action="store_true", help="do not serve without the draft: no speed-up, no identity check")
    add("--attention-backend", help="SGLang's (default: its own choice)")
    add("--draft-attention-backend", help="for the draft: flashinfer, fa3, triton, ... (default: the target's)")
    add("--server-memory", type=float, help="SGLang's mem_fraction_static (default: its own choice)")
    add(
        "--server-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another argument of sglang.Engine, the value as JSON: disable_cuda_graph=true; repeatable",
    )
    add("--server-python", default=sys.executable, help="interpreter that has sglang (default: this one)")
    add("--server-pythonpath", action="append", default=[], metavar="DIR", help="for that interpreter only; repeatable")
    add("--start-timeout", type=float, default=900.0, help="seconds until the server is ready (default: 900)")
    add("--request-timeout", type=float, default=900.0, help="seconds for all prompts once (default: 900)")
    add("--trust-remote-code", action="store_true", help="run Python code that comes with the target")
    add(
        "--output",
        metavar="DIR",
        help="folder for result.json, evaluations and server logs (default: RUN_DIR/serve_check)",
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `draft-jax serve-check`.

    Returns:
        Exit code: 0 when offline and served accept length agree at every temperature, else 1.

    Raises:
        ValueError, RuntimeError: it could not be measured; the message says why.
    """
    from train.serve_check.check import run

    args = parser().parse_args(argv)
    config = serve_config(args)
    check = _prepare(args)
    print(f"files: {check.output}", file=sys.stderr)
    offline = _offline(args, config, check)
    asked = _asked(args, check, offline)
    comparisons, facts = run(config, check, asked, offline, trust=args.trust_remote_code)
    failure = facts.get("without it", {}).get("failure")
    record = {
        "draft": check.name, "target": check.target, "block_size": check.draft.block_size,
        "prompts": len(asked.prompts), "max_new_tokens": args.max_new_tokens, "server": facts,
        "comparisons": [item.to_json() for item in comparisons],
        "agrees": all(item.problem is None for item in comparisons),
    }  # fmt: skip
    _write_json(check.output / RESULT, record)
    print(result_text(check, comparisons, facts, asked, args.max_new_tokens))
    if failure:
        print(f"\nserving without the draft failed, its numbers are missing: {failure}")
    print(f"\nwrote {check.output / RESULT}")
    return 0 if record["agrees"] and not failure else 1


def serve_config(args: argparse.Namespace) -> ServeConfig:
    """The server's part of the options.

    Raises:
        ValueError: one of them is out of range.
    """
    from target_bridge.serving.server import Deadlines

    return ServeConfig(
        temperatures=tuple(args.temperature),
        tolerance=args.tolerance,
        concurrency=args.concurrency,
        plain=not args.no_plain,
        attention_backend=args.attention_backend,
        draft_attention_backend=args.draft_attention_backend,
        memory=args.server_memory,
        arguments=_server_arguments(args.server_arg),
        python=args.server_python,
        pythonpath=tuple(args.server_pythonpath),
        deadlines=Deadlines(start=args.start_timeout, request=args.request_timeout),
        eval_timeout=args.eval_timeout,
        seed=args.seed,
    )


def _server_arguments(given: Sequence[str]) -> dict[str, Any]:
    arguments = {}
    for item in given:
        name, has_value, value = item.partition("=")
        if not has_value or not name.isidentifier():
            raise ValueError(f"--server-arg {item!r}: write NAME=VALUE, for example disable_cuda_graph=true")
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value  # a bare word is a string
    return arguments


def _prepare(args: argparse.Namespace) -> Check:
    """Reads the draft, exports a run's, and passes the folder through the export's checklist."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # this process reads weights and counts; others own the GPU
    from train.evaluate.draft import load_draft
    from train.evaluate.identity import draft_digest
    from train.export import export, verify_export, with_targets_ids
    from train.serve_check.check import Check
    from train.target_facts import TargetFacts

    loaded = load_draft(args.draft, args.step)
    target = args.target or loaded.target
    if not target:
        raise ValueError(f"{args.draft} does not say which target it was made for; name it with --target")
    facts = TargetFacts.from_folder(target) if Path(target).is_dir() else None
    if args.output:
        output = Path(args.output).absolute()
    elif loaded.step is not None:
        output = Path(args.draft).absolute() / "serve_check"
    else:
        output = Path(tempfile.mkdtemp(prefix="draft-jax-serve-check-"))
    output.mkdir(parents=True, exist_ok=True)
    folder = Path(args.draft).absolute()
    if loaded.step is not None:
        config = loaded.config if facts is None else with_targets_ids(loaded.config, facts)
        folder = export(loaded.params, config, output / "export", target_info=facts, force=True).path
    elif failed := [item for item in verify_export(folder, facts) if not item.ok]:
        lines = "\n".join(f"  {item}" for item in failed)
        raise ValueError(
            f"{folder} is no draft that stock SGLang serves right:\n{lines}\n"
            f"Rewrite it first: draft-jax export --draft {args.draft} --target {target} --output DIR"
        )
    return Check(loaded.origin, loaded.config, draft_digest(loaded.config, loaded.params), folder, target, output)


def _offline(args: argparse.Namespace, config: ServeConfig, check: Check) -> dict[float, OfflineResult]:
    """Temperature -> its evaluation, read or run."""
    from train.serve_check.offline import pick, read_evaluation, run_evaluation

    given = [read_evaluation(path) for path in args.offline]
    results = {}
    for temperature in config.temperatures:
        found = pick(given, temperature)
        if found is None:
            if given:
                known = ", ".join(f"{item.temperature:g}" for item in given)
                raise ValueError(f"no --offline file is of temperature {temperature:g}, they have {known}")
            print(f"evaluating offline at temperature {temperature:g}", file=sys.stderr)
            path = check.output / f"offline_t{temperature:g}.json"
            found = run_evaluation(_eval_arguments(args, check), temperature, path, config.eval_timeout)
        results[temperature] = found
    return results


def _eval_arguments(args: argparse.Namespace, check: Check) -> list[str]:
    from train.serve_check.offline import DTYPE

    arguments = [
        "--draft", str(check.folder), "--target", check.target, "--max-new-tokens", str(args.max_new_tokens),
        "--template", args.template, "--device", args.device, "--dtype", DTYPE, "--seed", str(args.seed),
    ]  # fmt: skip
    for option in ("prompts", "limit", "max_context", "bridge"):
        if (value := getattr(args, option)) is not None:
            arguments += [f"--{option.replace('_', '-')}", str(value)]
    if args.trust_remote_code:
        arguments.append("--trust-remote-code")
    return [*arguments, *args.eval_arg]


def _asked(args: argparse.Namespace, check: Check, offline: Mapping[float, OfflineResult]) -> Asked:
    """The prompts, proved to be those of every offline result.

    Raises:
        OfflineMismatch: an offline result measured something else.
        ValueError: a request would touch the end of the context.
    """
    from target_bridge.hf_source import load_tokenizer
    from train.evaluate.tasks import load_prompts
    from train.serve_check.check import SLACK
    from train.serve_check.offline import ask, check_same

    tokenizer = load_tokenizer(check.target, trust_remote_code=args.trust_remote_code)
    prompts = load_prompts(args.prompts, tokenizer, limit=args.limit, template=args.template).prompts
    for result in offline.values():
        limit = int(result.settings["context_limit"])
        asked = ask(prompts, args.max_new_tokens, limit, check.draft.vocab_size)
        check_same(result, asked, check.draft, check.digest, args.max_new_tokens, check.target)
        room = limit - (check.draft.block_size + 1 + SLACK)
        if asked.longest > room:
            raise ValueError(
                f"a prompt and its output have {asked.longest} tokens of a context of {limit}: the server needs "
                f"{limit - room} free for its verify window. Give --max-context {room}"
            )
    return asked


def result_text(
    check: Check, comparisons: Sequence[Comparison], facts: Mapping[str, Any], asked: Asked, max_new_tokens: int
) -> str:
    """The whole check as text."""
    from train.serve_check.tables import comparison_text

    server = facts.get("with the draft", {})
    head = [
        f"{check.name} for target {check.target}",
        f"stock SGLang {facts.get('version')}, attention {server.get('attention_backend')}, "
        f"draft attention {server.get('speculative_draft_attention_backend')}, {server.get('dtype')}; block "
        f"{check.draft.block_size}, {len(asked.prompts)} prompts, {max_new_tokens} new tokens, "
        f"{server.get('max_running_requests')} requests at once",
    ]
    if fault := facts.get("known_fault"):
        head += ["", f"KNOWN FAULT: {fault}"]
    return "\n".join(head) + "".join(f"\n\n{comparison_text(item)}" for item in comparisons)


def _write_json(path: Path, record: Mapping[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(partial, path)
