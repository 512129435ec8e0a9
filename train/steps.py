"""The optimizer steps of a run: capture, accumulate, apply; metrics of the step before; checkpoints; a clean stop.

With several processes all run them in lockstep: the same number of micro-steps, and one small agreement on the host
before each optimizer step, which carries stop requests, failures and a collapse to all.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from draft_jax.objective.metrics import finalize
from target_bridge.fence import jax_done

from . import assembly, resume, rollback
from .assembly import Assembled
from .checkpoint import Checkpoints, Saved
from .collapse import Collapse, CollapseError, CollapseGuard, Step
from .config import RunConfig
from .distributed import World
from .evaluate.in_loop import InLoopEvaluation
from .logbook import Logbook, tell
from .metrics import CompileCounter, Throughput, read_back
from .signals import StopRequest
from .start import Start
from .state import at_step
from .step import StepMetrics
from .topology import Topology
from .tracker import CompositeTracker, last_line
from .watchdog import Watchdog

#: Steps between comparisons of all processes' norms and sums, which must be the same bits.
_COMPARE_EVERY = 100
#: `train.watchdog_seconds` of several processes where it is not given.
_WATCHDOG_SECONDS = 1800.0
#: How a process comes to the agreement before an optimizer step; the worst of all decides.
_READY, _STOPPING, _LEFT, _COLLAPSED, _FAILED = range(5)


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        run_dir: what it left behind.
        steps: optimizer steps done, those before a resume included.
        total_steps: optimizer steps of the whole run.
        metrics: the last logged line.
        seconds: wall time of the loop.
        compiles: compilations while it ran, by program.
        exit_code: 0 = did what was asked (all steps, or up to train.stop_at); 128 + signal = stopped by it, saved.
    """

    run_dir: Path
    steps: int
    total_steps: int
    metrics: Mapping[str, Any]
    seconds: float
    compiles: Mapping[str, int] = field(default_factory=dict)
    exit_code: int = 0


@dataclass(frozen=True)
class Pending:
    """A step whose metrics are still on the device."""

    step: int
    metrics: StepMetrics
    epoch: int
    throughput: Throughput


