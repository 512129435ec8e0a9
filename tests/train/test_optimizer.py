"""Schedule and AdamW against their formulas and against torch."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.config import OptimizerConfig
from train.fused_update import Step, plain_update
from train.optimizer import group_norms, group_of, make_optimizer, make_schedule, squares_of


def formula(k: int, total: int, warmup: int, lr: float) -> float:
    if k < warmup:
        return lr * (k + 1) / warmup
    return lr * 0.5 * (1 + math.cos(math.pi * (k - warmup) / (total - warmup)))


@pytest.mark.parametrize(("total", "ratio"), [(100, 0.04), (1000, 0.04), (10, 0.04), (1, 0.04), (5, 0.9), (7, 0.0)])
def test_schedule(total, ratio):
    config = OptimizerConfig(lr=6e-4, warmup_ratio=ratio)
    schedule = jax.jit(make_schedule(config, total))
    got = [float(schedule(jnp.int32(k))) for k in range(total)]
    want = [formula(k, total, int(ratio * total), 6e-4) for k in range(total)]
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-10)
    assert float(schedule(jnp.int32(total))) == pytest.approx(0, abs=1e-10)


def test_lr_scale_changes_the_rate_and_not_the_shape():
    plain = make_schedule(OptimizerConfig(lr=1e-3), 50)
    scaled = make_schedule(OptimizerConfig(lr=1e-3, lr_scale=0.25), 50)
    for k in range(50):
        assert float(scaled(jnp.int32(k))) == pytest.approx(0.25 * float(plain(jnp.int32(k))), rel=1e-6)


@pytest.mark.parametrize("start", [0, 20, 90])
def test_a_rewarmed_rate_rises_to_the_schedule_and_is_it_from_then_on(start):
    """Steps 0..99, warm-up over 4; from `start` on one eighth more of the schedule's own rate each step."""
    config = OptimizerConfig(lr=1e-3, lr_scale=0.5, resume_rewarm_steps=8)
    schedule = jax.jit(make_schedule(config, 100))
    ramp = [1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8, 6 / 8, 7 / 8] + [1.0] * 100
    for k in range(start, 100):
        got = float(schedule(jnp.int32(k), jnp.int32(start)))
        assert got == pytest.approx(ramp[k - start] * formula(k, 100, 4, 5e-4), rel=2e-6, abs=1e-10)
    at_once = make_schedule(OptimizerConfig(lr=1e-3, lr_scale=0.5, resume_rewarm_steps=0), 100)
    assert float(at_once(jnp.int32(50), jnp.int32(50))) == pytest.approx(formula(50, 100, 4, 5e-4), rel=2e-6)


def test_empty_schedule_is_refused():
    with pytest.raises(ValueError, match="over 0 optimizer steps"):
        make_schedule(OptimizerConfig(), 0)


@functools.partial(jax.jit, static_argnums=0)
def updated(optimizer, rate, params, state, grads):
    """Parameters and state after a step, as the training step makes them on a CPU."""
    adam = state[1]
    step = Step(optimizer.clip(optax.global_norm(grads)), rate, jnp.asarray(True), adam.count)
    new = jax.tree.map(functools.partial(plain_update, optimizer, step), params, adam.mu, adam.nu, grads)
    of = lambda name: jax.tree.map(lambda leaf: getattr(leaf, name), new)  # noqa: E731
    return of("param"), (state[0], adam._replace(count=adam.count + 1, mu=of("mu"), nu=of("nu")), state[2])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_equals_torch(weight_decay):
    """Clip, moments, bias correction, decay and rate over 12 steps: torch.optim.AdamW is the independent opinion."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    shapes = {"fc": {"kernel": (6, 4)}, "layers": {"0": {"kernel": (5, 5)}}}
    params = jax.tree.map(
        lambda s: rng.normal(size=s).astype(np.float32), shapes, is_leaf=lambda s: isinstance(s, tuple)
    )
    config = OptimizerConfig(lr=1e-2, warmup_ratio=0.25, weight_decay=weight_decay, max_grad_norm=0.7)
    total = 12
    schedule, optimizer = make_schedule(config, total), make_optimizer(config)
    theirs = [torch.nn.Parameter(torch.tensor(p)) for p in jax.tree.leaves(params)]
    adamw = torch.optim.AdamW(theirs, lr=1.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay)
    ours = jax.tree.map(jnp.asarray, params)
    state = optimizer.init(ours)
    for k in range(total):
        grads = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), params)
        ours, state = updated(optimizer, schedule(jnp.int32(k)), ours, state, grads)
        for parameter, gradient in zip(theirs, jax.tree.leaves(grads)):
            parameter.grad = torch.tensor(gradient)
        torch.nn.utils.clip_grad_norm_(theirs, 0.7)
        adamw.param_groups[0]["lr"] = formula(k, total, 3, 1e-2)
        adamw.step()
    for a, b in zip(jax.tree.leaves(ours), theirs):
        np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_decay_spares_norms_and_biases():
    params = {"fc": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "norm": {"scale": jnp.ones(2)}}
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.5))
    zeros = jax.tree.map(jnp.zeros_like, params)
    new, _ = updated(optimizer, jnp.float32(1.0), params, optimizer.init(params), zeros)
    assert float(new["fc"]["kernel"][0, 0]) == 0.5
    assert float(new["fc"]["bias"][0]) == 1
    assert float(new["norm"]["scale"][0]) == 1


def test_groups_cover_the_draft(tiny_draft):
    from draft_jax.models.dspark import init_params

    params = init_params(tiny_draft, jax.random.key(0))
    norms = group_norms("size", squares_of(params))
    assert set(norms) == {f"size/{group}" for group in ("fc", "layers", "markov", "confidence", "norms")}
    total = math.sqrt(sum(float(v) ** 2 for v in norms.values()))
    assert total == pytest.approx(float(optax.global_norm(params)), rel=1e-6)
    assert group_of((jax.tree_util.DictKey("layers"), jax.tree_util.DictKey("input_layernorm"))) == "norms"


def test_moments_are_float32():
    params = {"fc": {"kernel": jnp.ones((2, 2), jnp.float32)}}
    state = make_optimizer(OptimizerConfig()).init(params)
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(state) if leaf.ndim}
    assert dtypes == {"float32"}
