"""Every attention implementation against one written with loops in NumPy; nothing leaks and nothing is
wasted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draft_jax.attention import IMPLEMENTATIONS, block_attention

B, L, N, K, H, G, C = 2, 13, 3, 4, 6, 2, 8
ANCHORS = np.array([[3, 5, 12], [0, 8, 0]])
STARTS = np.array([[0, 0, 6], [0, 8, 0]])
KEEP = np.array([[True, True, True], [True, True, False]])
VALID = np.ones((B, L), bool)
VALID[0, [1, 7]] = False
#: The kernels themselves need a GPU; their interpreted form runs the same code.
NAMES = sorted(set(IMPLEMENTATIONS) - {"triton"})


def inputs(seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    shapes = [(B, N, K, H, C), (B, L, G, C), (B, L, G, C), (B, N, K, G, C), (B, N, K, G, C)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@functools.partial(jax.jit, static_argnames="name")
def jitted(tensors, sides, name):
    return block_attention(*tensors, *sides, implementation=name)


def run(tensors, name="xla", anchors=ANCHORS, starts=STARTS, keep=KEEP, valid=VALID):
    return jitted(list(tensors), (anchors, starts, keep, valid), name)


def by_loops(tensors, anchors=ANCHORS, starts=STARTS, keep=KEEP, valid=VALID):
    """One query head of one slot at a time, fp64."""
    q, k_context, v_context, k_block, v_block = (np.asarray(x, np.float64) for x in tensors)
    out = np.zeros(q.shape)
    for b, n in np.ndindex(*anchors.shape):
        if not keep[b, n]:
            continue
        rows = [t for t in range(starts[b, n], anchors[b, n]) if valid[b, t]]
        for j, h in np.ndindex(q.shape[2], q.shape[3]):
            g = h // (q.shape[3] // k_block.shape[3])
            keys = np.concatenate([k_context[b, rows, g], k_block[b, n, :, g]])
            values = np.concatenate([v_context[b, rows, g], v_block[b, n, :, g]])
            scores = keys @ q[b, n, j, h] / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            out[b, n, j, h] = weights @ values / weights.sum()
    return out


@pytest.mark.parametrize("name", NAMES)
def test_equals_loops(name):
    tensors = inputs()
    np.testing.assert_allclose(run(tensors, name), by_loops(tensors), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_large_scores_do_not_overflow(name):
    tensors = inputs()
    tensors[0] = tensors[0] * 300
    np.testing.assert_allclose(run(tensors, name), by_loops(tensors), atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_softmax_is_fp32_in_bf16(name):
    """bf16 inputs: as good as fp64 on the same inputs, up to rounding weights and output once each."""
    tensors = inputs(dtype=jnp.bfloat16)
    out = run(tensors, name)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, np.float64), by_loops(tensors), atol=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_dummy_blocks_are_zero_with_finite_gradients(name):
    tensors = inputs()

    @jax.jit
    def gradients_of(tensors, keep):
        return jax.grad(lambda t: (run(t, name, keep=keep) ** 2).sum())(tensors)

    gradients = gradients_of(tensors, KEEP)
    assert not np.asarray(run(tensors, name))[~KEEP].any()
    for gradient in gradients:
        assert np.isfinite(gradient).all()
    for index in (0, 3, 4):  # q and the block's own keys and values
        assert not np.asarray(gradients[index])[~KEEP].any()
    none = np.zeros_like(KEEP)
    assert not np.asarray(run(tensors, name, keep=none)).any()
    assert not any(np.asarray(gradient).any() for gradient in gradients_of(tensors, none))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_those_of_a_dense_mask(name):
    """Against autodiff through one dense softmax over context and all blocks, K and V repeated."""
    tensors = inputs()
    probe = jnp.asarray(np.random.default_rng(9).normal(size=(B, N, K, H, C)), jnp.float32)

    def dense(tensors):
        q, k_context, v_context, k_block, v_block = tensors
        keys = jnp.concatenate([k_context, k_block.reshape(B, N * K, G, C)], 1).repeat(H // G, 2)
        values = jnp.concatenate([v_context, v_block.reshape(B, N * K, G, C)], 1).repeat(H // G, 2)
        t = np.arange(L)
        context = (t >= STARTS[..., None]) & (t < ANCHORS[..., None]) & VALID[:, None]
        own = np.broadcast_to(np.eye(N, dtype=bool).repeat(K, 1), (B, N, N * K))
        mask = np.concatenate([context, own], -1).repeat(K, 1)[:, None]
        scores = jnp.einsum("bqhc,bkhc->bhqk", q.reshape(B, N * K, H, C), keys) * C**-0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1)
        out = jnp.einsum("bhqk,bkhc->bqhc", weights, values).reshape(B, N, K, H, C)
        return jnp.where(KEEP[..., None, None, None], out, 0)

    def gradients_of(function):
        return jax.jit(jax.grad(lambda t: (function(t) * probe).sum()))(tensors)

    for got, want in zip(gradients_of(lambda t: run(t, name)), gradients_of(dense), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_case_t15_keys_seen(name):
    """Length 12, block 4, anchors 3 and 5: 7 and 9 keys, none of the other block (counted through the
    values)."""
    length, anchors = 12, np.array([[3, 5]])
    q = np.zeros((1, 2, 4, 1, 16), np.float32)  # all scores equal: the output is the mean of the visible values
    k_context, k_block = np.zeros((1, length, 1, 16), np.float32), np.zeros_like(q)
    # The value of key i is the unit vector i; block 0's slots share unit 12, block 1's share unit 13.
    unit = np.eye(16, dtype=np.float32)
    v_context = unit[None, :length, None]
    v_block = np.broadcast_to(unit[[12, 13]][None, :, None, None], q.shape)
    zeros, keep, valid = np.zeros((1, 2), int), np.ones((1, 2), bool), np.ones((1, length), bool)
    tensors = [q, k_context, v_context, k_block, v_block]
    out = np.asarray(run(tensors, name, anchors, zeros, keep, valid))[0, :, :, 0]
    seen_0, seen_1 = np.zeros(16), np.zeros(16)
    seen_0[:3], seen_0[12] = 1 / 7, 4 / 7
    seen_1[:5], seen_1[13] = 1 / 9, 4 / 9
    np.testing.assert_allclose(out[0], np.tile(seen_0, (4, 1)), atol=1e-6)
    np.testing.assert_allclose(out[1], np.tile(seen_1, (4, 1)), atol=1e-6)


def intermediate_sizes(function, *args) -> list[int]:
    """Elements of every array the traced function makes, inner calls included."""
    sizes = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            sizes.extend(int(np.prod(v.aval.shape)) for v in equation.outvars)
            for value in equation.params.values():
                for inner in value if isinstance(value, (list, tuple)) else [value]:
                    if hasattr(inner, "eqns"):
                        walk(inner)
                    elif hasattr(inner, "jaxpr"):
                        walk(inner.jaxpr)

    walk(jax.make_jaxpr(function)(*args).jaxpr)
    return sizes


@pytest.mark.parametrize("name", NAMES)
def test_no_scores_between_blocks_and_no_repeated_keys(name):
    """With many blocks and a short row, (N*K)^2 scores would dwarf everything; with a long row, repeated K
    would."""
    many = 40
    shapes = [(1, many, K, H, C), (1, 2, G, C), (1, 2, G, C), (1, many, K, G, C), (1, many, K, G, C)]
    tensors = [jnp.ones(shape) for shape in shapes]
    where, keep, valid = np.full((1, many), 2), np.ones((1, many), bool), np.ones((1, 2), bool)

    def loss(tensors):
        return run(tensors, name, where, np.zeros_like(where), keep, valid).sum()

    assert max(intermediate_sizes(jax.grad(loss), tensors)) < (many * K) ** 2

    long = 4096
    shapes = [(1, 1, 1, H, C), (1, long, G, C), (1, long, G, C), (1, 1, 1, G, C), (1, 1, 1, G, C)]
    tensors = [jnp.ones(shape) for shape in shapes]
    where, keep, valid = np.full((1, 1), long), np.ones((1, 1), bool), np.ones((1, long), bool)
    assert max(intermediate_sizes(jax.grad(loss), tensors)) < long * H * C


def test_unknown_implementation_is_named():
    with pytest.raises(ValueError, match=r"'flash9' is unknown; available: .*xla"):
        run(inputs(), "flash9")
