"""The two decodings of every prompt, with the draft and without, and what is kept of them as they finish."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from draft_jax.batch import FrozenHead
from draft_jax.config import DraftConfig
from target_bridge import handoff
from train.evaluate.config import EvalConfig
from train.evaluate.decoding import DraftDecoding
from train.evaluate.draft_runner import DraftRunner
from train.evaluate.journal import Journal
from train.evaluate.plain import PlainOutput, decode_plain
from train.evaluate.roster import Job, widest
from train.evaluate.sample_result import SampleResult
from train.evaluate.tasks import Prompt

if TYPE_CHECKING:
    from target_bridge.target import Target

#: The draft's cache is a multiple of this long, so that evaluations of similar prompts share their programs.
CONTEXT_STEP = 128


class Passes:
    """Decodes jobs with the draft and, if asked for, without; rows of the journal are not decoded again.

    Args:
        target: the verifier.
        config: the draft.
        params: its parameters; None = freshly initialised.
        frozen: the target's embedding and head; None = taken from the target.
        eval_config: how to decode.
        dtype: the draft's compute dtype.
        batch: prompts side by side, at most.
        journal: rows on disk, read and added to; None = none.
        progress: see `train.evaluate.protocol.Progress`.

    Attributes:
        drafted: prompt id -> decoding with the draft, those of the journal included.
        plain: prompt id -> decoding without.
        compiled: programs of the draft before the first and after the last prompt.
    """

    def __init__(
        self,
        target: Target,
        config: DraftConfig,
        params: Any | None,
        frozen: FrozenHead | None,
        eval_config: EvalConfig,
        dtype: str,
        batch: int,
        journal: Journal | None,
        progress: Callable[[int, int, float | None], None] | None,
    ) -> None:
        self._target, self._draft, self._params, self._frozen = target, config, params, frozen
        self._config, self._dtype, self._batch = eval_config, dtype, batch
        self._journal, self._progress = journal, progress
        self.drafted: dict[str, SampleResult] = dict(journal.drafted) if journal else {}
        self.plain: dict[str, PlainOutput] = dict(journal.plain) if journal else {}
        self.compiled: dict[str, int] = {}
        self._expected: list[Job] = []
        self._runner: DraftRunner | None = None
        self._committed = self._rounds = 0
        self._done = 0

    def expect(self, jobs: Sequence[Job]) -> None:
        """These will be run: the draft is compiled for the longest of them, progress counts to their number."""
        self._expected.extend(jobs)
        for job in jobs:
            self._done += (job.prompt.id in self.drafted) + (self._config.plain and job.prompt.id in self.plain)
            if job.prompt.id in self.drafted:
                self._count(self.drafted[job.prompt.id])

    def run(self, jobs: Sequence[Job]) -> None:
        """Decodes what is not yet decoded.

        Raises:
            ProposalError: the draft's probabilities are not finite.
        """
        todo = [job for job in jobs if job.prompt.id not in self.drafted]
        if todo:
            runner = self._runner_for(todo)
            for sample in DraftDecoding(self._target, runner, todo, self._config).run():
                self.drafted[sample.prompt] = sample
                if self._journal is not None:
                    self._journal.add_draft(sample)
                self._count(sample)
                self._tell()
            self.compiled["after"] = runner.compile_count
        todo = [job for job in jobs if job.prompt.id not in self.plain] if self._config.plain else []
        if todo:
            for output in decode_plain(self._target, todo, self._temperature, self._config.seed, self._batch):
                self.plain[output.prompt] = output
                if self._journal is not None:
                    self._journal.add_plain(output)
                self._tell()

    def complete(self, prompt: str) -> bool:
        """Whether all decodings of a prompt are there."""
        return prompt in self.drafted and (prompt in self.plain or not self._config.plain)

    @property
    def _temperature(self) -> float:
        return 0.0 if self._config.greedy else self._config.temperature

    def _runner_for(self, jobs: Sequence[Job]) -> DraftRunner:
        """The one draft of the evaluation; another only if later turns grow beyond its cache."""
        extra = self._draft.block_size + 1 if self._config.count_overshoot else 0
        if self._runner is None or self._runner.max_context < widest(jobs, extra):
            longest = widest(self._expected, extra)
            embedding, head = self._target.frozen_head()
            if self._frozen is None:
                self._frozen = handoff.frozen_to_jax(embedding, head)
            if self._params is None:
                self._params = _untrained(self._draft, self._config.seed)
            self._runner = DraftRunner(
                self._draft,
                self._params,
                self._frozen,
                max_context=longest + -longest % CONTEXT_STEP,
                batch=min(self._batch, 1 << (len(self._expected) - 1).bit_length()),  # few prompts, few shapes
                dtype=self._dtype,
                device=embedding.device,
                sample_dtype=self._config.draft_sampling,
            )
            self.compiled["before"] = self._runner.compile_count
            self._warm_up(self._runner, jobs[0].prompt)
        return self._runner

    def _warm_up(self, runner: DraftRunner, prompt: Prompt) -> None:
        """Runs steps that are not counted, so that no first-call cost lands in the timings."""
        shortest = Job(replace(prompt, input_ids=prompt.input_ids[-1:]), 3)
        company = [shortest] * runner.batch
        list(DraftDecoding(self._target, runner, company, self._config).run(stop_after=1))
        if self._config.plain:
            list(decode_plain(self._target, company, self._temperature, self._config.seed, self._batch, stop_after=2))

    def _count(self, sample: SampleResult) -> None:
        self._committed += sum(item.length for item in sample.rounds)
        self._rounds += len(sample.rounds)

    def _tell(self) -> None:
        self._done += 1
        if self._progress is not None:
            total = len(self._expected) * (2 if self._config.plain else 1)
            self._progress(self._done, total, self._committed / self._rounds if self._rounds else None)


def _untrained(config: DraftConfig, seed: int) -> Any:
    import jax

    from draft_jax.models.dspark import init_params

    return init_params(config, jax.random.key(seed % 2**32))
