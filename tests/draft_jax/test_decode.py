"""Decoding: the cached block is the training block, sampling is exact, the cache is updated in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring

from draft_jax import decode
from draft_jax.models.dspark import bind

from .drafts import blocks_at, frozen_head, random_batch, random_params, tiny_config

K, V = 4, 31
pytestmark = pytest.mark.usefixtures("quick_compilation")
CONFIGS = {
    "vanilla": tiny_config(),
    "gated": tiny_config(markov_head_type="gated"),
    "rnn": tiny_config(markov_head_type="rnn", confidence_head_with_markov=False),
    "none": tiny_config(markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False),
}


@functools.cache
def drafter_parts(kind):
    config = CONFIGS[kind]
    return config, random_params(config), frozen_head(config)


def make(kind="vanilla", batch=1, max_context=24, prefill_width=8, dtype=jnp.float32):
    config, params, frozen = drafter_parts(kind)
    return decode.make_drafter(
        config,
        dtype,
        params=params,
        frozen=frozen,
        batch=batch,
        max_context=max_context,
        prefill_width=prefill_width,
    )


def context(length, seed=0):
    return np.random.default_rng(seed).normal(size=(length, 72)).astype(np.float32)


def feed(drafter, *rows):
    """The given states of each row, packed."""
    drafter.extend(np.concatenate(rows), np.array([len(row) for row in rows]))


def uniforms(batch=1, seed=0):
    return np.random.default_rng(seed).random((batch, K)).astype(np.float32)


# -- the block -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
def test_hidden_of_a_decoded_block_is_that_of_training(kind):
    """dspark_spec 8.7, last check: same anchor, same context, once from the row and once from the cache."""
    config, params, frozen = drafter_parts(kind)
    batch = random_batch(config, [[15]], 15)
    anchors = [[3, 9, 12]]
    blocks = blocks_at(batch, anchors, config)
    trained = jax.jit(lambda p: bind(config, p, jnp.float32)(batch, blocks, frozen, jnp.ones((1, 15), bool)))(params)
    drafter = make(kind)
    states = np.asarray(batch.context_hidden)[0]
    done = 0
    for n, anchor in enumerate(anchors[0]):
        feed(drafter, states[done:anchor])
        done = anchor
        proposal = drafter.propose(int(batch.input_ids[0, anchor]), uniforms(), 0.0)
        np.testing.assert_allclose(proposal.hidden[0], trained[0, n], atol=1e-5)


def test_ragged_pieces_fill_the_cache_as_one_piece_does():
    """Two rows of different length, in uneven pieces with junk behind, against each row at once."""
    whole = [context(11), context(6, seed=1)]
    drafter = make(batch=2)
    junk = np.full((3, 72), np.nan, np.float32)
    done = [0, 0]
    for counts in ([2, 0], [3, 4], [0, 1], [5, 1], [1, 0]):
        pieces = [row[d : d + c] for row, d, c in zip(whole, done, counts, strict=True)]
        drafter.extend(np.concatenate([*pieces, junk]), np.array(counts))
        done = [d + c for d, c in zip(done, counts, strict=True)]
    assert drafter.lengths.tolist() == done == [11, 6]
    once = make(batch=2)
    feed(once, *whole)
    anchor = np.array([3, 17])
    a, b = drafter.propose(anchor, uniforms(2), 1.0), once.propose(anchor, uniforms(2), 1.0)
    np.testing.assert_allclose(a.hidden, b.hidden, atol=1e-5)
    np.testing.assert_allclose(a.probs, b.probs, atol=1e-5)
    for row, length in enumerate(done):
        for ours, theirs in ((drafter.cache.k, once.cache.k), (drafter.cache.v, once.cache.v)):
            np.testing.assert_allclose(ours[:, row, :length], theirs[:, row, :length], atol=1e-5)
    assert np.isfinite(drafter.cache.k).all()


def test_rows_of_a_batch_are_independent():
    whole = [context(7), context(4, seed=1)]
    both = make(batch=2)
    feed(both, *whole)
    together = both.propose(np.array([3, 17]), uniforms(2), 1.0)
    for row, token in enumerate([3, 17]):
        one = make()
        feed(one, whole[row])
        alone = one.propose(token, uniforms(2)[row], 1.0)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        np.testing.assert_allclose(alone.probs[0], together.probs[row], atol=1e-5)


def test_a_row_takes_another_text_while_the_others_go_on():
    """The second text of row 0 sees nothing of the first; row 1 does not notice."""
    drafter = make(batch=2)
    feed(drafter, context(12), context(5, seed=1))
    drafter.reset(0)
    assert drafter.lengths.tolist() == [0, 5]
    feed(drafter, context(3, seed=2), context(2, seed=3))
    ours = drafter.propose(np.array([3, 17]), uniforms(2), 1.0)
    for row, states in enumerate([context(3, seed=2), np.concatenate([context(5, seed=1), context(2, seed=3)])]):
        one = make()
        feed(one, states)
        alone = one.propose([3, 17][row], uniforms(2)[row], 1.0)
        np.testing.assert_allclose(ours.probs[row], alone.probs[0], atol=1e-5)


def test_few_rows_of_many_are_proposed_for_as_all_are():
    """Eight rows have a program of their own for two of them, in any order; the others are left alone."""
    drafter = make(batch=8)
    assert drafter.compile_count == 4
    feed(drafter, *(context(3 + row, seed=row) for row in range(8)))
    anchors, u = np.arange(1, 9), uniforms(8)
    whole = drafter.propose(anchors, u, 1.0)
    for rows in ([6, 1], [3], [7, 0, 4], list(range(8))):
        few = drafter.propose(anchors[rows], u[rows], 1.0, rows)
        assert few.tokens.shape[0] == (2 if len(rows) <= 2 else 8)
        for place, row in zip(drafter.places(rows), rows, strict=True):
            np.testing.assert_array_equal(few.tokens[place], whole.tokens[row])
            np.testing.assert_allclose(few.probs[place], whole.probs[row], atol=1e-5)
    for rows in ([8], [-1], []):
        with pytest.raises(ValueError, match=r"must be 1 to 8 rows below 8"):
            drafter.propose(np.ones(len(rows)), u[: len(rows)], 0.0, rows)


@pytest.mark.parametrize(
    ("count", "pieces"),
    [
        (0, []),
        (1, [(1, 8)]),
        (8, [(8, 8)]),
        (9, [(9, 16)]),
        (41, [(16, 16), (16, 16), (9, 16)]),
        (33, [(16, 16)] * 2 + [(1, 8)]),
    ],
)
def test_any_number_of_tokens_is_cut_into_compiled_widths(count, pieces):
    assert decode.cut(count, (8, 16)) == pieces


def test_empty_context_is_allowed():
    proposal = make().propose(3, uniforms(), 1.0)
    assert np.isfinite(proposal.probs).all()


# -- sampling ------------------------------------------------------------------------------------------------


def distributions_by_hand(kind, hidden, anchor, tokens, temperature):
    """softmax((U + Markov bias of the token *drafted* before) / T) of each slot, fp64 after the head."""
    config, params, frozen = drafter_parts(kind)
    logits = np.asarray(hidden, np.float64) @ np.asarray(frozen.lm_head, np.float64)[:V].T
    if config.markov_rank:
        prev = jnp.asarray([anchor, *tokens[:-1]], jnp.int32)
        markov = bind(config, params, jnp.float32).markov
        logits = logits + np.asarray(markov.states(hidden, prev), np.float64) @ np.asarray(markov.w2(), np.float64).T
    if temperature == 0:
        return np.eye(V)[logits.argmax(-1)]
    scaled = logits / temperature
    weights = np.exp(scaled - scaled.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("kind", CONFIGS)
def test_tokens_follow_the_returned_probabilities(kind):
    """The distributions use the sampled tokens, and each token is where its uniform falls in its own
    distribution."""
    drafter = make(kind)
    feed(drafter, context(6))
    seen = set()
    for seed, temperature in [(0, 0.0), (1, 1.0), (2, 1.0), (3, 0.5), (4, 3.0)]:
        u = uniforms(seed=seed)
        proposal = drafter.propose(5, u, temperature)
        tokens, probs = np.asarray(proposal.tokens)[0], np.asarray(proposal.probs)[0]
        assert probs.dtype == np.float32
        assert probs.shape == (K, V)
        expected = distributions_by_hand(kind, proposal.hidden[0], 5, tokens, temperature)
        np.testing.assert_allclose(probs, expected, atol=2e-6)
        if temperature == 0:
            np.testing.assert_array_equal(tokens, expected.argmax(-1))
        for k, token in enumerate(tokens):
            below = probs[k, :token].astype(np.float64).sum()
            assert probs[k, token] > 0
            assert below - 1e-6 <= u[0, k] * probs[k].sum() <= below + probs[k, token] + 1e-6
        seen.add(tuple(tokens.tolist()))
    assert len(seen) > 1


def test_deepspec_draws_from_a_rounded_distribution():
    """dspark_spec 8.2, defect 2: tokens from a bf16 softmax, here torch's, while the ratio's q stays fp32."""
    import torch

    config, params, frozen = drafter_parts("none")
    drafter = decode.make_drafter(
        config, jnp.float32, params=params, frozen=frozen, max_context=24, prefill_width=8, sample_dtype=jnp.bfloat16
    )
    feed(drafter, context(6))
    differ = 0
    for seed in range(40):
        u = uniforms(seed=seed)
        proposal = drafter.propose(5, u, 1.0)
        hidden, tokens = np.asarray(proposal.hidden)[0], np.asarray(proposal.tokens)[0]
        expected = distributions_by_hand("none", proposal.hidden[0], 5, tokens, 1.0)
        np.testing.assert_allclose(proposal.probs[0], expected, atol=2e-6)
        logits = torch.from_numpy(hidden @ np.asarray(frozen.lm_head, np.float32)[:V].T)
        rounded = torch.softmax(logits.bfloat16(), -1).double().numpy()
        for k, token in enumerate(tokens):
            total, below = rounded[k].sum(), rounded[k, :token].sum()
            assert below - 5e-3 <= u[0, k] * total <= below + rounded[k, token] + 5e-3
            exact = np.searchsorted(np.cumsum(expected[k]), u[0, k], side="right")
            differ += exact != token
    assert 0 < differ < 20, "rounding moves a few tokens, not most"


def test_bad_weights_show_slot_by_slot():
    config, params, frozen = drafter_parts("vanilla")
    assert np.asarray(make().propose(3, uniforms(), 1.0).finite).all()
    broken = jax.tree.map(lambda leaf: leaf * np.nan, params)
    drafter = decode.make_drafter(config, jnp.float32, params=broken, frozen=frozen, max_context=24, prefill_width=8)
    for temperature in (0.0, 1.0):
        assert not np.asarray(drafter.propose(3, uniforms(), temperature).finite).any()


def test_confidence_uses_the_sampled_tokens():
    config, params, _ = drafter_parts("vanilla")
    drafter = make()
    feed(drafter, context(6))
    draft = bind(config, params, jnp.float32)
    for seed in range(3):
        proposal = drafter.propose(5, uniforms(seed=seed), 2.0)
        prev = jnp.concatenate([jnp.asarray([[5]]), proposal.tokens[:, :-1]], axis=1)
        expected = draft.confidence(proposal.hidden, draft.markov.embed(prev))
        np.testing.assert_allclose(proposal.confidence_logits, expected, atol=1e-5)
    assert make("none").propose(5, uniforms(), 0.0).confidence_logits is None


def test_draws_are_distributed_as_the_probabilities():
    """A grid of uniforms through one distribution with zeros: counts equal probability times grid size."""
    probs = np.array([0, 0.125, 0, 0.5, 0.25, 0, 0.125, 0], np.float32)
    grid = (np.arange(4096) + 0.5) / 4096
    tokens = np.asarray(jax.jit(decode.draw)(jnp.tile(probs, (4096, 1)), jnp.asarray(grid, jnp.float32)))
    np.testing.assert_array_equal(np.bincount(tokens, minlength=8) / 4096, probs)


def test_a_token_of_probability_zero_is_never_drawn():
    """Uniforms at both ends, and a vocabulary large enough for the prefix sum to round."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(64, 50_000)).astype(np.float32) * 3
    logits[:, rng.random(50_000) < 0.5] = -np.inf
    logits[:, -1] = logits[:, 0] = -np.inf
    logits[::2, 256:512] = -np.inf  # a block of the vocabulary without any mass
    probs = jax.nn.softmax(logits, axis=-1)
    draw = jax.jit(decode.draw)
    for u in (0.0, np.nextafter(np.float32(1), np.float32(0)), 1.0, 0.5, 1e-38):
        tokens = np.asarray(draw(probs, np.full(64, u, np.float32)))
        assert (np.take_along_axis(np.asarray(probs), tokens[:, None], 1) > 0).all(), u


