"""Checkpoints: bit for bit, rotated, complete or absent, refused by name when they do not fit."""

import dataclasses
import functools
import json
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.checkpoint import (
    CheckpointError,
    Checkpoints,
    Saved,
    best_step,
    check_identity,
    complete_steps,
    load_trained,
    read_saved,
    set_aside,
)
from train.config import CheckpointConfig, OptimizerConfig
from train.optimizer import make_optimizer
from train.sharding import make_mesh
from train.state import abstract_state, new_state

MESH = make_mesh(jax.devices()[:1])
OPTIMIZER = make_optimizer(OptimizerConfig())
POSITION = {"next_batch": 7, "nested": {"list": [1, 2], "none": None, "text": "ä", "big": 2**40, "flag": True}}


@functools.cache
def initial_state(draft):
    return new_state(draft, OPTIMIZER, 0, MESH)


@functools.cache
def shapes_of(draft):
    return abstract_state(draft, OPTIMIZER, MESH)


def state_of(draft, seed: int = 0, step: int = 3):
    """A state in which no leaf is zero; another seed gives other bits."""
    rng = np.random.default_rng(seed)

    def noisy(x):
        return x + rng.normal(size=x.shape).astype(np.float32) if x.dtype == jnp.float32 else x + step

    state = initial_state(draft)
    return dataclasses.replace(
        state,
        params=jax.tree.map(noisy, state.params),
        opt_state=jax.tree.map(noisy, state.opt_state),
        step=jnp.int32(step),
        key=state.key + 0,  # an own copy: a test may donate it
        rewarm_from=state.rewarm_from + step,
    )


def saved_at(step: int) -> Saved:
    return Saved(step, POSITION, {"train.seed": 42}, {"optimizer": {"lr": 0.1}})


def same_bits(a, b) -> bool:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in leaves
    )


@pytest.fixture
def checkpoints(tmp_path):
    config = CheckpointConfig(keep=2, keep_best=1, best_metric="tau_probabilistic")
    opened = Checkpoints(tmp_path / "checkpoints", config)
    yield opened
    opened.close()


def test_round_trip_is_bit_for_bit(checkpoints, tiny_draft):
    state = state_of(tiny_draft)
    checkpoints.save(state, saved_at(3), {"tau_probabilistic": 1.5})
    checkpoints.wait()
    again, saved = checkpoints.restore(3, shapes_of(tiny_draft))
    assert same_bits(state, again)
    assert saved == saved_at(3)
    assert read_saved(checkpoints.folder, 3) == saved_at(3)


def test_what_is_in_a_checkpoint(checkpoints, tiny_draft):
    """Parameters, moments, step, key, position; nothing of the frozen target (its vocabulary x hidden matrices)."""
    checkpoints.save(state_of(tiny_draft), saved_at(3), {})
    checkpoints.wait()
    folder = checkpoints.folder / "3"
    assert {"params", "optimizer"} <= {entry.name for entry in folder.iterdir()}
    from orbax.checkpoint import v1 as ocp

    metadata = ocp.checkpointables_metadata(folder).metadata
    shapes = [leaf.shape for leaf in jax.tree.leaves(metadata["params"], is_leaf=lambda x: hasattr(x, "dtype"))]
    assert (tiny_draft.vocab_size, tiny_draft.hidden_size) not in shapes
    assert len(shapes) == len(tiny_draft.parameter_shapes())
    assert sum(np.prod(s) for s in shapes) == sum(np.prod(s) for s in tiny_draft.parameter_shapes().values())


def test_state_may_be_donated_right_after_save(checkpoints, tiny_draft):
    """The save runs in the background; the training step that follows writes into the same buffers."""
    state = state_of(tiny_draft)
    copy = jax.tree.map(lambda x: np.array(x, copy=True), state)
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 + 9, s), donate_argnums=0)
    checkpoints.save(state, saved_at(3), {})
    jax.block_until_ready(overwrite(state))
    checkpoints.wait()
    again, _ = checkpoints.restore(3, shapes_of(tiny_draft))
    assert same_bits(copy, jax.tree.map(np.asarray, again))


def test_latest_and_best_are_kept(checkpoints, tiny_draft):
    state = state_of(tiny_draft)
    for step, tau in enumerate([1.1, 1.9, 1.2, float("nan"), 1.3], start=1):
        checkpoints.save(state, saved_at(step), {"tau_probabilistic": tau})
    checkpoints.wait()
    assert checkpoints.steps() == [2, 4, 5]
    assert best_step(checkpoints.folder) == 2


