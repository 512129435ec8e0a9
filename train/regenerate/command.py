"""`draft-jax regenerate`: conversations answered anew by the target."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import LoopRule, Network, RegenerateConfig, Sampling

if TYPE_CHECKING:
    from .account import Account

_SAMPLING = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def parser() -> argparse.ArgumentParser:
    """The options of `draft-jax regenerate`."""
    made = argparse.ArgumentParser(
        prog="draft-jax regenerate",
        description="Answers every assistant turn of a conversation file with the target, through its servers.",
        epilog="Exit code 0: every row is answered or left out for a reason that is counted. 1: too many rows failed, "
        "or it could not be done. 130/143: stopped by SIGINT/SIGTERM; go on with --resume. docs/regenerate.md",
    )
    _file_options(made.add_argument_group("files").add_argument)
    _server_options(made.add_argument_group("servers").add_argument)
    _sampling_options(made.add_argument_group("sampling").add_argument)
    _row_options(made.add_argument_group("rows").add_argument)
    return made


def _file_options(add: Any) -> None:
    add("--input", required=True, help="conversations: what data.path takes, prompts without an answer as well")
    add("--output", required=True, help="ROWS.jsonl; rows left out go to ROWS.jsonl.errors, options to ROWS.jsonl.run")
    add("--resume", action="store_true", help="go on with the rows of --output; starts anew where there are none")
    add("--retry-errors", action="store_true", help="with --resume: ask again for rows that ended in an error")
    add("--limit", type=int, help="read at most this many rows")
    add("--format", default="auto", choices=("auto", "messages", "sharegpt"), help="as data.format (default: auto)")
    add("--ids", default="own", choices=("own", "place"), help="own: the row's id; place: its file and line, for "
        "inputs whose ids repeat (default: own)")  # fmt: skip


def _server_options(add: Any) -> None:
    add("--endpoint", nargs="+", required=True, metavar="URL", help="base URLs, http://HOST:PORT/v1")
    add("--model", help="its name in the servers (default: the only one they serve)")
    add("--concurrency", type=int, default=32, help="requests in flight in each server (default: 32)")
    add("--retries", type=int, default=5, help="further tries of a request that failed (default: 5)")
    add("--backoff", type=float, default=1.0, help="seconds before the first of them; doubled each time (default: 1)")
    add("--max-backoff", type=float, default=60.0, help="at most so many seconds (default: 60)")
    add("--request-timeout", type=float, default=600.0, help="seconds for one answer (default: 600)")
    add("--connect-timeout", type=float, default=10.0, help="seconds for a connection (default: 10)")
    add("--start-timeout", type=float, default=60.0, help="seconds until every server must answer (default: 60)")
    add("--outage", type=float, default=600.0, help="stop when no server has answered for so long (default: 600)")
    add("--api-key-env", metavar="NAME", help="environment variable with the servers' key")
    add("--max-error-share", type=float, default=0.1, help="stop when more of the rows fail, from 50 on (default: 0.1)")
    add("--progress-every", type=float, default=10.0, help="seconds between lines of progress (default: 10)")


def _sampling_options(add: Any) -> None:
    add("--temperature", type=float, required=True, help="0 = greedy; there is no default, drafts learn what it gives")
    add("--max-tokens", type=int, default=4096, help="longest answer (default: 4096)")
    for name in _SAMPLING:
        add(f"--{name.replace('_', '-')}", type=int if name == "top_k" else float, help="not sent unless given")
    add("--template-options", type=_object, default={}, metavar="JSON", help="variables of the chat template, as "
        """data.template_options and data.enable_thinking: '{"enable_thinking": false}'""")  # fmt: skip
    add("--extra-body", type=_object, default={}, metavar="JSON", help="further fields of every request")
    add("--seed", type=int, default=0, help="each request's seed is made of it, the id and the turn (default: 0)")
    add("--no-seed", action="store_true", help="send no seeds, for servers that refuse them")


def _row_options(add: Any) -> None:
    kinds = ("keep", "mark", "drop")
    add("--reasoning", default="keep", choices=("keep", "drop"), help="keep it in reasoning_content (default: keep)")
    add("--tool-turns", default="keep", choices=("keep", "regenerate", "drop"), help="turns that call tools: keep the "
        "source's; regenerate them, and go on while the same is called; drop the row (default: keep)")  # fmt: skip
    add("--truncated", default="mark", choices=kinds, help="rows with an answer cut at --max-tokens (default: mark)")
    add("--loops", default="drop", choices=kinds, help="rows with an answer that repeats itself (default: drop)")
    add("--loop-ngram", type=int, default=8, help="words of a repeated piece (default: 8)")
    add("--loop-count", type=int, default=4, help="how often it must occur (default: 4)")
    add("--loop-share", type=float, default=0.5, help="least share of the last words it covers (default: 0.5)")
    add("--leading-assistant", default="drop", choices=("drop", "refuse"), help="as data.leading_assistant")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `draft-jax regenerate`. Returns the exit code; raises what stops the run."""
    args = parser().parse_args(argv)
    config = regenerate_config(args)
    try:
        from .run import regenerate
    except ImportError as error:
        if error.name not in ("httpx2", "anyio", "httpcore2"):
            raise
        raise RuntimeError("draft-jax regenerate needs httpx2: pip install 'draft-jax[regenerate]'") from error
    from .account import Account

    account = Account()
    stopped: list[int] = []

    def stop(number: int, task: asyncio.Task) -> None:
        stopped.append(number)
        task.cancel()

    async def run() -> None:
        task = asyncio.create_task(regenerate(config, account, _say, args.progress_every))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number, task)
        try:
            await task
        except asyncio.CancelledError:
            if not stopped:
                raise

    try:
        asyncio.run(run())
    finally:
        if account.read:
            print(account.format())
            _write_summary(Path(config.output), account)
    if stopped:
        _say(f"stopped by {signal.Signals(stopped[0]).name}; go on with --resume")
        return 128 + stopped[0]
    if not account.read:
        raise ValueError(f"--input {config.input} holds no rows")
    failed = account.number("error")
    share = failed / max(1, failed + account.answered)
    if not account.answered:
        _say("no row is answered: see above")
    elif share > config.max_error_share:
        _say(f"{100 * share:.1f} % of the rows failed, more than --max-error-share ({config.max_error_share:g})")
    else:
        return 0
    return 1


