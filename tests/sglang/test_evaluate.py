"""Speculative decoding over the engine: lossless, and the same rounds as over Transformers."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from draft_jax.config import DraftConfig
from draft_jax.models.dspark import abstract_params, init_params
from target_bridge.hf import load_hf_target
from tests.places import public_draft, small_target
from tests.sglang.models import TAPS, running
from tests.sglang.texts import require_settled
from tests.train.conftest import build_target
from train.config import ConfigError
from train.evaluate.command import main
from train.evaluate.config import EvalConfig
from train.evaluate.protocol import evaluate
from train.evaluate.target import engine_options
from train.evaluate.tasks import Prompt
from train.export import export


def random_draft(target_config: dict[str, Any], **fields: Any) -> tuple[DraftConfig, Any]:
    """A draft that is confident and often wrong."""
    config = DraftConfig.from_target(
        target_config, num_hidden_layers=1, target_layer_ids=TAPS, block_size=4, mask_token_id=0, markov_rank=8,
        initializer_range=0.3, **fields,
    )  # fmt: skip
    random = np.random.default_rng(0)

    def leaf(path: Any, abstract: Any) -> jax.Array:
        noise = random.normal(size=abstract.shape) * config.initializer_range
        return jnp.asarray(noise + (path[-1].key == "scale"), jnp.float32)

    return config, jax.tree_util.tree_map_with_path(leaf, abstract_params(config))


@pytest.fixture(scope="module")
def folder(make_model):
    """Its logits are far apart, and three ids end a text."""
    return make_model("qwen3", initializer_range=0.3, eos_token_id=[7, 30, 55])


@pytest.fixture(scope="module")
def prompts():
    random = np.random.default_rng(1)
    return [Prompt(f"p{i}", random.integers(8, 70, int(random.integers(1, 30))).astype(np.int32)) for i in range(7)]


@pytest.fixture(scope="module")
def over_transformers(folder, prompts):
    """Temperature -> result."""
    target = load_hf_target(str(folder), TAPS, dtype="float32", device="cpu")
    config, params = random_draft(target.info.config)
    return {
        temperature: evaluate(
            target, config, params, None, prompts, EvalConfig(max_new_tokens=24, temperature=temperature)
        )
        for temperature in (0.0, 1.0)
    }


@pytest.mark.parametrize(
    "engine",
    [
        {"page_size": 1, "max_total_tokens": 512},
        {"page_size": 16, "max_total_tokens": 512},
        {"page_size": 16, "max_total_tokens": 96, "max_running_requests": 3},  # evicted and given back all the time
    ],
    ids=["page 1", "page 16", "small pool"],
)
def test_the_same_rounds_as_over_transformers(folder, prompts, over_transformers, engine):
    with running(folder, **engine) as target:
        config, params = random_draft(target.info.config)
        for temperature, expected in over_transformers.items():
            options = EvalConfig(max_new_tokens=24, temperature=temperature)
            result = evaluate(target, config, params, None, prompts, options)
            assert [s.output_tokens for s in result.samples] == [s.output_tokens for s in expected.samples]
            for ours, theirs in zip(result.samples, expected.samples):
                assert ours.finish == theirs.finish
                assert [(r.proposed, r.accepted) for r in ours.rounds] == [
                    (r.proposed, r.accepted) for r in theirs.rounds
                ]
            assert result.accept_length == expected.accept_length
            require_settled(target)
        greedy = over_transformers[0.0]
        assert {s.finish for s in greedy.samples} == {"eos", "length"}


def test_greedy_equals_plain_decoding_and_transformers_generate(folder, prompts):
    model = load_hf_target(str(folder), TAPS).model
    with running(folder, page_size=16, max_total_tokens=512) as target:
        config, params = random_draft(target.info.config)
        result = evaluate(target, config, params, None, prompts, EvalConfig(max_new_tokens=24))
    assert result.identical_to_plain == len(prompts)
    assert not result.differences
    for prompt, sample in zip(prompts, result.samples):
        ids = torch.as_tensor(prompt.input_ids)[None].long()
        with torch.no_grad():
            output = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=[7, 30, 55], pad_token_id=0)
        assert sample.output_tokens == output[0, ids.shape[1] :].tolist()


def test_the_command(tmp_path, capsys):
    target_folder = build_target(tmp_path / "target")
    raw = json.loads((target_folder / "config.json").read_text())
    config = DraftConfig.from_target(
        raw, num_hidden_layers=1, target_layer_ids=(0, 2), block_size=3, mask_token_id=5, markov_rank=4,
        target_name=str(target_folder),
    )  # fmt: skip
    draft = export(init_params(config, jax.random.key(0)), config, tmp_path / "export").path
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"w{i + 6} w{i + 9} w{i + 20}"]}) + "\n" for i in range(4)))
    common = ["--draft", str(draft), "--prompts", str(prompts), "--max-new-tokens", "10", "--device", "cpu"]
    results = {}
    for bridge, extra in (("hf", []), ("sglang", ["--engine", "page_size=16", "--engine", "max_total_tokens=256"])):
        output = tmp_path / f"{bridge}.json"
        assert main([*common, "--bridge", bridge, *extra, "--output", str(output)]) == 0
        results[bridge] = json.loads(output.read_text())
        assert "equal to plain greedy decoding" in capsys.readouterr().out
    assert [s["output_tokens"] for s in results["hf"]["samples"]] == [
        s["output_tokens"] for s in results["sglang"]["samples"]
    ]
    with pytest.raises(ValueError, match=r"--engine page_size=16 is for the SGLang engine"):
        main([*common, "--engine", "page_size=16"])


def test_engine_options():
    assert engine_options(["page_size=16", "attention_backend=triton"]).page_size == 16
    own = {"page_size": 16, "max_total_tokens": 40, "mem_fraction_static": 0.3, "load_format": "auto"}
    options = engine_options(["page_size=4"], own)
    assert (options.page_size, options.max_total_tokens, options.mem_fraction_static) == (4, None, None)
    with pytest.raises(ConfigError, match="unknown key page_sise; did you mean page_size"):
        engine_options(["page_sise=4"])
    with pytest.raises(ValueError, match="--engine page_size: give KEY=VALUE"):
        engine_options(["page_size"])


@pytest.mark.slow
def test_the_public_draft_on_the_real_small_target(tmp_path):
    """DeepSpec's own draft: the same tokens and rounds over both bridges, none lost against plain decoding."""
    common = ["--draft", str(public_draft()), "--target", str(small_target()), "--limit", "2", "--max-new-tokens", "24"]
    samples = {}
    for bridge in ("hf", "sglang"):
        output = tmp_path / f"{bridge}.json"
        assert main([*common, "--device", "cpu", "--bridge", bridge, "--output", str(output)]) == 0
        result = json.loads(output.read_text())
        assert result["identical_to_plain"] == 2
        samples[bridge] = [(s["output_tokens"], [r["accepted"] for r in s["rounds"]]) for s in result["samples"]]
    assert samples["hf"] == samples["sglang"]
