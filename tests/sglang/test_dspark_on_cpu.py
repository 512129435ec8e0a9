"""A draft of ours served by the real SGLang, round by round equal to our evaluator's.

SGLang 0.5.23 runs its own DSpark worker, Triton attention (interpreted), acceptance and accounting on a CPU in
float32; `dspark_cpu/` says what is changed around them to make that possible.
"""

import importlib.metadata
import importlib.util
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from target_bridge.serving.server import Deadlines, EngineServer, ServerSettings
from tests.train.conftest import build_target
from train.serve_check.comparison import Comparison, compare_outputs
from train.serve_check.config import ServeConfig
from train.serve_check.offline import ask, read_evaluation
from train.serve_check.serving import serve_pass

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("setproctitle", "uvloop", "xgrammar")),
        reason="sglang.Engine needs setproctitle, uvloop and xgrammar beside the in-process bridge's packages",
    ),
    pytest.mark.skipif(
        importlib.metadata.version("sglang") != "0.5.23",
        reason="0.5.16's Triton backend lays a draft's K rows out as K + 1 (sgl-project/sglang issue 30555)",
    ),
]
K, NEW, PROMPTS, VOCAB, EOS = 3, 12, 4, 61, 3
#: Of the Markov head's logits; the backbone's have a standard deviation of about 3.
GAIN = 5.0
PATCHES = Path(__file__).parent / "dspark_cpu"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return build_target(tmp_path_factory.mktemp("target") / "llama", hidden=64, layers=4)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [
        {"id": f"q{i}", "turns": [" ".join(f"w{6 + (7 * i + j) % 50}" for j in range(3 + 4 * i))]} for i in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def draft(target, prompts, tmp_path_factory):
    """A random draft whose Markov head knows which token the target likes after which.

    So some of its proposals pass, and whether they do hangs on the Markov head and on everything before it.
    """
    import jax
    import ml_dtypes
    from safetensors.numpy import load_file, save_file

    from draft_jax.config import DraftConfig
    from draft_jax.models.dspark import init_params
    from train.export import export

    raw = json.loads((target / "config.json").read_text())
    config = DraftConfig.from_target(
        raw, num_hidden_layers=2, target_layer_ids=(0, 1, 2), block_size=K, mask_token_id=5, markov_rank=VOCAB,
        initializer_range=0.2, target_name=str(target),
    )  # fmt: skip
    folder = export(init_params(config, jax.random.key(1)), config, tmp_path_factory.mktemp("draft") / "export").path
    file = str(folder / "model.safetensors")
    tensors = load_file(file)
    following = np.zeros((VOCAB, VOCAB), np.float32)
    for text in greedy_texts(target, prompts):
        following[text[1:], text[:-1]] = GAIN
    tensors["markov_head.markov_w1.weight"] = np.eye(VOCAB, dtype=np.float32).astype(ml_dtypes.bfloat16)
    tensors["markov_head.markov_w2.weight"] = following.astype(ml_dtypes.bfloat16)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def greedy_texts(target, prompts):
    """Prompt and plain greedy output, by Transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    from target_bridge.hf_source import load_tokenizer
    from train.evaluate.tasks import load_prompts

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    for prompt in load_prompts(prompts, load_tokenizer(str(target))).prompts:
        ids = prompt.input_ids.tolist()
        with torch.no_grad():
            for _ in range(NEW):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        yield ids


@pytest.fixture(scope="module")
def offline(draft, prompts, tmp_path_factory):
    """Our evaluation in float32, at temperature 0 and 1."""
    from train.evaluate.command import main

    results = {}
    for temperature in (0.0, 1.0):
        path = tmp_path_factory.mktemp("offline") / "eval.json"
        common = ["--draft", str(draft), "--prompts", str(prompts), "--max-new-tokens", str(NEW), "--device", "cpu"]
        assert main([*common, "--dtype", "float32", "--temperature", str(temperature), "--output", str(path)]) == 0
        results[temperature] = read_evaluation(path)
    return results


@pytest.fixture(scope="module")
def served(target, draft, prompts, offline, tmp_path_factory):
    from target_bridge.hf_source import load_tokenizer
    from train.evaluate.tasks import load_prompts

    asked = ask(load_prompts(prompts, load_tokenizer(str(target))).prompts, NEW, 128, VOCAB)
    assert asked.digest == offline[0.0].settings["prompts_digest"]
    config = ServeConfig(
        concurrency=PROMPTS,
        attention_backend="triton",
        arguments={"device": "cpu", "disable_cuda_graph": True, "max_total_tokens": 2048},
    )
    engine = config.engine(str(target), "float32", 96, draft=str(draft), block_size=K, trust=False)
    environment = {
        "SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1",
        "SGLANG_NCCL_SO_PATH": "/nonexistent", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    log = tmp_path_factory.mktemp("log") / "server.log"
    settings = ServerSettings(
        engine, log, pythonpath=(str(PATCHES),), environment=environment,
        deadlines=Deadlines(start=600, request=900),
    )  # fmt: skip
    with EngineServer(settings) as server:
        return {t: serve_pass(server, asked, t, [EOS], K, 1) for t in (0.0, 1.0)}


def test_greedy_serving_equals_our_evaluation_round_by_round(served, offline):
    """Same outputs, rounds and accepted drafts: taps, rotary, block attention, Markov head and accounting are right."""
    ours, theirs = offline[0.0], served[0.0]
    identity = compare_outputs(theirs.outputs, ours.outputs)
    assert identity.identical == identity.compared == PROMPTS, identity.differences
    accepted = 0
    for sample, record in zip(theirs.samples, ours.record["samples"]):
        assert sample.prompt == record["prompt"]
        assert sample.rounds == len(record["rounds"])
        whole = Counter(item["accepted"] for item in record["rounds"][:-1])
        counted = Counter({size: count for size, count in enumerate(sample.histogram) if count})
        last = counted - whole
        assert sum(last.values()) == 1, "all rounds but the last are the same"
        assert next(iter(last)) >= record["rounds"][-1]["accepted"], "the last one, before the budget cut it"
        accepted += sum(whole.elements())
    assert accepted > 5, "drafts were accepted, so there was something to compare"
    comparison = Comparison(0.0, ours, theirs, None, K, 0.03)
    assert comparison.relative_difference == pytest.approx(0.0, abs=1e-12)
    assert comparison.problem is None


def test_sampled_serving_is_counted(served, offline):
    """At temperature 1 the random numbers differ; every count still fits, and lengths are of the same kind."""
    comparison = Comparison(1.0, offline[1.0], served[1.0], None, K, 0.03)
    assert comparison.statistics.rounds > PROMPTS
    assert 1.0 <= comparison.statistics.accept_length <= K + 1
    assert abs(comparison.relative_difference) < max(0.03, 4 * comparison.relative_error)
