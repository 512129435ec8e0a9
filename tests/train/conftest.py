"""A tiny target, tiny data and a tiny draft for the trainer's tests."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
VOCAB = 61
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}\n{% endfor %}"
)


def build_target(folder: Path, *, hidden: int = 16, layers: int = 4, seed: int = 0, tie: bool = False) -> Path:
    """Write a random llama and a word-level tokenizer of the same vocabulary."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tie,
        bos_token_id=1,
        eos_token_id=3,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {"<pad>": 0, "<bos>": 1, "<|im_start|>": 2, "<|im_end|>": 3, "<unk>": 4, "<free>": 5}
    words |= {f"w{i}": i for i in range(len(words), VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", bos_token="<bos>", eos_token="<|im_end|>"
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<free>"]})
    fast.chat_template = CHATML
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory) -> Path:
    return build_target(tmp_path_factory.mktemp("target") / "llama")


def write_tokens(path: Path, rows: int = 12, seed: int = 0, longest: int = 24) -> Path:
    """Rows of ids with ragged lengths; the second half of each is supervised."""
    rng = np.random.default_rng(seed)
    with path.open("w") as file:
        for i in range(rows):
            length = int(rng.integers(10, longest + 1))
            ids = rng.integers(6, VOCAB, length).tolist()
            mask = [0] * (length // 3) + [1] * (length - length // 3)
            file.write(json.dumps({"id": f"s{i}", "input_ids": ids, "loss_mask": mask}) + "\n")
    return path


@pytest.fixture(scope="session")
def tokens_file(tmp_path_factory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("data") / "rows.jsonl")


@pytest.fixture
def tree(target_folder, tokens_file, plain_tree):
    """A run's configuration as nested plain values, over a real target and data; tests change it before building."""
    plain_tree["target"]["path"] = str(target_folder)
    plain_tree["data"]["path"] = str(tokens_file)
    return plain_tree


@pytest.fixture
def plain_tree(tmp_path):
    """The same without target and data on the disk."""
    return {
        "target": {"path": "no/target", "device": "cpu"},
        "data": {"path": "no.jsonl", "max_length": 24, "min_loss_tokens": 2, "seed": 3},
        "run_dir": str(tmp_path / "run"),
        "draft": {
            "layers": 1,
            "target_layer_ids": [0, 2],
            "block_size": 3,
            "mask_token_id": 5,
            "markov_rank": 4,
            "intermediate_size": 20,
        },
        "objective": {"num_anchors": 4},
        "optimizer": {"lr": 1e-2, "warmup_ratio": 0.2},
        "train": {"steps": 6, "batch_rows": 2, "accumulation": 2, "seed": 7},
        "checkpoint": {"every": 0, "keep": 2},
        "logging": {"progress": False},
    }


def nest(tree: dict, **changes) -> dict:
    """Copy of `tree` with `section__key=value` changes."""
    copy = json.loads(json.dumps(tree))
    for key, value in changes.items():
        *parents, leaf = key.split("__")
        node = copy
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return copy


@pytest.fixture
def change():
    return nest


@dataclass(frozen=True)
class Finished:
    """A finished `draft-jax` process."""

    code: int
    out: str
    err: str


def environment() -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture
def cli():
    """Run `draft-jax ARGS` in a new process."""

    def run(*arguments: str, timeout: float = 120) -> Finished:
        command = [sys.executable, "-m", "train.cli", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout, check=False
        )
        return Finished(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def start_cli():
    """Start `draft-jax ARGS` in the background; killed at the end of the test if it still runs."""
    running = []

    def start(*arguments: str, **extra_environment: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-m", "train.cli", *arguments],
            cwd=ROOT,
            env={**environment(), **extra_environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def write_config(tmp_path):
    """Write a configuration tree as YAML and return the path."""

    def write(tree: dict, name: str = "config.yaml") -> str:
        import yaml

        path = tmp_path / name
        path.write_text(yaml.safe_dump(tree))
        return str(path)

    return write


@pytest.fixture(scope="session")
def tiny_draft():
    """A draft of a few thousand parameters with every part: two layers, gated Markov head, confidence head."""
    from draft_jax.config import DraftConfig

    return DraftConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        vocab_size=VOCAB,
        num_target_layers=6,
        target_layer_ids=(0, 2, 4),
        block_size=4,
        mask_token_id=5,
        markov_rank=4,
        markov_head_type="gated",
        initializer_range=0.2,
        max_position_embeddings=128,
    )