@pytest.mark.parametrize("size", [3, 256, 1000])
def test_the_largest_logit_is_the_first_of_equals(size):
    """As NumPy's argmax, with ties inside a block of the vocabulary, across blocks, and nothing but -inf before it."""
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 4, size=(64, size)).astype(np.float32)  # the largest comes many times
    logits[1] = -np.inf
    logits[1, -1] = -5
    logits[2] = -np.inf
    np.testing.assert_array_equal(jax.jit(decode.largest)(logits), logits.argmax(-1))


# -- compiled once, in place ---------------------------------------------------------------------------------


def test_a_whole_sequence_compiles_nothing():
    """Prompts, rounds and temperatures of any kind, numpy and device arrays: nothing after the first
    three."""
    drafter = make()
    assert drafter.compile_count == 3
    names = []

    def count(event, duration, **details):
        if "backend_compile" in event:
            names.append(details.get("fun_name", event))

    monitoring.register_event_duration_secs_listener(count)
    try:
        for temperature in (0.0, 1.0, 0.7):
            drafter.reset()
            feed(drafter, context(13))
            for n in (1, 3, 5, 2):
                proposal = drafter.propose(n, uniforms(seed=n), temperature)
                assert np.asarray(proposal.tokens).max() < V
                states = context(n)
                drafter.extend(jax.device_put(states) if n == 3 else states, np.array([n]))
            feed(drafter, context(0))
        again = make()  # an equal drafter shares the programs
        feed(again, context(4))
        again.propose(3, uniforms(), 0.0)
    finally:
        monitoring.unregister_event_duration_listener(count)
    assert not names
    assert drafter.compile_count == 3


