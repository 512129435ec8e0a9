"""Exact rejection sampling: case T21 by enumeration of the verifier itself, and the edges easily lost."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from target_bridge.verify import (
    Verdict,
    VerifyError,
    accept_probabilities,
    residual,
    sample,
    softmax_temperature,
    verify,
)

P, Q = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]


def logits_of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32).log()


def probs(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32).reshape(len(rows), -1)


def midpoints(count: int) -> list[float]:
    """A grid on [0, 1) whose average over a threshold at j / count is exact."""
    return [(i + 0.5) / count for i in range(count)]


def outcome(p_rows: list[list[float]], q_rows: list[list[float]], grid: int = 30) -> dict[tuple[int, ...], float]:
    """Probability of every emitted sequence, by running `verify` on all tokens and a grid of all uniforms.

    The bonus row is the last of `p_rows`. Exact when all thresholds are multiples of 1 / grid.
    """
    slots, vocab = len(q_rows), len(p_rows[0])
    result: dict[tuple[int, ...], float] = {}
    for tokens in itertools.product(range(vocab), repeat=slots):
        drawn = float(np.prod([q_rows[k][t] for k, t in enumerate(tokens)]))
        if drawn == 0:
            continue
        for uniforms in itertools.product(midpoints(grid), repeat=slots + 1):
            verdict = verify(logits_of(*p_rows), probs(*q_rows), tokens, uniforms, 1.0)
            emitted = (*tokens[: verdict.accepted], verdict.next_token)
            result[emitted] = result.get(emitted, 0.0) + drawn / grid ** (slots + 1)
    return result


# --- T21


def test_t21_accept_probabilities_total_and_residual():
    p, q = probs(P)[0], probs(Q)[0]
    accept = accept_probabilities(p, q)
    assert accept.tolist() == pytest.approx([1, 0.6, 0.666667], abs=1e-6)
    assert float((q * accept).sum()) == pytest.approx(0.7, abs=1e-6)
    assert residual(p, q).tolist() == pytest.approx([1, 0, 0], abs=1e-6)
    for token, expected in enumerate([1, 0.6, 0.666667]):
        verdict = verify(logits_of(P, P), probs(Q), [token], [0.0, 0.5], 1.0)
        assert verdict.accept_probabilities == pytest.approx([expected], abs=1e-6)


def test_t21_the_output_distribution_is_p():
    """One slot and the token after a refusal, enumerated through `verify`."""
    emitted = outcome([P, [0.1, 0.1, 0.8]], [Q])
    first = [sum(v for k, v in emitted.items() if k[0] == token) for token in range(3)]
    assert first == pytest.approx(P, abs=1e-6)
    # And what follows an accepted first token is the bonus row.
    for token in range(3):
        kept = {k[1]: v for k, v in emitted.items() if k[0] == token and len(k) == 2}
        assert [kept.get(t, 0) / sum(kept.values()) for t in range(3)] == pytest.approx([0.1, 0.1, 0.8], abs=1e-6)


def test_the_token_after_a_refusal_has_a_number_of_its_own():
    """A residual with several tokens: drawing it with the number that decided the refusal would bias it."""
    p, q = [0.2, 0.4, 0.4], [0.6, 0.2, 0.2]
    emitted = outcome([p, P], [q], grid=6)
    assert [sum(v for k, v in emitted.items() if k[0] == t) for t in range(3)] == pytest.approx(p, abs=1e-6)


def test_t21_reduced_draft_vocabulary():
    q = [0.0, 0.6, 0.4]
    emitted = outcome([P, P], [q], grid=20)
    assert [sum(v for k, v in emitted.items() if k[0] == t) for t in range(3)] == pytest.approx(P, abs=1e-6)
    assert sum(v for k, v in emitted.items() if len(k) == 2) == pytest.approx(0.5, abs=1e-6)
    assert residual(probs(P)[0], probs(q)[0]).tolist() == pytest.approx([1, 0, 0], abs=1e-6)


@pytest.mark.parametrize(("temperature", "total"), [(1.0, 0.579488), (0.5, 0.250497)])
def test_t21_temperature_on_both_sides(temperature, total):
    target, draft = torch.tensor([2.0, 1.0, 0.0]), torch.tensor([1.0, 2.0, 0.0])
    q = softmax_temperature(draft, temperature)
    got = sum(
        float(q[token]) * verify(target.repeat(2, 1), q[None], [token], [0.0, 0.0], temperature).accept_probabilities[0]
        for token in range(3)
    )
    assert got == pytest.approx(total, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1e-9])
def test_t21_temperature_zero_accepts_iff_the_argmaxes_agree(temperature):
    target = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 3.0], [5.0, 1.0, 0.0]])
    draft = softmax_temperature(torch.tensor([[9.0, 1.0, 0.0], [0.0, 9.0, 3.0]]), temperature)
    tokens = draft.argmax(-1).tolist()
    uniforms = [0.999999, 0.0, 0.7]
    verdict = verify(target, draft, tokens, uniforms, temperature)
    assert verdict == Verdict(1, 2, (1.0, 0.0))
    agreeing = softmax_temperature(target[:2], temperature)
    assert verify(target, agreeing, [0, 2], uniforms, temperature) == Verdict(2, 0, (1.0, 1.0))


SECOND = {0: [0.6, 0.3, 0.1], 1: [0.1, 0.8, 0.1], 2: [0.3, 0.3, 0.4]}  # target rows given the first token
Q2 = [0.4, 0.4, 0.2]


def test_t21_chain_of_two():
    """P(both accepted) = .5, expected emitted per round 2.2, counted over all tokens and uniforms."""
    both = emitted = 0.0
    # The ratios of slot 0 are multiples of 1/15, those of slot 1 of 1/4: midpoints make the averages exact.
    for first, token in itertools.product(range(3), repeat=2):
        for u0, u1 in itertools.product(midpoints(15), midpoints(4)):
            verdict = verify(logits_of(P, SECOND[first], P), probs(Q, Q2), [first, token], [u0, u1, 0.5], 1.0)
            weight = Q[first] * Q2[token] / 60
            both += weight * (verdict.accepted == 2)
            emitted += weight * (verdict.accepted + 1)
    assert both == pytest.approx(0.5, abs=1e-6)
    assert emitted == pytest.approx(2.2, abs=1e-6)


def test_t21_the_second_token_is_distributed_as_the_target_given_the_first():
    rows = np.zeros((3, 3))
    for first, token in itertools.product(range(3), repeat=2):
        for u1 in midpoints(4):  # u0 = 0 keeps the first token
            verdict = verify(logits_of(P, SECOND[first], P), probs(Q, Q2), [first, token], [0.0, u1, 0.5], 1.0)
            follows = token if verdict.accepted == 2 else verdict.next_token
            rows[first, follows] += Q2[token] / 4
    assert rows == pytest.approx(np.array([SECOND[first] for first in range(3)]), abs=1e-6)


def test_t21_same_uniforms_same_tokens():
    rng = np.random.default_rng(0)
    logits, q = torch.randn(5, 50), torch.softmax(torch.randn(4, 50), -1)
    tokens, uniforms = rng.integers(0, 50, 4), rng.random(5)
    assert verify(logits, q, tokens, uniforms, 0.8) == verify(logits.clone(), q.clone(), tokens, uniforms, 0.8)


# --- edges


def test_u_zero_does_not_accept_what_the_target_excludes():
    verdict = verify(logits_of([0.0, 0.5, 0.5], P), probs([0.2, 0.4, 0.4]), [0], [0.0, 0.0], 1.0)
    assert verdict.accepted == 0
    assert verdict.accept_probabilities == (0.0,)
    assert verdict.next_token != 0


@pytest.mark.parametrize("seed", range(5))
def test_equal_distributions_never_reject(seed):
    torch.manual_seed(seed)
    logits = torch.randn(8, 300) * 4
    p = softmax_temperature(logits, 0.7)
    almost_one = float(np.nextafter(np.float32(1), np.float32(0)))
    for token in range(0, 300, 37):
        verdict = verify(logits, p[:7], [token] * 7, [almost_one] * 8, 0.7)
        assert verdict.accepted == 7
        assert verdict.accept_probabilities == (1.0,) * 7


def test_the_comparison_is_strict():
    # p / q = 0.5 exactly
    p, q = [0.25, 0.75], [0.5, 0.5]
    assert verify(logits_of(p, p), probs(q), [0], [0.499999, 0.0], 1.0).accepted == 1
    ratio = verify(logits_of(p, p), probs(q), [0], [0.0, 0.0], 1.0).accept_probabilities[0]
    assert verify(logits_of(p, p), probs(q), [0], [ratio, 0.0], 1.0).accepted == 0


def test_a_residual_without_mass_falls_back_to_p():
    p = probs([0.5, 0.5])[0]
    assert residual(p, p).tolist() == [0.5, 0.5]
    assert residual(p, probs([0.6, 0.5])[0]).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("uniform", [0.0, 1e-45, 0.5, 1 - 2**-24, 1 - 2**-53])
def test_a_token_without_probability_is_never_drawn(uniform):
    for weights in ([0.0, 0.3, 0.0, 0.7, 0.0], [0.0, 1e-40, 0.0, 1e-38, 0.0], [0.0, 1.0, 0.0, 3e-9, 0.0]):
        assert sample(torch.tensor(weights), uniform) in (1, 3)
    assert sample(torch.tensor([0.0, 0.0, 1.0]), uniform) == 2


def test_sampling_inverts_the_distribution_function():
    weights = torch.tensor([0.25, 0.0, 0.5, 0.25])
    drawn = [sample(weights, u) for u in midpoints(16)]
    assert [drawn.count(token) for token in range(4)] == [4, 0, 8, 4]
    assert [sample(weights, u) for u in (0.0, 0.25, 0.75)] == [0, 2, 3]  # thresholds belong to the next token


def test_unlikely_tokens_of_a_large_vocabulary_are_not_swallowed():
    """In fp32 sums 20000 tokens of 1e-9 after a likely one would add nothing."""
    weights = torch.full((20_001,), 1e-9)
    weights[0] = 1 - 2e-5
    assert sample(weights, 1 - 1e-5) == pytest.approx(10_000, abs=30)


def test_only_proposed_slots_count():
    logits, q = logits_of(P, P, P, P), probs(Q, Q, Q)
    tokens, uniforms = [0, 0, 1], [0.5, 0.5, 0.99, 0.75]
    assert verify(logits, q, tokens, uniforms, 1.0).accepted == 2
    verdict = verify(logits, q, tokens, uniforms, 1.0, proposed=2)
    assert verdict == Verdict(2, 1, (1.0, 1.0))  # 0.75 draws the bonus from P
    assert verify(logits, q, tokens, uniforms, 1.0, proposed=0) == Verdict(0, 1, ())
    nothing = torch.zeros(0, 3)
    assert verify(logits[:1], nothing, [], [0.75], 1.0) == Verdict(0, 1, ())
    assert verify(logits[:1], nothing, [], [0.75], 0.0) == Verdict(0, 0, ())
    # What lies after the proposed slots may be anything.
    logits[3], q[2] = float("nan"), float("nan")
    assert verify(logits, q, [0, 0, -1], uniforms, 1.0, proposed=2) == Verdict(2, 1, (1.0, 1.0))


def test_softmax_temperature():
    logits = torch.tensor([[1.0, 3.0, 3.0, -torch.inf]], dtype=torch.bfloat16)
    assert softmax_temperature(logits, 0.0).tolist() == [[0, 1, 0, 0]]  # the first of equals
    half = softmax_temperature(logits, 0.5)
    assert half.dtype == torch.float32
    assert half[0].tolist() == pytest.approx((torch.tensor([-4.0, 0, 0, -torch.inf]).exp() / 2.018316).tolist())
    assert softmax_temperature(torch.tensor([1e30, 0.0]), 1e-30).tolist() == [1, 0]
    assert softmax_temperature(torch.tensor([1.0, 1.0 - 1e-6]), 1e-38).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_temperatures_that_mean_nothing(temperature):
    with pytest.raises(VerifyError, match="temperature must be 0 or a positive number"):
        softmax_temperature(torch.zeros(3), temperature)
    with pytest.raises(VerifyError, match="temperature"):
        verify(logits_of(P, P), probs(Q), [0], [0.5, 0.5], temperature)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_logits": logits_of(P)}, "1 draft tokens need target logits"),
        ({"target_logits": logits_of(P, P)[0]}, "must be"),
        ({"draft_probs": probs(Q, Q)}, "need target logits"),
        ({"draft_probs": probs([0.5, 0.5])}, "need target logits"),
        ({"draft_tokens": [3]}, "draft token 3 of slot 0 is outside the vocabulary 0..2"),
        ({"draft_tokens": [-1]}, "draft token -1 of slot 0"),
        ({"uniforms": [0.5]}, "need 2 uniform numbers, got 1"),
        ({"uniforms": [1.0, 0.5]}, "uniform number 0 is 1.0"),
        ({"uniforms": [0.5, float("nan")]}, "uniform number 1 is nan"),
        ({"uniforms": [-0.1, 0.5]}, "uniform number 0 is -0.1"),
        ({"proposed": 2}, "proposed = 2 is not in 0..1"),
        ({"target_logits": logits_of(P, P).double()}, "target logits are torch.float64"),
        ({"draft_probs": probs(Q).bfloat16()}, "draft probabilities are torch.bfloat16"),
        ({"draft_probs": probs([0.0, 0.6, 0.4])}, "draft token 0 of slot 0 has draft probability 0.0"),
        ({"draft_probs": probs([0.2, 0.2, 0.2])}, "slot 0 are no distribution: they sum to 0.6"),
        ({"draft_probs": probs([1.2, -0.2, 0.0])}, "slot 0 are no distribution"),
        ({"draft_probs": probs([float("nan")] * 3)}, "slot 0 are no distribution"),
        ({"target_logits": torch.tensor([[0.0] * 3, [float("nan"), 0, 0]])}, "NaN"),
        ({"target_logits": torch.full((2, 3), -torch.inf)}, "exclude every token"),
        ({"target_logits": torch.full((2, 3), torch.inf), "temperature": 0.0}, "infinite"),
    ],
)
def test_what_cannot_be_verified_is_refused(changes, message):
    arguments = {
        "target_logits": logits_of(P, P),
        "draft_probs": probs(Q),
        "draft_tokens": [0],
        "uniforms": [0.5, 0.5],
        "temperature": 1.0,
    }
    with pytest.raises(VerifyError) as error:
        verify(**{**arguments, **changes})
    assert message in str(error.value)


@pytest.mark.parametrize("uniform", [1.0, -1e-9, float("nan")])
def test_sample_refuses_numbers_outside_the_unit_interval(uniform):
    with pytest.raises(VerifyError, match="uniform numbers must be in"):
        sample(torch.tensor([1.0]), uniform)


def test_sample_refuses_an_empty_distribution():
    with pytest.raises(VerifyError, match="no token has a positive probability"):
        sample(torch.zeros(3), 0.5)
