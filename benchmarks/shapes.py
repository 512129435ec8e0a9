"""Drafts by the name of their target, for measurements without a target: only sizes matter."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from draft_jax.config import DraftConfig

#: Sizes from the targets' config.json, and of their drafts (dspark_spec 1.8; GLM-5.2 as in issue 4).
TARGETS: dict[str, dict[str, Any]] = {
    "qwen3-4b": {"hidden": 2560, "mlp": 9728, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 151_936},
    "qwen3-8b": {"hidden": 4096, "mlp": 12288, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 151_936},
    "qwen3-14b": {"hidden": 5120, "mlp": 17408, "heads": 40, "kv_heads": 8, "head_dim": 128, "vocab": 151_936},
    "glm-5.2": {"hidden": 6144, "mlp": 12288, "heads": 64, "kv_heads": 16, "head_dim": 64, "vocab": 154_880},
    "smollm2": {
        "hidden": 576,
        "mlp": 1536,
        "heads": 9,
        "kv_heads": 3,
        "head_dim": 64,
        "vocab": 49_152,
        "layers": 3,
        "markov_rank": 128,
    },
}
DEFAULTS = {"layers": 5, "taps": 5, "block": 7, "markov_rank": 256}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a draft, each an option of the command line of the same name."""

    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    layers: int
    taps: int
    block: int
    markov_rank: int

    def draft(self) -> DraftConfig:
        """The draft of these sizes."""
        return DraftConfig(
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab,
            num_target_layers=self.taps + 1,
            target_layer_ids=tuple(range(self.taps)),
            block_size=self.block,
            mask_token_id=self.vocab - 1,
            markov_rank=self.markov_rank,
            confidence_head_with_markov=self.markov_rank > 0,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`--shape NAME`, and one option per size that overrides it."""
    parser.add_argument("--shape", choices=sorted(TARGETS), default="qwen3-8b", help="target whose draft is measured")
    for field in dataclasses.fields(Sizes):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, help=f"instead of the shape's {field.name}")


def sizes_of(arguments: argparse.Namespace) -> Sizes:
    """The sizes a command line asks for."""
    sizes = DEFAULTS | TARGETS[arguments.shape]
    given = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(Sizes)}
    return Sizes(**(sizes | {name: value for name, value in given.items() if value is not None}))
