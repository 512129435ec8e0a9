"""An evaluation spread over processes of one host: each decodes a share, their rows are put together afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


class ProcessError(RuntimeError):
    """A process of an evaluation failed; the message has the end of its output. Its rows stay: --resume goes on."""


def run_shares(argv: Sequence[str], count: int, folder: Path) -> None:
    """Runs `draft-jax eval` `count` times, each with its share of the prompts, and waits for all.

    Args:
        argv: the options of the whole evaluation.
        count: processes. With GPUs each sees one of them, in turn.
        folder: of the rows; what the processes print goes to `process-I.log` in it.

    Raises:
        ProcessError: one failed, after all have ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    running: list[tuple[Path, subprocess.Popen[bytes]]] = []
    try:
        for index in range(count):
            log = folder / f"process-{index + 1}.log"
            with open(log, "wb") as file:
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "train.cli", "eval"),
                        *without(argv, "--processes", "--report"),
                        *("--share", f"{index + 1}/{count}", "--resume"),
                    ],
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **_one_gpu(index)},
                )
            running.append((log, process))
        codes = [process.wait() for _, process in running]
    finally:
        for _, process in running:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if failed := [(log, code) for (log, _), code in zip(running, codes) if code]:
        log, code = failed[0]
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise ProcessError(f"process {log.stem.removeprefix('process-')} of {count} ended with {code} ({log}):\n{tail}")


def without(argv: Sequence[str], *names: str) -> list[str]:
    """The options without those named, and without their values."""
    kept: list[str] = []
    skip = False
    for argument in argv:
        if skip:
            skip = False
        elif argument in names:
            skip = True
        elif argument.partition("=")[0] not in names:
            kept.append(argument)
    return kept


def _one_gpu(index: int) -> dict[str, str]:
    """The environment of a process that shall see one GPU of those there are; nothing without any."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        import torch

        devices = [str(i) for i in range(torch.cuda.device_count())]
    else:
        devices = [device for device in listed.split(",") if device.strip()]
    return {"CUDA_VISIBLE_DEVICES": devices[index % len(devices)]} if devices else {}
