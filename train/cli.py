"""`draft-jax`: one command, many programs. Nothing heavy is imported before the arguments are understood."""

import logging
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

USAGE = """usage: draft-jax COMMAND [options]

Train speculative-decoding drafts, and prove what they accept.

commands:
  prepare      tokenise the training data once, in parallel, with an account of every row
  inspect      training rows as the model sees them, and whether a server would send the same
  train        train a draft from a YAML configuration
  eval         accept length and speed of a draft by exact rejection sampling
  compare      evaluations side by side: which differences are more than noise
  calibrate    fit the confidence head's temperatures (sts.json) to an evaluation
  report       one HTML page of a run, or of several drafts' evaluations
  regenerate   conversations answered anew by the target, through its servers
  tasks        files of the public evaluation tasks, from their sources
  export       write a run's draft as the folder SGLang serves
  probe        check what a target hands out, before training on it
  serve-check  the accept length in stock SGLang beside the offline one, on the same prompts
  quickstart   all of it on a small target, with a report

`draft-jax COMMAND --help` tells the options of each. Every command takes --debug: a traceback instead of one line.
Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130/143 stopped by SIGINT/SIGTERM after saving.
"""

TRAIN_USAGE = """usage: draft-jax train --config FILE [--KEY.KEY=VALUE ...] [options]

options:
  --config FILE        YAML configuration; see configs/
  --KEY.KEY=VALUE      override any key, for example --optimizer.lr=3e-4 (also: --optimizer.lr 3e-4)
  --resume MODE        never (default): a used run_dir is refused; auto: continue if there is a checkpoint; must: only
                       then; weights: only then, with new moments and a learning rate that rises anew
  --init-draft FOLDER  start from the weights of a draft (draft.init_draft)
  --plan[=PROCESSES]   print the resolved configuration, parameter counts, memory and operations of a run of so many
                       processes (1), of train.devices devices each; do not start
  --debug              traceback on errors
  -h, --help           this text and every key

SIGTERM or SIGINT saves a checkpoint of the last finished optimizer step and exits with 143 or 130.
Several GPUs or hosts: `torchrun --nproc-per-node=8 -m train.cli train ...`, or srun; docs/multi_host.md.
"""

_COMMANDS = {
    "train": ("train.cli", "train_main"),
    "eval": ("train.evaluate.command", "main"),
    "compare": ("train.evaluate.compare", "main"),
    "calibrate": ("train.evaluate.calibrate", "main"),
    "report": ("train.report.command", "main"),
    "regenerate": ("train.regenerate.command", "main"),
    "tasks": ("train.evaluate.tasks_command", "main"),
    "export": ("train.export", "main"),
    "probe": ("train.probe", "main"),
    "serve-check": ("train.serve_check.command", "main"),
    "quickstart": ("train.quickstart", "main"),
    "prepare": ("train.data.prepare_command", "main"),
    "inspect": ("train.data.inspect_command", "main"),
}

_ALIASES = {"init-draft": "draft.init_draft", "resume": "resume", "run-dir": "run_dir"}


class UsageError(ValueError):
    """Arguments that make no command; the message says which."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the process's exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"draft-jax {_version()}")
        return 0
    command, *rest = arguments
    if command not in _COMMANDS:
        print(f"draft-jax: unknown command {command!r}; known: {', '.join(_COMMANDS)}", file=sys.stderr)
        return 2
    if not debug:  # orbax tells of its inner workings through absl; what concerns the user raises
        logging.getLogger("absl").setLevel(logging.ERROR)
    module, function = _COMMANDS[command]
    try:
        return int(getattr(import_module(module), function)(rest) or 0)
    except KeyboardInterrupt:
        print(f"draft-jax {command}: interrupted", file=sys.stderr)
        code = 130
    except Exception as error:
        code = _report(command, error, debug)
    if "train.launch" in sys.modules:
        sys.modules["train.launch"].leave_at_once(code)
    return code


def _report(command: str, error: Exception, debug: bool) -> int:
    """Say what went wrong; returns the exit code."""
    code = _exit_code(error)
    if debug or code is None:
        traceback.print_exc()
        return 1
    print(f"draft-jax {command}: {_message(error)}", file=sys.stderr)
    print("(--debug shows where)", file=sys.stderr)
    return code


def train_main(argv: Sequence[str]) -> int:
    """`draft-jax train`. Returns the exit code; raises what the configuration or the run raises."""
    if any(a in ("-h", "--help") for a in argv):
        from .config_help import key_table

        print(TRAIN_USAGE)
        print(key_table(), end="")
        return 0
    path, overrides, plan = parse_train(argv)
    from .config_file import load_config

    if plan:
        config = load_config(path, overrides)
        from . import runtime
        from .plan import format_plan, make_plan

        platform, _ = runtime.start_jax(config)
        print(format_plan(config, make_plan(config, platform, plan)))
        return 0
    from .launch import joined

    with joined() as world:
        config = world.attempt("reading the configuration", lambda: load_config(path, overrides))
        from .loop import run

        return run(config, world=world).exit_code


def parse_train(argv: Sequence[str]) -> tuple[str | None, list[tuple[str, str]], int]:
    """Split arguments into the config file, `(dotted key, value)` overrides and the processes of `--plan` (0: none)."""
    path, overrides, plan = None, [], 0
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--") or argument == "--":
            raise UsageError(f"unexpected argument {argument!r}; options start with --, see draft-jax train --help")
        name, has_value, value = argument[2:].partition("=")
        if name == "plan":
            if has_value and not (value.isdecimal() and int(value)):
                raise UsageError(f"--plan={value}: give the number of processes, or --plan alone for one")
            plan = int(value) if has_value else 1
            continue
        if not has_value:
            if not rest or rest[0].startswith("--"):
                raise UsageError(f"--{name} needs a value: --{name}=VALUE")
            value = rest.pop(0)
        if name == "config":
            path = value
        else:
            overrides.append((_ALIASES.get(name, name), value))
    return path, overrides, plan


def _exit_code(error: Exception) -> int | None:
    """2 for what the user wrote, 1 for what went wrong while doing it, None for a defect (traceback wanted)."""
    names = {base.__name__ for base in type(error).__mro__}
    if names & {"ConfigError", "UsageError"}:
        return 2
    if isinstance(error, (ValueError, OSError, RuntimeError)) and not isinstance(error, NotImplementedError):
        return 1
    if _missing_package(error):
        return 1
    return None


def _missing_package(error: Exception) -> str | None:
    """The package outside this project that an import did not find; None if that is not what went wrong."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    name = error.name.split(".")[0]
    return None if name in ("train", "target_bridge", "draft_jax") else name


def _message(error: Exception) -> str:
    if package := _missing_package(error):
        return (
            f"the package {package} is not installed in {sys.prefix}: pip install draft-jax brings what every command "
            "needs, draft-jax[regenerate], [data], [tasks] or [quickstart] the rest (pyproject.toml)"
        )
    text = str(error).strip() or type(error).__name__
    ours = type(error).__module__.split(".")[0] in ("train", "target_bridge", "draft_jax")
    return text if ours or isinstance(error, OSError) else f"{type(error).__name__}: {text}"


def _version() -> str:
    try:
        return version("draft-jax")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
