"""Exact rejection sampling: which proposed tokens the target keeps, and which token comes next.

With draft distribution q and target distribution p, a proposed token x (drawn from q) is kept with
probability min(1, p(x) / q(x)); at the first refusal the next token is drawn from the residual max(p - q,
0), normalised. What comes out is distributed exactly as if the target had sampled alone (dspark_spec 5.1,
steps 5 to 8).

Exactness rests on details that are easily lost, so they are fixed here:

* p and q are fp32 and q is the very distribution the tokens were drawn from, not a recomputation of it.
* The comparison is strict, `u < p(x) / q(x)` with u in [0, 1): u = 0 does not accept a token the target
  excludes, and p = q gives the ratio 1, which no u reaches.
* A residual without mass is never sampled. In exact arithmetic a refusal implies mass; rounding can leave
  none when p and q agree to the last bits, and then the next token is drawn from p.
* Uniforms are arguments: seeds live with the caller, and equal uniforms give equal tokens. Draws run on the
  CPU, where sums have one order.

What ends a text (EOS, length) is the caller's business. Letters: `K` proposed tokens at most, `V` vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


class VerifyError(ValueError):
    """Numbers that no exact verification exists for. The message names the slot and the value."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one round.

    Attributes:
        accepted: How many proposed tokens are kept, 0..proposed: a prefix.
        next_token: The token after them: a correction if one was refused, a bonus if all were kept.
        accept_probabilities: min(1, p(x) / q(x)) of each proposed slot, given that the slots before it were
            kept; at temperature 0 either 0 or 1.
    """

    accepted: int
    next_token: int
    accept_probabilities: tuple[float, ...]


def verify(
    target_logits: torch.Tensor,
    draft_probs: torch.Tensor,
    draft_tokens: Sequence[int] | np.ndarray | torch.Tensor,
    uniforms: Sequence[float] | np.ndarray | torch.Tensor,
    temperature: float,
    proposed: int | None = None,
) -> Verdict:
    """Verify one round.

    Args:
        target_logits: fp32 [K+1, V]: row k is the target's for slot k, row K the one after all slots. Rows
            after `proposed` are ignored.
        draft_probs: fp32 [K, V]: row k is the distribution that token k was drawn from. Unused at temperature 0.
        draft_tokens: int [K].
        uniforms: [K+1] in [0, 1): number k decides slot k, number K draws the next token. Unused at temperature 0.
        temperature: 0 means the largest logit (the first of equals) with certainty.
        proposed: How many of the K slots were proposed; all when not given.

    Raises:
        VerifyError: shapes that do not fit, a dtype other than fp32, a token outside the vocabulary or with
            q = 0, a uniform outside [0, 1), logits or probabilities that are not finite where they must be.
    """
    slots = len(draft_tokens)
    proposed = slots if proposed is None else int(proposed)
    tokens = [int(token) for token in draft_tokens]
    numbers = [float(number) for number in uniforms]
    _check_shapes(target_logits, draft_probs, tokens, numbers, proposed)
    if temperature == 0:
        return _verify_greedy(target_logits, tokens[:proposed])
    p = softmax_temperature(target_logits[: proposed + 1], temperature)
    q = draft_probs[:proposed].to(p.device)
    _check_proposal(q, tokens[:proposed])
    index = torch.tensor(tokens[:proposed], dtype=torch.int64, device=p.device)[:, None]
    ratios = accept_probabilities(p[:proposed].gather(1, index)[:, 0], q.gather(1, index)[:, 0]).tolist()
    for slot, ratio in enumerate(ratios):
        # A Python float holds an fp32 exactly, so this compares the fp32 ratio itself.
        if not numbers[slot] < ratio:
            return Verdict(slot, sample(residual(p[slot], q[slot]), numbers[slots]), tuple(ratios))
    return Verdict(proposed, sample(p[proposed], numbers[slots]), tuple(ratios))


def softmax_temperature(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """softmax(logits / temperature) in fp32; at 0 all mass on the largest logit, the first of equals.

    Args:
        logits: [..., V]; -inf excludes a token.
        temperature: 0 or more, finite.

    Returns:
        fp32 [..., V].

    Raises:
        VerifyError: a negative or non-finite temperature, a row with NaN or +inf or with nothing but -inf.
    """
    if not temperature >= 0 or math.isinf(temperature):
        raise VerifyError(f"temperature must be 0 or a positive number, got {temperature}")
    logits = logits.float()
    largest = logits.amax(dim=-1, keepdim=True)
    if not bool(torch.isfinite(largest).all()):  # amax passes NaN on
        rows = (~torch.isfinite(largest[..., 0])).nonzero()
        raise VerifyError(
            f"target logits of row {rows[0].tolist() if rows.numel() else 0} are NaN, infinite or exclude every token"
        )
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    # Shifted first: a tiny temperature then underflows to an argmax instead of overflowing to NaN.
    return torch.softmax((logits - largest) / temperature, dim=-1)


def accept_probabilities(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """min(1, p / q), elementwise in fp32; q must be positive where a token was drawn.

    Args:
        p: Target probabilities of the proposed tokens, fp32, any shape.
        q: Draft probabilities of the same tokens.
    """
    return (p / q).clamp(max=1.0)


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What the token after a refusal is drawn from: max(p - q, 0) normalised, or p if that has no mass.

    Args:
        p: fp32 [V].
        q: fp32 [V].

    Returns:
        fp32 [V].
    """
    left = (p - q).clamp(min=0.0)
    mass = left.sum()
    return left / mass if float(mass) > 0 else p


