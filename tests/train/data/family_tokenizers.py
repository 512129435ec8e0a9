"""Tokenizers of the families' real special tokens over single bytes, and templates in their published formats.

Bytes instead of merges: every character boundary is a token boundary, so a supervised span decodes to exactly the text
it stands for. The templates in `published/` are written here after the published formats; tool declarations, which no
mask depends on, are shortened.
"""

# ruff: noqa: RUF001 (DeepSeek's markers are written with fullwidth bars)
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).parent / "published"

_GLM = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<think>",
        "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>",
        "<arg_value>", "</arg_value>"]  # fmt: skip
_DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>",
             "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
             "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>",
             "<｜tool▁output▁end｜>"]  # fmt: skip
_KIMI = ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
         "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
         "<|tool_call_argument_begin|>", "<|tool_call_end|>"]  # fmt: skip
_CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>",
           "</tool_response>", "<think>", "</think>"]  # fmt: skip

#: By the name of the template: the special tokens, the first of them the bos token where one is written.
SPECIAL_TOKENS: dict[str, list[str]] = {
    "glm-5.3": _GLM,
    "glm-4.6": _GLM,
    "deepseek-v3.1": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
    "kimi-k2": _KIMI,
    "kimi-k2-thinking": [*_KIMI, "<think>", "</think>"],
    "minimax-m2": ["]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>", "<think>", "</think>"],
    "gpt-oss": ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>",
                "<|end|>", "<|message|>", "<|call|>"],
    "gemma-4": ["<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>",
                "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|think|>", '<|"|>'],
    "inkling": ["<|message_user|>", "<|message_model|>", "<|message_system|>", "<|message_tool|>", "<|content_text|>",
                "<|content_thinking|>", "<|content_invoke_tool_json|>", "<|end_message|>",
                "<|content_model_end_sampling|>"],
    "qwen3-coder": _CHATML,
    "qwen2.5": _CHATML,
    "qwen3": _CHATML,
    "smollm2": _CHATML,
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>",
               "<|python_tag|>"],
    "llama-4": ["<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>", "<|python_start|>",
                "<|python_end|>"],
    "gemma3": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
}  # fmt: skip

#: The family each of them belongs to.
FAMILY = {
    "glm-5.3": "glm", "glm-4.6": "glm", "deepseek-v3.1": "deepseek", "deepseek-r1": "deepseek", "kimi-k2": "kimi-k2",
    "kimi-k2-thinking": "kimi-k2", "minimax-m2": "minimax-m2", "gpt-oss": "harmony", "gemma-4": "gemma4",
    "inkling": "inkling", "qwen3-coder": "chatml", "qwen2.5": "chatml", "qwen3": "chatml", "smollm2": "chatml",
    "llama3": "llama3", "llama-4": "llama4", "gemma3": "gemma",
}  # fmt: skip


def byte_tokenizer(name: str, template: str | None = None) -> Any:
    """A fast tokenizer with the special tokens of one of SPECIAL_TOKENS, and its unmarked template or another."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from train.data.templates import SHIPPED, shipped_source

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokens = SPECIAL_TOKENS[name]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in tokens])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=tokens[0])
    source = template or (
        shipped_source(name) if name in SHIPPED else (PUBLISHED / f"{name}.jinja").read_text(encoding="utf-8")
    )
    tokenizer.chat_template = source.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    return tokenizer
