"""Block outputs of draft_jax equal the torch reference: backbone, corrected logits, confidence logits."""

import jax
import numpy as np
import pytest
import torch

from .torch_objective import candidates, label_block

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def reference_hidden(case, context_valid=None):
    """Hidden of all blocks ``[B, N, K, D]``."""
    embedding = torch.from_numpy(case.embedding)
    rows = []
    with torch.no_grad():
        for b, row in enumerate(case.rows):
            valid = None if context_valid is None else context_valid[b].tolist()
            rows.append(case.model.block_hidden(row, case.anchors[b], case.keep[b], embedding, valid).numpy())
    return np.stack(rows)


@pytest.mark.parametrize("heads", ["vanilla", "gated", "rnn", "none", "vanilla_only"])
def test_outputs(make_case, heads):
    """Hidden states of every block, and logits and confidence of the kept ones."""
    case = make_case(heads)
    hidden, logits, confidence = case.forward()
    reference = reference_hidden(case)
    # Dummy blocks too: mask tokens that see nothing.
    np.testing.assert_allclose(hidden, reference, **TOLERANCE)
    previous = torch.from_numpy(np.array(case.blocks().prev)).long()
    for b, n in np.argwhere(case.keep):
        states = torch.from_numpy(reference[b, n])
        with torch.no_grad():
            expected = case.model.block_logits(states, previous[b, n], torch.from_numpy(case.lm_head))
            np.testing.assert_allclose(logits[b, n], expected.numpy(), **TOLERANCE)
            if confidence is not None:
                expected = case.model.block_confidence(states, previous[b, n])
                np.testing.assert_allclose(confidence[b, n], expected.numpy(), **TOLERANCE)


@pytest.mark.parametrize("rope", ["linear", "llama3"])
def test_rotary_scaling(make_case, rope):
    case = make_case("vanilla_only", rope)
    expected = reference_hidden(case)
    np.testing.assert_allclose(case.forward()[0], expected, **TOLERANCE)
    assert np.abs(expected - reference_hidden(make_case("vanilla_only"))).max() > 1e-2


def test_long_distances(make_case):
    """Keys up to 3800 positions away: frequencies rounded to bf16 would turn them by radians (8.2.1)."""
    case = make_case("vanilla_only")
    arrays = {**case.arrays, "positions": case.arrays["positions"] * 200}
    far = case.with_arrays(arrays)
    # fp32 angles of some thousand radians are exact to about 1e-4 on either side.
    np.testing.assert_allclose(far.forward()[0], reference_hidden(far), rtol=1e-3, atol=1e-3)
    assert np.abs(reference_hidden(far) - reference_hidden(case)).max() > 0.1


def test_context_valid(make_case):
    """An invalid position is no key."""
    case = make_case()
    valid = np.ones(case.arrays["input_ids"].shape, bool)
    valid[0, [1, 5]] = valid[1, [0, 3, 10]] = False
    expected = reference_hidden(case, valid)
    np.testing.assert_allclose(case.forward(valid)[0], expected, **TOLERANCE)
    assert np.abs(expected - reference_hidden(case)).max() > 1e-2


def test_unknown_attention_is_refused(make_case):
    with pytest.raises(ValueError, match="xla"):
        make_case().forward(attention="no-such-attention")


@pytest.mark.parametrize("gamma", [4.0, 7.0, None])
def test_blocks(make_case, gamma):
    """Labels, validity, weights, previous tokens and target rows (dspark_spec 2.2)."""
    case = make_case()
    last_valid = np.ones(case.arrays["input_ids"].shape, bool)
    last_valid[0, 5] = False
    blocks = case.blocks(gamma, last_valid)
    found = {name: np.asarray(getattr(blocks, name)) for name in ("labels", "prev", "valid", "weight")}
    target_index = np.asarray(blocks.target_index)
    for b, n in np.ndindex(case.anchors.shape):
        expected = label_block(
            case.rows[b],
            int(case.anchors[b, n]),
            bool(case.keep[b, n]),
            case.spec.block_size,
            gamma,
            last_valid[b],
        )
        counted = np.array(expected.valid)
        np.testing.assert_array_equal(found["valid"][b, n], counted)
        np.testing.assert_allclose(found["weight"][b, n], expected.weight, rtol=1e-6)
        np.testing.assert_array_equal(found["labels"][b, n][counted], np.array(expected.labels)[counted])
        np.testing.assert_array_equal(found["prev"][b, n][counted], np.array(expected.previous)[counted])
        np.testing.assert_array_equal(target_index[b, n][counted], np.array(expected.target_rows)[counted])


@pytest.mark.parametrize("strict", [False, True])
def test_sampled_anchors_are_candidates(make_case, strict):
    """Asked for more anchors than there are, the sampler returns exactly the candidates, in order."""
    from draft_jax import anchors

    case = make_case()
    sample = jax.jit(anchors.sample_anchors, static_argnames=("num_anchors", "supervised_anchors_only"))
    found, keep = sample(
        jax.random.key(0),
        case.batch.loss_mask,
        case.batch.document_start,
        num_anchors=16,
        supervised_anchors_only=strict,
    )
    for b, row in enumerate(case.rows):
        assert np.asarray(found[b])[np.asarray(keep[b])].tolist() == candidates(row, strict)
