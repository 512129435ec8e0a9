"""Tiny Hugging Face models, made here and saved to a temporary folder: no network, no real weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "initializer_range": 0.2,  # large enough that states differ visibly from layer to layer
}


def save_model(kind: str, folder: Path, **changes: object) -> Path:
    """A random model of a Transformers family ("llama", "qwen3", ...), saved with its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **{**SIZES, **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def make(kind: str, **changes: object) -> Path:
        return save_model(kind, tmp_path_factory.mktemp(kind), **changes)

    return make


@pytest.fixture(scope="session")
def llama_folder(make_model: Callable[..., Path]) -> Path:
    """Llama, tied embedding and head."""
    return make_model("llama", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def qwen3_folder(make_model: Callable[..., Path]) -> Path:
    """Qwen3, separate head."""
    return make_model("qwen3", tie_word_embeddings=False)


@pytest.fixture
def documents() -> list[np.ndarray]:
    """Ragged token ids below 64."""
    rng = np.random.default_rng(3)
    return [rng.integers(0, 64, size=count).astype(np.int32) for count in (5, 40, 1, 23, 41, 7)]


class Adder(nn.Module):
    """A marker layer: adds one number to every feature, in place if asked to."""

    def __init__(self, amount: float, in_place: bool) -> None:
        super().__init__()
        self.amount, self.in_place = amount, in_place

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.add_(self.amount) if self.in_place else hidden + self.amount


class MarkerDecoder(nn.Module):
    """T13: embedding 0, block i adds 10^i, final norm doubles."""

    def __init__(self, blocks: int, in_place: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 2)
        nn.init.zeros_(self.embed_tokens.weight)
        self.layers = nn.ModuleList([Adder(10.0**i, in_place) for i in range(blocks)])
        self.calls = 0

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * 2

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        self.calls += 1
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return SimpleNamespace(last_hidden_state=self.norm(hidden))


class MarkerModel(nn.Module):
    """The causal LM around it."""

    def __init__(self, blocks: int = 4, in_place: bool = False) -> None:
        super().__init__()
        self.model = MarkerDecoder(blocks, in_place)
        self.lm_head = nn.Linear(2, 8, bias=False)
        self.config = SimpleNamespace(
            num_hidden_layers=blocks,
            hidden_size=2,
            vocab_size=8,
            max_position_embeddings=16,
            eos_token_id=[7, 3],
        )

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        return SimpleNamespace(logits=self.lm_head(self.model(input_ids).last_hidden_state))


@pytest.fixture
def make_marker() -> Callable[..., MarkerModel]:
    return MarkerModel
