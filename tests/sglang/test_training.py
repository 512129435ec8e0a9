"""Training over the engine: the trainer does not know the difference."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.places import ROOT, small_target
from tests.sglang.models import save_model
from tests.train.processes import run_processes
from train.config_file import build
from train.loop import run

CONVERSATIONS = ROOT / "train" / "data" / "quickstart" / "conversations.jsonl.gz"
DRAFT = {"layers": 1, "block_size": 3, "mask_token_id": 5, "markov_rank": 4, "intermediate_size": 48}
pytestmark = pytest.mark.usefixtures("quick_compilation")


def write_tokens(path: Path, vocab: int, rows: int = 10, longest: int = 40) -> Path:
    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for index in range(rows):
            length = int(rng.integers(12, longest + 1))
            mask = [0] * (length // 3) + [1] * (length - length // 3)
            row = {"id": f"s{index}", "input_ids": rng.integers(6, vocab, length).tolist(), "loss_mask": mask}
            file.write(json.dumps(row) + "\n")
    return path


def losses(tree: dict, folder: Path, name: str = "loss", **target: object) -> list[float]:
    """Loss, or another metric, of every step of a run."""
    from target_bridge.sglang.engine import close_all

    config = build({**tree, "target": {**tree["target"], **target}, "run_dir": str(folder)})
    try:
        run(config)
    finally:
        close_all()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines if name in line]


@pytest.fixture
def tiny(tmp_path):
    folder = save_model("qwen3", tmp_path / "target")
    return {
        "target": {"path": str(folder), "device": "cpu", "probe": False},
        "data": {"path": str(write_tokens(tmp_path / "rows.jsonl", 70)), "format": "tokens", "max_length": 40,
                 "min_loss_tokens": 2},
        "draft": {**DRAFT, "target_layer_ids": [0, 2]},
        "objective": {"num_anchors": 4},
        "optimizer": {"lr": 1e-2},
        "train": {"steps": 6, "batch_rows": 2, "accumulation": 2},
        "checkpoint": {"every": 0},
        "logging": {"progress": False},
    }  # fmt: skip


def test_a_run_over_the_engine_equals_one_over_transformers(tiny, tmp_path):
    over_hf = losses(tiny, tmp_path / "hf")
    over_sglang = losses(tiny, tmp_path / "sglang", bridge="sglang", sglang={"page_size": 16})
    assert len(over_hf) == 6
    np.testing.assert_allclose(over_sglang, over_hf, rtol=0, atol=1e-3)


@pytest.mark.slow
def test_one_target_over_two_ranks_trains_as_one(tiny, tmp_path):
    """tp = 2: each rank has half of the rows, and the curve is that of one process at the same global batch."""
    alone = losses(tiny, tmp_path / "alone", bridge="sglang")
    shared = {**tiny["target"], "bridge": "sglang", "sglang": {"tp_size": 2}}
    config = tmp_path / "shared.yaml"
    config.write_text(json.dumps({**tiny, "target": shared, "run_dir": str(tmp_path / "shared")}))
    code = f"import sys; from train.cli import main; sys.exit(main(['train', '--config', {str(config)!r}]))"
    quick = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    for ended in run_processes(code, 2, limit=600, extra=quick):
        assert ended.code == 0, ended.output[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "shared" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == len(alone) == 6
    np.testing.assert_allclose([line["loss"] for line in lines], alone, rtol=0, atol=1e-4)


def test_random_weights_from_the_config_alone(tiny, tmp_path):
    """No weights, no tokenizer, rows of ids: what a timing run of a large target needs."""
    folder = Path(tiny["target"]["path"])
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((folder / "config.json").read_text())
    options = {"bridge": "sglang", "sglang": {"load_format": "dummy"}}
    found = losses(tiny, tmp_path / "run", "ce_loss", path=str(bare), **options)
    assert len(found) == 6
    assert np.isfinite(found).all()
    assert found[0] == pytest.approx(np.log(70), rel=1e-2)  # SGLang's random weights are tiny: all ids alike


@pytest.mark.slow
def test_twenty_steps_of_the_real_target(tmp_path):
    """SmolLM2-135M over both bridges: equal losses within 1e-3."""
    tree = {
        "target": {"path": str(small_target()), "device": "cpu", "probe": False},
        # Short rows for speed: many answers are cut off before they begin, which a run would refuse.
        "data": {"path": str(CONVERSATIONS), "max_length": 64, "limit": 40, "min_retention": 0.0},
        "draft": {"layers": 1, "num_taps": 3, "block_size": 4, "mask_token_id": 18, "markov_rank": 16,
                  "intermediate_size": 256},
        "objective": {"num_anchors": 8},
        "train": {"steps": 20, "batch_rows": 2},
        "checkpoint": {"every": 0},
        "logging": {"progress": False},
    }  # fmt: skip
    over_hf = losses(tree, tmp_path / "hf")
    over_sglang = losses(tree, tmp_path / "sglang", bridge="sglang")
    assert len(over_hf) == 20
    assert over_hf[-1] < over_hf[0]
    np.testing.assert_allclose(over_sglang, over_hf, rtol=0, atol=1e-3)
