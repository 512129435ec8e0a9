"""Arguments of the commands that look at a run's data: the run's own keys, and a few options beside them."""

import argparse
from collections.abc import Sequence
from typing import Any

from train.cli import UsageError, parse_train
from train.config import RunConfig
from train.config_file import apply_override, build, read_yaml
from train.resolve import read_target_config

CONFIG_HELP = (
    "Keys are those of draft-jax train: --config FILE and/or --KEY.KEY=VALUE, at least --target.path and --data.path."
)


def read_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, RunConfig]:
    """Splits a command line into the command's own options and the run's configuration.

    Raises:
        UsageError, ConfigError: it makes no command.
    """
    options, rest = parser.parse_known_args(argv)
    path, overrides, plan = parse_train(rest)
    if plan:
        raise UsageError(f"--plan belongs to draft-jax train, not to {parser.prog}")
    tree = read_yaml(path) if path is not None else {}
    for key, text in overrides:
        apply_override(tree, key, text)
    tree.setdefault("run_dir", "runs/unused")  # a run's configuration names one; nothing is written there
    return options, build(tree)


def load_tokenizer(config: RunConfig) -> tuple[Any, int]:
    """The target's tokenizer, None if all rows are ids, and the size of its vocabulary; no weights are read.

    Raises:
        ConfigError, TargetError: there is no such target.
    """
    from draft_jax import hf_config

    vocab_size = hf_config.read_target(read_target_config(config.target))["vocab_size"]
    if config.data.format == "tokens":
        return None, vocab_size
    from target_bridge.hf_source import load_tokenizer as load

    target = config.target
    return load(target.path, revision=target.revision, trust_remote_code=target.trust_remote_code), vocab_size
