"""A draft this project did not make, on the real small target: DeepSpec's trainer measured 2.08 at
temperature 0.
"""

import pytest

from draft_jax.weights import load_folder
from tests.places import public_draft, small_target
from train.evaluate.config import EvalConfig
from train.evaluate.protocol import evaluate
from train.evaluate.tasks import load_prompts


@pytest.mark.slow
def test_deepspec_draft_accepts_about_two_tokens_and_loses_none():
    from target_bridge.hf import load_hf_target

    config, params, _ = load_folder(public_draft())
    target = load_hf_target(str(small_target()), config.target_layer_ids, dtype="float32", device="cpu")
    prompts = load_prompts(None, target.tokenizer, limit=4).prompts
    result = evaluate(target, config, params, None, prompts, EvalConfig(max_new_tokens=32))
    assert result.identical_to_plain == 4
    # Measured: 3.02 here, 2.41 on eight prompts of 64 tokens. The shipped prompts and the beginnings of answers
    # are easier than the 14 prompts of 128 tokens behind the 2.08. A misaligned draft falls to about 1.
    assert 2.0 < result.accept_length < 3.5
    assert result.survival[0] > 0.45
