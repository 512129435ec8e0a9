"""The attention kernels, run by Pallas' interpreter: real head dims, ragged sizes, drawn anchors; against NumPy."""

import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

from draft_jax.attention import block_attention, choose_implementation, triton, xla
from draft_jax.attention.tiles import Tile, filling, key_ranges, row_ranges

#: Names to B, L, N, K, H, G, C. No L is a multiple of a key tile, no N * K * H / G of a row tile.
SHAPES = {
    "qwen3": (1, 37, 3, 7, 8, 2, 128),
    "glm": (1, 21, 2, 7, 4, 1, 64),
    "smollm2": (2, 19, 3, 7, 9, 3, 64),
    "one head each": (1, 45, 5, 3, 2, 2, 64),
    "wide": (1, 33, 1, 16, 8, 1, 64),
}


def draw(shape, seed, documents=3):
    """Tensors and an output gradient; anchors at document starts, dummies and hidden keys among them."""
    B, L, N, K, H, G, C = shape
    rng = np.random.default_rng(seed)
    sizes = [(B, N, K, H, C), (B, L, G, C), (B, L, G, C), (B, N, K, G, C), (B, N, K, G, C), (B, N, K, H, C)]
    *tensors, probe = (rng.normal(size=size).astype(np.float32) for size in sizes)
    borders = np.sort(np.concatenate([np.zeros((B, 1), int), rng.integers(1, L, (B, documents - 1))], 1), axis=1)
    anchors = np.sort(rng.integers(0, L, (B, N)), axis=1)
    anchors[:, 0] = borders[:, -1]  # an anchor at the start of a document has no context
    starts = np.take_along_axis(borders, (borders[:, None] <= anchors[..., None]).sum(-1) - 1, axis=1)
    keep = rng.random((B, N)) < 0.8
    valid = rng.random((B, L)) < 0.9 if seed % 2 else np.ones((B, L), bool)
    return tensors, (anchors.astype(np.int32), starts.astype(np.int32), keep, valid), probe


def dense(tensors, sides, probe):
    """Output and the five gradients in fp64, written out: one mask over context and all blocks, K and V repeated."""
    anchors, starts, keep, valid = sides
    q, kc, vc, kb, vb = (x.astype(np.float64) for x in tensors)
    B, N, K, H, C = q.shape
    L, G = kc.shape[1:3]
    R = H // G
    repeat = lambda c, b: np.concatenate([c, b.reshape(B, N * K, G, C)], 1).repeat(R, 2)  # noqa: E731
    keys, values = repeat(kc, kb), repeat(vc, vb)
    t = np.arange(L)
    context = (t >= starts[..., None]) & (t < anchors[..., None]) & valid[:, None]
    own = np.broadcast_to(np.eye(N, dtype=bool).repeat(K, 1), (B, N, N * K))
    mask = np.concatenate([context, own], -1).repeat(K, 1)[:, None]  # [B, 1, N * K, L + N * K]
    rows, do = q.reshape(B, N * K, H, C), (probe * keep[..., None, None, None]).reshape(B, N * K, H, C)
    scores = np.where(mask, np.einsum("bqhc,bkhc->bhqk", rows, keys) / np.sqrt(C), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bhqk,bkhc->bqhc", weights, values).reshape(q.shape) * keep[..., None, None, None]
    dweights = np.einsum("bqhc,bkhc->bhqk", do, values)
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdims=True)) / np.sqrt(C)
    dq = np.einsum("bhqk,bkhc->bqhc", dscores, keys).reshape(q.shape)
    results = [out, dq]
    gathered = [np.einsum("bhqk,bqhc->bkhc", dscores, rows), np.einsum("bhqk,bqhc->bkhc", weights, do)]
    grouped = [x.reshape(B, L + N * K, G, R, C).sum(3) for x in gathered]
    results += [x[:, :L] for x in grouped] + [x[:, L:].reshape(B, N, K, G, C) for x in grouped]
    return results


# Kernels are large loops to the CPU's compiler; nearly all of a test's time would go into optimising them.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.partial(jax.jit, compiler_options=QUICK)
def interpreted(tensors, sides, probe):
    """Output and the five gradients of the kernels."""
    out, back = jax.vjp(lambda *t: triton.block_attention(*t, *sides, interpret=True), *tensors)
    return [out, *back(probe)]


def assert_equal(got, want):
    for name, a, b in zip(("out", "q", "k_context", "v_context", "k_block", "v_block"), got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("name", SHAPES)
def test_equals_dense(name):
    case = draw(SHAPES[name], seed=1)
    assert_equal(interpreted(*case), dense(*case))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), documents=st.integers(1, 6), order=st.sampled_from(["sorted", "shuffled"]))
def test_any_anchors(seed, documents, order):
    """Whatever the documents, the dummies, the hidden keys and the order of the anchors."""
    tensors, (anchors, starts, keep, valid), probe = draw((1, 29, 4, 2, 2, 1, 16), seed, documents)
    if order == "shuffled":
        perm = np.random.default_rng(seed).permutation(anchors.shape[1])
        anchors, starts, keep = anchors[:, perm], starts[:, perm], keep[:, perm]
    case = (tensors, (anchors, starts, keep, valid), probe)
    assert_equal(interpreted(*case), dense(*case))


