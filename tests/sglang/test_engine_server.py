"""`EngineServer` around a real SGLang engine on a CPU: the plain half of serve-check, and the refusal of DSPARK."""

import importlib.util
import os
from pathlib import Path

import pytest

from target_bridge.serving.server import Deadlines, EngineServer, ServerFailure, ServerSettings
from tests.train.conftest import VOCAB, build_target
from train.evaluate.tasks import Prompt
from train.serve_check.config import ServeConfig
from train.serve_check.offline import ask
from train.serve_check.serving import margins, serve_pass

EOS = 3
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("setproctitle", "uvloop", "xgrammar")),
        reason="sglang.Engine needs setproctitle, uvloop and xgrammar beside the in-process bridge's packages",
    ),
]
CPU = {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True, "max_total_tokens": 4096}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return build_target(tmp_path_factory.mktemp("target") / "llama", layers=4)


@pytest.fixture(scope="module")
def settings(target, tmp_path_factory):
    def make(draft=None, **arguments):
        config = ServeConfig(concurrency=4, arguments=CPU | arguments)
        engine = config.engine(str(target), "float32", 96, draft=draft, block_size=3, trust=False)
        environment = {name: os.environ[name] for name in os.environ if name.startswith("SGLANG_")}
        environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        log = tmp_path_factory.mktemp("log") / "server.log"
        return ServerSettings(engine, log, environment=environment, deadlines=Deadlines(start=400, request=200))

    return make


def greedy(target: Path, ids: list[int], budget: int):
    """Plain decoding by Transformers: (tokens, gaps of the two largest logits)."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tokens, gaps = [], []
    while len(tokens) < budget and (not tokens or tokens[-1] != EOS):
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *tokens]])).logits[0, -1]
        top = torch.topk(logits, 2)
        tokens.append(int(top.indices[0]))
        gaps.append(float(top.values[0] - top.values[1]))
    return tokens, gaps


def test_plain_serving_equals_transformers(settings, target):
    """Ids in, ids out, stop rule, budgets, both temperatures, and the margin of a choice."""
    import numpy as np

    random = np.random.default_rng(0)
    prompts = [Prompt(f"p{i}", random.integers(6, VOCAB, 4 + 3 * i).astype(np.int32)) for i in range(6)]
    asked = ask(prompts, 12, 128, VOCAB)
    with EngineServer(settings()) as server:
        assert server.version
        plain = serve_pass(server, asked, 0.0, [EOS], None, 4)
        again = serve_pass(server, asked, 0.0, [EOS], None, 4)
        sampled = serve_pass(server, asked, 1.0, [EOS], None, 4)
        expected = {prompt.id: greedy(target, prompt.input_ids.tolist(), 12) for prompt in prompts}
        places = {name: tokens[:2] for name, (tokens, _) in expected.items() if len(tokens) > 2}
        gaps = margins(server, {prompt.id: prompt.input_ids.tolist() for prompt in prompts}, places)
    assert {name: list(tokens) for name, tokens in plain.outputs.items()} == {n: t for n, (t, _) in expected.items()}
    assert again.outputs == plain.outputs
    assert sampled.outputs != plain.outputs
    assert again.cached_tokens == 0, "the prefix cache was emptied in between"
    assert plain.tokens_per_second > 0
    assert gaps
    for name, gap in gaps.items():
        assert gap == pytest.approx(expected[name][1][2], abs=1e-3)


def test_stock_sglang_refuses_dspark_on_a_cpu_and_we_say_so(settings, target, tmp_path):
    """Why no test serves a draft here."""
    import json

    import jax

    from draft_jax.config import DraftConfig
    from draft_jax.models.dspark import init_params
    from train.export import export

    raw = json.loads((target / "config.json").read_text())
    config = DraftConfig.from_target(
        raw, num_hidden_layers=1, target_layer_ids=(0, 2), block_size=3, mask_token_id=5, markov_rank=4
    )
    folder = export(init_params(config, jax.random.key(0)), config, tmp_path / "draft").path
    with pytest.raises(ServerFailure, match="DSpark speculative decoding only supports") as caught:
        EngineServer(settings(draft=str(folder))).__enter__()
    assert "stock SGLang serves DSpark drafts on GPUs only" in str(caught.value)