def test_best_by_a_loss(tmp_path, tiny_draft):
    config = CheckpointConfig(keep=1, keep_best=1, best_metric="ce_loss", best_mode="min")
    checkpoints = Checkpoints(tmp_path / "c", config)
    for step, loss in enumerate([3.0, 1.0, 2.0], start=1):
        checkpoints.save(state_of(tiny_draft), saved_at(step), {"ce_loss": loss})
    checkpoints.close()
    assert complete_steps(tmp_path / "c") == [2, 3]
    assert best_step(tmp_path / "c") == 2


def write_draft_config(run_dir, draft):
    (run_dir / "draft_config.json").write_text(json.dumps(draft.to_hf()))


def test_load_trained(tmp_path, checkpoints, tiny_draft):
    write_draft_config(tmp_path, tiny_draft)
    states = {step: state_of(tiny_draft, seed=step) for step in (1, 2, 3)}
    for step, state in states.items():
        checkpoints.save(state, saved_at(step), {"tau_probabilistic": 2.0 - step})
    checkpoints.wait()
    for asked, step in (("latest", 3), ("best", 1), (2, 2)):
        draft, params = load_trained(tmp_path, asked)
        assert same_bits(params, states[step].params)
        assert draft.target_layer_ids == tiny_draft.target_layer_ids
    with pytest.raises(CheckpointError, match="no checkpoint of step 9; it holds 1, 2, 3"):
        load_trained(tmp_path, 9)


def test_load_trained_without_a_run(tmp_path, tiny_draft):
    with pytest.raises(CheckpointError, match=r"is not a run: it has no draft_config\.json"):
        load_trained(tmp_path)
    write_draft_config(tmp_path, tiny_draft)
    with pytest.raises(CheckpointError, match="no complete checkpoint; train first"):
        load_trained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"intermediate_size": 20},
            r"layers\.0\.mlp\.down_proj\.kernel has shape \(24, 16\), this run needs \(20, 16\)",
        ),
        ({"num_hidden_layers": 3}, r"mu\.layers\.2\.input_layernorm\.scale is missing"),
        ({"num_hidden_layers": 1}, r"mu\.layers\.1\.\S+ is unknown to this draft"),
        ({"enable_confidence_head": False}, r"mu\.confidence\.\S+ is unknown"),
        ({"hidden_size": 32, "head_dim": 8}, r"mu\.fc\.kernel has shape \(48, 16\), this run needs \(96, 32\)"),
    ],
)
def test_another_draft_is_refused_by_name(checkpoints, tiny_draft, changes, message):
    checkpoints.save(state_of(tiny_draft), saved_at(3), {})
    checkpoints.wait()
    other = dataclasses.replace(tiny_draft, **changes)
    with pytest.raises(CheckpointError, match=message):
        checkpoints.restore(3, shapes_of(other))


def test_another_dtype_is_refused(checkpoints, tiny_draft):
    """orbax itself would cast without a word."""
    checkpoints.save(state_of(tiny_draft), saved_at(3), {})
    checkpoints.wait()
    abstract = shapes_of(tiny_draft)
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding), abstract.params)
    with pytest.raises(CheckpointError, match=r"params\.fc\.kernel has dtype float32, this run needs bfloat16"):
        checkpoints.restore(3, dataclasses.replace(abstract, params=half))


def test_a_missing_tensor_is_named(checkpoints, tiny_draft):
    state = state_of(tiny_draft)
    params = dict(state.params)
    del params["fc"]
    checkpoints.save(dataclasses.replace(state, params=params), saved_at(3), {})
    checkpoints.wait()
    with pytest.raises(CheckpointError, match=r"params\.fc\.kernel is missing"):
        checkpoints.restore(3, shapes_of(tiny_draft))


