"""Metrics: ratios taken once, compilations counted, values that are not finite named and stopped."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draft_jax.objective.config import ObjectiveConfig
from draft_jax.objective.metrics import zero_sums
from train.metrics import CompileCounter, Meter, NonFiniteError, Throughput, not_finite, read_back
from train.step import StepMetrics


def sums(**changes) -> dict[str, np.ndarray]:
    values = {name: np.asarray(value) for name, value in zero_sums(3).items()}
    return values | {name: np.asarray(value, np.float32) for name, value in changes.items()}


def test_meter_divides_sums_and_not_ratios():
    """Two steps of 10 and 30 weights: the mean weighs tokens, not steps."""
    meter = Meter(ObjectiveConfig())
    meter.add(sums(weight=10, ce=20, tau_num=3, tau_den=2), {"lr": 0.1, "skipped_updates": 0.0})
    meter.add(sums(weight=30, ce=30, tau_num=8, tau_den=2), {"lr": 0.2, "skipped_updates": 1.0})
    result = meter.result()
    assert result["ce_loss"] == pytest.approx(50 / 40)
    assert result["tau_probabilistic"] == pytest.approx(11 / 4)
    assert result["lr"] == 0.2
    assert result["skipped_updates"] == 1
    assert meter.steps == 2
    meter.reset()
    assert meter.steps == 0


def step_metrics(changes: dict, values: dict) -> StepMetrics:
    return StepMetrics(
        {k: jnp.asarray(v) for k, v in sums(**changes).items()}, {k: jnp.float32(v) for k, v in values.items()}
    )


@pytest.mark.parametrize(
    ("changes", "values", "name"),
    [
        ({"ce": math.nan}, {"grad_norm": 1.0}, "ce is nan"),
        ({"l1": math.inf}, {"grad_norm": math.nan}, "l1 is inf"),
        ({}, {"grad_norm": math.nan, "lr": 1.0}, "grad_norm is nan"),
        ({"accept@num": [0.0, math.nan, 0.0]}, {}, r"accept@num is \[0\.0, nan, 0\.0\]"),
    ],
)
def test_the_first_bad_value_is_named_with_its_step(changes, values, name):
    with pytest.raises(NonFiniteError, match=rf"step 17: {name}, the first value that is not finite"):
        read_back(17, step_metrics(changes, values))


def test_read_back_gives_host_numbers():
    found, values = read_back(1, step_metrics({"ce": 2.0}, {"lr": 0.5}))
    assert isinstance(found["ce"], np.ndarray)
    assert found["ce"] == 2
    assert values == {"lr": 0.5}


def test_compile_counter_counts_by_name():
    def counted(x):
        return x * 3 + 1

    with CompileCounter() as counter:
        program = jax.jit(counted)
        for _ in range(3):
            program(jnp.ones(7))
        assert counter.counts["counted"] == 1
        program(jnp.ones(8))
        assert counter.counts["counted"] == 2
        jax.jit(counted).lower(jnp.ones(9)).compile()
        assert counter.counts["counted"] == 3
        assert counter.training == 0
    program(jnp.ones(10))
    assert counter.counts["counted"] == 3, "it goes on counting after it was left"


def test_throughput():
    total = Throughput()
    total.add(Throughput(tokens=100, seconds=2.0, capture_seconds=0.5, draft_seconds=1.0))
    total.add(Throughput(tokens=50, seconds=1.0, capture_seconds=0.25, draft_seconds=0.5))
    assert total.result(2) == {
        "tokens_per_second": 50.0,
        "seconds_per_step": 1.5,
        "capture_share": 0.25,
        "draft_share": 0.5,
    }


def test_not_finite_names():
    assert not_finite({"a": 1.0, "b": math.nan, "c": "text", "d": -math.inf, "e": 3}) == ["b", "d"]