def test_nothing_visible():
    """Anchors at 0, every key hidden, all dummies: the block alone, or zeros."""
    tensors, (anchors, starts, keep, valid), probe = draw((1, 29, 4, 2, 2, 1, 16), seed=3)
    zeros, all_kept = np.zeros_like(anchors), np.ones_like(keep)
    for sides in (
        (zeros, zeros, all_kept, np.ones_like(valid)),
        (anchors, starts, all_kept, np.zeros_like(valid)),
        (anchors, starts, np.zeros_like(keep), valid),
    ):
        got = interpreted(tensors, sides, probe)
        assert_equal(got, dense(tensors, sides, probe))
        assert not np.asarray(got[2]).any()
        assert not np.asarray(got[3]).any()


def test_bf16_is_as_good_as_xla():
    """Relative error of outputs and gradients against fp64 on the same bf16 values: below 1e-2."""
    tensors, sides, probe = draw(SHAPES["smollm2"], seed=2)
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in (*tensors, probe)]
    exact = [np.asarray(x, np.float32) for x in rounded]
    got = interpreted(rounded[:5], sides, rounded[5])
    for a, b in zip(got, dense(exact[:5], sides, exact[5]), strict=True):
        assert a.dtype == jnp.bfloat16
        assert np.linalg.norm(np.asarray(a, np.float64) - b) < 1e-2 * np.linalg.norm(b)


@functools.partial(jax.jit, static_argnames="tile")
def both_ranges(low, high, valid, tile):
    ranges = key_ranges(low, high, valid, tile)
    return ranges[0], row_ranges(ranges, valid.shape[1] // tile.keys)[0]


ranges_case = st.tuples(st.integers(0, 2**31), st.sampled_from([4, 8]), st.sampled_from([4, 16]), st.booleans())


@settings(max_examples=100, deadline=None)
@given(ranges_case)
def test_ranges_cover_what_is_seen_and_no_more(case):
    """Every visible pair is visited once; tiles said to need no mask need none; nothing past the last anchor."""
    seed, rows, keys, ordered = case
    tile = Tile(rows, keys, 4, 1)
    _, (anchors, starts, keep, valid), _ = draw((1, 48, 12, 2, 1, 1, 1), seed)
    if not ordered:
        anchors = anchors[:, ::-1].copy()
        starts = starts[:, ::-1].copy()
    low, high = (np.where(keep, x, 0).repeat(2, 1) for x in (starts, anchors))
    t = np.arange(48)
    within = (t >= low[0][:, None]) & (t < high[0][:, None])
    sees = within & valid[0]
    tiles = sees.reshape(-1, rows, 48 // keys, keys).transpose(0, 2, 1, 3)  # [T, J, rows, keys]
    ranges, flipped = map(np.asarray, both_ranges(low, high, valid, tile))
    for i, j in np.ndindex(tiles.shape[:2]):
        for (first, full_low, full_high, last), at in ((ranges[i], j), (flipped[j], i)):
            assert first <= full_low <= full_high <= last
            if tiles[i, j].any():
                assert first <= at < last
            if full_low <= at < full_high:
                assert tiles[i, j].all()
    for i, (first, _, _, last) in enumerate(ranges):
        mine = within[i * rows : (i + 1) * rows]
        if mine.any():
            assert first == np.flatnonzero(mine.any(0))[0] // keys
            assert last == np.flatnonzero(mine.any(0))[-1] // keys + 1
        else:
            assert first == last


def test_splits_fill_the_device():
    assert filling(Tile(64, 128, 8, 3), programs=256).splits == 1
    assert filling(Tile(64, 128, 8, 3), programs=64).splits == 4
    assert filling(Tile(64, 128, 8, 3), programs=1).splits == 8
    assert filling(Tile(64, 128, 8, 3, splits=2), programs=1).splits == 2


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1, 500, 64, 7, 9, 3, 64), "bfloat16"), ((2, 512, 9, 16, 8, 1, 128), "float16")]
)
def test_compiles_to_kernels_of_the_gpu(shape, dtype):
    """Lowered for an H200 (no GPU needed): Triton takes only arrays whose sizes are powers of two."""
    tensors, sides, probe = draw(shape, seed=0)
    tensors, probe = [jnp.asarray(x, dtype) for x in tensors], jnp.asarray(probe, dtype)

    def step(tensors, probe):
        out, back = jax.vjp(lambda *t: block_attention(*t, *sides, implementation="triton"), *tensors)
        return out, back(probe)

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        lowered = jax.jit(step).trace(tensors, probe).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("__gpu$xla.gpu.triton") == 5


