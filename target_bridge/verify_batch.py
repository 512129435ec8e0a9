"""The exact rejection sampling of `target_bridge.verify`, for many sequences in a few kernels.

`verify` is the readable reference; this module gives the same tokens for the same numbers, without a Python loop over
the sequences and with one wait for the device. Letters: `B` sequences, `K` slots, `V` vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch

from target_bridge.verify import VerifyError, accept_probabilities, softmax_temperature


@dataclass(frozen=True)
class Verdicts:
    """The outcomes of one round of `B` sequences, on the host.

    Attributes:
        accepted: int64 [B]: how many proposed tokens of each are kept, a prefix.
        next_tokens: int64 [B]: the token after them: a correction if one was refused, a bonus if all were kept.
        accept_probabilities: fp32 [B, K]: min(1, p(x) / q(x)) of each proposed slot, given that the slots before it
            were kept; at temperature 0 either 0 or 1. NaN for slots that were not proposed.
    """

    accepted: np.ndarray
    next_tokens: np.ndarray
    accept_probabilities: np.ndarray


def verify_batch(
    target_logits: torch.Tensor,
    draft_probs: torch.Tensor | None,
    draft_tokens: np.ndarray,
    uniforms: np.ndarray,
    temperature: float,
    proposed: np.ndarray | None = None,
) -> Verdicts:
    """Verify one round of many sequences.

    Args:
        target_logits: fp32 [B, K+1, V]: row k is the target's for slot k, row `proposed` the one after the proposal;
            rows behind it are ignored, but must be finite.
        draft_probs: fp32 [B, K, V]: row k is the distribution that token k was drawn from. Not needed at
            temperature 0, or when K is 0.
        draft_tokens: int [B, K]; what stands in slots that are not proposed is ignored.
        uniforms: [B, K+1] in [0, 1): number k decides slot k, number K draws the next token. Unused at temperature 0.
        temperature: 0 means the largest logit (the first of equals) with certainty.
        proposed: int [B]: how many of the K slots were proposed; all when not given.

    Raises:
        VerifyError: shapes that do not fit, a dtype other than fp32, a token outside the vocabulary or with q = 0, a
            uniform outside [0, 1), logits or probabilities that are not finite where they must be.
    """
    tokens = np.asarray(draft_tokens, np.int64)
    numbers = np.asarray(uniforms, np.float32)
    if target_logits.ndim != 3 or tokens.ndim != 2 or target_logits.shape[:2] != (len(tokens), tokens.shape[1] + 1):
        raise VerifyError(
            f"{tokens.shape} draft tokens need target logits [B, K+1, V], got {tuple(target_logits.shape)}"
        )
    B, K = tokens.shape
    V = target_logits.shape[2]
    counts = np.full(B, K) if proposed is None else np.asarray(proposed, np.int64)
    _check_host(tokens, numbers, counts, B, K, V)
    if target_logits.dtype != torch.float32:
        raise VerifyError(f"target logits are {target_logits.dtype}; verification is exact only in float32")
    device = target_logits.device
    shown = np.arange(K) < counts[:, None]
    index = torch.as_tensor(np.where(shown, tokens, 0), device=device)
    live = torch.as_tensor(shown, device=device)
    if temperature == 0:
        return _greedy(target_logits, index, live, shown)
    p, finite = _softmax(target_logits, temperature)
    rows = torch.arange(B, device=device)
    drawn = torch.as_tensor(numbers, device=device)
    if K:
        q = _check_draft(draft_probs, (B, K, V), device)
        q_token = q.gather(2, index[..., None])[..., 0]
        ratios = accept_probabilities(p[:, :K].gather(2, index[..., None])[..., 0], q_token)
        no_law, undrawn = _wrong(q, q_token, live)
        accepted = ((drawn[:, :K] < ratios) & live).int().cumprod(dim=1).sum(dim=1)
        p_next, q_next = p[rows, accepted], q[rows, accepted.clamp(max=K - 1)]
        refused = accepted < torch.as_tensor(counts, device=device)
        # What is left after a refusal; where rounding leaves nothing, and where nothing was refused, p itself.
        left = torch.where(refused[:, None], (p_next - q_next).clamp(min=0.0), 0.0)
        mass = left.sum(dim=1, keepdim=True)
        weights = torch.where(mass > 0, left / mass, p_next)
        wrong = (no_law | undrawn).any(dim=1)
    else:
        accepted, weights = torch.zeros(B, dtype=torch.int64, device=device), p[:, 0]
        ratios, wrong = p.new_zeros((B, 0)), torch.zeros(B, dtype=torch.bool, device=device)
    chosen = sample_rows(weights, drawn[:, K])
    verdicts, sane = _fetch(accepted, chosen, ratios, finite & ~wrong, shown)
    if not sane:
        softmax_temperature(target_logits, temperature)  # raises with the row, if it is the target's
        assert draft_probs is not None
        _refuse_proposal(q, q_token, no_law, undrawn, tokens)
    return verdicts


def _softmax(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`softmax_temperature` without waiting for the device: fp32 [B, K+1, V], and bool [B], whether it is right."""
    if not temperature > 0 or math.isinf(temperature):
        softmax_temperature(logits, temperature)  # raises
    largest = logits.amax(dim=2, keepdim=True)
    # At temperature 1 the shift is torch's own business, with the same bits.
    scaled = logits if temperature == 1 else (logits - largest).div_(temperature)
    return torch.softmax(scaled, dim=2), torch.isfinite(largest).all(dim=1)[:, 0]


