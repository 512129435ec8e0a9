"""The words of token ids, for readers of a result that have no tokenizer."""

from __future__ import annotations

from typing import Any

from train.evaluate.result import EvalResult


def token_texts(tokenizer: Any, result: EvalResult) -> dict[str, str]:
    """Text of every id that the result's outputs and proposals hold, by the id as a string.

    An id is decoded after another one, so that a leading space is kept by tokenizers that drop it at the start. A
    token that is part of a character becomes the replacement character.
    """
    ids = {token for sample in result.samples for token in sample.output_tokens}
    ids |= {token for sample in result.samples for item in sample.rounds for token in item.drafts}
    anchor = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
    shown = len(tokenizer.decode(anchor))
    return {str(token): tokenizer.decode([*anchor, token])[shown:] for token in sorted(ids)}
