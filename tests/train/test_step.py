"""The two training programs: compiled once, exact about shapes, donated, and the invariants of design section 2."""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draft_jax.batch import DraftBatch, FrozenHead
from draft_jax.objective.config import ObjectiveConfig
from draft_jax.objective.metrics import zero_sums
from train.config import OptimizerConfig
from train.metrics import CompileCounter
from train.optimizer import make_optimizer, make_schedule
from train.sharding import batch_shardings, make_mesh, place, replicated
from train.state import new_state, zero_accumulator
from train.step import StepOptions, compile_programs, make_accumulate, make_apply

LENGTH = 24
OBJECTIVE = ObjectiveConfig(num_anchors=6, chunk_rows=16)
MESH = make_mesh(jax.devices()[:1])
pytestmark = pytest.mark.usefixtures("quick_compilation")


def rows_of(draft, documents: list[list[int]], seed: int = 0, length: int = LENGTH, taught: float = 2 / 3) -> dict:
    """Rows of random documents with the given lengths, as numpy fields of a batch.

    A document's content depends on the seed and its number alone, wherever it lies.
    """
    shape = (len(documents), length)
    fields = {name: np.zeros(shape, np.int32) for name in ("input_ids", "loss_mask", "document_start")}
    fields["context_hidden"] = np.zeros((*shape, draft.num_taps * draft.hidden_size), np.float32)
    fields["last_hidden"] = np.zeros((*shape, draft.hidden_size), np.float32)
    number = 0
    for row, lengths in enumerate(documents):
        offset = 0
        for size in lengths:
            rng = np.random.default_rng([seed, number])
            part = slice(offset, offset + size)
            fields["input_ids"][row, part] = rng.integers(6, draft.vocab_size, size)
            fields["loss_mask"][row, offset + size - round(size * taught) : offset + size] = 1
            fields["document_start"][row, part] = offset
            fields["context_hidden"][row, part] = rng.normal(size=(size, draft.num_taps * draft.hidden_size))
            fields["last_hidden"][row, part] = rng.normal(size=(size, draft.hidden_size))
            offset += size
            number += 1
        fields["document_start"][row, offset:] = offset
    fields["positions"] = np.arange(length, dtype=np.int32)[None] - fields["document_start"]
    return fields


def batch_of(fields: dict, rows=slice(None), mesh=MESH) -> DraftBatch:
    return jax.device_put(DraftBatch(**{k: v[rows] for k, v in fields.items()}), batch_shardings(mesh))


@functools.cache
def head_of(draft) -> FrozenHead:
    rng = np.random.default_rng(9)
    shape = (draft.vocab_size, draft.hidden_size)
    arrays = FrozenHead(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2)))
    return jax.device_put(arrays, replicated(MESH))


@pytest.fixture(scope="module")
def draft(tiny_draft):
    return dataclasses.replace(tiny_draft, num_hidden_layers=1, target_layer_ids=(0, 2))


@pytest.fixture(scope="module")
def counter():
    """Counts every compilation of this module."""
    with CompileCounter() as counter:
        yield counter


def options_of(draft, objective=OBJECTIVE, dtype=jnp.float32, **optimizer) -> StepOptions:
    config = OptimizerConfig(**{"lr": 1e-2, "warmup_ratio": 0.0, **optimizer})
    return StepOptions(draft, objective, make_optimizer(config), make_schedule(config, 10), dtype)


@functools.cache
def programs_of(draft, rows: int, objective=OBJECTIVE, dtype=jnp.float32, length: int = LENGTH):
    return compile_programs(
        options_of(draft, objective, dtype),
        MESH,
        rows=rows,
        length=length,
        frozen=head_of(draft),
        hidden_dtype=jnp.float32,
    )


@functools.cache
def _initial(draft):
    return new_state(draft, options_of(draft).optimizer, 1, MESH)


def fresh_state(draft):
    """A state that a test may donate."""
    return jax.tree.map(lambda x: x + 0, _initial(draft))


