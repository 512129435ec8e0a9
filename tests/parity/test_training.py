"""AdamW steps of the real training programs equal torch.optim.AdamW on the reference.

The programs draw their own anchors. Asked for more than a row has candidates they must take all of those, so
the anchors are known in advance: the reference is given all candidates, and nothing is sampled on its side.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draft_jax import weights
from draft_jax.objective.config import ObjectiveConfig
from draft_jax.objective.metrics import finalize
from train import sharding, state, step
from train.config import OptimizerConfig
from train.optimizer import make_optimizer, make_schedule

from .cases import LENGTH, Case, batch_arrays, build_case, jax_batch, torch_rows
from .torch_objective import ReferenceObjective, candidates
from .torch_trainer import ReferenceOptimizer, train

STEPS, ACCUMULATION, NUM_ANCHORS = 4, 2, 16
#: Two steps of warm-up (rates 1/2 and 1), then two of the cosine (1 and 1/2). The clip bites in every step.
OPTIMIZER = {"lr": 6e-4, "warmup_ratio": 0.5, "max_grad_norm": 0.3}


def window_arrays(case: Case, window: int) -> list[dict[str, np.ndarray]]:
    """The micro-batches of one optimizer step; the second has an empty row more than the first."""
    micro_batches = [batch_arrays(case.spec, seed=10 * window + m)[0] for m in range(ACCUMULATION)]
    micro_batches[1]["loss_mask"][0] = 0
    return micro_batches


def reference_run(case: Case, objective: ReferenceObjective):
    """Train the case's model in place."""

    def micro_step(arrays):
        def sums():
            rows = torch_rows(arrays)
            anchors = [candidates(row, objective.supervised_anchors_only) or [0] for row in rows]
            keep = [[bool(row.loss_mask.any())] * len(found) for row, found in zip(rows, anchors, strict=True)]
            return case.with_rows(rows, anchors, keep).sums(objective)

        return sums

    windows = [[micro_step(arrays) for arrays in window_arrays(case, w)] for w in range(STEPS)]
    return train(
        case.model,
        windows,
        objective,
        ReferenceOptimizer(
            total_steps=STEPS,
            learning_rate=OPTIMIZER["lr"],
            warmup_ratio=OPTIMIZER["warmup_ratio"],
            max_grad_norm=OPTIMIZER["max_grad_norm"],
        ),
    )


def jax_run(case: Case, objective: ObjectiveConfig):
    """The same through `compile_programs`.

    Returns:
        parameters in torch layout, and (loss, grad_norm, lr) of every step.
    """
    config = OptimizerConfig(**OPTIMIZER)
    options = step.StepOptions(
        draft=case.config,
        objective=objective,
        optimizer=make_optimizer(config),
        schedule=make_schedule(config, STEPS),
        dtype=jnp.float32,
    )
    mesh = sharding.make_mesh(jax.devices()[:1])
    frozen = jax.device_put(case.frozen, sharding.replicated(mesh))
    programs = step.compile_programs(options, mesh, rows=3, length=LENGTH, frozen=frozen, hidden_dtype=jnp.float32)
    run = state.new_state(case.config, options.optimizer, seed=0, mesh=mesh, params=case.params)
    accumulator, history = programs.start(run.params), []
    for window in range(STEPS):
        for arrays in window_arrays(case, window):
            batch = jax.device_put(jax_batch(arrays), sharding.batch_sharding(mesh))
            accumulator = programs.accumulate(run.params, frozen, batch, run.key, run.step, accumulator)
        run, accumulator, metrics = programs.apply(run, accumulator)
        final = finalize({name: np.asarray(v) for name, v in metrics.sums.items()}, objective)
        final |= {name: float(v) for name, v in metrics.values.items()}
        history.append((final["loss"], final["grad_norm"], final["lr"]))
    return weights.to_torch_layout(run.params, case.config, dtype=np.float32), history


@pytest.mark.parametrize(("heads", "normalization"), [("rnn", "window"), ("vanilla", "micro_step")])
def test_adamw_steps(heads, normalization):
    case = build_case(heads)
    before = case.tensors
    found, history = jax_run(case, ObjectiveConfig(num_anchors=NUM_ANCHORS, normalization=normalization))
    expected = reference_run(case, ReferenceObjective(normalization=normalization))
    for ours, theirs in zip(history, expected, strict=True):
        np.testing.assert_allclose(ours, (theirs.loss, theirs.grad_norm, theirs.learning_rate), rtol=1e-5)
        assert theirs.grad_norm > OPTIMIZER["max_grad_norm"], "the clip should bite"
    after = case.tensors
    assert found.keys() == after.keys()
    for name, value in after.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
        # 1e-5 is 1/60 of one step: the whole way of the tensor must agree far better than that.
        way = np.linalg.norm(value - before[name])
        assert way > OPTIMIZER["lr"], f"{name} hardly moved"
        assert np.linalg.norm(found[name] - value) < 1e-3 * way, name
