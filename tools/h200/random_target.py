"""A target of SmolLM2's depth with random weights, and rows of random ids for it: what a fresh machine can run at once.

    python3 tools/h200/random_target.py FOLDER [--heads 9] [--kv-heads 3] [--rows 400] [--length 512]

Writes FOLDER/{config.json,model.safetensors,rows.jsonl}. Heads have 64 numbers;
SmolLM2 has 9 and 3 heads, which no two ranks can share.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

VOCABULARY = 49152


def random_target(folder: Path, heads: int = 9, kv_heads: int = 3) -> Path:
    """A Llama whose states differ visibly from layer to layer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64 * heads, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=8192, tie_word_embeddings=True,
        rope_theta=100000.0, initializer_range=0.05,
    )  # fmt: skip
    LlamaForCausalLM(config).to(dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: int, longest: int) -> Path:
    """Rows of random ids, ragged; the second two thirds are supervised."""
    import numpy as np

    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for index in range(rows):
            length = int(rng.integers(longest // 4, longest + 1))
            mask = [0] * (length // 3) + [1] * (length - length // 3)
            ids = rng.integers(20, VOCABULARY, length).tolist()
            file.write(json.dumps({"id": str(index), "input_ids": ids, "loss_mask": mask}) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name, default in (("--heads", 9), ("--kv-heads", 3), ("--rows", 400), ("--length", 512)):
        parser.add_argument(name, type=int, default=default)
    args = parser.parse_args()
    random_target(args.folder, args.heads, args.kv_heads)
    write_rows(args.folder / "rows.jsonl", args.rows, args.length)


if __name__ == "__main__":
    main()