def accumulate(programs, draft, state, *batches):
    accumulator = programs.start(state.params)
    for batch in batches:
        accumulator = programs.accumulate(state.params, head_of(draft), batch, state.key, state.step, accumulator)
    return accumulator


@functools.cache
def plain_accumulate(draft, objective):
    return jax.jit(make_accumulate(options_of(draft, objective), MESH))


def sums_and_gradients(draft, *fields: dict, objective=OBJECTIVE):
    """The micro-steps of the given rows alone, without an optimizer step."""
    state = _initial(draft)
    placed = place(state.params, MESH)
    accumulator = zero_accumulator(state.params, placed, zero_sums(draft.block_size), jnp.float32)
    for rows in fields:
        accumulator = plain_accumulate(draft, objective)(
            state.params, head_of(draft), batch_of(rows), state.key, state.step, accumulator
        )
    return accumulator


def window(programs, draft, *batches):
    """One optimizer step from the fresh state."""
    state = fresh_state(draft)
    return programs.apply(state, accumulate(programs, draft, state, *batches))


def assert_close(a, b, rtol=2e-5, atol=2e-6):
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


def test_two_programs_whatever_the_data(draft, counter):
    """Ragged rows, an empty batch and several steps: each program was compiled once, nothing while running."""
    programs_of.cache_clear()
    counter.counts.clear()
    programs = programs_of(draft, 2)
    state = fresh_state(draft)
    accumulator = programs.start(state.params)
    ragged = [[[24], [3]], [[10, 9], [24]], [[], []], [[2], [17]]]
    batches = [batch_of(rows_of(draft, documents)) for documents in ragged]
    before = sum(counter.counts.values())
    for step in range(3):
        for batch in batches[step:]:
            accumulator = programs.accumulate(state.params, head_of(draft), batch, state.key, state.step, accumulator)
        state, accumulator, metrics = programs.apply(state, accumulator)
    jax.block_until_ready(metrics)
    assert sum(counter.counts.values()) == before
    assert counter.counts["accumulate"] == 1
    assert counter.counts["apply"] == 1
    assert counter.training == 2
    assert int(state.step) == 3


@pytest.mark.parametrize("wrong", ["rows", "length", "dtype_ids", "dtype_hidden", "missing_tap"])
def test_a_wrong_batch_raises_and_nothing_is_lost(draft, counter, wrong):
    programs, state = programs_of(draft, 2), fresh_state(draft)
    batch = batch_of(rows_of(draft, [[20], [9]]))
    changed = {
        "rows": lambda: batch_of(rows_of(draft, [[20], [9], [4]])),
        "length": lambda: batch_of(rows_of(draft, [[20], [9]], length=25)),
        "dtype_ids": lambda: dataclasses.replace(batch, loss_mask=batch.loss_mask.astype(jnp.int8)),
        "dtype_hidden": lambda: dataclasses.replace(batch, last_hidden=batch.last_hidden.astype(jnp.bfloat16)),
        "missing_tap": lambda: dataclasses.replace(batch, context_hidden=batch.context_hidden[..., 16:]),
    }[wrong]()
    accumulator = programs.start(state.params)
    compiled = counter.training
    with pytest.raises((TypeError, ValueError)):
        programs.accumulate(state.params, head_of(draft), changed, state.key, state.step, accumulator)
    assert counter.training == compiled
    programs.accumulate(state.params, head_of(draft), batch, state.key, state.step, accumulator)


