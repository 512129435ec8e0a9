"""The one-kernel optimizer step against optax's own chain and against XLA's form: on a CPU by Pallas' interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from train import fused_update as fused
from train.config import OptimizerConfig
from train.optimizer import make_optimizer
from train.sharding import make_mesh

SHAPE = (3, fused.BLOCK)
MESH = make_mesh(jax.devices()[:1])
INTERPRET = jax.default_backend() != "gpu"


def leaves(seed):
    """Parameter, moments and gradient; a moment of squares is not negative."""
    rng = np.random.default_rng(seed)
    param, mu, nu, gradient = (rng.normal(size=SHAPE).astype(np.float32) for _ in range(4))
    return param, 0.1 * mu, 0.1 * nu**2, gradient


def step_of(scale=0.5, rate=1e-2, usable=True, count=3):
    return fused.Step(jnp.float32(scale), jnp.float32(rate), jnp.asarray(usable), jnp.int32(count))


@pytest.fixture(scope="module")
def run():
    @jax.jit
    def call(step, *arrays):
        return vars(
            fused.fused_update(
                make_optimizer(OptimizerConfig(weight_decay=0.1)), step, *arrays,
                sharding=NamedSharding(MESH, P()), rounded=jnp.bfloat16, empty=True, interpret=INTERPRET,
            )
        )  # fmt: skip

    return call


@pytest.mark.gpu_too
def test_equals_the_chain_of_optax(run):
    """Clip, Adam, decay and rate of optax, over six steps that feed on each other; every second gradient is clipped."""
    config = OptimizerConfig(weight_decay=0.1, max_grad_norm=20.0)
    chain = optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(1e-2, b1=config.betas[0], b2=config.betas[1], eps=config.eps, weight_decay=config.weight_decay),
    )
    param, *_ = leaves(0)
    theirs, state = jnp.asarray(param), chain.init(jnp.asarray(param))
    ours, mu, nu = jnp.asarray(param), jnp.zeros(SHAPE), jnp.zeros(SHAPE)
    clipped = 0
    for count in range(6):
        gradient = leaves(count)[3] * (1.0 if count % 2 else 0.1)
        norm = float(np.linalg.norm(gradient))
        clipped += norm > config.max_grad_norm
        updates, state = chain.update(jnp.asarray(gradient), state, theirs)
        new = run(step_of(make_optimizer(config).clip(jnp.float32(norm)), 1e-2, True, count), ours, mu, nu, gradient)
        assert float(new["update_square"]) == pytest.approx(float(jnp.sum(updates**2)), rel=1e-5)
        theirs = optax.apply_updates(theirs, updates)
        ours, mu, nu = new["param"], new["mu"], new["nu"]
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)
        assert float(new["param_square"]) == pytest.approx(float(jnp.sum(theirs**2)), rel=1e-6)
    assert clipped == 3


@pytest.mark.gpu_too
def test_equals_the_form_for_other_devices(run):
    step, arrays = step_of(), [jnp.asarray(x) for x in leaves(1)]
    plain = vars(fused.plain_update(make_optimizer(OptimizerConfig(weight_decay=0.1)), step, *arrays))
    new = run(step, *arrays)
    for name in ("param", "mu", "nu"):
        np.testing.assert_allclose(new[name], plain[name], rtol=1e-6, atol=1e-8, err_msg=name)
    for name in ("update_square", "param_square"):
        np.testing.assert_allclose(new[name], plain[name], rtol=1e-5, err_msg=name)
    assert new["rounded"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(new["rounded"]), np.asarray(new["param"].astype(jnp.bfloat16)))
    assert not np.any(new["emptied"])


@pytest.mark.gpu_too
def test_a_step_that_is_not_usable_changes_no_bit(run):
    param, mu, nu, gradient = leaves(2)
    param[0, :4] = -0.0
    gradient[1, 1] = np.nan
    new = run(step_of(usable=False), param, mu, nu, gradient)
    for name, old in (("param", param), ("mu", mu), ("nu", nu)):
        assert np.asarray(new[name]).tobytes() == old.tobytes(), name
    assert float(new["update_square"]) == 0
    assert not np.any(new["emptied"])


@pytest.mark.gpu_too
def test_only_what_was_asked_for_is_written():
    arrays = [jnp.asarray(x) for x in leaves(3)]
    for rounded, empty in ((None, False), (None, True), (jnp.bfloat16, False)):
        new = fused.fused_update(
            make_optimizer(OptimizerConfig()), step_of(), *arrays,
            sharding=NamedSharding(MESH, P()), rounded=rounded, empty=empty, interpret=INTERPRET,
        )  # fmt: skip
        assert (new.rounded is None) == (rounded is None)
        assert (new.emptied is None) == (not empty)


def test_which_leaves_go_through_the_kernel():
    """None on a CPU; on NVIDIA GPUs those of whole blocks that are not small."""

    class Card:
        platform, device_kind = "gpu", "NVIDIA H200"

    def on(device):
        class Sharding:
            mesh = type("Mesh", (), {"devices": np.array([device], dtype=object)})
            shard_shape = staticmethod(lambda shape: shape)

        return Sharding()

    card = Card()
    large = jax.ShapeDtypeStruct((64, fused.BLOCK), jnp.float32)
    assert fused.can_fuse(large, on(card))
    assert not fused.can_fuse(jax.ShapeDtypeStruct((fused.BLOCK,), jnp.float32), on(card))
    assert not fused.can_fuse(jax.ShapeDtypeStruct((64, fused.BLOCK + 1), jnp.float32), on(card))
    assert not fused.can_fuse(large, NamedSharding(MESH, P()))
    card.device_kind = "AMD Instinct MI300X"
    assert not fused.can_fuse(large, on(card))


DEVICES = """
import functools, sys
sys.path.insert(0, {root!r})
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from tests.train import test_fused_update as module
from train import fused_update as fused
from train.config import OptimizerConfig
from train.optimizer import make_optimizer
from train.sharding import make_mesh
assert len(jax.devices()) == 4
arrays = [jnp.tile(jnp.asarray(x), (4, 1)) for x in module.leaves(4)]

def run(*arrays, sharding):
    return vars(fused.fused_update(make_optimizer(OptimizerConfig()), module.step_of(), *arrays, sharding=sharding,
                                   rounded=jnp.bfloat16, interpret=True))

alone = run(*arrays, sharding=NamedSharding(make_mesh(jax.devices()[:1]), P()))
mesh = make_mesh(jax.devices(), 2)
for spec in (P(), P("fsdp"), P(None, ("data", "fsdp"))):
    sharding = NamedSharding(mesh, spec)
    split = jax.jit(functools.partial(run, sharding=sharding))(*jax.device_put(arrays, sharding))
    assert split["param"].sharding.is_equivalent_to(sharding, 2)
    for name, value in split.items():
        if value is not None:
            np.testing.assert_allclose(np.asarray(value, np.float32), np.asarray(alone[name], np.float32), rtol=1e-5)
print("equal")
"""


def test_split_leaves_equal_whole_ones():
    """4 devices: whole on each, split by rows, split by columns over two axes of the mesh."""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", DEVICES.format(root=str(root))],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("equal")
