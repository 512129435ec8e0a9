"""What is refused before the engine sees it, in our words, and what an error inside it leaves behind."""

import importlib.metadata
import json
import shutil

import numpy as np
import pytest
import torch

from target_bridge.sglang import versions
from target_bridge.sglang.adapter import Packed, find_hook
from target_bridge.target import TargetError
from tests.sglang.models import require_full, running


@pytest.fixture(scope="module")
def target(make_model):
    with running(make_model("qwen3"), max_total_tokens=64, max_running_requests=3, page_size=16) as started:
        yield started


@pytest.fixture
def untouched(target):
    """Nothing may have run, and nothing may be held."""
    before = target.engine.forwards
    yield
    assert target.engine.forwards == before
    require_full(target)


REFUSED = [
    ([], "no documents: the list is empty"),
    ([[1, 2], []], "document 1 is empty"),
    ([[1, 70]], r"document 0 holds id 70 at position 1.*0\.\.69"),  # a padding row of the embedding, so no crash
    ([[1, 200]], "document 0 holds id 200"),
    ([[3], [-1]], "document 1 holds id -1"),
    ([np.zeros(65, np.int32)], "document 0 has 65 tokens, but the target takes at most 64"),
    ([np.zeros((2, 2), np.int32)], "one-dimensional"),
    ([[0.5]], "must be integers"),
]


@pytest.mark.parametrize(("documents", "message"), REFUSED)
def test_documents_are_refused_before_the_engine_sees_them(target, untouched, documents, message):
    with pytest.raises(TargetError, match=message):
        target.capture(documents)


def test_requests_are_refused_before_the_engine_sees_them(target, untouched):
    engine = target.engine
    with pytest.raises(TargetError, match="no requests: the list is empty"):
        engine.forward([])
    with pytest.raises(TargetError, match="has 97 tokens, but the target takes at most 96"):
        engine.begin([1] * 97, reuse=False)
    requests = [engine.begin([1, 2], reuse=False) for _ in range(4)]
    with pytest.raises(TargetError, match=r"4 requests in one forward, but the engine has room for 3 of its 3"):
        engine.forward(requests)
    long = [engine.begin([1] * 40, reuse=False) for _ in range(2)]
    with pytest.raises(TargetError, match=r"need 96 KV slots \(pages of 16\), but 64 of 64 are free"):
        engine.forward(long)
    for request in (*requests, *long):
        engine.abandon(request)


def test_keep_is_checked(target):
    engine = target.engine
    request = engine.begin([1, 2, 3], reuse=False, name="text")
    engine.forward([request])
    with pytest.raises(TargetError, match="text: cannot keep 4 tokens"):
        engine.finish(request, keep=4)
    engine.finish(request)
    require_full(target)


def test_an_error_inside_the_engine_resets_it(target, documents, monkeypatch):
    engine = target.engine
    truth = target.capture([documents[0]]).context_hidden[0]
    waiting = engine.begin([1, 2, 3], reuse=False, name="waiting")

    def broken(*args, **kwargs):
        raise RuntimeError("out of something")

    with monkeypatch.context() as patch:
        patch.setattr(engine._adapter.runner, "forward", broken)
        with pytest.raises(RuntimeError, match="out of something"):
            target.capture([documents[0]])
    require_full(target)
    with pytest.raises(TargetError, match="waiting is void: the engine was reset"):
        engine.forward([waiting])
    assert torch.equal(target.capture([documents[0]]).context_hidden[0], truth)


