"""Outputs with the origin of every token: accepted from the draft, or the target's own."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from train.evaluate.result_file import NamedResult

KIND_WORDS = {
    "draft": "proposed by the draft and accepted",
    "target": "the target's own token (correction or bonus)",
    "first": "first token, from the prefill",
}
#: Outputs shown when they are made of an evaluation, and tokens of each.
_SHOWN, _TOKENS = 4, 160


def output_section(samples: Sequence[Mapping[str, Any]], evaluations: Sequence[NamedResult]) -> list[str]:
    """The given samples, or the first outputs of the last evaluation that has texts."""
    chosen: list[Mapping[str, Any]] = list(samples)
    for item in reversed(evaluations):
        chosen = chosen or list(outputs(item))
    if not chosen:
        return []
    out = ["<h2>Sample outputs</h2>", legend()]
    for sample in chosen:
        pieces = "".join(piece(item["text"], item["kind"]) for item in sample["pieces"])
        out.append(f'<div class="sample"><span class="of">{html.escape(str(sample["prompt"]))}</span>{pieces}</div>')
    return out


def legend(more: Mapping[str, str] | None = None) -> str:
    """What the colours mean."""
    words = {**KIND_WORDS, **(more or {})}
    spans = " ".join(f'<span class="{kind}">{html.escape(text)}</span>' for kind, text in words.items())
    return f'<p class="legend">{spans}</p>'


def piece(text: Any, kind: Any) -> str:
    """A stretch of text in the colour of its origin."""
    name = str(kind) if str(kind) in ("draft", "target", "first", "missed") else ""
    return f'<span class="{name}">{html.escape(str(text))}</span>'


def outputs(item: NamedResult) -> list[dict[str, Any]]:
    """The first outputs of an evaluation, from its token texts; empty when it has none."""
    texts = item.result.get("token_texts") or {}
    if not texts:
        return []
    made = []
    for sample in list(item.samples)[:_SHOWN]:
        tokens, kinds = sample["output_tokens"], token_kinds(sample)
        pieces = [
            {"text": texts.get(str(token), f"<{token}>"), "kind": kind}
            for token, kind in list(zip(tokens, kinds))[:_TOKENS]
        ]
        if len(tokens) > _TOKENS:
            pieces.append({"text": f" … ({len(tokens) - _TOKENS} more tokens)", "kind": ""})
        made.append({"prompt": sample.get("text") or sample["prompt"], "pieces": pieces})
    return made


def token_kinds(sample: Mapping[str, Any]) -> list[str]:
    """For each output token of a sample's record: first, draft or target."""
    kinds = ["first"]
    for item in sample["rounds"]:
        kinds += ["draft"] * item["accepted"] + ["target"] * (item["committed"] - item["accepted"])
    return kinds
