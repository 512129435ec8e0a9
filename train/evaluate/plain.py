"""Plain decoding with the target alone, token by token: the speed to beat and the tokens to equal.

It uses the same session class, the same sampling function and the same stop rules as decoding with a draft,
so the two differ in nothing but the draft.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from target_bridge import fence
from target_bridge.verify import verify
from train.evaluate.result import Seconds

if TYPE_CHECKING:
    from target_bridge.target import Target


@dataclass(frozen=True)
class PlainOutput:
    """What the target says by itself.

    Attributes:
        tokens: generated ids, a stop token included.
        margins: per token, the gap between the two largest logits it was chosen from.
        finish: "eos" or "length".
        seconds: wall-clock seconds; `draft` is 0.
    """

    tokens: list[int]
    margins: list[float]
    finish: str
    seconds: Seconds


def sample(logits: torch.Tensor, temperature: float, uniform: float) -> int:
    """One token from one row of target logits, by the verifier itself with nothing proposed.

    Args:
        logits: fp32 [V].
        temperature: 0 = the largest logit.
        uniform: in [0, 1).
    """
    nothing = logits.new_zeros((0, logits.shape[-1]))
    uniforms = np.array([uniform], np.float32)
    return verify(logits[None], nothing, [], uniforms, temperature).next_token


def plain_decode(
    target: Target,
    prompt_ids: np.ndarray,
    max_new_tokens: int,
    temperature: float,
    uniforms: np.ndarray,
) -> PlainOutput:
    """Decodes one prompt without a draft.

    Args:
        target: any target; its `eos_token_ids` stop the output.
        prompt_ids: int [T], at least one.
        max_new_tokens: at least 1.
        temperature: 0 = greedy.
        uniforms: fp32 [max_new_tokens] in [0, 1), one per token.
    """
    eos = set(target.info.eos_token_ids)
    tokens: list[int] = []
    margins: list[float] = []
    seconds = Seconds()
    begin = time.perf_counter()
    session = target.open_session(len(prompt_ids) + max_new_tokens)
    try:
        ids = np.asarray(prompt_ids)
        while True:
            start = time.perf_counter()
            logits = session.extend({0: ids}, last_logits=1)[0].logits[-1]
            fence.torch_done(logits.device)
            session.commit({0: len(ids)})
            spent = time.perf_counter() - start
            if tokens:
                seconds.target += spent
            else:
                seconds.prefill += spent
            tokens.append(sample(logits, temperature, float(uniforms[len(tokens)])))
            top = torch.topk(logits, 2).values
            margins.append(float(top[0] - top[1]))
            if tokens[-1] in eos or len(tokens) >= max_new_tokens:
                break
            ids = np.array([tokens[-1]])
    finally:
        session.close()
    seconds.total = time.perf_counter() - begin
    return PlainOutput(tokens, margins, "eos" if tokens[-1] in eos else "length", seconds)
