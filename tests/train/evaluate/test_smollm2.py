"""The real small target and a draft that is not ours: lossless at both temperatures, whatever the batch.

`DRAFT_JAX_TEST_ALL=1 pytest -s -m slow` decodes 200 prompts to 10 tokens instead of 24 to 6, and says how far it is.
"""

import functools
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy import stats

from draft_jax import decode
from draft_jax.weights import load_folder
from target_bridge import handoff
from target_bridge.verify_batch import verify_batch
from tests.places import public_draft, small_target
from train.data import QUICKSTART_CONVERSATIONS
from train.evaluate.config import EvalConfig
from train.evaluate.protocol import evaluate
from train.evaluate.tasks import Prompt, load_prompts

pytestmark = pytest.mark.slow
SAMPLES = 20_000
ALL = os.environ.get("DRAFT_JAX_TEST_ALL") == "1"
PROMPTS, NEW_TOKENS = (200, 10) if ALL else (24, 6)


@pytest.fixture(scope="module")
def draft():
    config, params, _ = load_folder(public_draft())
    return config, params


@pytest.fixture(scope="module")
def target(draft):
    from target_bridge.hf import load_hf_target

    return load_hf_target(str(small_target()), draft[0].target_layer_ids, dtype="float32", device="cpu")


def test_the_next_token_has_the_targets_law(target, draft):
    """20,000 tokens after one text: drawn from the draft's q, kept or replaced, against Transformers' probabilities.

    The draft's first slot depends on the context alone, so one proposal gives q for all of them.
    """
    config, params = draft
    ids = load_prompts(None, target.tokenizer, limit=1).prompts[0].input_ids
    text = np.concatenate([ids, target.tokenizer("The answer is", add_special_tokens=False)["input_ids"]])
    with torch.inference_mode():
        logits = target._model(torch.as_tensor(text[None].astype(np.int64))).logits[0, -1].float()
    p = torch.softmax(logits.double(), -1).numpy()
    frozen = handoff.frozen_to_jax(*target.frozen_head())
    drafter = decode.make_drafter(config, jnp.float32, params=params, frozen=frozen, max_context=128)
    context = target.capture([text]).context_hidden[0][:-1]
    drafter.extend(context.numpy(), np.array([len(context)]))
    q = drafter.propose(int(text[-1]), np.zeros(config.block_size, np.float32), 1.0).probs[0, 0]
    random, draw = np.random.default_rng(0), jax.jit(decode.draw)
    counts, kept, batch = np.zeros(len(p), int), 0, 250
    for _ in range(SAMPLES // batch):
        tokens = np.asarray(draw(jnp.tile(q, (batch, 1)), random.random(batch, dtype=np.float32)))
        uniforms = random.random((batch, 2), dtype=np.float32)
        probs = torch.from_numpy(np.array(q)).expand(batch, 1, -1)
        verdicts = verify_batch(logits.expand(batch, 2, -1), probs, tokens[:, None], uniforms, 1.0)
        np.add.at(counts, np.where(verdicts.accepted == 1, tokens, verdicts.next_tokens), 1)
        kept += int(verdicts.accepted.sum())
    assert counts.sum() == SAMPLES
    assert kept / SAMPLES == pytest.approx(float(np.minimum(p, np.asarray(q, np.float64)).sum()), abs=0.02)
    common = p * SAMPLES >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(p[common], p[~common].sum()) * SAMPLES
    assert len(expected) > 20
    assert stats.chisquare(observed, expected * SAMPLES / expected.sum()).pvalue > 1e-3
    greedy_draft = np.bincount(np.full(SAMPLES, int(np.argmax(q))), minlength=len(p))
    assert stats.chisquare(np.append(greedy_draft[common], 0), expected).pvalue < 1e-6, "the test would notice"


def greedy_by_transformers(target, prompts):
    """What `generate` says to each prompt alone, the stop token included."""
    answers = []
    for done, prompt in enumerate(prompts, 1):
        ids = torch.as_tensor(prompt.input_ids[None].astype(np.int64))
        whole = target._model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS
        )
        answers.append(whole[0, ids.shape[1] :].tolist())
        say("Transformers", done, len(prompts))
    return answers


def say(what, done, total):
    if ALL and done % 25 == 0:
        print(f"{time.strftime('%H:%M:%S')} {what}: {done} of {total}", flush=True)


def test_prompts_are_token_identical_for_every_batch(target, draft):
    """Temperature 0 in float32: with the draft, batches of 1, 7 and 32 give what plain decoding gives, ours and
    Transformers'."""
    config, params = draft
    found = load_prompts(QUICKSTART_CONVERSATIONS, target.tokenizer, limit=PROMPTS)
    prompts = [Prompt(prompt.id, prompt.input_ids[-24:]) for prompt in found.prompts]
    assert len(prompts) == PROMPTS
    reference = greedy_by_transformers(target, prompts)
    statistics = []
    for batch in (32, 7, 1):
        settings = EvalConfig(max_new_tokens=NEW_TOKENS, batch_size=batch, plain=batch == 32)
        progress = functools.partial(say_progress, batch)
        result = evaluate(target, config, params, None, prompts, settings, progress)
        if batch == 32:
            assert result.identical_to_plain == PROMPTS, result.differences
        outputs = [sample.output_tokens for sample in result.samples]
        different = [prompt.id for prompt, ours, theirs in zip(prompts, outputs, reference) if ours != theirs]
        assert different == [], f"batch {batch}: {len(different)} of {PROMPTS} differ from Transformers"
        statistics.append(result.statistics)
    assert statistics[0] == statistics[1] == statistics[2]
    assert 1.2 < statistics[0].accept_length < 3.0
    if ALL:
        print(f"{PROMPTS} prompts x {NEW_TOKENS} tokens identical; {statistics[0]}")


def say_progress(batch, done, total, accept_length):
    say(f"batch {batch}", done, total)
