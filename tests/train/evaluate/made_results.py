"""Evaluation results made of invented rounds: what tests of figures, comparisons and reports read."""

import json

import numpy as np

from train.evaluate.accounting import Round, accept_statistics
from train.evaluate.result import EvalResult
from train.evaluate.sample_result import SampleResult, Seconds


def made_result(
    chances=(0.8, 0.7, 0.6),
    *,
    prompts=40,
    rounds=12,
    seed=0,
    tasks=("math", "chat"),
    scale=1.0,
    with_plain=True,
    **settings,
):
    """A result whose slot k is accepted with a chance near `chances[k]`, drawn anew for every round.

    Args:
        chances: [K] mean conditional acceptance.
        scale: the head's logits are the true ones times this.
        settings: replace or add settings.
    """
    random = np.random.default_rng(seed)
    K = len(chances)
    samples = []
    for index in range(prompts):
        ability = random.normal(0, 0.4)  # prompts differ: rounds of one prompt resemble each other
        made = []
        for _ in range(rounds):
            logits = np.log(np.array(chances) / (1 - np.array(chances))) + ability + random.normal(0, 0.7, K)
            hits = random.random(K) < 1 / (1 + np.exp(-logits))
            accepted = int(np.cumprod(hits).sum())
            drafts = tuple(int(t) for t in random.integers(10, 30, K))
            own = int(random.integers(30, 40))
            made.append(Round((*drafts[:accepted], own), K, accepted, None, drafts, tuple(logits * scale)))
        tokens = 1 + sum(r.length for r in made)
        samples.append(
            SampleResult(
                f"p{index}", 5 + index % 3, 9, made, "length", Seconds(0.1, 0.1 * rounds, 0.2 * rounds, 0.4 * rounds),
                list(range(tokens)) if with_plain else None, Seconds(total=0.02 * tokens) if with_plain else None,
                task=tasks[index % len(tasks)], text=f"Question {index} <why>?",
            )
        )  # fmt: skip
    result = EvalResult(
        accept_statistics([r for s in samples for r in s.rounds], K), samples, [], [],
        {"target": "smol", "temperature": 1.0, "max_new_tokens": 64, "block_size": K, "seed": 1,
         "confidence_threshold": 0.0, "draft": "made up", "draft_digest": "d1", "prompts": "made", "greedy": False,
         "eos_token_ids": [2], "target_dtype": "float32", "draft_dtype": "float32"} | settings,
        token_texts={str(i): f" w{i}" for i in range(50)},
    )  # fmt: skip
    return result.to_json()


def written(path, result):
    """Writes a made result to a file; returns the path as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result))
    return str(path)
