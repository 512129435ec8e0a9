"""One prompt decoded with the draft: propose, verify, settle, commit, until it ends (dspark_spec 5.1)."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING

import numpy as np

from target_bridge import fence
from target_bridge.verify import verify
from train.evaluate.accounting import Round, settle_round
from train.evaluate.config import EvalConfig
from train.evaluate.draft_runner import DraftRunner
from train.evaluate.plain import sample
from train.evaluate.result import SampleResult, Seconds
from train.evaluate.tasks import Prompt

if TYPE_CHECKING:
    from target_bridge.target import Target


def sample_generator(seed: int, prompt_id: str, stream: str = "draft") -> np.random.Generator:
    """The random numbers of one prompt: from the seed and the prompt's id, never its place in the file."""
    digest = hashlib.blake2b(f"{stream}\0{prompt_id}".encode(), digest_size=8).digest()
    key = np.array([seed % 2**64, int.from_bytes(digest, "little")], np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def decode_with_draft(
    target: Target,
    runner: DraftRunner,
    prompt: Prompt,
    max_new_tokens: int,
    eval_config: EvalConfig,
    stop_after: int | None = None,
) -> SampleResult:
    """Decodes one prompt with the draft.

    Args:
        target: the verifier.
        runner: the draft; it is reset first.
        prompt: what to continue.
        max_new_tokens: tokens to generate at most, the first included.
        eval_config: temperature, seed, threshold.
        stop_after: end after so many rounds (warming up).
    """
    eos = frozenset(target.info.eos_token_ids)
    temperature = 0.0 if eval_config.greedy else eval_config.temperature
    random = sample_generator(eval_config.seed, prompt.id)
    K = runner.config.block_size
    seconds = Seconds()
    rounds: list[Round] = []
    begin = time.perf_counter()
    runner.reset()
    session = target.open_session(len(prompt.input_ids) + max_new_tokens)
    try:
        step = session.extend({0: prompt.input_ids}, last_logits=1)[0]
        fence.torch_done(step.logits.device)
        session.commit({0: len(prompt.input_ids)})
        first = sample(step.logits[-1], temperature, float(random.random(dtype=np.float32)))
        runner.extend(step.context_hidden)
        mark = time.perf_counter()
        seconds.prefill = mark - begin
        anchor, remaining = first, max_new_tokens - 1
        finish = "eos" if first in eos else "length" if remaining == 0 else None
        while finish is None:
            numbers = random.random(2 * K + 1, dtype=np.float32)  # always as many, whatever the round needs
            block = runner.propose(anchor, numbers[:K], temperature)
            proposed = min(_confident(block.confidence, eval_config.confidence_threshold, K), remaining)
            tokens = block.tokens[:proposed]
            drafted = time.perf_counter()
            seconds.draft += drafted - mark
            step = session.extend({0: np.array([anchor, *tokens])})[0]
            fence.torch_done(step.logits.device)
            verified = time.perf_counter()
            seconds.target += verified - drafted
            verdict = verify(step.logits, block.probs[:proposed], tokens, numbers[K : K + proposed + 1], temperature)
            settled = settle_round(tokens, verdict.accepted, verdict.next_token, eos, remaining)
            rounds.append(settled)
            finish = settled.finish
            mark = time.perf_counter()
            if finish is None:
                # The anchor and the accepted drafts stay in both caches; the new anchor has no state yet.
                kept = 1 + settled.accepted
                session.commit({0: kept})
                anchor, remaining = settled.tokens[-1], remaining - settled.length
                runner.extend(step.context_hidden[:kept])
            if stop_after is not None and len(rounds) >= stop_after:
                break
    finally:
        session.close()
    seconds.total = time.perf_counter() - begin
    return SampleResult(prompt.id, len(prompt.input_ids), first, rounds, finish or "stopped", seconds)


def _confident(confidence: np.ndarray | None, threshold: float, block_size: int) -> int:
    """Slots before the first one predicted to be accepted less often than the threshold (rule 4)."""
    if threshold <= 0 or confidence is None:
        return block_size
    low = np.flatnonzero(confidence < threshold)
    return int(low[0]) if low.size else block_size
