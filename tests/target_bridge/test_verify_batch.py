"""Verification of many sequences at once: the same verdicts as one by one, and T21 by enumeration in one batch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from target_bridge.verify import VerifyError, residual, sample, verify
from target_bridge.verify_batch import sample_rows, verify_batch

P, Q = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]
SECOND = {0: [0.6, 0.3, 0.1], 1: [0.1, 0.8, 0.1], 2: [0.3, 0.3, 0.4]}  # target rows given the first token
Q2 = [0.4, 0.4, 0.2]
BONUS = {0: [0.1, 0.1, 0.8], 1: [0.7, 0.2, 0.1], 2: [0.25, 0.5, 0.25]}  # given the second


def midpoints(count: int) -> list[float]:
    """A grid on [0, 1) whose average over a threshold at j / count is exact."""
    return [(i + 0.5) / count for i in range(count)]


def test_t21_chain_of_two_by_enumeration():
    """Every pair of proposed tokens and a grid of all three uniforms, in one batch: the law of what is emitted.

    The first token has the target's law, the second the target's given the first, whether it was accepted, drawn from
    a residual, or a bonus; P(both accepted) = .5 and 2.2 tokens a round, as T21 has them.
    """
    cases = list(itertools.product(range(3), range(3), midpoints(15), midpoints(20), midpoints(20)))
    tokens = np.array([case[:2] for case in cases])
    weight = np.array([Q[a] * Q2[b] for a, b, *_ in cases]) / (15 * 20 * 20)
    rows = torch.tensor([[P, SECOND[a], BONUS[b]] for a, b, *_ in cases])
    q = torch.tensor([Q, Q2]).expand(len(cases), 2, 3)
    verdicts = verify_batch(rows.log(), q, tokens, np.array([case[2:] for case in cases]), 1.0)
    assert weight.sum() == pytest.approx(1)
    assert (weight * (verdicts.accepted == 2)).sum() == pytest.approx(0.5, abs=1e-6)
    assert (weight * (verdicts.accepted + 1)).sum() == pytest.approx(2.2, abs=1e-6)
    emitted: dict[tuple[int, ...], float] = {}
    for pair, accepted, chosen, mass in zip(tokens, verdicts.accepted, verdicts.next_tokens, weight, strict=True):
        text = (*pair[:accepted].tolist(), int(chosen))
        emitted[text] = emitted.get(text, 0.0) + mass
    first = [sum(mass for text, mass in emitted.items() if text[0] == token) for token in range(3)]
    assert first == pytest.approx(P, abs=1e-6)
    # Where a first token was accepted, what follows it has the target's law; so has what follows two.
    for a in range(3):
        longer = {text: mass for text, mass in emitted.items() if text[0] == a and len(text) > 1}
        follows = np.array([sum(mass for text, mass in longer.items() if text[1] == b) for b in range(3)])
        assert follows / follows.sum() == pytest.approx(SECOND[a], abs=1e-6)
        for b in range(3):
            third = np.array([longer.get((a, b, c), 0.0) for c in range(3)])
            assert third / third.sum() == pytest.approx(BONUS[b], abs=1e-6)


def test_after_a_refusal_only_the_residual_is_drawn_from():
    """T21: refused in 40 % of cases, and then always token 0, which the target alone would give half the time."""
    tokens, uniforms = np.array([[1]] * 400), np.array(list(itertools.product(midpoints(20), midpoints(20))))
    logits, q = torch.tensor([[P, P]]).log().expand(400, 2, 3), torch.tensor([[Q]]).expand(400, 1, 3)
    verdicts = verify_batch(logits, q, tokens, uniforms, 1.0)
    refused = verdicts.accepted == 0
    assert refused.mean() == pytest.approx(0.4)
    assert set(verdicts.next_tokens[refused]) == {0}, "the residual of T21 is [1, 0, 0]"
    assert sample(residual(torch.tensor(P), torch.tensor(Q)), 0.99) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.6])
@pytest.mark.parametrize("seed", range(4))
def test_the_same_verdicts_as_one_by_one(temperature, seed):
    """Ragged proposals, from sharp and flat distributions; some drafts equal the target."""
    rng, torch_rng = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    B, K, V = 40, 5, 300
    logits = torch.randn((B, K + 1, V), generator=torch_rng) * torch.rand((B, 1, 1), generator=torch_rng) * 6
    near = logits[:, :K] + torch.randn((B, K, V), generator=torch_rng) * torch.rand((B, 1, 1), generator=torch_rng)
    near[::7] = logits[::7, :K]
    q = torch.softmax(near / (temperature or 1), -1)
    uniforms = rng.random((B, 2 * K + 1), dtype=np.float32)
    drawn = sample_rows(q.reshape(B * K, V), torch.from_numpy(uniforms[:, :K].reshape(-1))).reshape(B, K).numpy()
    tokens = near.argmax(-1).numpy() if temperature == 0 else drawn
    proposed = rng.integers(0, K + 1, B)
    verdicts = verify_batch(logits, q, tokens, uniforms[:, K:], temperature, proposed)
    for b in range(B):
        one = verify(logits[b], q[b], tokens[b], uniforms[b, K:], temperature, int(proposed[b]))
        assert (verdicts.accepted[b], verdicts.next_tokens[b]) == (one.accepted, one.next_token)
        shown = verdicts.accept_probabilities[b, : proposed[b]]
        assert shown.tolist() == pytest.approx(list(one.accept_probabilities))
        assert np.isnan(verdicts.accept_probabilities[b, proposed[b] :]).all()
    assert 0 < verdicts.accepted.sum() < proposed.sum()


def test_company_changes_nothing():
    """A sequence's verdict alone, and among others."""
    rng = np.random.default_rng(0)
    logits, q = torch.randn(9, 4, 200), torch.softmax(torch.randn(9, 3, 200), -1)
    tokens, uniforms = rng.integers(0, 200, (9, 3)), rng.random((9, 4), dtype=np.float32)
    together = verify_batch(logits, q, tokens, uniforms, 0.9)
    for b in range(9):
        alone = verify_batch(logits[b : b + 1], q[b : b + 1], tokens[b : b + 1], uniforms[b : b + 1], 0.9)
        assert alone.accepted[0] == together.accepted[b]
        assert alone.next_tokens[0] == together.next_tokens[b]


