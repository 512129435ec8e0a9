"""`draft_jax.decode`: cached proposals equal the reference, which recomputes everything without a cache."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from draft_jax import decode

from .torch_spec import ReferenceRow

HEADS = ["vanilla", "gated", "rnn", "none"]
#: Two requests with context of different length, fed in pieces, as rounds of a decode feed them.
PIECES = [np.array([5, 7]), np.array([2, 4]), np.array([0, 1])]
ANCHORS = np.array([3, 17], np.int32)


@functools.cache
def drafter_of(case):
    """The compiled programs of a case; both tests of a head kind share them."""
    return decode.make_drafter(
        case.config,
        jnp.float32,
        params=case.params,
        frozen=case.frozen,
        max_context=32,
        batch=2,
        prefill_width=8,
    )


def fill(case, seed=0):
    """Feed ragged pieces to the case's drafter, emptied first.

    Returns:
        the drafter, and the context of each request so far ``[S_b, M*D]``.
    """
    rng = np.random.default_rng(seed)
    drafter = drafter_of(case)
    drafter.reset()
    contexts = [np.zeros((0, case.spec.num_taps * case.spec.hidden_size), np.float32) for _ in range(2)]
    for count in PIECES:
        # Beyond the tokens stands junk: it must not reach the cache's used part.
        piece = rng.normal(size=(2, 7, contexts[0].shape[1])).astype(np.float32)
        tokens = [p[:n] for p, n in zip(piece, count, strict=True)]
        drafter.extend(np.concatenate([*tokens, piece[0]]), count)
        contexts = [np.concatenate([c, p[:n]]) for c, p, n in zip(contexts, piece, count, strict=True)]
    np.testing.assert_array_equal(drafter.lengths, [7, 12])
    return drafter, contexts


def reference(case, context, token, forced=None):
    return case.model.propose(
        torch.from_numpy(context),
        token,
        torch.from_numpy(case.embedding),
        torch.from_numpy(case.lm_head),
        forced,
    )


@pytest.mark.parametrize("heads", HEADS)
def test_greedy(make_case, heads):
    case = make_case(heads)
    drafter, contexts = fill(case)
    proposal = drafter.propose(ANCHORS, np.full((2, case.spec.block_size), 0.5), 0.0)
    for b in range(2):
        tokens, logits, confidence = reference(case, contexts[b], int(ANCHORS[b]))
        top = logits.sort(dim=-1, descending=True).values
        assert float((top[:, 0] - top[:, 1]).min()) > 1e-3, "a tie: choose another seed"
        np.testing.assert_array_equal(proposal.tokens[b], tokens)
        one_hot = np.zeros(logits.shape, np.float32)
        one_hot[np.arange(len(tokens)), tokens] = 1
        np.testing.assert_array_equal(proposal.probs[b], one_hot)
        np.testing.assert_allclose(proposal.confidence_logits[b], confidence.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("heads", HEADS)
def test_sampled(make_case, heads, temperature):
    """Probabilities along the sampled chain, and tokens by inverse CDF of exactly these probabilities."""
    case = make_case(heads)
    drafter, contexts = fill(case)
    uniforms = np.random.default_rng(1).random((2, case.spec.block_size)).astype(np.float32)
    uniforms[0, 0], uniforms[1, 0] = 0.0, np.nextafter(np.float32(1), np.float32(0))
    proposal = drafter.propose(ANCHORS, uniforms, temperature)
    tokens = np.asarray(proposal.tokens)
    for b in range(2):
        _, logits, confidence = reference(case, contexts[b], int(ANCHORS[b]), tokens[b].tolist())
        expected = (logits.double() / temperature).softmax(-1).numpy()
        np.testing.assert_allclose(proposal.probs[b], expected, rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(proposal.confidence_logits[b], confidence.numpy(), rtol=1e-5, atol=1e-5)
        for slot, token in enumerate(tokens[b]):
            upper = expected[slot, : token + 1].sum()
            lower = upper - expected[slot, token]
            assert lower - 1e-5 <= uniforms[b, slot] <= upper + 1e-5


def test_proposal_equals_training_block(make_case):
    """The cached block of an anchor has the hidden states of the training-time block."""
    case = make_case("rnn")
    drafter, contexts = fill(case)
    proposal = drafter.propose(ANCHORS, np.full((2, case.spec.block_size), 0.5), 0.0)
    length = contexts[1].shape[0]
    states = np.concatenate([contexts[1], np.zeros_like(contexts[1][:1])])
    row = ReferenceRow(
        input_ids=torch.tensor([0] * length + [17]),
        loss_mask=torch.ones(length + 1),
        positions=torch.arange(length + 1),
        document_start=torch.zeros(length + 1, dtype=torch.long),
        context_hidden=torch.from_numpy(states),
        last_hidden=torch.zeros(length + 1, case.spec.hidden_size),
    )
    with torch.no_grad():
        hidden = case.model.block_hidden(row, [length], [True], torch.from_numpy(case.embedding))[0]
    np.testing.assert_allclose(proposal.hidden[1], hidden.numpy(), rtol=1e-5, atol=1e-5)
