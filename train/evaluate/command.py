"""`draft-jax eval`: accept length and speed of a draft on prompts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.evaluate.config import EvalConfig
from train.evaluate.options import deviations, eval_options, parser

if TYPE_CHECKING:
    from target_bridge.target import Target
    from train.evaluate.draft import LoadedDraft
    from train.evaluate.journal import Journal
    from train.evaluate.result import EvalResult
    from train.evaluate.task_folder import TaskFile


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `draft-jax eval`.

    Returns:
        Exit code: 0, or 1 when the evaluation is no measurement (nothing proposed, nothing decoded).

    Raises:
        ValueError, RuntimeError: it could not be done; the message says why.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(argv)
    _prepare(args.device, args.memory_fraction)
    from train.evaluate.output import output_path, rows_folder

    if args.processes > 1:  # before anything of ours is on a GPU: the processes want it
        from train.evaluate.journal import prepare
        from train.evaluate.processes import run_shares

        if not args.output:
            raise ValueError("--processes works on the rows beside the result: name it with --output")
        rows = rows_folder(Path(args.output))
        prepare(rows, args.resume)
        run_shares(argv, args.processes, rows)
        args.resume = True  # what is left is to put the rows together
    from train.evaluate.draft import load_draft

    draft = load_draft(args.draft, args.step)
    options = eval_options(args, draft.run_config)
    output = output_path(args, draft, options)
    if output is None and (args.resume or args.share != (0, 1)):
        raise ValueError("--resume and --share work on the rows beside the result: name it with --output")
    tasks = asked_tasks(args, options)
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
        return _evaluate(args, draft, options, tasks, target, output)
    finally:
        close_target(target)


def _evaluate(
    args: argparse.Namespace,
    draft: LoadedDraft,
    options: EvalConfig,
    tasks: Sequence[TaskFile] | None,
    target: Target,
    output: Path | None,
) -> int:
    _check_stored_head(draft, target, Path(args.draft))

    from train.evaluate.identity import draft_digest
    from train.evaluate.journal import Journal, shares
    from train.evaluate.output import rows_folder, write_report, write_result
    from train.evaluate.protocol import evaluate
    from train.evaluate.task_folder import load_tasks
    from train.evaluate.tasks import load_prompts
    from train.evaluate.terminal import ProgressBar, format_result
    from train.evaluate.texts import token_texts

    limit, template = options.limit, options.template
    if tasks is None:
        prompts = load_prompts(options.prompts, target.tokenizer, limit=limit, template=template)
    else:
        prompts = load_tasks(tasks, target.tokenizer, limit=limit, template=template)
    if left_out := prompts.summary(all_turns=args.all_turns):
        print(left_out, file=sys.stderr)
    name = f"untrained draft shaped as {draft.origin}" if args.untrained else draft.origin
    facts: dict[str, Any] = {
        "draft_digest": None if args.untrained else draft_digest(draft.config, draft.params),
        "protocol": args.protocol,
        "protocol_deviations": deviations(args, options, target.info.dtype),
        "template": options.template,
        "all_turns": args.all_turns,
    }

    def journal(settings: Mapping[str, Any]) -> Journal:
        assert output is not None
        return Journal(rows_folder(output), {**settings, **facts}, resume=args.resume, share=args.share)

    def described(result: EvalResult) -> EvalResult:
        result.settings |= {**facts, "draft": name, "prompts": options.prompts or "shipped with the package"}
        processes = 1 if output is None else shares(rows_folder(output))
        result.settings |= {"left_out": left_out.splitlines(), "processes": processes}
        if args.tasks or args.tasks_folder or args.protocol:
            result.settings["prompts"] = ", ".join(result.tasks)
        result.token_texts = token_texts(target.tokenizer, result)
        return result

    whole = args.share == (0, 1)
    with ProgressBar() as progress:
        result = evaluate(
            target,
            draft.config,
            None if args.untrained else draft.params,
            None,
            prompts,
            options,
            progress,
            journal=None if output is None else journal,
            share=args.share,
            partial=(lambda so_far: write_result(output, described(so_far))) if output is not None and whole else None,
            all_turns=args.all_turns,
        )
    described(result)
    wrote = []  # before anything is printed: a closed pipe (| head) must not cost the result
    if output is not None and whole:
        write_result(output, result)
        wrote.append(f"wrote {output}, rows in {rows_folder(output)}")
    if args.report and whole:
        wrote.append(f"wrote {write_report(args.report, result, name, target.tokenizer)}")
    print(format_result(result, name))
    if not whole:
        print(f"\nshare {args.share[0] + 1} of {args.share[1]} is done; --resume without --share puts all together")
        return 0
    if wrote:
        print("\n" + "\n".join(wrote))
    return 1 if result.error else 0


def asked_tasks(args: argparse.Namespace, options: EvalConfig) -> list[TaskFile] | None:
    """The task files that are asked for; None = prompts of a file, or those shipped. Known before a target is loaded.

    Raises:
        ValueError: a file or a task is not there, or both are named.
    """
    if options.prompts and (args.tasks or args.tasks_folder):
        raise ValueError(f"prompts of {options.prompts} and tasks: give one of the two")
    if options.prompts and not Path(options.prompts).is_file():
        raise ValueError(f"prompts file {options.prompts} does not exist")
    if options.prompts or not (args.tasks or args.tasks_folder or args.protocol):
        return None
    from train.evaluate.converters import SOURCES
    from train.evaluate.task_folder import resolve_tasks
    from train.evaluate.tasks_command import FOLDER

    names = args.tasks.split(",") if args.tasks else list(SOURCES) if args.protocol else None
    return resolve_tasks(names, args.tasks_folder or (FOLDER if Path(FOLDER).is_dir() else None))


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
