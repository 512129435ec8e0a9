"""The TOY tokenizer and template of cases T01-T08, and the real small target's tokenizer if it is here."""

import gzip
import json
import string
from collections.abc import Callable
from typing import Any

import pytest

from tests.places import small_target

TOY_TEMPLATE = """
{%- for message in messages -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}
            {{- message.content -}}
            {%- for call in message.tool_calls or [] -%}
                {{- '<tool_call>' ~ call.function.name ~ ' ' ~ call.function.arguments ~ '</tool_call>' -}}
            {%- endfor -%}
            {{- '<|im_end|>' -}}
        {%- endgeneration -%}
    {%- else -%}
        {{- message.content ~ '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

TOY_SPECIAL = [
    "<pad>", "<bos>", "<|im_start|>", "<|im_end|>", "\n", "system", "user", "assistant", "tool",
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<unk>", "<mask>",
]  # fmt: skip
TOY_VOCABULARY = TOY_SPECIAL + list(string.ascii_lowercase[:16])


@pytest.fixture(scope="session")
def make_toy_tokenizer() -> Callable[..., Any]:
    """Word level, split on single spaces, ids as in cases.md; with `bos` it adds one unless told not to."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    def make(bos: bool = False, chat_template: str | None = None):
        backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOY_VOCABULARY)}, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Split(" ", behavior="removed")
        backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in TOY_SPECIAL])
        if bos:
            backend.post_processor = processors.TemplateProcessing(
                single="<bos> $A", special_tokens=[("<bos>", TOY_VOCABULARY.index("<bos>"))]
            )
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<|im_end|>")
        tokenizer.chat_template = chat_template
        return tokenizer

    return make


@pytest.fixture(scope="session")
def toy_tokenizer(make_toy_tokenizer):
    return make_toy_tokenizer()


@pytest.fixture(scope="session")
def toy_template() -> str:
    """Source of the TOY template; its only header, body and end are easy to replace in a test."""
    return TOY_TEMPLATE


@pytest.fixture
def encode(toy_tokenizer, toy_template) -> Callable[..., tuple[list[int], list[int]]]:
    """A row as a dict -> its ids and its mask, through the reader and the encoder of the package."""
    from train.data.encoding import Encoder
    from train.data.files import Place
    from train.data.formats import RowRefused, parse_row
    from train.data.templates import ChatTemplate

    def run(
        row: dict,
        template: str = toy_template,
        tokenizer=toy_tokenizer,
        notes: dict | None = None,
        **variables,
    ):
        conversation = parse_row(json.dumps(row).encode(), Place("rows.jsonl", 1), vocab_size=31)
        encoder = Encoder(ChatTemplate("toy", template, variables), tokenizer, 31, None)
        (rows,) = encoder.encode([conversation])
        if isinstance(rows, RowRefused):
            raise rows
        (result,) = rows
        if notes is not None:
            notes.update(result.notes)
        return result.input_ids.tolist(), result.loss_mask.tolist()

    return run


@pytest.fixture
def write_rows(tmp_path) -> Callable[..., str]:
    """Rows (dicts, or raw lines) -> a file in tmp_path; .gz names are compressed."""

    def write(rows: list, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        data = b"".join(line + b"\n" for line in lines)
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return str(path)

    return write


@pytest.fixture
def toy_template_file(tmp_path, toy_template) -> str:
    path = tmp_path / "toy.jinja"
    path.write_text(toy_template)
    return str(path)


@pytest.fixture(scope="session")
def smollm2_tokenizer():
    """Of the real small target."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(small_target())
