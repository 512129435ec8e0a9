"""The loop in one process, over a real tiny target: what a run leaves behind, and what stops it."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from draft_jax.config import DraftConfig
from train import feeding, loop, runtime, steps
from train.checkpoint import CheckpointError, complete_steps, load_trained
from train.config import ConfigError
from train.config_file import build, load_config
from train.feeding import NonFiniteStateError
from train.loop import run
from train.metrics import NonFiniteError

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def target(target_folder):
    config = build({"target": {"path": str(target_folder), "device": "cpu"}, "data": {"path": "x"}, "run_dir": "x"})
    return runtime.load_target(config, (0, 2), "cpu", "float32")


@pytest.fixture
def lines(tmp_path):
    def read() -> list[dict]:
        text = (tmp_path / "run" / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    return read


class Wrapped:
    """A target whose captured states a test changes."""

    def __init__(self, target, change):
        self._target, self._change, self.calls = target, change, 0

    def __getattr__(self, name):
        return getattr(self._target, name)

    def capture(self, documents):
        self.calls += 1
        captured = self._target.capture(documents)
        context = [states.clone() for states in captured.context_hidden]
        last = [states.clone() for states in captured.last_hidden]
        self._change(self.calls, context, last)
        return dataclasses.replace(captured, context_hidden=context, last_hidden=last)


def test_a_run(tree, tmp_path, target, lines, monkeypatch):
    """One run: two programs over ragged rows, metrics one step late, all files, and a fenced run's bits."""
    late = []

    class Spy(loop.Loop):
        def _read_pending(self):
            if self._pending is not None:
                late.append((self.step, self._pending.step))
            super()._read_pending()

    monkeypatch.setattr(loop, "Loop", Spy)
    config = build(tree)
    result = run(config, target=target)
    assert (result.exit_code, result.steps, result.total_steps) == (0, 6, 6)
    assert result.compiles["accumulate"] == 1
    assert result.compiles["apply"] == 1
    # Step t is read when step t + 1 has been dispatched; only the last one is read for itself.
    assert late == [(2, 1), (3, 2), (4, 3), (5, 4), (6, 5), (6, 6)]

    found = lines()
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
    expected = {
        "loss", "ce_loss", "l1_loss", "confidence_loss", "tau_probabilistic", "accept_rate@0", "accept_rate@2",
        "lr", "grad_norm", "grad_norm/fc", "update_norm/layers", "param_norm/markov", "tokens_per_second", "epoch",
        "compiles", "skipped_updates",
    }  # fmt: skip
    assert expected <= set(found[0])
    assert all(math.isfinite(v) for line in found for v in line.values())
    assert found[-1]["compiles"] == 2
    assert found[0]["lr"] == pytest.approx(1e-2)  # W = int(0.2 * 6) = 1: the first step is at the peak
    assert result.metrics["step"] == 6

    run_dir = tmp_path / "run"
    assert load_config(run_dir / "config.yaml") == config
    draft = DraftConfig.from_hf(json.loads((run_dir / "draft_config.json").read_text()))
    assert draft.target_layer_ids == (0, 2)
    assert complete_steps(run_dir / "checkpoints") == [6]

    # A run whose hand-overs are all deep copies has the same bits: the fences were enough.
    to_batch = feeding.handoff.to_batch

    def copied(*arguments, **options):
        batch = jax.block_until_ready(to_batch(*arguments, **options))
        return jax.tree.map(lambda x: jax.device_put(np.array(x, copy=True), x.sharding), batch)

    monkeypatch.setattr(feeding.handoff, "to_batch", copied)
    run(build({**tree, "run_dir": str(tmp_path / "copied")}), target=target)
    (_, ours), (_, theirs) = load_trained(run_dir), load_trained(tmp_path / "copied")
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    with pytest.raises(ConfigError, match=r"already holds a run .*continue it with --resume auto"):
        run(config, target=target)
    again = run(dataclasses.replace(config, resume="auto"), target=target)
    assert (again.steps, again.metrics["step"]) == (6, 6)
    assert len(lines()) == 6


def test_logging_every_few_steps_sums_over_them(tree, target, lines, change):
    changed = change(tree, logging__every=4, train__accumulation=1, target__capture_cache_gib=0.01)
    result = run(build(changed), target=target)
    assert [line["step"] for line in lines()] == [4, 6]
    assert result.metrics["step"] == 6


def test_states_that_are_not_finite_are_counted_or_refused(tree, tmp_path, target, lines, change, capsys):
    def spoil(call, context, last):
        if call == 2:
            context[0][3, 5] = math.nan
            last[1][4, 0] = math.inf

    spoiled = Wrapped(target, spoil)
    result = run(build(change(tree, train__steps=2)), target=spoiled)
    assert result.exit_code == 0
    assert (lines()[0]["nonfinite_context"], lines()[0]["nonfinite_last"]) == (1, 1)
    assert "target states are not finite (nonfinite_context), masked out" in capsys.readouterr().err
    _, params = load_trained(tmp_path / "run")
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))

    off = change(tree, objective__sanitize=False, run_dir=str(tmp_path / "off"))
    with pytest.raises(NonFiniteStateError, match=r"sample s\d+: context_hidden of token 3 is not finite"):
        run(build(off), target=Wrapped(target, spoil))