def change_rows(packed: Packed, what: str) -> Packed:
    fields = {name: getattr(packed, name) for name in ("context", "last", "logits", "counts")}
    if what == "counts":
        fields["counts"] = [packed.counts[0] + 1, packed.counts[1] - 1]
    elif what == "missing":
        fields["last"] = None
    else:
        fields[what] = fields[what][:-1]
    return Packed(**fields)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("counts", "document 0: expected 2 rows from the engine, got 3"),
        (
            "context",
            r"context states of document 0 \(2 rows\), document 1 \(3 rows\): expected \[5, 96\].*got \[4, 96\]",
        ),
        ("last", r"last states of document 0 .*expected \[5, 32\] from the engine, got \[4, 32\]"),
        ("missing", r"last states of document 0 .*got none"),
        ("logits", r"logits states of document 0 .*expected \[2, "),
    ],
)
def test_rows_that_do_not_fit_their_requests(target, monkeypatch, what, message):
    adapter = target.engine._adapter
    real = adapter.forward
    with monkeypatch.context() as patch:
        patch.setattr(adapter, "forward", lambda handles, tree: change_rows(real(handles, tree), what))
        with pytest.raises(TargetError, match=message):
            target.capture([[1, 2], [3, 4, 5]])
    require_full(target)


def test_one_engine_at_a_time_and_none_after_close(make_model, target):
    with pytest.raises(TargetError, match="already running in this process"), running(make_model("llama")):
        pass
    require_full(target)  # the one that runs was left alone


def test_a_closed_engine(make_model, request):
    request.getfixturevalue("target").close()
    with running(make_model("llama")) as other:
        other.close()
        with pytest.raises(TargetError, match="engine is closed"):
            other.capture([[1]])
        other.close()


def test_versions(monkeypatch):
    installed = importlib.metadata.version("sglang")
    assert versions.adapter_name(installed)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.19")
    with pytest.raises(
        TargetError, match=r"SGLang 0\.5\.19 is installed; the bridge supports exactly 0\.5\.23, 0\.5\.16"
    ):
        versions.make_adapter()


class Unstartable:
    """An adapter of an installation that lacks something, and of one that breaks while it starts."""

    def __init__(self, error):
        self.error = error

    def start(self, start):
        raise self.error

    def stop(self):
        raise RuntimeError("nothing to take down")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ModuleNotFoundError("No module named 'xgrammar'"),
            r"could not be imported: No module named 'xgrammar'.*sglang\.md",
        ),
        (AssertionError("heads"), r"could not start target .* on cpu: AssertionError: heads"),
        (ValueError(), r"could not start target .*: ValueError: ValueError\(\)"),
    ],
)
def test_an_engine_that_does_not_start(make_model, monkeypatch, error, message):
    with monkeypatch.context() as patch:
        patch.setattr("target_bridge.sglang.engine.make_adapter", lambda: Unstartable(error))
        with pytest.raises(TargetError, match=message), running(make_model("llama")):
            pass
    with running(make_model("llama")) as after:
        assert len(after.capture([[1, 2]])) == 1


def with_config(folder, into, **changes):
    shutil.copytree(folder, into)
    config = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(config | changes))
    return into


def test_a_model_without_a_hook(make_model):
    folder = make_model("olmo")
    with (
        pytest.raises(TargetError, match=r"OlmoForCausalLM has no way to hand out.*give target\.bridge: hf"),
        running(folder),
    ):
        pass


class OnlyEagle:
    def set_eagle3_layers_to_capture(self, layer_ids): ...


class All(OnlyEagle):
    def set_dflash_layers_to_capture(self, layer_ids): ...

    def set_dspark_layers_to_capture(self, layer_ids): ...


def test_the_best_hook_is_taken():
    assert find_hook(OnlyEagle, "x") == "set_eagle3_layers_to_capture"
    assert find_hook(All, "x") == "set_dspark_layers_to_capture"


def test_a_model_that_changes_its_logits(make_model, tmp_path):
    folder = with_config(make_model("llama"), tmp_path / "scaled", logit_scale=0.5)
    with pytest.raises(TargetError, match=r"cannot be used.*logit_scale=0\.5"), running(folder):
        pass


def test_damaged_weights(make_model, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(make_model("qwen3"), tmp_path / "damaged")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][69, 3] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match="row 69 of its input embedding is not finite"), running(folder):
        pass


@pytest.mark.parametrize(
    ("taps", "message"), [([0, 4], "out of range"), ([2, 0], "taps must ascend"), ([], "is empty")]
)
def test_taps_are_checked_before_anything_starts(make_model, taps, message):
    with pytest.raises(TargetError, match=message), running(make_model("qwen3"), taps):
        pass
