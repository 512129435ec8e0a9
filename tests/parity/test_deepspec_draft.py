"""A draft made by DeepSpec's trainer, read by `draft_jax.weights` and, by itself, by the torch reference."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

LENGTH = 48
ANCHORS = [[5, 17, 30, 40]]


@pytest.fixture(scope="module")
def folder(shared_folder):
    return shared_folder / "data" / "dspark_smollm2_deepspec"


@pytest.fixture(scope="module")
def reference(folder):
    """Spec read by hand from config.json; weights by safetensors, all names required, none left over."""
    from safetensors.torch import load_file

    from .torch_dspark import ReferenceDSpark
    from .torch_spec import ReferenceSpec

    spec = ReferenceSpec.from_deepspec(json.loads((folder / "config.json").read_text()))
    model = ReferenceDSpark(spec)
    model.load_state_dict({name: t.float() for name, t in load_file(folder / "model.safetensors").items()})
    return model


@pytest.fixture(scope="module")
def arrays(reference):
    """Random context of the size of real hidden states."""
    rng = np.random.default_rng(0)
    spec = reference.spec
    return {
        "input_ids": rng.integers(0, spec.vocab_size, (1, LENGTH)).astype(np.int32),
        "loss_mask": np.ones((1, LENGTH), np.int32),
        "positions": np.arange(LENGTH, dtype=np.int32)[None],
        "document_start": np.zeros((1, LENGTH), np.int32),
        "context_hidden": (5 * rng.normal(size=(1, LENGTH, spec.num_taps * spec.hidden_size))).astype(np.float32),
        "last_hidden": rng.normal(size=(1, LENGTH, spec.hidden_size)).astype(np.float32),
    }


@pytest.fixture(scope="module")
def embedding(reference):
    spec = reference.spec
    return (0.1 * np.random.default_rng(1).normal(size=(spec.vocab_size, spec.hidden_size))).astype(np.float32)


@pytest.fixture(scope="module")
def loaded(folder):
    from draft_jax import weights

    return weights.load_folder(folder)


@pytest.fixture(scope="module")
def outputs(loaded, arrays, embedding):
    from draft_jax import anchors
    from draft_jax.batch import FrozenHead
    from draft_jax.models import dspark

    from .cases import jax_batch

    config, params, _ = loaded
    batch = jax_batch(arrays)
    head = FrozenHead(embedding=jnp.asarray(embedding), lm_head=jnp.asarray(embedding))
    kept = jnp.ones((1, len(ANCHORS[0])), bool)
    blocks = anchors.make_blocks(batch, jnp.asarray(ANCHORS), kept, config.block_size, 4.0)

    @jax.jit
    def forward(params, batch, blocks, head):
        draft = dspark.bind(config, params, jnp.float32)
        hidden = draft(batch, blocks, head, jnp.ones((1, LENGTH), bool))
        biases = draft.markov.states(hidden, blocks.prev) @ draft.markov.w2().T
        return hidden, biases, draft.confidence(hidden, draft.markov.embed(blocks.prev))

    return forward(params, batch, blocks, head)


def test_config_is_read_the_same(loaded, reference):
    config, spec = loaded[0], reference.spec
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (576, 1536, 3)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.block_size, config.mask_token_id) == (49152, 7, 4)
    assert (config.num_target_layers, tuple(config.target_layer_ids)) == (30, (1, 7, 14, 21, 27))
    assert (config.rms_norm_eps, config.rope_theta, config.rope_scaling) == (1e-5, 1e5, None)
    assert (config.markov_rank, config.markov_head_type) == (128, "vanilla")
    assert (spec.markov_rank, spec.markov_kind) == (128, "vanilla")
    assert config.enable_confidence_head
    assert config.confidence_head_with_markov


def test_block_outputs(outputs, reference, arrays, embedding):
    """Hidden states of four blocks, Markov features and confidence logits: fp32, 1e-4."""
    from .cases import torch_rows
    from .torch_objective import label_block

    hidden, biases, confidence = outputs
    row = torch_rows(arrays)[0]
    with torch.no_grad():
        expected = reference.block_hidden(row, ANCHORS[0], [True] * 4, torch.from_numpy(embedding))
        scale = float(expected.abs().max())
        assert scale > 0.5
        np.testing.assert_allclose(hidden[0], expected.numpy(), rtol=1e-4, atol=1e-4)
        for n, anchor in enumerate(ANCHORS[0]):
            previous = torch.tensor(label_block(row, anchor, True, 7, 4.0).previous)
            bias = reference.markov_head.block(expected[n], previous)
            assert float(bias.abs().max()) > 0.1
            np.testing.assert_allclose(biases[0, n], bias.numpy(), rtol=1e-4, atol=1e-4)
            logits = reference.block_confidence(expected[n], previous)
            np.testing.assert_allclose(confidence[0, n], logits.numpy(), rtol=1e-4, atol=1e-4)


def test_every_tensor_arrives(folder, loaded):
    """`load_folder` and back again: the file's own bits under the file's own names."""
    from safetensors.numpy import load_file

    from draft_jax import weights

    config, params, _ = loaded
    written = weights.to_torch_layout(params, config)
    stored = load_file(folder / "model.safetensors")
    assert written.keys() == stored.keys()
    for name, value in stored.items():
        assert written[name].dtype == value.dtype, name
        np.testing.assert_array_equal(written[name].view(np.uint16), value.view(np.uint16), err_msg=name)
