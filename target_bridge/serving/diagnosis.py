"""The end of a server's log -> what went wrong and what to do, in a sentence."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

#: Lines of the log shown with a failure.
TAIL_LINES = 25
#: Bytes of the log searched for a known cause.
SEARCHED_BYTES = 64 * 1024
TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Remedy:
    """A known cause.

    Attributes:
        pattern: searched in the end of the log; the first remedy whose pattern occurs is the one told.
        cause: what it means.
        action: what to do.
    """

    pattern: re.Pattern[str]
    cause: str
    action: str


def _remedy(pattern: str, cause: str, action: str) -> Remedy:
    return Remedy(re.compile(pattern, re.IGNORECASE), cause, action)


#: Most specific first: a missing GPU also makes kernels fail to import, a refused draft also ends the scheduler.
REMEDIES = (
    _remedy(
        r"No module named 'sglang'",
        "this interpreter has no sglang",
        "install it (docs/serving.md), or name an interpreter that has it with --server-python",
    ),
    _remedy(
        r"DSpark speculative decoding only supports",
        "stock SGLang serves DSpark drafts on GPUs only",
        "run serve-check on a machine with a CUDA GPU",
    ),
    _remedy(
        r"No CUDA GPUs are available|Found no NVIDIA driver|no CUDA-capable device|libcuda\.so\.1: cannot open"
        r"|No accelerator .*available|No supported (?:device|hardware) (?:detected|found)",
        "SGLang finds no GPU",
        "check nvidia-smi and CUDA_VISIBLE_DEVICES",
    ),
    _remedy(
        r"speculative_algorithm.*(?:invalid choice|not supported)|Unknown speculative algorithm"
        r"|Invalid speculative algorithm|unexpected keyword argument 'speculative_dspark|DSPARK.*is not a valid",
        "this SGLang does not know DSPARK",
        "use 0.5.16 or newer (docs/serving.md)",
    ),
    _remedy(
        r"unexpected keyword argument",
        "this SGLang does not know one of the server arguments",
        "compare --server-arg with the version's `python -m sglang.launch_server --help`",
    ),
    _remedy(
        r"undefined symbol|no kernel image is available|sgl_kernel.*(?:ImportError|not found)"
        r"|No module named 'sgl_kernel|common_ops.*not found|Could not load (?:any )?common_ops|flash_ops",
        "kernels are missing, or built for another torch, CUDA or GPU",
        "install the sglang-kernel and torch that this SGLang pins; without FlashAttention-3's library pass "
        "--attention-backend triton",
    ),
    _remedy(
        r"CUDA out of memory|OutOfMemoryError|Not enough memory|not enough GPU memory",
        "the GPU's memory does not suffice",
        "free the GPU, or lower --server-memory or --concurrency",
    ),
    _remedy(
        r"Capture (?:the )?cuda graph failed|CUDA graph capture|cudaErrorStreamCapture|while capturing",
        "capturing CUDA graphs failed",
        "pass --server-arg disable_cuda_graph=true",
    ),
    _remedy(
        r"set_(?:dflash|dspark)_layers_to_capture|does not support (?:DFLASH|DSPARK)",
        "this target's class in SGLang cannot hand its hidden states to a DSpark draft",
        "`draft-jax probe` tells which targets can",
    ),
    _remedy(
        r"DSpark (?:requires|draft|mask_token_id|markov|could not)|Unsupported DSpark|markov_rank|mask_token_id"
        r"|size of tensor .* must match|shape mismatch|Attempted to load weight",
        "SGLang refuses the draft",
        "check it with `draft-jax export --check FOLDER --target TARGET`; export it again if it is not ours",
    ),
    _remedy(
        r"couldn't connect to 'https?://|LocalEntryNotFoundError|OfflineModeIsEnabled|Max retries exceeded with url",
        "a file is neither here nor downloadable",
        "give --target as a local folder",
    ),
    _remedy(
        r"does not recognize this architecture|Unrecognized (?:model|configuration class)|model type `",
        "the transformers that SGLang runs with does not know the model",
        "give SGLang the transformers it pins; with two versions on the path, SGLang's must come first",
    ),
    _remedy(
        r"No module named '([\w.]+)'",
        "a package that SGLang imports is missing",
        "install it into SGLang's environment",
    ),
    _remedy(r"Address already in use", "a port that SGLang chose was taken meanwhile", "run it again"),
)


def log_tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, indented; a sentence when there are none.

    When an error was traced, its end and its message are shown first: what a dying server says afterwards would
    push them out.
    """
    kept = [line for line in _end_of(log).splitlines() if line.strip()]
    traces = [index for index, line in enumerate(kept) if line.lstrip().startswith(TRACEBACK)]
    if traces:
        message = next(
            (i for i in range(traces[-1] + 1, len(kept)) if not kept[i].startswith((" ", "\t"))), len(kept) - 1
        )
        error, after = kept[: message + 1][-lines:], kept[message + 1 :]
        left = max(0, lines - len(error))
        skipped = [f"... {len(after) - left} more line(s)"] if len(after) > left else []
        kept = [*error, *after[:left], *skipped]
    else:
        kept = kept[-lines:]
    return "\n".join(f"  | {line}" for line in kept) if kept else "  (the server wrote no log)"


def diagnose(log: Path, exit_code: int | None, message: str = "") -> Remedy | None:
    """The known cause of a failure, if it is one.

    Args:
        log: the server's output.
        exit_code: of its process, negative for a signal; None while it runs.
        message: the error it reported itself; searched first, since a log also holds harmless warnings.
    """
    for text in (message, _after_first_traceback(_end_of(log))):
        for remedy in REMEDIES:
            if remedy.pattern.search(text):
                return remedy
    if exit_code == -9 and TRACEBACK not in _end_of(log):  # after an error SGLang kills its own processes
        return _remedy("", "the server was killed, most likely by the system for want of memory", "free host memory")
    return None


def _after_first_traceback(text: str) -> str:
    """What was said from the first error on: before it, a log lists every server argument by name."""
    place = text.find(TRACEBACK)
    return text if place < 0 else text[place:]


def _end_of(log: Path) -> str:
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - SEARCHED_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