def sample(probabilities: torch.Tensor, uniform: float) -> int:
    """Draw a token by inverting the cumulative distribution.

    Only tokens of positive probability take part, and the last of them takes what rounding leaves above the
    total: a token of probability 0 cannot come out, however close `uniform` is to 0 or 1. The sums are fp64,
    because in fp32 a likely token early in a vocabulary of 150,000 would swallow the unlikely ones after it.

    Args:
        probabilities: fp32 [V], not negative; they need not sum to 1 exactly.
        uniform: In [0, 1).

    Raises:
        VerifyError: no token with positive probability, or a uniform outside [0, 1).
    """
    if not 0.0 <= uniform < 1.0:
        raise VerifyError(f"uniform numbers must be in [0, 1), got {uniform!r}")
    weights = probabilities.detach().to("cpu", torch.float64)
    support = (weights > 0).nonzero()[:, 0]
    if support.numel() == 0:
        raise VerifyError("no token has a positive probability, so none can be drawn")
    cumulative = weights[support].cumsum(0)
    # right=True: the first whose cumulative sum is above the number, so u = 0 gives the first token.
    place = int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
    return int(support[min(place, support.numel() - 1)])


def _verify_greedy(target_logits: torch.Tensor, tokens: list[int]) -> Verdict:
    rows = target_logits[: len(tokens) + 1]
    if not bool(torch.isfinite(rows.amax(dim=-1)).all()):
        softmax_temperature(rows, 0.0)  # raises with the row
    best = rows.argmax(dim=-1).tolist()
    agree = [token == choice for token, choice in zip(tokens, best)]
    accepted = next((slot for slot, same in enumerate(agree) if not same), len(tokens))
    return Verdict(accepted, best[accepted], tuple(float(same) for same in agree))


def _check_shapes(
    target_logits: torch.Tensor,
    draft_probs: torch.Tensor,
    tokens: list[int],
    numbers: list[float],
    proposed: int,
) -> None:
    slots = len(tokens)
    if target_logits.ndim != 2 or draft_probs.ndim != 2:
        raise VerifyError(
            "target logits must be [K+1, V] and draft probabilities [K, V], got "
            f"{tuple(target_logits.shape)} and {tuple(draft_probs.shape)}"
        )
    vocab_size = target_logits.shape[1]
    if target_logits.shape[0] != slots + 1 or tuple(draft_probs.shape) != (slots, vocab_size):
        raise VerifyError(
            f"{slots} draft tokens need target logits [{slots + 1}, V] and draft probabilities [{slots}, "
            f"V], got {tuple(target_logits.shape)} and {tuple(draft_probs.shape)}"
        )
    if len(numbers) != slots + 1:
        raise VerifyError(f"{slots} draft tokens need {slots + 1} uniform numbers, got {len(numbers)}")
    if not 0 <= proposed <= slots:
        raise VerifyError(f"proposed = {proposed} is not in 0..{slots}")
    for what, tensor in (("target logits", target_logits), ("draft probabilities", draft_probs)):
        if tensor.dtype != torch.float32:
            raise VerifyError(f"{what} are {tensor.dtype}; verification is exact only in float32")
    for slot, token in enumerate(tokens[:proposed]):
        if not 0 <= token < vocab_size:
            raise VerifyError(f"draft token {token} of slot {slot} is outside the vocabulary 0..{vocab_size - 1}")
    for position, number in enumerate(numbers):
        if not 0.0 <= number < 1.0:
            raise VerifyError(f"uniform number {position} is {number!r}, outside [0, 1)")


def _check_proposal(q: torch.Tensor, tokens: list[int]) -> None:
    if not tokens:
        return
    lowest, sums = q.amin(dim=-1).tolist(), q.sum(dim=-1).tolist()
    drawn = q[torch.arange(len(tokens)), torch.tensor(tokens, device=q.device)].tolist()
    for slot, token in enumerate(tokens):
        if not lowest[slot] >= 0 or not abs(sums[slot] - 1.0) < 1e-3:
            raise VerifyError(
                f"draft probabilities of slot {slot} are no distribution: they sum to {sums[slot]:.6g}, "
                f"the smallest is {lowest[slot]:.3g}"
            )
        if not drawn[slot] > 0:
            raise VerifyError(
                f"draft token {token} of slot {slot} has draft probability {drawn[slot]}, so it was not "
                "drawn from the distribution given: verification would not be exact"
            )