def test_donation(draft):
    """State and accumulator live once: what went in is gone, parameters of `accumulate` are not."""
    programs, state = programs_of(draft, 2), fresh_state(draft)
    batch = batch_of(rows_of(draft, [[20], [9]]))
    first = programs.start(state.params)
    second = programs.accumulate(state.params, head_of(draft), batch, state.key, state.step, first)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first.grads))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    programs.apply(state, second)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.opt_state, second.grads)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_float32_masters_whatever_the_compute(draft, dtype):
    programs = programs_of(draft, 2, dtype=dtype)
    state, accumulator, metrics = window(programs, draft, batch_of(rows_of(draft, [[20], [9]])))
    assert {str(x.dtype) for x in accumulator.rounded.values()} == ({"bfloat16"} if dtype == jnp.bfloat16 else set())
    for tree in (state.params, dataclasses.replace(accumulator, rounded={}), metrics):
        assert {str(x.dtype) for x in jax.tree.leaves(tree)} - {"int32"} == {"float32"}
    assert {str(x.dtype) for x in jax.tree.leaves(state.opt_state)} == {"float32", "int32"}


@pytest.mark.parametrize("fused", [False, True])
def test_our_optimizer_kernel_only_where_asked_for(draft, monkeypatch, fused):
    asked = []
    monkeypatch.setattr("train.step.can_fuse", lambda leaf, sharding: asked.append(leaf.shape))
    options, state = options_of(draft, fused=fused), fresh_state(draft)
    placed = place(state.params, MESH)
    empty = zero_accumulator(state.params, placed, zero_sums(draft.block_size), jnp.float32)
    jax.eval_shape(make_apply(options, MESH), state, empty)
    assert len(asked) == (len(jax.tree.leaves(state.params)) if fused else 0)


def test_small_updates_are_not_rounded_away(draft):
    """1 + 2e-3 is 1 in bfloat16; with float32 masters a bfloat16 run still moves."""
    programs = programs_of(draft, 2, dtype=jnp.bfloat16)
    before = np.asarray(fresh_state(draft).params["norm"]["scale"])
    state, _, _ = window(programs, draft, batch_of(rows_of(draft, [[20], [9]])))
    assert (np.asarray(state.params["norm"]["scale"]) != before).all()


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_accumulation_split_changes_nothing(draft, rows):
    """4 x 1, 2 x 2 and 1 x 4 rows: the same anchors, hence the same step."""
    fields = rows_of(draft, [[24], [11], [7, 9], [18]])
    parts = [batch_of(fields, slice(i, i + rows)) for i in range(0, 4, rows)]
    state, _, metrics = window(programs_of(draft, rows), draft, *parts)
    whole_state, _, whole = window(programs_of(draft, 4), draft, batch_of(fields))
    assert_close(metrics.sums, whole.sums)
    assert float(metrics.sums["sampled_anchors"]) > 12
    assert_close(metrics.values, whole.values)
    assert_close(state.params, whole_state.params)


def test_anchors_change_with_step_and_row(draft):
    """The same row twice in a window, or in the next step, is taught at other anchors."""
    fields = rows_of(draft, [[24]])
    programs, state = programs_of(draft, 1), fresh_state(draft)
    once = accumulate(programs, draft, state, batch_of(fields))
    twice = accumulate(programs, draft, state, batch_of(fields), batch_of(fields))
    assert float(twice.sums["ce"][0]) != pytest.approx(2 * float(once.sums["ce"][0]), rel=1e-4)
    later = dataclasses.replace(fresh_state(draft), step=jnp.int32(1))
    assert float(accumulate(programs, draft, later, batch_of(fields)).sums["ce"][0]) != pytest.approx(
        float(once.sums["ce"][0]), rel=1e-4
    )


