"""A target that is only a shape: config.json for SGLang's random weights, and rows of random ids for it.

    python -m benchmarks.dummy_target --shape qwen3-8b --rows 512 --length 4096 FOLDER

Writes FOLDER/config.json and FOLDER/rows.jsonl. No weights, no tokenizer: `target.sglang.load_format: dummy`,
`data.format: tokens` (docs/sglang.md).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shapes import TARGETS

#: Decoder layers of the targets of `shapes.TARGETS` that are Qwen3 models.
LAYERS = {"qwen3-4b": 36, "qwen3-8b": 36, "qwen3-14b": 40}
#: For trying a program out on a CPU.
TINY = {"hidden": 64, "mlp": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 512}
#: Ids at the end of the vocabulary that no row uses: the draft's mask token is one of them.
RESERVED = 16


def config_of(shape: str, length: int) -> dict[str, Any]:
    """config.json of a Qwen3 target.

    Args:
        shape: one of `LAYERS`, or "tiny".
        length: most tokens of a text.
    """
    sizes = TINY if shape == "tiny" else TARGETS[shape]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["mlp"],
        "num_hidden_layers": 36 if shape == "tiny" else LAYERS[shape],  # the recipe's taps go up to 33
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["head_dim"],
        "vocab_size": sizes["vocab"],
        "max_position_embeddings": max(length, 512),
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def write(folder: Path, shape: str, rows: int, length: int) -> None:
    """Write config.json and rows.jsonl; every row has `length` tokens, all of them supervised."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(shape, length)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    rng = np.random.default_rng(0)
    with (folder / "rows.jsonl").open("w") as file:
        for index in range(rows):
            ids = rng.integers(0, config["vocab_size"] - RESERVED, length).tolist()
            file.write(json.dumps({"id": str(index), "input_ids": ids, "loss_mask": [1] * length}) + "\n")


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=["tiny", *LAYERS], default="qwen3-8b")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--length", type=int, default=4096)
    given = parser.parse_args()
    write(given.folder, given.shape, given.rows, given.length)


if __name__ == "__main__":
    main()