def test_keeps_output_and_log_sum_exp_only():
    """What the backward pass holds besides the inputs: one output and one fp32 number per query row."""
    tensors, sides, _ = draw((1, 64, 16, 4, 4, 2, 16), seed=0)
    out, back = jax.eval_shape(
        lambda *t: jax.vjp(lambda *t: triton.block_attention(*t, *sides, interpret=True), *t), *tensors
    )
    query_rows = 16 * 4 * 4
    held = sorted(x.size for x in jax.tree.leaves(back) if x.size >= query_rows)
    assert held == sorted([*(x.size for x in tensors), out.size, query_rows])


@pytest.mark.parametrize(
    ("name", "platform", "kind", "dtype", "head_dim", "chosen"),
    [
        ("auto", "gpu", "NVIDIA H200", "bfloat16", 128, "triton"),
        ("auto", "gpu", "NVIDIA H200", "float32", 128, "xla"),
        ("auto", "gpu", "NVIDIA H200", "bfloat16", 96, "xla"),
        ("auto", "gpu", "gfx942", "bfloat16", 128, "xla"),
        ("auto", "cpu", "cpu", "bfloat16", 64, "xla"),
        ("xla", "gpu", "NVIDIA H200", "bfloat16", 128, "xla"),
        ("triton", "gpu", "NVIDIA H200", "float16", 64, "triton"),
    ],
)
def test_choice(name, platform, kind, dtype, head_dim, chosen):
    assert choose_implementation(name, platform, kind, dtype, head_dim) == chosen


@pytest.mark.parametrize(
    ("name", "platform", "dtype", "head_dim", "message"),
    [
        ("triton", "gpu", "float32", 128, "bfloat16 or float16, not float32; use 'xla'"),
        ("triton", "gpu", "bfloat16", 80, "head dims 64, 128, not 80; use 'xla'"),
        ("triton", "cpu", "bfloat16", 64, "needs an NVIDIA GPU"),
        ("flash9", "gpu", "bfloat16", 64, "'flash9' is unknown; available: auto, triton"),
    ],
)
def test_a_kernel_that_cannot_run_says_why(name, platform, dtype, head_dim, message):
    with pytest.raises(ValueError, match=message):
        choose_implementation(name, platform, "NVIDIA H200" if platform == "gpu" else "cpu", dtype, head_dim)


def test_refuses_what_it_is_not_made_for():
    tensors, sides, _ = draw((1, 29, 4, 2, 2, 1, 16), seed=0)
    with pytest.raises(ValueError, match="computes in bfloat16 or float16, not float32; use 'xla'"):
        block_attention(*map(jnp.asarray, tensors), *sides, implementation="triton")


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    "shape",
    [
        (2, 1000, 65, 7, 32, 8, 128),
        (1, 513, 40, 7, 64, 16, 64),
        (1, 300, 33, 16, 8, 1, 64),
        (1, 100, 9, 5, 9, 3, 64),
        (1, 64, 3, 7, 2, 2, 128),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_a_gpu(shape, dtype):
    """Compiled: relative error of outputs and gradients against fp64 on the same rounded values."""
    tensors, sides, probe = draw(shape, seed=5)
    rounded = [jnp.asarray(x, dtype) for x in (*tensors, probe)]
    exact = [np.asarray(x, np.float32) for x in rounded]

    @jax.jit
    def step(tensors, probe):
        out, back = jax.vjp(lambda *t: block_attention(*t, *sides, implementation="triton"), *tensors)
        return [out, *back(probe)]

    for a, b in zip(step(rounded[:5], rounded[5]), dense(exact[:5], sides, exact[5]), strict=True):
        assert np.linalg.norm(np.asarray(a, np.float64) - b) < 1e-2 * np.linalg.norm(b)


SHARDED = """
import sys
sys.path.insert(0, {root!r})
import importlib.util
import jax, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
spec = importlib.util.spec_from_file_location("test_attention_triton", {here!r})
module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
assert len(jax.devices()) == 2
tensors, sides, probe = module.draw((2, 19, 2, 2, 2, 1, 16), seed=1)
mesh = Mesh(np.array(jax.devices()), ("data",))
specs = dict(in_specs=P("data"), out_specs=P("data"))
split = jax.shard_map(module.interpreted.__wrapped__, mesh=mesh, check_vma=False, **specs)
got = jax.jit(split, compiler_options=module.QUICK)(tensors, sides, probe)
assert all(len(x.sharding.device_set) == 2 for x in got)
module.assert_equal(got, module.dense(tensors, sides, probe))
print("equal")
"""


def test_rows_split_over_devices():
    """Inside `shard_map`, as the training step calls it: two devices (fake ones, a new process), a row each."""
    here = Path(__file__).resolve()
    result = subprocess.run(
        [sys.executable, "-c", SHARDED.format(root=str(here.parents[2]), here=str(here))],
        env={"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == "equal", result.stderr


def test_xla_is_the_same_function():
    case = draw(SHAPES["qwen3"], seed=4)
    tensors, sides, _ = case
    np.testing.assert_allclose(xla.block_attention(*tensors, *sides), dense(*case)[0], atol=1e-5)