def test_extend_updates_the_cache_in_place():
    config, params, _ = drafter_parts("vanilla")
    abstract = jax.eval_shape(lambda: decode.new_cache(config, 1, 4096, jnp.float32))
    hidden = jax.ShapeDtypeStruct((5, 72), jnp.float32)
    index = jax.ShapeDtypeStruct((5,), jnp.int32)
    program = jax.jit(
        lambda p, cache, hidden, rows, at: decode.extend(p, config, cache, hidden, rows, at, jnp.float32),
        donate_argnums=1,
    )
    size = sum(x.size * x.dtype.itemsize for x in (abstract.k, abstract.v))
    memory = program.lower(params, abstract, hidden, index, index).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 10

    drafter = make()
    before, pointer = drafter.cache, drafter.cache.k.unsafe_buffer_pointer()
    for n in range(3):
        feed(drafter, context(2, seed=n))
        assert drafter.cache.k.unsafe_buffer_pointer() == pointer
    assert before.k.is_deleted()
    drafter.propose(3, uniforms(), 0.0)
    assert not drafter.cache.k.is_deleted()


def test_reset_forgets():
    drafter = make()
    feed(drafter, context(9))
    first = drafter.propose(3, uniforms(), 1.0)
    drafter.reset()
    assert drafter.lengths.tolist() == [0]
    feed(drafter, context(17, seed=5))
    drafter.reset()
    feed(drafter, context(9))
    np.testing.assert_array_equal(drafter.propose(3, uniforms(), 1.0).probs, first.probs)