@pytest.mark.parametrize("damage", ["empty", "no_params", "no_marker"])
def test_incomplete_folders_do_not_count(tmp_path, tiny_draft, damage, capsys):
    folder = tmp_path / "c"
    checkpoints = Checkpoints(folder, CheckpointConfig())
    checkpoints.save(state_of(tiny_draft), saved_at(3), {})
    checkpoints.close()
    if damage == "empty":
        (folder / "9").mkdir()
    else:
        shutil.copytree(folder / "3", folder / "9")
        lost = folder / "9" / ("params" if damage == "no_params" else "_CHECKPOINT_METADATA")
        shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    assert complete_steps(folder) == [3]
    again = Checkpoints(folder, CheckpointConfig())
    assert "9.incomplete" in capsys.readouterr().out
    assert again.steps() == [3]
    again.save(state_of(tiny_draft), saved_at(9), {})
    again.wait()
    assert again.steps() == [3, 9]
    again.close()


def test_a_damaged_array_is_an_error_and_not_random_weights(checkpoints, tiny_draft):
    checkpoints.save(state_of(tiny_draft), saved_at(3), {})
    checkpoints.wait()
    for file in (checkpoints.folder / "3" / "params").rglob("d/*"):
        file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoints.restore(3, shapes_of(tiny_draft))


@pytest.mark.parametrize("part", ["params", "optimizer"])
def test_a_truncated_file_makes_a_checkpoint_incomplete(checkpoints, tiny_draft, part, capsys):
    """Named with both sizes; the older one is the newest complete one, and opening the folder sets the other aside."""
    for step in (3, 4):
        checkpoints.save(state_of(tiny_draft), saved_at(step), {})
    checkpoints.wait()
    file = max((checkpoints.folder / "4" / part).rglob("d/*"), key=lambda path: path.stat().st_size)
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(size - 1)
    assert complete_steps(checkpoints.folder) == [3]
    with pytest.raises(CheckpointError, match=rf"4 is not a complete checkpoint: it has {part}/.* with {size - 1} of"):
        checkpoints.restore(4, shapes_of(tiny_draft))
    set_aside(checkpoints.folder)
    assert f"with {size - 1} of {size} bytes; set aside as 4.incomplete" in capsys.readouterr().out
    file = next((checkpoints.folder / "3" / part).rglob("d/*"))
    file.unlink()
    assert complete_steps(checkpoints.folder) == []


def test_identity_names_every_difference(tmp_path):
    saved = Saved(3, {}, {"train.seed": 1, "draft.hidden_size": 16, "data.samples": 5}, {})
    check_identity(saved, dict(saved.identity), tmp_path)
    with pytest.raises(CheckpointError) as error:
        check_identity(saved, {"train.seed": 2, "draft.hidden_size": 32, "data.samples": 5}, tmp_path)
    text = str(error.value)
    assert "train.seed: checkpoint 1, this run 2" in text
    assert "draft.hidden_size: checkpoint 16, this run 32" in text
    assert "data.samples" not in text


def test_disk_full_error_is_clear_and_earlier_checkpoints_survive(tmp_path, tiny_draft):
    """On a real full file system where the test may mount one."""
    small = tmp_path / "small"
    small.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("mounting a small tmpfs is not allowed here")
    try:
        checkpoints = Checkpoints(small / "checkpoints", CheckpointConfig(keep=50))
        state = state_of(tiny_draft)

        def save_until_full():
            for step in range(1, 40):
                checkpoints.save(state, saved_at(step), {})

        with pytest.raises(CheckpointError) as error:
            save_until_full()
        kept = checkpoints.steps()
        assert kept
        assert f"checkpoint of step {kept[-1] + 1} could not be written" in str(error.value)
        assert "no space left on the disk" in str(error.value)
        assert "--resume auto" in str(error.value)
        again, _ = checkpoints.restore(kept[-1], shapes_of(tiny_draft))
        assert same_bits(state, again)
        checkpoints.close()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_disk_full_simulated(checkpoints, tiny_draft, monkeypatch):
    checkpoints.save(state_of(tiny_draft), saved_at(1), {})
    checkpoints.wait()

    class Failed:
        def result(self):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints._checkpointer, "save_checkpointables_async", lambda *a, **k: Failed(), raising=True)
    checkpoints.save(state_of(tiny_draft), saved_at(2), {})
    with pytest.raises(CheckpointError, match=r"step 2 could not be written .* no space left .* there: 1"):
        checkpoints.poll()


def test_unwritable_folder_surfaces_at_once(tmp_path):
    (tmp_path / "c").write_text("a file")
    with pytest.raises(OSError, match=r"exists|Not a directory"):
        Checkpoints(tmp_path / "c", CheckpointConfig())