class Loop:
    """One pass from a start step to the end, a stop or an error."""

    def __init__(
        self,
        config: RunConfig,
        parts: Assembled,
        start: Start,
        checkpoints: Checkpoints,
        tracker: CompositeTracker,
        compiles: CompileCounter,
        evaluation: InLoopEvaluation | None = None,
        world: World | None = None,
    ):
        self.world = world or World(Topology())
        limit = config.train.watchdog_seconds
        if limit is None:
            limit = _WATCHDOG_SECONDS if self.world.size > 1 else 0.0
        self.watchdog = Watchdog(limit, self.world.who)
        # Whether one process may leave a window that the others go on with: not while they exchange numbers in it.
        self._may_leave = self.world.size == 1 or (not assembly.coupled(config) and config.target.sglang.tp_size == 1)
        self.config, self.parts, self.state = config, parts, start.state
        self.checkpoints = checkpoints
        self.step = start.step
        self.feeder = parts.feeder()
        self.position = self.feeder.position  # of the data, behind the last finished optimizer step
        self.accumulator = parts.programs.start(self.state.params)
        self.book = Logbook(config.objective, tracker, compiles, self.world.is_first)
        self.book.note(start.facts)
        self._compiles = compiles
        self._pending: Pending | None = None
        self._clock = time.perf_counter()
        self._saved_step = start.step or -1
        self._guard, self._rollbacks = CollapseGuard.from_state(start.guard), start.rollbacks
        self._collapse: Collapse | None = None  # found, and not yet rolled back
        self._evaluation = evaluation
        self._evaluated: dict[str, float] = {}  # of the last evaluation

    def run(self, stop: StopRequest) -> RunResult:
        """Train until the last step, `train.stop_at` or a stop request; then save."""
        begin = self._clock = time.perf_counter()
        total = self.parts.total_steps
        last = min(total, self.config.train.stop_at or total)
        every = self.config.checkpoint.every
        shown = self.config.logging.progress
        hidden = None if shown is None else not shown
        with (
            self.watchdog,
            tqdm(
                total=total,
                initial=self.step,
                desc="train",
                unit="step",
                disable=hidden if self.world.is_first else True,
                file=sys.stderr,
            ) as bar,
        ):
            worst = _READY
            while worst == _READY and (self.step < last or self._collapse is not None):
                worst = self._window(stop)
                if worst == _LEFT:
                    break  # stopped inside a window: it is not part of any checkpoint
                if worst == _COLLAPSED:
                    self._roll_back()
                    worst = _READY
                    bar.n = bar.last_print_n = self.step
                    continue
                bar.update(1)
                if self._evaluation is not None and self._evaluation.due(self.step, total):
                    self._evaluate(self._evaluation, stop)
                self.book.show(bar, self._evaluated)
                if self.step == last:
                    self._read_pending()
                elif every and self.step % every == 0:
                    self._save()
            self._read_pending()
            if self._collapse is not None:
                self._roll_back()  # asked to stop meanwhile
            if self.step > self._saved_step:
                self._save()
            with self.watchdog.phase("waiting for the checkpoint"):
                self.checkpoints.wait_together(self.world)
            exit_code = self.world.worst(stop.exit_code, "the end of the loop")
        if self.book.unwritten:
            self.book.write(self.step, {})
        return RunResult(
            run_dir=Path(self.config.run_dir),
            steps=self.step,
            total_steps=total,
            metrics=self.book.logged or last_line(Path(self.config.run_dir) / resume.METRICS),
            seconds=time.perf_counter() - begin,
            compiles=dict(self._compiles.counts),
            exit_code=0 if self.step >= last else exit_code,
        )

    def _window(self, stop: StopRequest) -> int:
        """One optimizer step, or none: all processes agree before it which it is.

        Returns:
            _READY; _STOPPING = a stop request came, the step is done; _LEFT = it came before the last micro-step, and
            the step is not done; _COLLAPSED = the steps before are to be undone, and this one is not done.

        Raises:
            What went wrong here in a micro-step, or DistributedError if it did on another process.
        """
        failure: Exception | None = None
        level, spent, epoch = _READY, Throughput(), 0
        if self._collapse is not None:
            level = _COLLAPSED
        else:
            with self.watchdog.phase("micro-steps"):
                try:
                    level, spent, epoch = self._micro_steps(stop)
                except Exception as error:
                    failure, level = error, _FAILED
        with self.watchdog.phase("agreement before the optimizer step"):
            worst = self.world.worst(level, f"optimizer step {self.step + 1}")
            if worst == _FAILED:
                self._raise_everywhere(failure)
        if worst in (_LEFT, _COLLAPSED):
            return worst
        with self.watchdog.phase("optimizer step"):
            self.state, self.accumulator, metrics = self.parts.programs.apply(self.state, self.accumulator)
            if getattr(self.parts.target, "lockstep", False):
                # Ranks that share a target meet again in the next capture, in torch's collectives: JAX's have ended.
                jax_done(self.accumulator)
            self.step += 1
            self.position = self.feeder.position
            self._read_pending()  # of the step before: the device is never waited for to log
        self.watchdog.alive(self.step)
        now = time.perf_counter()
        spent.seconds, self._clock = now - self._clock, now
        self._pending = Pending(self.step, metrics, epoch, spent)
        return worst

    def _raise_everywhere(self, failure: Exception | None) -> None:
        def again() -> None:
            if failure is not None:
                raise failure

        self.world.attempt(f"optimizer step {self.step + 1}", again)

    def _micro_steps(self, stop: StopRequest) -> tuple[int, Throughput, int]:
        """The micro-steps of a window; returns how this process comes to the agreement, what they took, the epoch."""
        programs, state = self.parts.programs, self.state
        spent, epoch = Throughput(), 0
        self.checkpoints.poll()
        for _ in range(self.config.train.accumulation):
            if stop.signal is not None and self._may_leave:
                return _LEFT, spent, epoch
            self.watchdog.alive()
            captured = self.feeder.capture_seconds
            with self.feeder.next_batch() as (host, batch, slot):
                begin = time.perf_counter()
                self.accumulator = programs.accumulate(
                    state.params, self.parts.frozen, batch, state.key, state.step, self.accumulator
                )
                self.feeder.prefetch()
                slot.fence(self.accumulator)  # fence B: the slot may be written again
                spent.draft_seconds += time.perf_counter() - begin
            spent.capture_seconds += self.feeder.capture_seconds - captured
            spent.tokens += sum(len(document.input_ids) for document in host.documents)
            epoch = host.epoch
        return (_READY if stop.signal is None else _STOPPING), spent, epoch

    def _evaluate(self, evaluation: InLoopEvaluation, stop: StopRequest) -> None:
        """Exact accept length of the draft as it is now; its time is not the training's."""
        begin = time.perf_counter()

        def stopping() -> bool:
            self.watchdog.alive()
            return stop.signal is not None

        with self.watchdog.phase("in-loop evaluation"):
            self._evaluated = evaluation.run(self.step, self.state.params, stopping)
        self.book.note(self._evaluated)
        self._clock += time.perf_counter() - begin

    def _read_pending(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        sums, values = read_back(pending.step, pending.metrics)
        if self.world.size > 1 and pending.step % _COMPARE_EVERY == 0:
            # The same program on the same numbers: other bits are a broken device, network or replica.
            seen = {name: value.tolist() for name, value in sums.items()} | values
            self.world.agree(f"what the processes computed in step {pending.step}", seen)
        self.book.add(sums, values, pending.throughput)
        self._look_for_collapse(pending.step, sums, values)
        if pending.step % self.config.logging.every == 0 or pending.step == self.parts.total_steps:
            self.book.write(pending.step, {"epoch": pending.epoch})

    def _look_for_collapse(self, step: int, sums: Mapping[str, Any], values: Mapping[str, float]) -> None:
        action = self.config.train.on_collapse
        if action == "ignore" or values.get("skipped_updates"):
            return
        metrics = finalize(sums, self.config.objective)
        found = self._guard.add(Step(step, metrics["loss"], metrics["tau_probabilistic"], values["grad_norm"]))
        if found is None:
            return
        if action == "rollback":
            self._collapse = found
            return
        advice = (
            f"{found.text}. Checkpoints before step {found.good_before} are good: move later ones away and continue"
            " with --resume auto"
        )
        if action == "stop":
            raise CollapseError(advice)
        if self.world.is_first:
            tell(f"WARNING step {step}: {advice}")

    def _roll_back(self) -> None:
        """Back to the last good checkpoint, with the data that come next; see `rollback`."""
        found, self._collapse, self._pending = self._collapse, None, None
        train, rewarm = self.config.train, self.config.optimizer.resume_rewarm_steps
        run_dir = Path(self.config.run_dir)
        with self.watchdog.phase("rolling back"):
            back = rollback.go_back(
                found, self.checkpoints, self.feeder.position, run_dir, train.max_rollbacks, self.world
            )
            del self.state, self.accumulator  # two states may not fit
            state, saved = self.world.attempt(
                "reading the checkpoint", lambda: self.checkpoints.restore(back.to, self.parts.abstract_state)
            )
            self.state = at_step(state, rewarm_from=back.to)
            self.accumulator = self.parts.programs.start(self.state.params)
        self.step = self._saved_step = back.to
        self.position, self._rollbacks, self._evaluated = back.position, back.number, {}
        self._guard = CollapseGuard.from_state(saved.guard)
        self.world.attempt("going back in metrics.jsonl", lambda: self.book.rewind(back.to))
        self.book.note(back.facts())
        self._clock = time.perf_counter()
        if self.world.is_first and found is not None:
            tell(f"WARNING step {back.found}: {rollback.message(back, found, train.max_rollbacks, rewarm)}")

    def _save(self) -> None:
        self._read_pending()  # a step that is not finite raises here, before it could be saved
        if self._collapse is not None:
            return  # nor one of a collapse
        metrics = self.book.of_checkpoint()
        if self._evaluated.get("eval_step") == self.step:  # of this very state, not of an earlier one
            metrics |= self._evaluated
        saved = Saved(
            self.step,
            self.position,
            self.parts.identity,
            resume.settings_of(self.config),
            guard=self._guard.state(),
            rollbacks=self._rollbacks,
        )
        with self.watchdog.phase("saving a checkpoint"):
            self.checkpoints.wait_together(self.world)
            self.world.attempt(f"saving step {self.step}", lambda: self.checkpoints.save(self.state, saved, metrics))
        self._saved_step = self.step
