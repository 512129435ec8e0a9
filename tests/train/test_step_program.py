"""The lowered step as a program: operations as the formula says, devices that do not talk inside micro-steps."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.shapes import Sizes
from draft_jax.batch import FrozenHead
from draft_jax.cost import Shape, step_flops
from draft_jax.objective.config import ObjectiveConfig
from train.config import OptimizerConfig
from train.optimizer import make_optimizer, make_schedule
from train.sharding import make_mesh
from train.step import StepOptions, lower_programs

SIZES = Sizes(
    hidden=512, mlp=1024, heads=8, kv_heads=2, head_dim=64, vocab=8192, layers=2, taps=3, block=4, markov_rank=64
)


def lowered(draft, rows, length, anchors, dtype=jnp.float32, **changes):
    """The programs of one device, never compiled; one chunk, because a loop's body is counted once."""
    optimizer = OptimizerConfig()
    options = StepOptions(
        draft,
        ObjectiveConfig(num_anchors=anchors, chunk_rows=rows * anchors * draft.block_size),
        make_optimizer(optimizer),
        make_schedule(optimizer, 10),
        jnp.dtype(dtype),
        **changes,
    )
    head = jax.ShapeDtypeStruct((draft.vocab_size, draft.hidden_size), dtype)
    mesh = make_mesh(jax.devices()[:1])
    return lower_programs(options, mesh, rows=rows, length=length, frozen=FrozenHead(head, head), hidden_dtype=dtype)[0]


@pytest.mark.parametrize(
    ("rows", "length", "anchors", "changes"),
    [
        (1, 256, 32, {}),
        (2, 384, 16, {}),
        (1, 256, 32, {"layers": 1, "mlp": 2048}),
        (1, 256, 32, {"markov_rank": 0}),
        (1, 512, 32, {"taps": 5, "heads": 16}),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_operations_of_the_lowered_step(rows, length, anchors, changes, dtype):
    """XLA counts what we say, within 5 %: nothing is computed twice, nothing that we do not know of."""
    draft = dataclasses.replace(SIZES, **changes).draft()
    program = lowered(draft, rows, length, anchors, dtype)["accumulate"]
    # The XLA form of attention visits all context whatever the anchor, and its backward pass makes 4 products of 2.
    formula = step_flops(draft, Shape(rows, length, anchors, 4, "cpu"), context_keys=length)
    formula["attention"] *= (1 + 2) / (1 + 2.5)
    assert program.cost_analysis()["flops"] == pytest.approx(sum(formula.values()), rel=0.05)


def test_operations_with_layers_computed_again():
    draft = dataclasses.replace(SIZES, layers=4).draft()
    kept, again = (
        lowered(draft, 1, 256, 32, rematerialise=on)["accumulate"].cost_analysis()["flops"] for on in (False, True)
    )
    formula = step_flops(draft, Shape(1, 256, 32, 4, "cpu", rematerialise=True), context_keys=256)
    formula["attention"] *= (1 + 3) / (1 + 3.5)
    assert again == pytest.approx(sum(formula.values()), rel=0.05)
    assert again > 1.1 * kept


def test_a_gpu_gets_its_own_compiler_options(monkeypatch):
    """By platform and program; options of a run win; on a CPU there are none."""
    from train import step

    given = {}

    class Lowered:
        def __init__(self, name):
            self.name = name

        def as_text(self):
            return ""

        def compile(self, options):
            given[self.name] = options

    names = ("start", "accumulate", "apply")
    monkeypatch.setattr(step, "lower_programs", lambda *_, **__: ({name: Lowered(name) for name in names}, None))
    device = type("Device", (), {"platform": "cpu"})()
    mesh = type("Mesh", (), {"devices": np.array([device], dtype=object)})()
    options = type("Options", (), {"compiler_options": {}})()
    shape = {"rows": 1, "length": 8, "frozen": None, "hidden_dtype": None}
    step.compile_programs(options, mesh, **shape)
    assert given == {name: {} for name in names}
    device.platform = "gpu"
    step.compile_programs(options, mesh, **shape)
    assert given == {"start": {}, "accumulate": {"xla_gpu_enable_triton_gemm": False}, "apply": {}}
    options.compiler_options = {"xla_gpu_enable_triton_gemm": True}
    step.compile_programs(options, mesh, **shape)
    assert given["accumulate"] == {"xla_gpu_enable_triton_gemm": True}


def test_the_count_would_notice():
    """The control: one part left out of the formula is more than the tolerance."""
    draft = SIZES.draft()
    counted = lowered(draft, 1, 256, 32)["accumulate"].cost_analysis()["flops"]
    formula = step_flops(draft, Shape(1, 256, 32, 4, "cpu"), context_keys=256)
    for part in ("fc", "block layers", "vocabulary, draft", "vocabulary, target"):
        assert counted > 1.05 * (sum(formula.values()) - formula[part]), part


DEVICES = """
import re
import jax, jax.numpy as jnp
from benchmarks.shapes import Sizes
from draft_jax.batch import FrozenHead
from draft_jax.objective.config import ObjectiveConfig
from train.config import OptimizerConfig
from train.optimizer import make_optimizer, make_schedule
from train.sharding import make_mesh
from train.step import StepOptions, lower_programs

draft = Sizes(hidden=32, mlp=64, heads=4, kv_heads=2, head_dim=8, vocab=64, layers=1, taps=2, block=3,
              markov_rank=8).draft()
optimizer = OptimizerConfig()
mesh = make_mesh(jax.devices())
head = jax.ShapeDtypeStruct((64, 32), jnp.float32)

def collectives(name, normalization):
    options = StepOptions(draft, ObjectiveConfig(num_anchors=4, chunk_rows=8, normalization=normalization),
                          make_optimizer(optimizer), make_schedule(optimizer, 10), jnp.dtype("float32"))
    program = lower_programs(options, mesh, rows=8, length=16, frozen=FrozenHead(head, head),
                             hidden_dtype=jnp.float32)[0][name].compile()
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
    return re.findall(rf"(?m)^ *(?:ROOT )?%\\S+ = (.*?) (?:{kinds})(?:-start)?\\(", program.as_text())

assert len(jax.devices()) == 8
assert collectives("accumulate", "window") == [], "a micro-step must not communicate"
assert [shape.split("{")[0] for shape in collectives("accumulate", "micro_step")] in (["f32[]"], ["f32[]"] * 2)
assert collectives("apply", "window"), "the window's sums have to be added up somewhere"
print("silent")
"""


def test_devices_do_not_talk_inside_a_window():
    """8 devices: no collective in a micro-step, one number with "micro_step"; the optimizer step adds up."""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", DEVICES], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("silent")
