"""Small real targets and random drafts for them. The targets' weights are large, so that their tokens are far
from uniform and no two logits are nearly equal."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from draft_jax.config import DraftConfig
from draft_jax.models.dspark import abstract_params
from target_bridge.hf import HFTarget
from train.evaluate.tasks import Prompt

TAPS = (0, 2)


@pytest.fixture(scope="session")
def make_target() -> Callable[..., HFTarget]:
    """A Llama of 4 layers with random weights; `eos` names the stop id."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(vocab: int = 64, hidden: int = 32, eos: int | None = None, scale: float = 0.3, **options: Any) -> HFTarget:
        config = LlamaConfig(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=48, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
            initializer_range=scale, bos_token_id=None, eos_token_id=eos, pad_token_id=None,
            tie_word_embeddings=False, attn_implementation="eager",
        )  # fmt: skip
        torch.manual_seed(7)
        model = LlamaForCausalLM(config).to(torch.float32)
        return HFTarget(model, TAPS, name="tiny-llama", **options)

    return make


@pytest.fixture(scope="session")
def make_config() -> Callable[..., DraftConfig]:
    """The config of a 2-layer draft for such a target."""

    def make(target: HFTarget, **overrides: Any) -> DraftConfig:
        fields = {
            "num_hidden_layers": 2, "block_size": 4, "mask_token_id": 0, "target_layer_ids": TAPS,
            "markov_rank": 8, "initializer_range": 0.3,
        } | overrides  # fmt: skip
        return DraftConfig.from_target(target.info.config, **fields)

    return make


@pytest.fixture(scope="session")
def make_params() -> Callable[..., Any]:
    """Random parameters, large enough that the draft is confident and often wrong; made without compiling."""

    def make(config: DraftConfig, seed: int = 0) -> Any:
        random = np.random.default_rng(seed)

        def leaf(path: Any, abstract: Any) -> jax.Array:
            noise = random.normal(size=abstract.shape) * config.initializer_range
            return jnp.asarray(noise + (path[-1].key == "scale"), jnp.float32)

        return jax.tree_util.tree_map_with_path(leaf, abstract_params(config))

    return make


@pytest.fixture(scope="session")
def make_prompts() -> Callable[..., list[Prompt]]:
    """Random prompts of 1 to 40 tokens."""

    def make(count: int, vocab: int = 64, seed: int = 0) -> list[Prompt]:
        random = np.random.default_rng(seed)
        return [
            Prompt(f"p{i}", random.integers(0, vocab, int(random.integers(1, 41))).astype(np.int32))
            for i in range(count)
        ]

    return make
