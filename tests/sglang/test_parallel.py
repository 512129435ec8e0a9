"""Several processes: one target over two ranks (tp = 2), and two such targets in one world (dp = 2 x tp = 2)."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from target_bridge.sglang.adapter import free_port
from tests.places import ROOT
from tests.sglang.models import transformers_states

pytestmark = pytest.mark.slow


def run_ranks(world: int, tp: int, page_size: int, folder, documents: list[list[np.ndarray]], tmp_path) -> list[dict]:
    """What each rank wrote."""
    file = tmp_path / "documents.npz"
    np.savez(file, **{f"rank{rank}_{i}": ids for rank, own in enumerate(documents) for i, ids in enumerate(own)})
    # One "node" of cores per rank, since SGLang wants as many NUMA nodes as ranks otherwise.
    environment = os.environ | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1" if tp > 1 else "0", "OMP_NUM_THREADS": "1"}
    port = str(free_port())
    ranks = []
    for rank in range(world):
        arguments = [rank, world, tp, page_size, port, folder, file, tmp_path / f"out{rank}.npz"]
        command = [sys.executable, "-m", "tests.sglang.parallel_rank", *map(str, arguments)]
        ranks.append(
            subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    try:
        said = [process.communicate(timeout=900)[0].decode() for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for rank, (process, text) in enumerate(zip(ranks, said)):
        assert process.returncode == 0, f"rank {rank}:\n{text[-4000:]}"
    return [dict(np.load(tmp_path / f"out{rank}.npz")) for rank in range(world)]


def own_documents(world: int) -> list[list[np.ndarray]]:
    """Different ones for every rank, of different number."""
    rng = np.random.default_rng(5)
    return [[rng.integers(0, 70, size) for size in (17 + rank, 40, 1)[: 3 - rank % 2]] for rank in range(world)]


@pytest.mark.parametrize(("world", "tp", "page_size"), [(2, 2, 1), (4, 2, 16)])
def test_every_rank_gets_the_states_of_its_own_rows(make_model, tmp_path, world, tp, page_size):
    folder = make_model("qwen3")
    documents = own_documents(world)
    ranks = run_ranks(world, tp, page_size, folder, documents, tmp_path)
    from transformers import AutoModelForCausalLM

    truth = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    _, _, logits = transformers_states(folder, np.array([5, 6, 7]))
    for rank, facts in enumerate(ranks):
        assert facts["qkv_rows"] == 64 // tp  # really split: 4 + 2 + 2 heads of 8
        for turn in range(2):
            for index, ids in enumerate(documents[rank]):
                context, last, _ = transformers_states(folder, ids)
                np.testing.assert_allclose(facts[f"context{turn}_{index}"], context.numpy(), rtol=0, atol=1e-4)
                np.testing.assert_allclose(facts[f"last{turn}_{index}"], last.numpy(), rtol=0, atol=1e-4)
        # 70 rows in 128, of which each rank holds a part.
        assert np.array_equal(facts["embedding"], truth.get_input_embeddings().weight.detach().numpy())
        assert np.array_equal(facts["head"], truth.get_output_embeddings().weight.detach().numpy())
        np.testing.assert_allclose(facts["logits"], logits[-1].numpy(), rtol=0, atol=1e-4)
        refused = "document 1 holds id 70 at position 0"
        if rank % tp != tp - 1:
            refused = f"rank {tp - 1} of the {tp} that share the target was refused: {refused}"
        assert str(facts["refused"]).startswith(refused)


def test_a_process_alone_cannot_share(make_model):
    from target_bridge.target import TargetError
    from tests.sglang.models import running

    with (
        pytest.raises(TargetError, match=r"tp_size is 2, but this process is alone"),
        running(make_model("qwen3"), tp_size=2),
    ):
        pass