def test_bf16_rounds_weights_once_to_the_same_result():
    """The drafter's weights, rounded ahead, give what fp32 master weights give when bound in bf16."""
    config, params, frozen = drafter_parts("rnn")
    drafter = make("rnn", dtype=jnp.bfloat16)
    feed(drafter, context(6))
    ours = drafter.propose(3, uniforms(), 1.0)
    assert ours.hidden.dtype == jnp.bfloat16
    assert ours.probs.dtype == jnp.float32

    @jax.jit
    def from_master(params):
        cache = decode.new_cache(config, 1, 24, jnp.bfloat16)
        states = jnp.asarray(context(6), jnp.bfloat16)
        cache = decode.extend(params, config, cache, states, jnp.zeros(6, int), jnp.arange(6), jnp.bfloat16)
        arguments = (jnp.asarray([6]), jnp.asarray([3]), jnp.asarray(uniforms()), jnp.float32(1), jnp.bfloat16)
        return decode.propose(params, config, frozen, cache, *arguments)

    np.testing.assert_allclose(ours.probs, from_master(params).probs, atol=1e-3)


def test_misuse_is_refused_in_words():
    drafter = make()
    feed(drafter, context(20))
    with pytest.raises(ValueError, match="context would grow to 25 tokens but the cache holds 24"):
        feed(drafter, context(5))
    assert drafter.lengths.tolist() == [20]
    with pytest.raises(ValueError, match=r"context_hidden has shape \(3, 71\), expected \[n, 72\]"):
        feed(drafter, context(3)[..., :-1])
    for counts in ([4], [-1], [1, 1]):
        with pytest.raises(
            ValueError, match=rf"counts \[{counts[0]}.* must be 1 numbers of tokens, in all at most the 3"
        ):
            drafter.extend(context(3), np.array(counts))
    with pytest.raises(ValueError, match=r"anchor_token \[31\] must be 1 id\(s\) below 31"):
        drafter.propose(31, uniforms(), 0.0)
    with pytest.raises(ValueError, match=r"temperature -1\.0 is negative"):
        drafter.propose(3, uniforms(), -1.0)
    with pytest.raises(ValueError, match=r"uniforms has shape \(1, 3\), expected \(1, 4\)"):
        drafter.propose(3, uniforms()[:, :3], 0.0)