def regenerate_config(args: argparse.Namespace) -> RegenerateConfig:
    """Options as a configuration.

    Raises:
        ValueError: one of them is out of range.
    """
    key = None
    if args.api_key_env:
        key = os.environ.get(args.api_key_env)
        if not key:
            raise ValueError(f"--api-key-env {args.api_key_env}: there is no such environment variable, or it is empty")
    network = ("concurrency", "retries", "backoff", "max_backoff", "request_timeout", "connect_timeout",
               "start_timeout", "outage")  # fmt: skip
    own = ("input", "output", "model", "reasoning", "tool_turns", "truncated", "loops", "ids", "leading_assistant",
           "limit", "resume", "retry_errors", "max_error_share")  # fmt: skip
    return RegenerateConfig(
        sampling=Sampling(
            temperature=args.temperature, max_tokens=args.max_tokens, template=args.template_options,
            extra=args.extra_body, **{name: getattr(args, name) for name in _SAMPLING},
        ),
        network=Network(
            endpoints=tuple(url.rstrip("/") for url in args.endpoint), api_key=key,
            **{name: getattr(args, name) for name in network},
        ),
        seed=None if args.no_seed else args.seed,
        loop_rule=LoopRule(args.loop_ngram, args.loop_count, args.loop_share),
        row_format=args.format,
        **{name: getattr(args, name) for name in own},
    )  # fmt: skip


def _object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _write_summary(output: Path, account: Account) -> None:
    path = output.with_name(output.name + ".summary")
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(account.to_json(), indent=1) + "\n")
    os.replace(partial, path)
