"""The probe on the real engine: it passes, and every way the engine can be set up wrongly fails it."""

from __future__ import annotations

import json

import pytest
import torch

from target_bridge.probe import ProbeReport
from target_bridge.sglang.versions import installed_version
from target_bridge.sglang_hooks import HOOKS
from tests.sglang.models import running, save_model
from train import probe as command
from train.config_file import build


def probed(target, folder, *, compare: bool = True) -> ProbeReport:
    config = build(
        {
            "target": {"path": str(folder), "bridge": "sglang", "device": "cpu"},
            "data": {"path": "none"},
            "run_dir": "none",
        }
    )
    raw = json.loads((folder / "config.json").read_text())
    return command.run_probe(target, config, raw, budget=2**30 if compare else 0)


def failed(report: ProbeReport) -> dict[str, str]:
    return {check.name: check.detail for check in report.failures}


@pytest.fixture(scope="module")
def folder(make_model):
    return make_model("qwen3")


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_healthy_engine_passes(make_model, kind, dtype):
    folder = make_model(kind)
    with running(folder, dtype=dtype) as target:
        report = probed(target, folder)
    assert report.ok, command.format_report(report, "sglang")
    assert set(report.streams[0].references) == {"the engine's layers", "Transformers in float32"}
    limit = 1e-4 if dtype == "float32" else 0.05
    for stream in report.streams:
        for source, found in stream.references.items():
            if stream.name == "final" and source == "the engine's layers":
                assert found is None
            else:
                assert found.difference < limit
                assert found.best == stream.layer
    hooks = next(str(check) for check in report.checks if check.name == "capture hook")
    assert "(its loaded class)" in hooks
    assert installed_version() in hooks


@pytest.mark.parametrize("compare", [True, False], ids=["with Transformers", "by its own layers alone"])
def test_taps_one_layer_off(folder, compare):
    """SGLang is told other ids than the run's: what a wrong convention of a hook amounts to."""
    with running(folder, (0, 1, 2)) as target:
        target.engine.model.set_dflash_layers_to_capture([tap + 1 for tap in (0, 1, 2)])
        report = probed(target, folder, compare=compare)
    names = ["equal to the engine's layers", "equal to Transformers in float32"][: 2 if compare else 1]
    assert set(failed(report)) == set(names)
    for name in names:
        assert "layer 0 is off by" in failed(report)[name]
        assert "it fits layer 1, shifted by +1" in failed(report)[name]
        assert "it fits layer 3, shifted by +1" in failed(report)[name]


def test_a_head_with_two_rows_exchanged(folder):
    """The frozen head is a copy that was changed; the engine still answers with its own."""
    with running(folder) as target:
        embedding, head = target.frozen_head()
        changed = head.clone()
        changed[[3, 7]] = changed[[7, 3]]
        target.frozen_head = lambda: (embedding, changed)
        assert set(failed(probed(target, folder))) == {"LM head on the final state gives the logits"}


def test_weights_that_are_not_the_folders(folder):
    """A layer the engine holds differs from the file: only Transformers can tell."""
    with running(folder) as target:
        with torch.no_grad():
            target.engine.model.model.layers[1].mlp.down_proj.weight.mul_(1.2)
        report = probed(target, folder)
    assert set(failed(report)) == {"equal to Transformers in float32"}
    assert "layer 2 is off by" in failed(report)["equal to Transformers in float32"]
    assert "layer 0" not in failed(report)["equal to Transformers in float32"]


def test_weights_that_overflow(folder):
    with running(folder) as target:
        with torch.no_grad():
            target.engine.model.model.layers[2].mlp.down_proj.weight.fill_(float("inf"))
        assert "finite numbers" in failed(probed(target, folder))["finite"]


def test_a_target_sglang_cannot_serve_a_dspark_draft_for(tmp_path):
    """Qwen2's class has the EAGLE-3 hook only: it can be captured, and the run is refused all the same."""
    folder = save_model("qwen2", tmp_path / "qwen2")
    with running(folder) as target:
        report = probed(target, folder)
    assert set(failed(report)) == {"capture hook", "SGLang serves DSpark"}
    assert all(found is None or found.difference < 1e-4 for s in report.streams for found in s.references.values())


def test_a_run_does_not_start_on_a_target_that_fails(tmp_path, monkeypatch):
    from target_bridge.sglang import engine as engines
    from tests.sglang.test_training import DRAFT, write_tokens
    from train.assembly import assemble

    folder = save_model("qwen2", tmp_path / "qwen2")
    tree = {
        "target": {"path": str(folder), "bridge": "sglang", "device": "cpu", "sglang": {"max_total_tokens": 256}},
        "data": {"path": str(write_tokens(tmp_path / "rows.jsonl", 70)), "format": "tokens", "max_length": 40},
        "draft": {**DRAFT, "target_layer_ids": [0, 2]},
        "train": {"steps": 1},
        "run_dir": str(tmp_path / "run"),
    }
    try:
        with pytest.raises(command.ProbeError, match=r"Qwen2ForCausalLM has no .*target\.probe: false"):
            assemble(build(tree))
    finally:
        for engine in list(engines._ALIVE):
            engine.close()
    tree["target"]["probe"] = False
    try:
        assert assemble(build(tree)).total_steps == 1
    finally:
        for engine in list(engines._ALIVE):
            engine.close()


def test_the_probe_leaves_no_traces(folder, documents):
    with running(folder) as target:
        before = target.capture(documents)
        free = target.engine.free_tokens
        probed(target, folder, compare=False)
        assert target.engine.free_tokens == free
        again = target.capture(documents)
    for a, b in zip(before.context_hidden, again.context_hidden):
        assert torch.equal(a, b)


def test_the_table_of_hooks_is_the_installed_sglangs(folder):
    """Every class of the registry that can be imported here, drafts and heads aside."""
    from sglang.srt.models.registry import ModelRegistry

    drafts = ("NextN", "MTP", "Eagle", "Eagle3", "EmbeddingGemmaModel", "BidirectionalModel")
    table = HOOKS[installed_version()]
    names = ModelRegistry.get_supported_archs()
    checked = 0
    for name in names:
        model = ModelRegistry.models[name]
        if not isinstance(model, type) or name.endswith(drafts) or "Assistant" in name:
            continue
        has = {key for key in ("dflash", "dspark", "eagle3") if hasattr(model, f"set_{key}_layers_to_capture")}
        assert table.get(name, frozenset()) == has, name
        checked += bool(has)
    assert checked > 40