def test_window_and_micro_step_normalization(draft):
    """window: sum of gradients / sum of weights. micro_step: mean of each micro-step's own ratio."""
    fields = rows_of(draft, [[24], [8]])
    batches = [batch_of(fields, slice(i, i + 1)) for i in range(2)]
    programs = programs_of(draft, 1)
    both = accumulate(programs, draft, fresh_state(draft), *batches)
    first = accumulate(programs, draft, fresh_state(draft), batches[0])
    second = jax.tree.map(jnp.subtract, both, first)
    weights = [float(x.sums["weight"][0]) for x in (first, second)]
    assert weights[0] != weights[1]
    ratios = [x.sums["loss_num"][0] / w for x, w in zip((first, second), weights)]

    def norm_of(tree):
        return float(jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(tree))))

    _, _, windowed = window(programs, draft, *batches)
    expected = jax.tree.map(lambda g: g / sum(weights), both.grads)
    assert float(windowed.values["grad_norm"]) == pytest.approx(norm_of(expected), rel=1e-5)

    by_step = programs_of(draft, 1, dataclasses.replace(OBJECTIVE, normalization="micro_step"))
    _, _, stepped = window(by_step, draft, *batches)
    expected = jax.tree.map(lambda a, b: (a / weights[0] + b / weights[1]) / 2, first.grads, second.grads)
    assert float(stepped.values["grad_norm"]) == pytest.approx(norm_of(expected), rel=1e-4)
    loss = float(stepped.sums["loss_num"] / stepped.sums["loss_den"])
    assert loss == pytest.approx(float(sum(ratios)) / 2, rel=1e-5)


@pytest.mark.parametrize("normalization", ["window", "micro_step"])
def test_nothing_supervised_changes_nothing_but_the_step(draft, normalization):
    """Documented rule for weight 0: parameters, moments and Adam's count stay, bit for bit."""
    programs = programs_of(draft, 1, dataclasses.replace(OBJECTIVE, normalization=normalization))
    batch = batch_of(rows_of(draft, [[20]]))
    empty = dataclasses.replace(batch, loss_mask=jnp.zeros_like(batch.loss_mask))
    state, _, _ = window(programs, draft, batch)  # moments are no longer zero
    before = jax.tree.map(np.array, state)
    accumulator = accumulate(programs, draft, state, empty, empty)
    assert all(not np.any(g) for g in jax.tree.leaves(accumulator.grads))
    after, _, metrics = programs.apply(state, accumulator)
    for a, b in zip(
        jax.tree.leaves((before.params, before.opt_state)), jax.tree.leaves((after.params, after.opt_state))
    ):
        assert a.tobytes() == np.asarray(b).tobytes()
    assert int(after.step) == int(before.step) + 1
    assert float(metrics.values["skipped_updates"]) == 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(metrics))


def test_a_gradient_that_is_not_finite_is_never_applied(draft):
    programs = programs_of(draft, 2)
    state = fresh_state(draft)
    accumulator = accumulate(programs, draft, state, batch_of(rows_of(draft, [[20], [9]])))
    grads = jax.tree.map(lambda g: g + jnp.nan, accumulator.grads)
    before = jax.tree.map(np.array, (state.params, state.opt_state))
    after, _, metrics = programs.apply(state, dataclasses.replace(accumulator, grads=grads))
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves((after.params, after.opt_state))):
        assert a.tobytes() == np.asarray(b).tobytes()
    assert not np.isfinite(float(metrics.values["grad_norm"]))


def test_norms_of_every_group_are_reported(draft):
    _, _, metrics = window(programs_of(draft, 2), draft, batch_of(rows_of(draft, [[20], [9]])))
    for what in ("grad_norm", "update_norm", "param_norm"):
        for group in ("fc", "layers", "markov", "confidence", "norms"):
            assert float(metrics.values[f"{what}/{group}"]) > 0, (what, group)
    squares = sum(float(v) ** 2 for k, v in metrics.values.items() if k.startswith("grad_norm/"))
    assert squares**0.5 == pytest.approx(float(metrics.values["grad_norm"]), rel=1e-5)


def test_layers_computed_again_give_the_same_gradients(draft):
    rows, state, results = rows_of(draft, [[24], [8]]), _initial(draft), []
    for rematerialise in (False, True):
        options = dataclasses.replace(options_of(draft), rematerialise=rematerialise)
        accumulator = zero_accumulator(
            state.params, place(state.params, MESH), zero_sums(draft.block_size), jnp.float32
        )
        arguments = state.params, head_of(draft), batch_of(rows), state.key, state.step, accumulator
        results.append(jax.jit(make_accumulate(options, MESH))(*arguments))
    assert_close(results[1].grads, results[0].grads)
    assert_close(results[1].sums, results[0].sums)


