"""Every recipe in configs/ is a configuration the trainer takes, and fits the target it is for."""

from pathlib import Path

import pytest

from draft_jax.config import DraftConfig
from train.config_file import load_config

RECIPES = sorted((Path(__file__).resolve().parent.parent / "configs").glob("*.yaml"))
#: Depth, width, heads, kv heads, head dimension, vocabulary of the targets (their published config.json).
TARGETS = {
    "smollm2-135m": (30, 576, 9, 3, 64, 49152),
    "qwen3-4b": (36, 2560, 32, 8, 128, 151936),
    "qwen3-8b": (36, 4096, 32, 8, 128, 151936),
    "qwen3-14b": (40, 5120, 40, 8, 128, 151936),
}


def test_there_are_recipes():
    assert {path.stem for path in RECIPES} == set(TARGETS)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_loads_and_fits_its_target(path):
    config = load_config(path)
    layers, hidden, heads, kv_heads, head_dim, vocab = TARGETS[path.stem]
    target = {
        "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "head_dim": head_dim,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab, "rope_theta": 1e6,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 8192,
    }  # fmt: skip
    draft = DraftConfig.from_target(
        target,
        num_hidden_layers=config.draft.layers,
        target_layer_ids=config.draft.target_layer_ids,
        block_size=config.draft.block_size,
        mask_token_id=config.draft.mask_token_id,
        markov_rank=config.draft.markov_rank or 256,
    )
    assert draft.num_target_layers == layers
    assert config.run_dir == f"runs/{path.stem}"
