"""Our side of a stock SGLang server: started with a deadline, asked, and always stopped with its whole group.

Why `sglang.Engine` in a process of its own, not the HTTP server: it is the same scheduler, model runner and
accounting that `sglang.launch_server` starts, without ports, health polling or web packages; token ids go in and
come out as ids; the process may run another interpreter, with the pins SGLang wants; its end frees the GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from target_bridge.serving.diagnosis import diagnose, log_tail

PROGRAM = Path(__file__).with_name("engine_process.py")
#: Variables that change what the server proposes or accepts: a measurement must not inherit them.
NEUTRAL = {"SGLANG_RAGGED_VERIFY_MODE": "static"}
REMOVED = ("SGLANG_SIMULATE_ACC_LEN", "SGLANG_SIMULATE_ACC_METHOD", "SGLANG_DSPARK_USE_GREEDY_DRAFT")
#: Set unless the caller's environment says otherwise.
DEFAULTS = {
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",  # a crash would wait more than a minute for dumps
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


class ServerFailure(RuntimeError):
    """The server did not do what was asked; the message holds cause, remedy and the end of its log."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds each phase may take before the server is stopped.

    Attributes:
        start: from the process's start until the engine is ready: import, weights, kernels, CUDA graphs.
        request: one `generate` call; the first ones compile kernels.
        stop: an orderly shutdown, before the group is killed.
    """

    start: float = 900.0
    request: float = 900.0
    stop: float = 20.0

    def __post_init__(self):
        for name in ("start", "request", "stop"):
            if not getattr(self, name) > 0:
                raise ValueError(f"deadline {name} is {getattr(self, name)}; give seconds above 0")


@dataclass(frozen=True)
class ServerSettings:
    """How to run the server.

    Attributes:
        engine: keyword arguments of `sglang.Engine`.
        python: interpreter that has sglang.
        pythonpath: folders put before the inherited PYTHONPATH, for SGLang alone.
        environment: further variables for the server.
        log: file its output is written to.
        deadlines: see `Deadlines`.
    """

    engine: Mapping[str, Any]
    log: Path
    python: str = sys.executable
    pythonpath: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    deadlines: Deadlines = field(default_factory=Deadlines)


@dataclass(frozen=True)
class ServedOutput:
    """One request's answer.

    Attributes:
        tokens: generated ids, as the server returned them.
        meta: its meta_info: finish_reason, completion_tokens, spec_* and what else was measured.
    """

    tokens: list[int]
    meta: dict[str, Any]


class EngineServer:
    """A running server; use it as a context manager.

    Raises:
        ServerFailure: from `__enter__`, `generate` and `flush`: it failed, ended or took too long.
    """

    def __init__(self, settings: ServerSettings):
        self.settings = settings
        self.version = ""
        self.facts: dict[str, Any] = {}
        self.start_seconds = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = self._answers = -1
        self._buffer = b""

    def __enter__(self) -> EngineServer:
        begin = time.monotonic()
        try:
            self._spawn()
            self._send({"engine": dict(self.settings.engine)}, "start")
            allowed = self.settings.deadlines.start
            self.version = self._receive("imported", "import sglang", begin, allowed)["version"]
            self.facts = self._receive("ready", "start the engine", begin, allowed)["facts"]
        except BaseException:
            self._kill()
            raise
        self.start_seconds = time.monotonic() - begin
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self._send({"stop": True}, "stop")
                self._receive("stopped", "stop", time.monotonic(), self.settings.deadlines.stop)
                assert self._process is not None
                self._process.wait(self.settings.deadlines.stop)
        except (ServerFailure, subprocess.TimeoutExpired):
            pass  # everything was measured already; the group is killed below
        finally:
            self._kill()

    def generate(
        self,
        input_ids: Sequence[Sequence[int]],
        sampling_params: Sequence[Mapping[str, Any]],
        *,
        top_logprobs: int = 0,
    ) -> tuple[list[ServedOutput], float]:
        """Runs many requests at once, in the server's own scheduling.

        Args:
            input_ids: ids of every prompt.
            sampling_params: SGLang's sampling parameters of every prompt.
            top_logprobs: also ask for so many top log-probabilities per generated token (plain decoding only).

        Returns:
            The answers in order, and the seconds the engine took.
        """
        if not input_ids or len(input_ids) != len(sampling_params):
            raise ValueError(f"{len(input_ids)} prompts with {len(sampling_params)} sampling parameters")
        request: dict[str, Any] = {
            "input_ids": [[int(token) for token in ids] for ids in input_ids],
            "sampling_params": [dict(parameters) for parameters in sampling_params],
        }
        if top_logprobs:
            request |= {"return_logprob": True, "top_logprobs_num": top_logprobs}
        self._send({"generate": request}, "generate")
        what, allowed = f"answer {len(input_ids)} request(s)", self.settings.deadlines.request
        answer = self._receive("generated", what, time.monotonic(), allowed)
        outputs = [ServedOutput(item["output_ids"], item["meta"]) for item in answer["outputs"]]
        if len(outputs) != len(input_ids):
            raise ServerFailure(f"the server gave {len(outputs)} answers to {len(input_ids)} requests")
        return outputs, float(answer["seconds"])

    def flush(self) -> None:
        """Empties the prefix cache, so that a pass does not find the one before."""
        self._send({"flush": True}, "flush")
        self._receive("flushed", "flush its cache", time.monotonic(), self.settings.deadlines.request)

    # -- the process -----------------------------------------------------------------------------------------

    def _spawn(self) -> None:
        their_in, self._requests = os.pipe()
        self._answers, their_out = os.pipe()
        self.settings.log.parent.mkdir(parents=True, exist_ok=True)
        command = [self.settings.python, "-P", str(PROGRAM), str(their_in), str(their_out)]
        try:
            with self.settings.log.open("wb") as log:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    pass_fds=(their_in, their_out), start_new_session=True, env=self._environment(),
                )  # fmt: skip
        except OSError as error:
            raise ServerFailure(f"cannot run {self.settings.python}: {error.strerror}; see --server-python") from error
        finally:
            os.close(their_in)
            os.close(their_out)

    def _environment(self) -> dict[str, str]:
        merged = {**DEFAULTS, **os.environ, **NEUTRAL, **self.settings.environment}
        for name in REMOVED:
            merged.pop(name, None)
        paths = [*self.settings.pythonpath, merged.get("PYTHONPATH", "")]
        merged["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        return merged

    def _send(self, request: Mapping[str, Any], phase: str) -> None:
        line = (json.dumps(request) + "\n").encode()
        try:
            while line:
                line = line[os.write(self._requests, line) :]
        except OSError as error:
            raise self._failure(f"ended before it was asked to {phase}") from error

    def _receive(self, event: str, what: str, begin: float, allowed: float) -> dict[str, Any]:
        """The next answer, which must be `event` and come within `allowed` seconds of `begin`."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = begin + allowed - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise self._failure(f"took longer than {allowed:g} s to {what}", running=True)
                piece = os.read(self._answers, 1 << 16)
                if not piece:
                    raise self._failure(f"ended while it was to {what}")
                self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = json.loads(line)
        if answer["event"] == "error":
            told = f"{answer['type']}: {answer['message']}"
            raise self._failure(f"failed to {what}: {told}", told)
        if answer["event"] != event:
            raise self._failure(f"answered {answer['event']!r} where {event!r} was due", running=True)
        return answer

    def _failure(self, what: str, message: str = "", *, running: bool = False) -> ServerFailure:
        """The error with everything known: cause, remedy, log. Stops the server first, so its log is complete.

        Args:
            what: follows "the SGLang server".
            message: the error it told itself.
            running: it still runs, so the exit code to come is our own doing.
        """
        code = None
        if self._process is not None and not running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(5.0)
        self._kill()
        log = self.settings.log
        lines = [f"the SGLang server {what}" + ("" if code is None else f" (exit code {code})")]
        if remedy := diagnose(log, code, message):
            lines.append(f"Likely cause: {remedy.cause}. What to do: {remedy.action}.")
        lines += [f"The end of its log ({log}):", log_tail(log)]
        return ServerFailure("\n".join(lines))

    def _kill(self) -> None:
        """Kills the whole group, whoever of it is left, and closes the pipes."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        for name in ("_requests", "_answers"):
            if (descriptor := getattr(self, name)) >= 0:
                os.close(descriptor)
                setattr(self, name, -1)
