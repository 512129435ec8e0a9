"""At temperature 1 the output is distributed as the target alone would sample: joint law of the first three
tokens.

The first comes from the prefill, the others from rounds with accepted drafts, residual and bonus samples, so
every branch of the loop takes part. The law is enumerated from the target's logits by Transformers, not by
our sessions.
"""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from train.evaluate import draft_runner
from train.evaluate.config import EvalConfig
from train.evaluate.draft_runner import ProposedBlocks
from train.evaluate.protocol import evaluate
from train.evaluate.tasks import Prompt

VOCAB, SAMPLES, TEMPERATURE = 5, 6000, 0.8
PROMPT = np.array([3, 1, 4], np.int32)


@pytest.fixture(scope="module")
def target(make_target):
    return make_target(vocab=VOCAB, scale=0.12)


@pytest.fixture(scope="module")
def exact_law(target):
    """fp64 [V, V, V]: probability of the first three tokens after PROMPT."""
    law = np.zeros((VOCAB, VOCAB, VOCAB))
    prefixes = torch.tensor([[*PROMPT, a, b] for a, b in itertools.product(range(VOCAB), repeat=2)])
    with torch.no_grad():
        p = torch.softmax(target._model(prefixes).logits.double() / TEMPERATURE, -1).numpy()
    for row, (a, b) in enumerate(itertools.product(range(VOCAB), repeat=2)):
        law[a, b] = p[row, 2, a] * p[row, 3, b] * p[row, 4]
    return law


@pytest.fixture(scope="module")
def run(target, make_config, make_params):
    config = make_config(target, block_size=2, initializer_range=0.15)
    params = make_params(config, seed=3)

    def sample(count):
        prompts = [Prompt(f"s{i}", PROMPT) for i in range(count)]
        settings = EvalConfig(max_new_tokens=3, temperature=TEMPERATURE, plain=False, batch_size=64)
        return evaluate(target, config, params, None, prompts, settings)

    return sample


def chi_square(result, law) -> float:
    """p-value of the sampled joint counts; cells expected fewer than five times are pooled."""
    counts = np.zeros(law.shape)
    for sample in result.samples:
        counts[tuple(sample.output_tokens)] += 1
    expected = law * len(result.samples)
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    if wanted[-1] < 5:
        observed, wanted = observed[:-1], wanted[:-1]
    assert len(wanted) > 20
    return stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue


def test_output_law_is_the_targets(run, exact_law):
    result = run(SAMPLES)
    assert 0.2 < result.survival[0] < 0.95, "both acceptance and residual must occur often"
    assert chi_square(result, exact_law) > 1e-3


def test_the_test_would_notice_a_greedy_draft(run, exact_law, monkeypatch):
    """Control: the most likely tokens proposed, but judged as if drawn from q. That is not lossless."""
    honest = draft_runner.DraftRunner.propose

    def greedy(self, *arguments):
        blocks = honest(self, *arguments)
        return ProposedBlocks(blocks.probs.argmax(-1).numpy(), blocks.probs, blocks.confidence_logits)

    monkeypatch.setattr(draft_runner.DraftRunner, "propose", greedy)
    assert chi_square(run(SAMPLES // 8), exact_law) < 1e-6
