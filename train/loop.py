"""The training loop: capture, accumulate, apply; metrics of the step before; checkpoints; a clean stop.

With several processes all run it in lockstep: the same number of micro-steps, and one small agreement on the host
before each optimizer step, which carries stop requests and failures to all.
"""

import functools
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from draft_jax.objective.metrics import finalize

from . import assembly, launch, resume
from .assembly import Assembled
from .checkpoint import CHECKPOINTS, Checkpoints, Saved
from .collapse import CollapseError, CollapseGuard, Step
from .config import RunConfig
from .distributed import PeerLostError, World
from .evaluate.in_loop import InLoopEvaluation
from .metrics import CompileCounter, Meter, Throughput, not_finite, read_back
from .signals import StopRequest
from .state import TrainState
from .step import StepMetrics
from .topology import Topology
from .tracker import CompositeTracker, last_line, open_trackers
from .watchdog import Watchdog

#: Steps between comparisons of all processes' norms and sums, which must be the same bits.
_COMPARE_EVERY = 100
#: `train.watchdog_seconds` of several processes where it is not given.
_WATCHDOG_SECONDS = 1800.0
#: With several processes a signal may come twice, from the batch system and from the launcher, shortly after.
_PATIENCE_SECONDS = 30.0
#: How a process comes to the agreement before an optimizer step; the worst of all decides.
_READY, _STOPPING, _LEFT, _FAILED = range(4)


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


def run(config: RunConfig, *, target: Any = None, world: World | None = None) -> RunResult:
    """Train as configured.

    Args:
        config: the run.
        target: a loaded target to use instead of loading `config.target` (it must have the draft's taps).
        world: the processes of the run, all of which call this; None = this one alone.

    Raises:
        ConfigError, CheckpointError, DataError, TargetError, NonFiniteError: with the thing and the remedy named.
        DistributedError: one of these on another process, named, or processes that cannot work as one.
    """
    world = world or World(Topology())
    launch.agree_on_start(world, config)
    run_dir = Path(config.run_dir)
    launch.require_shared(world, run_dir)
    start = resume.find_start(config, run_dir, world)
    folder = run_dir / CHECKPOINTS

    def check(identity: dict[str, Any]) -> None:
        if start is not None:
            for line in resume.check_same_run(config, identity, folder, start):
                if world.is_first:
                    print(f"changed since step {start}: {line}", flush=True)

    with CompileCounter() as compiles:
        parts = assembly.assemble(config, target, check, world)
        if world.is_first:
            world.attempt("writing the run's files", lambda: resume.write_run_files(config, parts.draft, run_dir))
        else:
            world.attempt("writing the run's files", lambda: None)
        checkpoints = Checkpoints(folder, replace(config.checkpoint, best_metric=config.best_metric))
        try:
            if start is None:
                state = parts.initial_state()
            else:
                restore = functools.partial(checkpoints.restore, start, parts.abstract_state)
                state, saved = world.attempt("reading the checkpoint", restore)
                parts.rows.set_state(saved.position)
                if world.is_first:
                    print(f"resumed {run_dir} at optimizer step {start} of {parts.total_steps}", flush=True)
            tracker = world.attempt("opening trackers", lambda: _open_trackers(config, run_dir, start, world))
            evaluation = None
            if config.eval.every:
                evaluation = world.attempt("reading evaluation prompts", lambda: _evaluation(config, parts, world))
            loop = Loop(config, parts, state, start or 0, checkpoints, tracker, compiles, evaluation, world)
            try:
                with StopRequest(_PATIENCE_SECONDS if world.size > 1 else 0.0) as stop:
                    result = loop.run(stop)
            finally:
                tracker.finish()
        except PeerLostError:
            raise  # to end a save properly would take the lost process; what is complete stays
        except BaseException:
            checkpoints.close()
            raise
        checkpoints.close()
        return result


def _open_trackers(config: RunConfig, run_dir: Path, start: int | None, world: World) -> CompositeTracker:
    """Those of the configuration on the first process, none on the others: all have the same numbers."""
    if not world.is_first:
        return CompositeTracker(())
    return open_trackers(
        config.logging.trackers,
        run_dir,
        last_step=start,
        project=config.logging.wandb_project,
        config=resume.settings_of(config),
    )