def test_a_step_that_is_not_finite_ends_the_run_and_is_not_saved(tree, tmp_path, target, change):
    """States so large that the loss overflows: found on the read-back, one step late, before anything is saved."""

    def explode(call, context, last):
        if call == 5:  # third optimizer step, two micro-steps each
            for states in last:
                states.fill_(3e38)

    changed = change(tree, checkpoint__every=1)
    with pytest.raises(NonFiniteError, match=r"step 3: \S+ is (nan|inf)"):
        run(build(changed), target=Wrapped(target, explode))
    assert complete_steps(tmp_path / "run" / "checkpoints") == [1, 2]
    _, params = load_trained(tmp_path / "run")
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


def test_full_disk_while_training(tree, tmp_path, target, change, monkeypatch):
    """The first save works, the second meets a full disk: a clear error, and the first can be resumed from."""
    from train.checkpoint import Checkpoints

    class Failing(Checkpoints):
        saves = 0

        def save(self, *arguments):
            super().save(*arguments)
            Failing.saves += 1
            if Failing.saves == 2:
                step, response = self._pending
                response.result()

                class Full:
                    def result(self):
                        raise OSError(28, "No space left on device")

                self._pending = (step, Full())
                for folder in self.folder.glob(str(step)):
                    folder.rename(self.folder / f"{step}.orbax-checkpoint-tmp")

    monkeypatch.setattr(loop, "Checkpoints", Failing)
    changed = change(tree, checkpoint__every=2)
    with pytest.raises(
        CheckpointError, match=r"step 4 could not be written .*no space left .*there: 2\. .*--resume auto"
    ):
        run(build(changed), target=target)
    assert complete_steps(tmp_path / "run" / "checkpoints") == [2]
    monkeypatch.undo()
    assert run(build(change(changed, resume="auto")), target=target).steps == 6


def test_warm_start_from_a_folder(tree, tmp_path, target, change):
    """Weights only: the parameters are the folder's, step and moments are new."""
    import safetensors.numpy

    from draft_jax import weights
    from draft_jax.models.dspark import init_params
    from train import assembly
    from train.resolve import read_target_config, resolve_draft

    draft = resolve_draft(build(tree), read_target_config(build(tree).target))
    params = init_params(draft, jax.random.key(123))
    folder = tmp_path / "draft"
    folder.mkdir()
    tensors = weights.to_torch_layout(params, draft, dtype=np.float32)
    safetensors.numpy.save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(draft.to_hf()))
    changed = {**tree, "draft": {"init_draft": str(folder)}}
    parts = assembly.assemble(build(changed), target)
    state = parts.initial_state()
    assert (int(state.step), int(state.rewarm_from)) == (0, 0)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(state.params), strict=True):
        assert b.dtype == jnp.float32
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert not any(np.any(x) for x in jax.tree.leaves(state.opt_state))
    assert int(assembly.assemble(build(tree), target).initial_state().rewarm_from) < -(2**20)  # a new draft does not


def test_the_ranks_of_a_shared_target_capture_only_when_jax_is_done(tree, target, change, monkeypatch):
    """Their captures are collectives of torch, an optimizer step is one of JAX: never in flight together."""
    happened = []

    class Spy(steps.Loop):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            real = self.parts.programs.apply

            def apply(*arguments):
                outputs = real(*arguments)
                happened.append(("apply", id(outputs[1].rows)))
                return outputs

            programs = dataclasses.replace(self.parts.programs, apply=apply)
            self.parts = dataclasses.replace(self.parts, programs=programs)

    done = steps.jax_done
    monkeypatch.setattr(loop, "Loop", Spy)
    monkeypatch.setattr(
        steps, "jax_done", lambda outputs: (happened.append(("fence", id(outputs.rows))), done(outputs))
    )
    shared = Wrapped(target, lambda *_: happened.append(("capture", 0)))
    shared.lockstep = True
    run(build(change(tree, train__steps=2)), target=shared)
    applied = [place for place, (what, _) in enumerate(happened) if what == "apply"]
    assert len(applied) == 2
    for place in applied:
        assert happened[place + 1] == ("fence", happened[place][1])
    assert happened[applied[0] + 2][0] == "capture"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__max_length": 4000}, r"data\.max_length is 4000; target .* takes at most 128 tokens"),
        ({"draft__target_layer_ids": [0, 1]}, r"tapped layers \(0, 2\), but the draft is made for \(0, 1\)"),
        ({"train": {"epochs": 1, "batch_rows": 64}}, r"12 rows of data do not fill one optimizer step of 64 "),
        ({"train__devices": 2}, r"train\.devices is 2; JAX sees \d on this host"),
        ({"resume": "must"}, r"resume is 'must', but .* holds no checkpoint"),
        ({"draft__mask_token_id": None}, r"mask_token_id is not given and the target has no free embedding row"),
    ],
)
def test_refused_before_anything_is_trained(tree, target, change, changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        run(build(change(tree, **changes)), target=target)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
