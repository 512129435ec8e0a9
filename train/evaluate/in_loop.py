"""Exact accept length while training, on fixed prompts: never in the way of the run it watches.

An evaluation reads the parameters and the target; it draws from its own random numbers, compiles its own programs, and
leaves the stream of rows alone. Whatever goes wrong in it is logged whole, and the run goes on.
"""

from __future__ import annotations

import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from draft_jax.batch import FrozenHead
from draft_jax.config import DraftConfig
from train.evaluate.config import EvalConfig
from train.evaluate.tasks import Prompt, load_prompts

if TYPE_CHECKING:
    from target_bridge.target import Target

#: Failures, whole, of all evaluations of a run.
ERRORS = "eval_errors.log"


class _Interrupted(Exception):
    """The run is asked to stop: the checkpoint must not wait for an evaluation."""


@dataclass(frozen=True)
class Counts:
    """What one process counted, or all of them together.

    Attributes:
        committed, rounds, proposed: of its share of the prompts.
        failed: processes whose evaluation failed.
    """

    committed: int = 0
    rounds: int = 0
    proposed: int = 0
    failed: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other))))


#: Every process's value, by rank (`train.distributed.World.gather`).
Gather = Callable[[Any, str], Sequence[Any]]


class InLoopEvaluation:
    """Evaluates the draft in training every so many steps.

    Args:
        config: `every` is at least 1. Plain decoding is left out.
        draft: the draft.
        target: the run's own.
        run_dir: where failures are written.
        tell: prints a line without tearing the progress bar.
        share: (i, n): this process evaluates the i-th of n shares of the prompts.
        gather: how the processes put their counts together; all of them call `run` at the same steps.

    Raises:
        ValueError: the prompts cannot be read: before the run starts, not in its middle.
    """

    def __init__(
        self,
        config: EvalConfig,
        draft: DraftConfig,
        target: Target,
        run_dir: Path,
        tell: Callable[[str], None],
        *,
        share: tuple[int, int] = (0, 1),
        gather: Gather = lambda value, what: [value],
    ) -> None:
        self._config = replace(config, plain=False)
        self._draft, self._target, self._run_dir, self._tell = draft, target, run_dir, tell
        self._share, self._gather = share, gather
        found = load_prompts(config.prompts, target.tokenizer, limit=config.limit, template=config.template)
        self._prompts: Sequence[Prompt] = found.prompts
        self._frozen: FrozenHead | None = None
        if left_out := found.summary():
            tell(f"in-loop evaluation: {left_out}")

    def facts(self) -> dict[str, int | str]:
        """What all processes must have alike before they evaluate: the number of prompts and a checksum of them."""
        checksum = 0
        for prompt in self._prompts:
            name = prompt.id.encode("utf-8", "surrogatepass")
            checksum = zlib.crc32(name + np.ascontiguousarray(prompt.input_ids, "<i4").tobytes(), checksum)
        return {"prompts": len(self._prompts), "checksum": f"{checksum:08x}"}

    def due(self, step: int, total: int) -> bool:
        """Whether step `step` of `total` is evaluated: every so many, and the last."""
        return step % self._config.every == 0 or step == total

    def run(self, step: int, params: Any, stopping: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Evaluates, whatever happens.

        Every process must call it at the same step: it gathers sharded parameters, and sums over processes.

        Args:
            step: optimizer steps done.
            params: the draft's parameters as the run has them; they are copied.
            stopping: asked after every prompt; True ends the evaluation without a result.

        Returns:
            What is to be logged: `eval_step`, `eval_rounds`, `eval_seconds`, and `accept_length` unless the evaluation
            failed (`eval_failed` then) or the draft proposed nothing.
        """
        begin = time.perf_counter()
        # A collective where parameters are sharded over processes, so that nobody may be missing: not in the `try`.
        held = jax.tree.map(_to_host, params)
        try:
            counts = self._evaluate(held, stopping)
        except _Interrupted:
            counts = Counts(failed=1)
        except Exception:
            counts = Counts(failed=1)
            self._report(step, traceback.format_exc())
        counts = sum(self._gather(counts, "in-loop evaluation"), Counts())
        metrics: dict[str, float] = {
            "eval_step": step,
            "eval_rounds": counts.rounds,
            "eval_seconds": round(time.perf_counter() - begin, 3),
        }
        if counts.failed:
            metrics["eval_failed"] = counts.failed
        elif not counts.proposed:
            self._tell(f"WARNING step {step}: the draft proposed nothing in {counts.rounds} rounds; no accept length")
        else:
            metrics["accept_length"] = counts.committed / counts.rounds
        return metrics

    def _evaluate(self, held: Any, stopping: Callable[[], bool]) -> Counts:
        from target_bridge import handoff
        from train.evaluate.protocol import evaluate

        if self._frozen is None:
            # Not the run's arrays: those are spread over its mesh, this is on the target's device alone.
            self._frozen = handoff.frozen_to_jax(*self._target.frozen_head())
        params = jax.device_put(held, next(iter(self._frozen.embedding.devices())))

        def progress(done: int, total: int, accept_length: float | None) -> None:
            if stopping():
                raise _Interrupted

        result = evaluate(
            self._target, self._draft, params, self._frozen, self._prompts, self._config, progress, share=self._share
        )
        found = result.statistics
        if not result.samples and self._share[1] == 1:
            raise ValueError(result.error)
        return Counts(found.committed, found.rounds, found.proposed)

    def _report(self, step: int, trace: str) -> None:
        last = trace.strip().splitlines()[-1]
        path = self._run_dir / ERRORS
        self._tell(f"WARNING step {step}: in-loop evaluation failed, training goes on: {last} (whole: {path})")
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"step {step}, process {self._share[0]}\n{trace}\n")
        except OSError as error:
            self._tell(f"WARNING step {step}: {path} cannot be written ({error}):\n{trace}")


def _to_host(array: Any) -> np.ndarray:
    """A copy: the run donates its own arrays to the next step."""
    if array.is_fully_addressable:
        return np.array(array)
    if array.is_fully_replicated:
        return np.array(array.addressable_data(0))
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