def test_nothing_proposed_is_plain_sampling():
    logits = torch.tensor([[P], [Q]]).log()
    none = np.zeros((2, 0), int)
    assert verify_batch(logits, None, none, np.array([[0.49], [0.75]]), 1.0).next_tokens.tolist() == [0, 2]
    assert verify_batch(logits, None, none, np.array([[0.5], [0.0]]), 1.0).next_tokens.tolist() == [1, 0]
    assert verify_batch(logits, None, none, np.array([[0.9], [0.9]]), 0.0).next_tokens.tolist() == [0, 1]


def test_edges_of_the_single_verifier_hold_here_too():
    """u = 0 never accepts what the target excludes; p = q accepts whatever u; the comparison is strict."""
    excluded = torch.tensor([[[0.0, 0.5, 0.5], P]]).log()
    out = verify_batch(excluded, torch.tensor([[[0.2, 0.4, 0.4]]]), np.array([[0]]), np.zeros((1, 2)), 1.0)
    assert out.accepted[0] == 0
    assert out.next_tokens[0] != 0
    almost_one = np.nextafter(np.float32(1), np.float32(0))
    logits = torch.randn(1, 8, 300) * 4
    p = torch.softmax(logits - logits.amax(-1, keepdim=True), -1)
    tokens = np.arange(7)[None] * 37
    assert verify_batch(logits, p[:, :7], tokens, np.full((1, 8), almost_one), 1.0).accepted[0] == 7
    half = torch.tensor([[[0.25, 0.75], [0.25, 0.75]]]).log()
    q = torch.tensor([[[0.5, 0.5]]])
    ratio = verify_batch(half, q, np.array([[0]]), np.zeros((1, 2)), 1.0).accept_probabilities[0, 0]
    below = np.nextafter(ratio, np.float32(0))
    uniforms = np.array([[ratio, 0.0], [below, 0.0]], np.float32)
    out = verify_batch(half.expand(2, 2, 2), q.expand(2, 1, 2), np.array([[0], [0]]), uniforms, 1.0)
    assert out.accepted.tolist() == [0, 1]


@pytest.mark.parametrize("uniform", [0.0, 1e-45, 0.5, 1 - 2**-24])
def test_a_token_without_probability_is_never_drawn(uniform):
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0], [0.0, 1e-40, 0.0, 1e-38, 0.0], [0.0, 1.0, 0.0, 3e-9, 0.0]])
    drawn = sample_rows(weights, torch.full((3,), uniform))
    assert set(drawn.tolist()) <= {1, 3}
    assert drawn.tolist() == [sample(row, uniform) for row in weights]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_logits": torch.zeros(2, 1, 3)}, "(2, 1) draft tokens need target logits [B, K+1, V], got (2, 1, 3)"),
        ({"draft_probs": torch.zeros(2, 1, 4)}, "draft probabilities must be [2, 1, 3], got [2, 1, 4]"),
        ({"draft_probs": None}, "draft probabilities must be [2, 1, 3], got None"),
        ({"draft_tokens": np.array([[0], [3]])}, "draft token 3 of sequence 1, slot 0 is outside the vocabulary 0..2"),
        ({"uniforms": np.zeros((2, 1))}, "need uniform numbers [2, 2], got (2, 1)"),
        ({"uniforms": np.array([[0.0, 0.0], [0.0, 1.0]])}, "uniform number 1 of sequence 1 is"),
        ({"uniforms": np.array([[np.nan, 0.0], [0.0, 0.0]])}, "uniform number 0 of sequence 0 is"),
        ({"proposed": np.array([0, 2])}, "proposed = [0, 2] must be 2 numbers in 0..1"),
        ({"target_logits": torch.zeros(2, 2, 3).double()}, "target logits are torch.float64"),
        ({"draft_probs": torch.full((2, 1, 3), 1 / 3).bfloat16()}, "draft probabilities are torch.bfloat16"),
        ({"draft_probs": torch.tensor([[Q], [[0.0, 0.6, 0.4]]])}, "draft token 0 of sequence 1, slot 0 has draft prob"),
        ({"draft_probs": torch.tensor([[Q], [[0.2, 0.2, 0.2]]])}, "sequence 1, slot 0 are no distribution"),
        ({"draft_probs": torch.tensor([[Q], [[np.nan] * 3]])}, "sequence 1, slot 0 are no distribution"),
        ({"target_logits": torch.full((2, 2, 3), torch.nan)}, "NaN"),
        ({"target_logits": torch.full((2, 2, 3), torch.nan), "temperature": 0.0}, "NaN"),
    ],
)
def test_what_cannot_be_verified_is_refused(changes, message):
    arguments = {
        "target_logits": torch.zeros(2, 2, 3),
        "draft_probs": torch.tensor([[Q], [Q]]),
        "draft_tokens": np.array([[0], [0]]),
        "uniforms": np.full((2, 2), 0.5),
        "temperature": 1.0,
    }
    with pytest.raises(VerifyError) as error:
        verify_batch(**{**arguments, **changes})
    assert message in str(error.value)
