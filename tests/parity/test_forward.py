"""Block outputs of draft_jax equal the torch reference: backbone, Markov biases, confidence logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from draft_jax.models import dspark

from .torch_objective import candidates, label_block

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def reference_hidden(case, context_valid=None):
    """Hidden of all blocks ``[B, N, K, D]``."""
    with torch.no_grad():
        return np.stack(
            [
                case.model.block_hidden(
                    row,
                    case.anchors[b].tolist(),
                    case.keep[b].tolist(),
                    torch.from_numpy(case.embedding),
                    None if context_valid is None else context_valid[b].tolist(),
                ).numpy()
                for b, row in enumerate(case.rows)
            ]
        )


def jax_hidden(case, context_valid=None, **options):
    valid = np.ones(case.arrays["input_ids"].shape, bool) if context_valid is None else context_valid
    draft = dspark.bind(case.config, case.params, jnp.float32)
    return draft, draft(case.batch, case.blocks(), case.frozen, jnp.asarray(valid), **options)


@pytest.mark.parametrize("rope", [None, "linear", "llama3"])
def test_hidden(make_case, rope):
    case = make_case(rope=rope)
    _, hidden = jax_hidden(case)
    # Dummy blocks too: mask tokens that see nothing.
    np.testing.assert_allclose(hidden, reference_hidden(case), **TOLERANCE)


@pytest.mark.parametrize("heads", ["vanilla", "gated", "rnn", "none", "plain_confidence", "no_confidence"])
def test_heads(make_case, heads):
    """Logits and confidence of every kept block, from each side's own hidden states."""
    case = make_case(heads)
    draft, hidden = jax_hidden(case)
    blocks = case.blocks()
    logits = hidden @ case.frozen.lm_head[: case.spec.vocab_size].T
    embedded = None
    if case.spec.markov_kind:
        logits = logits + draft.markov.states(hidden, blocks.prev) @ draft.markov.w2().T
        embedded = draft.markov.embed(blocks.prev)
    else:
        assert draft.markov is None
    confidence = None
    if case.spec.confidence:
        confidence = draft.confidence(hidden, embedded if case.spec.confidence_with_markov else None)
    else:
        assert draft.confidence is None

    reference = reference_hidden(case)
    for b, row in enumerate(case.rows):
        for n in np.flatnonzero(case.keep[b]):
            block = label_block(row, int(case.anchors[b, n]), True, case.spec.block_size, 4.0)
            previous = torch.tensor(block.previous)
            states = torch.from_numpy(reference[b, n])
            with torch.no_grad():
                expected = case.model.block_logits(states, previous, torch.from_numpy(case.lm_head))
                np.testing.assert_allclose(logits[b, n], expected.numpy(), **TOLERANCE)
                if confidence is not None:
                    expected = case.model.block_confidence(states, previous)
                    np.testing.assert_allclose(confidence[b, n], expected.numpy(), **TOLERANCE)


def test_context_valid(make_case):
    """An invalid position is no key; what stands there cannot matter."""
    case = make_case()
    valid = np.ones(case.arrays["input_ids"].shape, bool)
    valid[0, [1, 5]] = valid[1, [0, 3, 10]] = False
    _, hidden = jax_hidden(case, valid)
    expected = reference_hidden(case, valid)
    np.testing.assert_allclose(hidden, expected, **TOLERANCE)
    assert np.abs(expected - reference_hidden(case)).max() > 1e-2


def test_every_attention_implementation(make_case):
    """Each implementation that runs here is the same op; an unknown name is refused with the list."""
    from draft_jax import attention

    case = make_case()
    expected = reference_hidden(case)
    with pytest.raises(ValueError, match="xla"):
        jax_hidden(case, attention="no-such-attention")
    names = getattr(attention, "IMPLEMENTATIONS", {"xla": None})
    assert "xla" in names
    for name in names:
        _, hidden = jax_hidden(case, attention=name)
        np.testing.assert_allclose(hidden, expected, **TOLERANCE, err_msg=name)


def test_same_under_jit(make_case):
    case = make_case("rnn")

    @jax.jit
    def forward(params, batch, blocks, frozen):
        draft = dspark.bind(case.config, params, jnp.float32)
        hidden = draft(batch, blocks, frozen, jnp.ones(batch.input_ids.shape, bool))
        return hidden, draft.markov.states(hidden, blocks.prev)

    hidden, _ = forward(case.params, case.batch, case.blocks(), case.frozen)
    np.testing.assert_allclose(hidden, reference_hidden(case), **TOLERANCE)


@pytest.mark.parametrize("gamma", [4.0, 7.0, None])
def test_blocks(make_case, gamma):
    """Labels, validity, weights, previous tokens and target rows (dspark_spec 2.2)."""
    case = make_case()
    last_valid = np.ones(case.arrays["input_ids"].shape, bool)
    last_valid[0, 5] = False
    blocks = case.blocks(gamma, last_valid)
    for b, row in enumerate(case.rows):
        for n, (anchor, kept) in enumerate(zip(case.anchors[b].tolist(), case.keep[b].tolist(), strict=True)):
            expected = label_block(row, anchor, kept, case.spec.block_size, gamma, last_valid[b])
            np.testing.assert_array_equal(blocks.valid[b, n], expected.valid)
            np.testing.assert_allclose(blocks.weight[b, n], expected.weight, rtol=1e-6)
            counted = np.flatnonzero(expected.valid)
            np.testing.assert_array_equal(blocks.labels[b, n][counted], np.array(expected.labels)[counted])
            np.testing.assert_array_equal(blocks.prev[b, n][counted], np.array(expected.previous)[counted])
            rows = np.array(expected.target_rows)
            np.testing.assert_array_equal(blocks.target_index[b, n][counted], rows[counted])


@pytest.mark.parametrize("strict", [False, True])
def test_sampled_anchors_are_candidates(make_case, strict):
    """Asked for more anchors than there are, the sampler returns exactly the candidates, in order."""
    from draft_jax import anchors

    case = make_case()
    found, keep = anchors.sample_anchors(
        jax.random.key(0),
        case.batch.loss_mask,
        case.batch.document_start,
        num_anchors=16,
        supervised_anchors_only=strict,
    )
    for b, row in enumerate(case.rows):
        assert np.asarray(found[b])[np.asarray(keep[b])].tolist() == candidates(row, strict)