def _fetch(
    accepted: torch.Tensor, chosen: torch.Tensor, ratios: torch.Tensor, sane: torch.Tensor, shown: np.ndarray
) -> tuple[Verdicts, bool]:
    """Everything that the host needs, in one transfer: fp64 holds the ids and the fp32 ratios exactly."""
    columns = [accepted[:, None], chosen[:, None], sane[:, None], ratios]
    held = torch.cat([column.double() for column in columns], dim=1).cpu().numpy()
    probabilities = np.where(shown, held[:, 3:].astype(np.float32), np.float32(np.nan))
    return Verdicts(held[:, 0].astype(np.int64), held[:, 1].astype(np.int64), probabilities), bool(held[:, 2].all())


def sample_rows(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw a token of each row by inverting its cumulative distribution, as `verify.sample` does for one.

    Args:
        probabilities: fp32 [B, V], not negative; every row has a positive entry.
        uniforms: fp32 [B] in [0, 1), on the same device.

    Returns:
        int64 [B].
    """
    weights = probabilities.double()
    cumulative = weights.cumsum(dim=1)
    positive = weights > 0
    # A device may sum in parallel, so that the sums need not be monotone to the last bit: positive ones only count.
    passed = (cumulative > uniforms.double()[:, None] * cumulative[:, -1:]) & positive
    last = weights.shape[1] - 1 - positive.flip(1).int().argmax(dim=1)
    return torch.where(passed.any(dim=1), passed.int().argmax(dim=1), last)


def _greedy(logits: torch.Tensor, tokens: torch.Tensor, live: torch.Tensor, shown: np.ndarray) -> Verdicts:
    largest, best = logits.max(dim=2)
    agree = (tokens == best[:, :-1]) & live
    accepted = agree.int().cumprod(dim=1).sum(dim=1)
    chosen = best.gather(1, accepted[:, None])[:, 0]
    verdicts, sane = _fetch(accepted, chosen, agree.float(), torch.isfinite(largest).all(dim=1), shown)
    if not sane:
        softmax_temperature(logits, 0.0)  # raises with the row
    return verdicts


def _check_host(tokens: np.ndarray, numbers: np.ndarray, counts: np.ndarray, B: int, K: int, V: int) -> None:
    if numbers.shape != (B, K + 1):
        raise VerifyError(f"{B} sequences of {K} slots need uniform numbers [{B}, {K + 1}], got {numbers.shape}")
    if counts.shape != (B,) or (counts < 0).any() or (counts > K).any():
        raise VerifyError(f"proposed = {counts.tolist()} must be {B} numbers in 0..{K}")
    outside = (np.arange(K) < counts[:, None]) & ((tokens < 0) | (tokens >= V))
    if outside.any():
        row, slot = np.argwhere(outside)[0]
        raise VerifyError(
            f"draft token {tokens[row, slot]} of sequence {row}, slot {slot} is outside the vocabulary 0..{V - 1}"
        )
    wrong = ~((numbers >= 0) & (numbers < 1))
    if wrong.any():
        row, position = np.argwhere(wrong)[0]
        raise VerifyError(f"uniform number {position} of sequence {row} is {numbers[row, position]!r}, outside [0, 1)")


def _check_draft(probs: torch.Tensor | None, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    if probs is None or tuple(probs.shape) != shape:
        raise VerifyError(f"draft probabilities must be {list(shape)}, got {None if probs is None else [*probs.shape]}")
    if probs.dtype != torch.float32:
        raise VerifyError(f"draft probabilities are {probs.dtype}; verification is exact only in float32")
    return probs.to(device)


def _wrong(q: torch.Tensor, drawn: torch.Tensor, live: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [B, K] each: draft rows that are no distribution, and tokens that their own row could not have given."""
    sums, lowest = q.sum(dim=2), q.amin(dim=2)
    return ~((lowest >= 0) & ((sums - 1.0).abs() < 1e-3)) & live, ~(drawn > 0) & live


def _refuse_proposal(
    q: torch.Tensor, drawn: torch.Tensor, no_law: torch.Tensor, undrawn: torch.Tensor, tokens: np.ndarray
) -> NoReturn:
    row, slot = (int(i) for i in (no_law | undrawn).nonzero()[0])
    if bool(no_law[row, slot]):
        raise VerifyError(
            f"draft probabilities of sequence {row}, slot {slot} are no distribution: they sum to "
            f"{float(q[row, slot].sum()):.6g}, the smallest is {float(q[row, slot].amin()):.3g}"
        )
    raise VerifyError(
        f"draft token {tokens[row, slot]} of sequence {row}, slot {slot} has draft probability "
        f"{float(drawn[row, slot])}, so it was not drawn from the distribution given: verification would not be exact"
    )