def _evaluation(config: RunConfig, parts: Assembled, world: World) -> InLoopEvaluation:
    def say(text: str) -> None:
        tell(text if world.size == 1 else f"{world.who}: {text}")

    # Ranks that share a target decode the same texts: each of its forwards needs all of them.
    tp = config.target.sglang.tp_size
    share = (world.rank // tp, world.size // tp)
    run_dir = Path(config.run_dir)
    return InLoopEvaluation(config.eval, parts.draft, parts.target, run_dir, say, share=share, gather=world.gather)


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
        world: World | None = None,
    ):
        self.world = world or World(Topology())
        limit = config.train.watchdog_seconds
        if limit is None:
            limit = _WATCHDOG_SECONDS if self.world.size > 1 else 0.0
        self.watchdog = Watchdog(limit, self.world.who)
        # Whether one process may leave a window that the others go on with: not while they exchange numbers in it.
        self._may_leave = self.world.size == 1 or (not assembly.coupled(config) and config.target.sglang.tp_size == 1)
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
        self._guard = CollapseGuard()
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
            while self.step < last and worst == _READY:
                worst = self._window(stop)
                if worst == _LEFT:
                    break  # stopped inside a window: it is not part of any checkpoint
                bar.update(1)
                if self._evaluation is not None and self._evaluation.due(self.step, total):
                    self._evaluate(self._evaluation, stop)
                self._show(bar)
                if self.step < last and every and self.step % every == 0:
                    self._save()
            self._read_pending()
            if self.step > self._saved_step:
                self._save()
            with self.watchdog.phase("waiting for the checkpoint"):
                self.world.attempt(f"the checkpoint of step {self.step}", self.checkpoints.wait)
            exit_code = self.world.worst(stop.exit_code, "the end of the loop")
        if self._since_log.steps:
            self._log(self.step, {})
        return RunResult(
            run_dir=Path(self.config.run_dir),
            steps=self.step,
            total_steps=total,
            metrics=self.logged or last_line(Path(self.config.run_dir) / resume.METRICS),
            seconds=time.perf_counter() - begin,
            compiles=dict(self.compiles.counts),
            exit_code=0 if self.step >= last else exit_code,
        )

    def _window(self, stop: StopRequest) -> int:
        """One optimizer step, or none: all processes agree before it which it is.

        Returns:
            _READY; _STOPPING = a stop request came, the step is done; _LEFT = it came before the last micro-step, and
            the step is not done.

        Raises:
            What went wrong here in a micro-step, or DistributedError if it did on another process.
        """
        failure: Exception | None = None
        level, spent, epoch = _READY, Throughput(), 0
        with self.watchdog.phase("micro-steps"):
            try:
                level, spent, epoch = self._micro_steps(stop)
            except Exception as error:
                failure, level = error, _FAILED
        with self.watchdog.phase("agreement before the optimizer step"):
            worst = self.world.worst(level, f"optimizer step {self.step + 1}")
            if worst == _FAILED:
                self._raise_everywhere(failure)
        if worst == _LEFT:
            return worst
        with self.watchdog.phase("optimizer step"):
            self.state, self.accumulator, metrics = self.parts.programs.apply(self.state, self.accumulator)
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
            self._evaluated = self._unlogged = evaluation.run(self.step, self.state.params, stopping)
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
        for meter in (self._since_log, self._since_save):
            meter.add(sums, values)
        self._throughput.add(pending.throughput)
        self._look_for_collapse(pending.step, sums, values)
        if pending.step % self.config.logging.every == 0 or pending.step == self.parts.total_steps:
            self._log(pending.step, {"epoch": pending.epoch})

    def _look_for_collapse(self, step: int, sums: Mapping[str, Any], values: Mapping[str, float]) -> None:
        action = self.config.train.on_collapse
        if action == "ignore" or values.get("skipped_updates"):
            return
        metrics = finalize(sums, self.config.objective)
        message = self._guard.add(Step(step, metrics["loss"], metrics["tau_probabilistic"], values["grad_norm"]))
        if message is None:
            return
        if action == "stop":
            raise CollapseError(message)
        if self.world.is_first:
            tell(f"WARNING step {step}: {message}")

    def _log(self, step: int, facts: Mapping[str, Any]) -> None:
        metrics: dict[str, Any] = {
            **self._since_log.result(),
            **self._throughput.result(self._since_log.steps),
            **facts,
            **self._unlogged,
            "compiles": self.compiles.training,
        }
        for name in not_finite(metrics):
            if name not in self._warned and self.world.is_first:
                self._warned.add(name)
                tell(f"WARNING step {step}: {name} is {metrics[name]} (nothing to average); logged as null")
        for name in ("nonfinite_context", "nonfinite_last"):
            if metrics.get(name) and name not in self._warned and self.world.is_first:
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
        with self.watchdog.phase("saving a checkpoint"):
            self.world.attempt(f"saving step {self.step}", lambda: self.checkpoints.save(self.state, saved, metrics))
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
