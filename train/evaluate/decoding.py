"""Prompts decoded with the draft, many at a time: propose, verify, settle, commit, until they end (dspark_spec 5.1).

Every slot's text is decoded as if it were alone: its context, its random numbers and its rounds are its own. What is
shared is the cost: one proposal, one forward of the target and one verification for all slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from target_bridge import fence
from target_bridge.verify_batch import Verdicts, verify_batch
from train.evaluate.accounting import Round, settle_round
from train.evaluate.config import EvalConfig
from train.evaluate.draft_runner import DraftRunner, ProposedBlocks
from train.evaluate.plain import last_logits, sample
from train.evaluate.roster import Clock, Job, Roster, Text, sample_generator, widest
from train.evaluate.sample_result import SampleResult

if TYPE_CHECKING:
    from target_bridge.target import Session, SessionStep, Target


@dataclass
class _DraftText(Text):
    """A prompt and its rounds so far; `anchor` is its last token, whose state the target has not computed yet."""

    first: int = -1
    anchor: int = -1
    rounds: list[Round] = field(default_factory=list)
    finish: str | None = None


class DraftDecoding:
    """Decodes prompts with a draft, yielding each as it ends.

    Args:
        target: the verifier.
        runner: the draft; its slots are the texts decoded side by side.
        jobs: prompts of at least one token; order and company change nothing but the speed.
        eval_config: temperature, seed, threshold, and how rounds are counted.
    """

    def __init__(self, target: Target, runner: DraftRunner, jobs: Sequence[Job], eval_config: EvalConfig) -> None:
        self._target, self._runner, self._config = target, runner, eval_config
        self._jobs = jobs
        self._eos = frozenset(target.info.eos_token_ids)
        self._temperature = 0.0 if eval_config.greedy else eval_config.temperature
        self._K = runner.config.block_size
        self._clock = Clock()
        self._roster = Roster((self._open(job) for job in jobs), runner.batch)

    def run(self, stop_after: int | None = None) -> Iterator[SampleResult]:
        """Decodes all of them.

        Args:
            stop_after: end after so many rounds (warming up).
        """
        extra = self._K + 1 if self._config.count_overshoot else 0
        session = self._target.open_session(widest(self._jobs, extra), self._runner.batch)
        rounds = 0
        try:
            while True:
                self._clock.start()
                while seated := self._roster.seat():
                    self._prefill(session, seated)
                    yield from self._leave(session)
                    self._clock.start()
                if not self._roster.live:
                    return
                self._round(session)
                yield from self._leave(session)
                rounds += 1
                if stop_after is not None and rounds >= stop_after:
                    return
        finally:
            session.close()

    def _open(self, job: Job) -> _DraftText:
        # DeepSpec's loop looks at the index of the last token, which is one less than the tokens so far.
        remaining = job.max_new_tokens if self._config.count_overshoot else job.max_new_tokens - 1
        return _DraftText(job, prompt_generator(self._config, job), remaining)

    def _prefill(self, session: Session, seated: Mapping[int, _DraftText]) -> None:
        """Runs the prompts of newly seated texts and draws their first tokens."""
        prompts = {slot: np.asarray(text.job.prompt.input_ids) for slot, text in seated.items()}
        steps = session.extend(prompts, last_logits=1)
        logits = last_logits(steps)
        fence.torch_done(logits.device)
        session.commit({slot: len(ids) for slot, ids in prompts.items()})
        texts = [seated[slot] for slot in sorted(seated)]
        uniforms = np.array([text.random.random(dtype=np.float32) for text in texts], np.float32)
        for text, token in zip(texts, sample(logits, self._temperature, uniforms).tolist()):
            text.first = text.anchor = token
            text.finish = "eos" if token in self._eos else "length" if text.remaining == 0 else None
        for slot in seated:
            self._runner.reset(slot)
        self._runner.extend({slot: step.context_hidden for slot, step in steps.items()})
        self._clock.charge(texts, "prefill")

    def _round(self, session: Session) -> None:
        """One round of every text: at most K + 1 tokens each."""
        live, K = self._roster.live, self._K
        slots, texts = list(live), list(live.values())
        # Always as many, whatever the round needs.
        numbers = np.stack([text.random.random(2 * K + 1, dtype=np.float32) for text in texts])
        anchors = {slot: text.anchor for slot, text in live.items()}
        blocks = self._runner.propose(anchors, numbers[:, :K], self._temperature)
        counts = self._proposed(blocks, texts)
        self._clock.charge(texts, "draft")
        steps = session.extend(
            {
                slot: np.concatenate(([text.anchor], blocks.tokens[row, : counts[row]]))
                for row, (slot, text) in enumerate(live.items())
            }
        )
        fence.torch_done(steps[slots[0]].logits.device)
        self._clock.charge(texts, "target")
        verdicts = self._verify(steps, blocks, slots, counts, numbers)
        kept: dict[int, int] = {}
        for row, (slot, text) in enumerate(live.items()):
            settled = self._settle(text, blocks, verdicts, row, int(counts[row]))
            if settled.finish is None:
                # The anchor and the accepted drafts stay in both caches; the new anchor has no state yet.
                kept[slot] = 1 + settled.accepted
                text.anchor = settled.tokens[-1]
            else:
                session.free(slot)
        session.commit(kept)
        self._clock.charge(texts)
        if kept:
            self._runner.extend({slot: steps[slot].context_hidden[:count] for slot, count in kept.items()})
        self._clock.charge(texts, "draft")

    def _proposed(self, blocks: ProposedBlocks, texts: Sequence[_DraftText]) -> np.ndarray:
        """int [n]: slots of each block that are verified: before the first predicted to be accepted less often than
        the threshold (rule 4), and no more than may still be generated."""
        counts = np.full(len(texts), self._K)
        threshold = self._config.confidence_threshold
        if threshold > 0 and blocks.confidence_logits is not None:
            low = 1.0 / (1.0 + np.exp(-blocks.confidence_logits)) < threshold
            counts = np.where(low.any(axis=1), low.argmax(axis=1), counts)
        if self._config.count_overshoot:
            return counts
        return np.minimum(counts, [text.remaining for text in texts])

    def _verify(
        self,
        steps: Mapping[int, SessionStep],
        blocks: ProposedBlocks,
        slots: list[int],
        counts: np.ndarray,
        numbers: np.ndarray,
    ) -> Verdicts:
        """One verification for all slots, as wide as the longest proposal."""
        width, K = int(counts.max()), self._K
        logits = [steps[slot].logits for slot in slots]
        stacked = torch.stack(logits) if counts.min() == width else pad_sequence(logits, batch_first=True)
        probs = None if blocks.probs is None else blocks.probs[:, :width]
        uniforms = np.concatenate([numbers[:, K : K + width], numbers[:, 2 * K :]], axis=1)
        return verify_batch(stacked, probs, blocks.tokens[:, :width], uniforms, self._temperature, counts)

    def _settle(self, text: _DraftText, blocks: ProposedBlocks, verdicts: Verdicts, row: int, count: int) -> Round:
        confidence = blocks.confidence_logits
        settled = settle_round(
            blocks.tokens[row, :count].tolist(),
            int(verdicts.accepted[row]),
            int(verdicts.next_tokens[row]),
            self._eos,
            text.remaining,
            confidence_logits=None if confidence is None else confidence[row, :count].tolist(),
            overshoot=self._config.count_overshoot,
        )
        text.rounds.append(settled)
        text.remaining -= settled.length
        text.finish = settled.finish
        return settled

    def _leave(self, session: Session) -> Iterator[SampleResult]:
        """Those that have ended give their slots back."""
        for slot, text in list(self._roster.live.items()):
            if text.finish is None:
                continue
            session.free(slot)
            prompt = self._roster.leave(slot).job.prompt
            yield SampleResult(
                prompt=prompt.id,
                prompt_tokens=len(prompt.input_ids),
                first_token=text.first,
                rounds=text.rounds,
                finish=text.finish,
                seconds=text.seconds,
                task=prompt.task,
                text=prompt.text,
                max_new_tokens=text.job.max_new_tokens,
            )


def prompt_generator(config: EvalConfig, job: Job) -> np.random.Generator:
    """The prompt's numbers: of the seed and its id; with DeepSpec's seeds, of the seed plus its place in its task."""
    if config.seed_by == "index":
        return sample_generator(config.seed + job.prompt.index, "", "deepspec")
    return sample_generator(config.seed, job.prompt.id)
