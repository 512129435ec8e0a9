"""What an export is compared with: a target's sizes, read without loading the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TargetFacts:
    """What an export is compared with: the target's sizes and its config.json (text part).

    `target_bridge.target.TargetInfo` has the same attributes and can be passed in its place.
    """

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    max_length: int
    config: dict[str, Any]

    @classmethod
    def from_config(cls, name: str, config: Mapping[str, Any]) -> TargetFacts:
        """From a HF config.json; a nested `text_config` is used when there is one.

        Raises:
            ValueError: a size is missing.
        """
        text = dict(config.get("text_config") or config)
        # A server chooses its class by the outer name, which a nested text config does not repeat.
        text["architectures"] = config.get("architectures") or text.get("architectures")
        keys = ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings")
        if missing := [key for key in keys if key not in text]:
            raise ValueError(f"the config of target {name} lacks {', '.join(missing)}: is it a causal language model?")
        hidden, layers, vocab, length = (int(text[key]) for key in keys)
        return cls(name, hidden, layers, vocab, length, text)

    @classmethod
    def from_folder(cls, folder: str | Path) -> TargetFacts:
        """From a target's folder, without loading the model."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ValueError(f"{folder} is not a target's folder: it has no config.json")
        return cls.from_config(str(folder), json.loads(path.read_text()))
