"""The training loop: capture, accumulate, apply; metrics of the step before; checkpoints; a clean stop."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from . import assembly, resume
from .assembly import Assembled
from .checkpoint import CHECKPOINTS, Checkpoints, Saved
from .config import RunConfig
from .evaluate.in_loop import InLoopEvaluation
from .metrics import CompileCounter, Meter, Throughput, not_finite, read_back
from .signals import StopRequest
from .state import TrainState
from .step import StepMetrics
from .tracker import CompositeTracker, last_line, open_trackers


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


def run(config: RunConfig, *, target: Any = None) -> RunResult:
    """Train as configured.

    Args:
        config: the run.
        target: a loaded target to use instead of loading `config.target` (it must have the draft's taps).

    Raises:
        ConfigError, CheckpointError, DataError, TargetError, NonFiniteError: with the thing and the remedy named.
    """
    run_dir = Path(config.run_dir)
    start = resume.find_start(config, run_dir)
    folder = run_dir / CHECKPOINTS

    def check(identity: dict[str, Any]) -> None:
        if start is not None:
            for line in resume.check_same_run(config, identity, folder, start):
                print(f"changed since step {start}: {line}", flush=True)

    with CompileCounter() as compiles:
        parts = assembly.assemble(config, target, check)
        resume.write_run_files(config, parts.draft, run_dir)
        checkpoints = Checkpoints(folder, replace(config.checkpoint, best_metric=config.best_metric))
        try:
            if start is None:
                state = parts.initial_state()
            else:
                state, saved = checkpoints.restore(start, parts.abstract_state)
                parts.rows.set_state(saved.position)
                print(f"resumed {run_dir} at optimizer step {start} of {parts.total_steps}", flush=True)
            tracker = open_trackers(
                config.logging.trackers,
                run_dir,
                last_step=start,
                project=config.logging.wandb_project,
                config=resume.settings_of(config),
            )
            evaluation = None
            if config.eval.every:
                evaluation = InLoopEvaluation(config.eval, parts.draft, parts.target, run_dir, tell)
            loop = Loop(config, parts, state, start or 0, checkpoints, tracker, compiles, evaluation)
            try:
                with StopRequest() as stop:
                    return loop.run(stop)
            finally:
                tracker.finish()
        finally:
            checkpoints.close()


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
        state: TrainState,
        start: int,
        checkpoints: Checkpoints,
        tracker: CompositeTracker,
        compiles: CompileCounter,
        evaluation: InLoopEvaluation | None = None,
    ):
        self.config, self.parts, self.state = config, parts, state
        self.checkpoints, self.tracker, self.compiles = checkpoints, tracker, compiles
        self.step = start
        self.feeder = parts.feeder()
        self.position = self.feeder.position  # of the data, behind the last finished optimizer step
        self.accumulator = parts.programs.start(state.params)
        self._pending: Pending | None = None
        self._since_log = Meter(config.objective)
        self._since_save = Meter(config.objective)
        self._throughput = Throughput()
        self._clock = time.perf_counter()
        self._saved_step = start if start else -1
        self._warned: set[str] = set()
        self._evaluation = evaluation
        self._evaluated: dict[str, float] = {}  # of the last evaluation
        self._unlogged: dict[str, float] = {}
        self.logged: dict[str, Any] = {}

    def run(self, stop: StopRequest) -> RunResult:
        """Train until the last step, `train.stop_at` or a stop request; then save."""
        begin = self._clock = time.perf_counter()
        total = self.parts.total_steps
        last = min(total, self.config.train.stop_at or total)
        every = self.config.checkpoint.every
        shown = self.config.logging.progress
        with tqdm(
            total=total,
            initial=self.step,
            desc="train",
            unit="step",
            disable=(None if shown is None else not shown),
            file=sys.stderr,
        ) as bar:
            while self.step < last and stop.signal is None:
                if not self._window(stop):
                    break  # stopped inside a window: it is not part of any checkpoint
                bar.update(1)
                if self._evaluation is not None and self._evaluation.due(self.step, total):
                    self._evaluate(self._evaluation, stop)
                self._show(bar)
                if self.step < last and every and self.step % every == 0:
                    self._save()
                self.checkpoints.poll()
        self._read_pending()
        if self.step > self._saved_step:
            self._save()
        self.checkpoints.wait()
        if self._since_log.steps:
            self._log(self.step, {})
        return RunResult(
            run_dir=Path(self.config.run_dir),
            steps=self.step,
            total_steps=total,
            metrics=self.logged or last_line(Path(self.config.run_dir) / resume.METRICS),
            seconds=time.perf_counter() - begin,
            compiles=dict(self.compiles.counts),
            exit_code=0 if self.step >= last else stop.exit_code,
        )

    def _window(self, stop: StopRequest) -> bool:
        """One optimizer step. Returns False if a stop request came before its last micro-step."""
        programs, state = self.parts.programs, self.state
        spent, epoch = Throughput(), 0
        for _ in range(self.config.train.accumulation):
            if stop.signal is not None:
                return False
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
        self.state, self.accumulator, metrics = programs.apply(state, self.accumulator)
        self.step += 1
        self.position = self.feeder.position
        self._read_pending()  # of the step before: the device is never waited for to log
        now = time.perf_counter()
        spent.seconds, self._clock = now - self._clock, now
        self._pending = Pending(self.step, metrics, epoch, spent)
        return True

    def _evaluate(self, evaluation: InLoopEvaluation, stop: StopRequest) -> None:
        """Exact accept length of the draft as it is now; its time is not the training's."""
        begin = time.perf_counter()
        self._evaluated = self._unlogged = evaluation.run(self.step, self.state.params, lambda: stop.signal is not None)
        self._clock += time.perf_counter() - begin

    def _read_pending(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        sums, values = read_back(pending.step, pending.metrics)
        for meter in (self._since_log, self._since_save):
            meter.add(sums, values)
        self._throughput.add(pending.throughput)
        if pending.step % self.config.logging.every == 0 or pending.step == self.parts.total_steps:
            self._log(pending.step, {"epoch": pending.epoch})

    def _log(self, step: int, facts: Mapping[str, Any]) -> None:
        metrics: dict[str, Any] = {
            **self._since_log.result(),
            **self._throughput.result(self._since_log.steps),
            **facts,
            **self._unlogged,
            "compiles": self.compiles.training,
        }
        for name in not_finite(metrics):
            if name not in self._warned:
                self._warned.add(name)
                tell(f"WARNING step {step}: {name} is {metrics[name]} (nothing to average); logged as null")
        for name in ("nonfinite_context", "nonfinite_last"):
            if metrics.get(name) and name not in self._warned:
                self._warned.add(name)
                tell(f"WARNING step {step}: {metrics[name]:.0f} target states are not finite ({name}), masked out")
        self.tracker.log(step, metrics)
        self.logged = {"step": step, **metrics}
        self._since_log.reset()
        self._unlogged = {}
        self._throughput = Throughput()

    def _save(self) -> None:
        self._read_pending()  # a step that is not finite raises here, before it could be saved
        metrics = dict(self._since_save.result()) if self._since_save.steps else {}
        if self._evaluated.get("eval_step") == self.step:  # of this very state, not of an earlier one
            metrics |= self._evaluated
        saved = Saved(self.step, self.position, self.parts.identity, resume.settings_of(self.config))
        self.checkpoints.save(self.state, saved, metrics)
        self._since_save.reset()
        self._saved_step = self.step

    def _show(self, bar: tqdm) -> None:
        show = {"loss": "loss", "tau": "tau_probabilistic", "tok/s": "tokens_per_second"}
        values = {name: self.logged[key] for name, key in show.items() if key in self.logged}
        if "accept_length" in self._evaluated:
            values["accept"] = self._evaluated["accept_length"]
        bar.set_postfix({**{k: f"{v:.4g}" for k, v in values.items()}, "compiles": self.compiles.training})


def tell(text: str) -> None:
    """A line on stderr that does not tear the progress bar."""
    tqdm.write(text, file=sys.stderr)
