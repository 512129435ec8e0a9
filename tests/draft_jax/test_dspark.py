"""DSpark's forward: what a block may see, what it must not, and in which dtype. Values: tests/parity."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draft_jax.batch import FrozenHead
from draft_jax.models.dspark import abstract_params, bind, init_params, path_name

from .drafts import blocks_at, frozen_head, random_batch, random_params, tiny_config

pytestmark = pytest.mark.usefixtures("quick_compilation")
CONFIG = tiny_config()
FROZEN = frozen_head(CONFIG)


@functools.cache
def params_of(config=CONFIG):
    return random_params(config)


@functools.partial(jax.jit, static_argnames=("config", "dtype"))
def forward(params, batch, blocks, frozen, valid, config=CONFIG, dtype=jnp.float32):
    return bind(config, params, dtype)(batch, blocks, frozen, valid)


def hidden_of(batch, anchors, keep=None, valid=None, params=None, **options):
    valid = jnp.ones(batch.input_ids.shape, bool) if valid is None else jnp.asarray(valid)
    params = params_of() if params is None else params
    return np.asarray(forward(params, batch, blocks_at(batch, anchors, CONFIG, keep), FROZEN, valid, **options))


def changed(batch, positions, **fields):
    """The batch with other ids and states at `positions` of row 0."""
    rng = np.random.default_rng(99)
    context, ids = np.array(batch.context_hidden), np.array(batch.input_ids)
    context[0, positions] = rng.normal(size=context[0, positions].shape)
    if fields.get("ids", True):
        ids[0, positions] = (ids[0, positions] + 1) % CONFIG.vocab_size
    return dataclasses.replace(batch, context_hidden=jnp.asarray(context), input_ids=jnp.asarray(ids))


def perturbed(params, *path, by=1.5):
    """The parameters with one leaf scaled."""
    key, *rest = path
    return {**params, key: perturbed(params[key], *rest, by=by) if rest else params[key] * by}


# -- what a block sees ---------------------------------------------------------------------------------------


def test_case_t15_no_leak_between_blocks():
    """Anchors 3 and 5 overlap: states from 5 on do not reach block 1, states from 3 on do not reach block
    0."""
    batch = random_batch(CONFIG, [[12]], 12)
    before = hidden_of(batch, [[3, 5]])
    late = hidden_of(changed(batch, range(5, 12), ids=False), [[3, 5]])
    np.testing.assert_array_equal(late, before)
    later = hidden_of(changed(batch, range(3, 12), ids=False), [[3, 5]])
    np.testing.assert_array_equal(later[:, 0], before[:, 0])
    assert np.abs(later[:, 1] - before[:, 1]).max() > 1e-2
    for position in (0, 2):
        earlier = hidden_of(changed(batch, [position], ids=False), [[3, 5]])
        assert np.abs(earlier - before).max(axis=(2, 3)).min() > 1e-3


def test_tokens_matter_only_as_the_anchor():
    """dspark_spec 8.7: other tokens from p on change the block of p only through x_p itself."""
    batch = random_batch(CONFIG, [[12]], 12)
    before = hidden_of(batch, [[4, 6]])
    np.testing.assert_array_equal(hidden_of(changed(batch, range(5, 12)), [[4, 6]])[:, 0], before[:, 0])
    assert np.abs(hidden_of(changed(batch, [4]), [[4, 6]]) - before).max() > 1e-2


def test_a_block_is_seen_whole_by_each_of_its_slots():
    """Bidirectional: slot 0 changes with the number of slots behind it."""
    batch = random_batch(CONFIG, [[12]], 12)
    longer = tiny_config(block_size=5)
    valid = jnp.ones((1, 12), bool)
    hidden = forward(params_of(), batch, blocks_at(batch, [[4]], longer), FROZEN, valid, config=longer)
    assert np.abs(hidden[0, 0, 0] - hidden_of(batch, [[4, 6]])[0, 0, 0]).max() > 1e-2


def test_packed_documents_equal_documents_alone():
    packed = random_batch(CONFIG, [[5, 9, 4]], 20)
    together = hidden_of(packed, [[3, 5, 8, 11, 16]])
    where = {
        0: (5, [3]),
        5: (9, [0, 3, 6]),
        14: (4, [2]),
    }  # first token of the document: length, anchors in it
    alone = []
    for begin, (length, anchors) in where.items():
        batch = random_batch(CONFIG, [[length]], 20)
        fields = {name: np.array(getattr(batch, name)) for name in ("input_ids", "context_hidden", "last_hidden")}
        for name, field in fields.items():
            field[:, :length] = getattr(packed, name)[:, begin : begin + length]
        batch = dataclasses.replace(batch, **{name: jnp.asarray(field) for name, field in fields.items()})
        count = len(anchors)
        hidden = hidden_of(batch, [anchors + [0] * (5 - count)], keep=[[n < count for n in range(5)]])
        alone.append(hidden[:, :count])
    np.testing.assert_allclose(together, np.concatenate(alone, axis=1), atol=1e-5)


def test_padding_changes_nothing():
    """Neither rows that are all padding, nor a longer tail, nor what stands in it."""
    short = random_batch(CONFIG, [[12]], 12)
    alone = hidden_of(short, [[3, 7]])
    wide = random_batch(CONFIG, [[12], []], 20)
    junk = np.array(wide.context_hidden)
    junk[:, 12:] = np.random.default_rng(5).normal(size=junk[:, 12:].shape) * 100
    wide = dataclasses.replace(wide, context_hidden=jnp.asarray(junk))
    padded = hidden_of(wide, [[3, 7], [0, 0]], keep=[[True, True], [False, False]])
    np.testing.assert_allclose(padded[:1], alone, atol=1e-5)


def test_positions_come_from_the_batch():
    """Only distances matter to rotary attention; a gap in the positions is one."""
    batch = random_batch(CONFIG, [[12]], 12)
    before = hidden_of(batch, [[6, 9]])
    shifted = dataclasses.replace(batch, positions=batch.positions + 40)
    np.testing.assert_allclose(hidden_of(shifted, [[6, 9]]), before, atol=1e-4)
    gap = dataclasses.replace(batch, positions=batch.positions.at[:, 6:].add(7))
    assert np.abs(hidden_of(gap, [[6, 9]]) - before).max() > 1e-2


def test_invalid_context_is_unseen_whatever_it_holds():
    """NaN at a hidden position reaches neither the result nor any gradient."""
    batch = random_batch(CONFIG, [[12], []], 12)
    anchors, keep = [[3, 6], [0, 0]], [[True, True], [False, False]]
    valid = np.ones((2, 12), bool)
    valid[0, [1, 4]] = False
    broken = np.array(batch.context_hidden)
    broken[0, [1, 4]] = np.nan
    broken = dataclasses.replace(batch, context_hidden=jnp.asarray(broken))
    masked = hidden_of(batch, anchors, keep, valid)
    np.testing.assert_array_equal(hidden_of(broken, anchors, keep, valid), masked)
    assert np.abs(masked - hidden_of(batch, anchors, keep)).max() > 1e-2
    for gradient in jax.tree.leaves(gradients(broken, anchors, keep, valid)):
        assert np.isfinite(gradient).all()


@functools.partial(jax.jit, static_argnames="config")
def _gradients(params, batch, blocks, valid, config=CONFIG):
    def loss(params):
        hidden = bind(config, params, jnp.float32)(batch, blocks, FROZEN, valid)
        return (hidden**2 * blocks.keep[..., None, None]).sum()

    return jax.grad(loss)(params)


def gradients(batch, anchors, keep=None, valid=None):
    valid = jnp.ones(batch.input_ids.shape, bool) if valid is None else jnp.asarray(valid)
    return _gradients(params_of(), batch, blocks_at(batch, anchors, CONFIG, keep), valid)


def test_dummy_blocks_are_finite_and_teach_nothing():
    batch = random_batch(CONFIG, [[12], []], 12)
    keep = [[True, False], [False, False]]
    assert np.isfinite(hidden_of(batch, [[6, 0], [0, 0]], keep=keep)).all()
    with_dummies = gradients(batch, [[6, 0], [0, 0]], keep=keep)
    alone = gradients(random_batch(CONFIG, [[12]], 12), [[6]])
    for got, want in zip(jax.tree.leaves(with_dummies), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * (1e-3 + np.abs(want).max()))
    nothing = gradients(batch, [[0, 0], [0, 0]], keep=np.zeros((2, 2), bool))
    for gradient in jax.tree.leaves(nothing):
        assert not np.asarray(gradient).any()


# -- how the context gets in ---------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="config")
def context_keys_values(params, batch, config=CONFIG):
    draft = bind(config, params, jnp.float32)
    return draft.context_keys_values(draft.context(batch.context_hidden), batch.positions)


def test_every_layer_projects_the_same_features_without_its_input_norm():
    batch = random_batch(CONFIG, [[12]], 12)
    plain = context_keys_values(params_of(), batch)
    assert [k.shape for k, _ in plain] == [(1, 12, 2, 8)] * 2
    other = perturbed(params_of(), "layers", "1", "input_layernorm", "scale")
    for got, want in zip(jax.tree.leaves(context_keys_values(other, batch)), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(got, want)
    # Values by hand: RMSNorm of the projected taps, through the layer's own v_proj.
    taps = np.asarray(batch.context_hidden, np.float64)
    features = taps @ np.asarray(params_of()["fc"]["kernel"], np.float64)
    features /= np.sqrt((features**2).mean(-1, keepdims=True) + CONFIG.rms_norm_eps)
    features *= np.asarray(params_of()["hidden_norm"]["scale"], np.float64)
    for layer, (_, values) in enumerate(plain):
        kernel = np.asarray(params_of()["layers"][str(layer)]["self_attn"]["v_proj"]["kernel"], np.float64)
        np.testing.assert_allclose(values.reshape(1, 12, 16), features @ kernel, atol=1e-4)


@pytest.mark.parametrize("silent", ["0", "1"])
def test_context_reaches_the_block_through_each_layer(silent):
    """With the attention of one layer switched off, the other one still brings the context in."""
    batch = random_batch(CONFIG, [[12]], 12)
    params = perturbed(params_of(), "layers", silent, "self_attn", "o_proj", "kernel", by=0.0)
    difference = hidden_of(changed(batch, [2], ids=False), [[3, 7]], params=params)
    assert np.abs(difference - hidden_of(batch, [[3, 7]], params=params)).max() > 1e-2


def test_embedding_and_head_are_arguments():
    """They are in no parameter, and another target's rows give another result from the same compiled
    program."""
    assert not [path for path in paths(params_of()) if "embed_tokens" in path or "lm_head" in path]
    batch = random_batch(CONFIG, [[12]], 12)
    valid, blocks = jnp.ones((1, 12), bool), blocks_at(batch, [[3, 7]], CONFIG)
    before = forward(params_of(), batch, blocks, FROZEN, valid)
    compiled = forward._cache_size()
    other = frozen_head(CONFIG, seed=7)
    assert np.abs(forward(params_of(), batch, blocks, other, valid) - before).max() > 1e-2
    # The head is not used by the backbone, so a target without a second matrix can pass the embedding twice.
    tied = FrozenHead(embedding=FROZEN.embedding, lm_head=FROZEN.embedding)
    np.testing.assert_array_equal(forward(params_of(), batch, blocks, tied, valid), before)
    assert forward._cache_size() == compiled


# -- numbers -------------------------------------------------------------------------------------------------


def test_bf16_computes_in_bf16_with_fp32_rotary_angles():
    batch = random_batch(CONFIG, [[12]], 12)
    hidden = hidden_of(batch, [[3, 7]], dtype=jnp.bfloat16)
    assert hidden.dtype == jnp.bfloat16
    exact = hidden_of(batch, [[3, 7]])
    np.testing.assert_allclose(hidden.astype(np.float32), exact, atol=0.15)
    assert np.abs(hidden.astype(np.float32) - exact).mean() < 0.02

    blocks, valid = blocks_at(batch, [[3, 7]], CONFIG), jnp.ones((1, 12), bool)
    traced = jax.make_jaxpr(lambda p: bind(CONFIG, p, jnp.bfloat16)(batch, blocks, FROZEN, valid))(params_of())
    kinds: dict[str, set[str]] = {}

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            kinds.setdefault(equation.primitive.name, set()).update(str(v.aval.dtype) for v in equation.invars)
            for value in equation.params.values():
                if hasattr(getattr(value, "jaxpr", value), "eqns"):
                    walk(getattr(value, "jaxpr", value))

    walk(traced.jaxpr)
    for name in ("cos", "sin", "exp", "rsqrt", "reduce_max"):
        assert kinds[name] == {"float32"}, name
    assert kinds["dot_general"] == {"bfloat16"}


def test_bf16_block_depends_on_distances_only():
    """3000 positions further on, the same block: rounded frequencies or angles would turn it into another."""
    batch = random_batch(CONFIG, [[12]], 12)
    near = hidden_of(batch, [[3, 7]], dtype=jnp.bfloat16).astype(np.float32)
    far = dataclasses.replace(batch, positions=batch.positions + 3000)
    moved = hidden_of(far, [[3, 7]], dtype=jnp.bfloat16).astype(np.float32)
    np.testing.assert_allclose(moved, near, atol=0.15)


def test_sublayers_are_named_for_profiles():
    batch = random_batch(CONFIG, [[12]], 12)
    blocks, valid = blocks_at(batch, [[3, 7]], CONFIG), jnp.ones((1, 12), bool)
    text = forward.lower(params_of(), batch, blocks, FROZEN, valid).as_text(debug_info=True)
    for scope in ("context", "context_kv", "embed", "layer_0", "self_attn", "attention", "mlp", "norm"):
        assert f"{scope}/" in text, scope


# -- parameters ----------------------------------------------------------------------------------------------


def paths(params) -> list[str]:
    return [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]


def test_initialisation():
    config = tiny_config(
        num_hidden_layers=1, hidden_size=96, vocab_size=500, markov_head_type="gated", initializer_range=0.02
    )
    params = init_params(config, jax.random.key(3))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name, value = path_name(path), np.asarray(leaf)
        assert value.dtype == np.float32
        if name.endswith("scale"):
            assert (value == 1).all(), name
        elif name.endswith("bias"):
            assert not value.any(), name
        else:
            assert value.std() == pytest.approx(0.02, rel=6 / np.sqrt(value.size)), name
    again = init_params(config, jax.random.key(3))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), params, again)))
    other = init_params(config, jax.random.key(4))
    assert not (other["fc"]["kernel"] == params["fc"]["kernel"]).any()


@pytest.mark.parametrize("heads", ["vanilla", "gated", "rnn"])
def test_abstract_params_are_the_real_ones_without_memory(heads):
    config = tiny_config(markov_head_type=heads, num_hidden_layers=1)
    real, abstract = (
        init_params(config, jax.random.key(0), jnp.bfloat16),
        abstract_params(config, jnp.bfloat16),
    )
    assert jax.tree.structure(real) == jax.tree.structure(abstract)
    for a, b in zip(jax.tree.leaves(real), jax.tree.leaves(abstract), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_eleven_layers_stay_in_order():
    """Layer "10" sorts before "2" as text; it must still be the eleventh layer."""
    config = tiny_config(num_hidden_layers=11)
    draft = bind(config, params_of(config), jnp.float32)
    for i, layer in enumerate(draft.ordered_layers()):
        expected = params_of(config)["layers"][str(i)]["self_attn"]["q_proj"]["kernel"]
        np.testing.assert_array_equal(layer.self_attn.q_proj.kernel[...], expected)


def test_bind_refuses_other_trees_by_name():
    params = params_of()
    mlp = {k: v for k, v in params["layers"]["1"]["mlp"].items() if k != "up_proj"}
    layers = {**params["layers"], "1": {**params["layers"]["1"], "mlp": mlp}}
    with pytest.raises(ValueError, match="parameters lack layers/1/mlp/up_proj/kernel"):
        bind(CONFIG, {**params, "layers": layers}, jnp.float32)
    with pytest.raises(ValueError, match="parameters hold markov/gate_proj/bias"):
        bind(CONFIG, params_of(tiny_config(markov_head_type="gated")), jnp.float32)
    with pytest.raises(ValueError, match=r"fc/kernel has shape \(48, 24\), the draft config says \(72, 24\)"):
        bind(CONFIG, {**params, "fc": {"kernel": jnp.zeros((48, 24))}}, jnp.float32)