def test_padding_changes_nothing(draft):
    """Rows of padding behind the real ones, and rows that are wider: equal anchors, loss and gradients."""
    plain = sums_and_gradients(draft, rows_of(draft, [[24], [8]]))
    padded = sums_and_gradients(draft, rows_of(draft, [[24], [8], [], []], length=LENGTH + 9))
    assert float(plain.sums["weight"][0]) > 10
    assert_close(padded.grads, plain.grads)
    assert_close(padded.sums, plain.sums)


@pytest.mark.parametrize("taught", [1.0, 0.6])
def test_packed_documents_equal_the_sum_of_them_alone(draft, taught):
    """With more anchors than candidates all are taken, so packing can be compared without fixing anchors."""
    everything = dataclasses.replace(OBJECTIVE, num_anchors=LENGTH)
    sizes = [9, 4, 11]
    rows = rows_of(draft, [[size] for size in sizes], taught=taught)
    each = [{name: field[i : i + 1] for name, field in rows.items()} for i in range(3)]
    packed = sums_and_gradients(draft, rows_of(draft, [sizes], taught=taught), objective=everything)
    alone = sums_and_gradients(draft, *each, objective=everything)
    assert float(packed.sums["weight"][0]) > 10
    assert_close(packed.grads, alone.grads)
    per_row = {"rows", "anchor_slots"}  # one row instead of three
    assert_close(
        {k: v for k, v in packed.sums.items() if k not in per_row},
        {k: v for k, v in alone.sums.items() if k not in per_row},
    )


DEVICES = """
import sys
import jax, numpy as np
jax.config.update("jax_disable_most_optimizations", True)
sys.path.insert(0, {root!r})
import importlib.util
spec = importlib.util.spec_from_file_location("test_step", {here!r})
module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
import jax.numpy as jnp
from train.sharding import make_mesh, replicated
from train.state import new_state
from train.step import compile_programs
import train.sharding
train.sharding.MIN_ELEMENTS_TO_SPLIT = 1
from draft_jax.config import DraftConfig
draft = DraftConfig(**eval({draft!r}))
assert len(jax.devices()) == 8
fields = module.rows_of(draft, [[24], [11], [7, 9], [18], [], [5], [24], [13]])
results = []
for count, fsdp in ((1, 1), (8, 1), (8, 4)):
    mesh = make_mesh(jax.devices()[:count], fsdp)
    options = module.options_of(draft)
    frozen = jax.device_put(module.head_of(draft), replicated(mesh))
    programs = compile_programs(options, mesh, rows=8, length=24, frozen=frozen, hidden_dtype=jnp.float32)
    state = new_state(draft, options.optimizer, 1, mesh)
    accumulator = programs.start(state.params)
    for step in range(2):
        batch = module.batch_of(fields, mesh=mesh)
        accumulator = programs.accumulate(state.params, frozen, batch, state.key, state.step, accumulator)
        state, accumulator, metrics = programs.apply(state, accumulator)
    if fsdp == 4:
        moments = state.opt_state[1].mu["fc"]["kernel"]
        assert moments.addressable_shards[0].data.size * 4 == moments.size, "moments are not split"
    results.append(jax.tree.map(np.asarray, (state.params, metrics)))
for params, metrics in results[1:]:
    module.assert_close(metrics, results[0][1], rtol=1e-4, atol=1e-5)
    # Adam divides a gradient near 0 by its own size, rounding included: a hundredth of one update (1e-2) is allowed.
    module.assert_close(params, results[0][0], rtol=1e-4, atol=1e-4)
print("equal")
"""


def test_number_of_devices_changes_nothing(draft):
    """1 device, 8 devices, and 8 with state split over 4: the same two steps (fake CPU devices, new process)."""
    root = Path(__file__).resolve().parents[2]
    fields = repr(dataclasses.asdict(draft))
    code = DEVICES.format(root=str(root), here=__file__, draft=fields)
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("equal")
