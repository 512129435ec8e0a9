"""What a GPU did in a trace of JAX's profiler, which records the kernels of every framework in the process.

A kernel that belongs to an XLA program says so (`hlo_module`); the others are torch's: the target's layers, and the
copies of captured states into the staging slots, which are device-to-device copies and nothing else is.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def read_trace(folder: str | Path) -> list[dict[str, Any]]:
    """The events of the newest trace below a folder; see `jax.profiler.trace`.

    Raises:
        FileNotFoundError: nothing was traced into it.
    """
    files = sorted(Path(folder).rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise FileNotFoundError(f"{folder} holds no trace (*.trace.json.gz)")
    with gzip.open(files[-1], "rt", encoding="utf-8") as file:
        return json.load(file)["traceEvents"]


def kernels(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that ran on a GPU's streams; the lines that JAX derives from them are left out."""
    events = list(events)
    named = [event for event in events if event.get("ph") == "M"]
    gpus = {e["pid"] for e in named if e["name"] == "process_name" and e["args"]["name"].startswith("/device:GPU")}
    streams = {
        (e["pid"], e["tid"])
        for e in named
        if e["name"] == "thread_name" and e["pid"] in gpus and e["args"]["name"].startswith("Stream")
    }
    return [e for e in events if e.get("ph") == "X" and (e["pid"], e["tid"]) in streams]


def owner(kernel: Mapping[str, Any]) -> str:
    """`draft` (an XLA program), `hand_over` (states copied into a slot) or `target` (all else of torch)."""
    if kernel.get("args", {}).get("hlo_module"):
        return "draft"
    name = kernel["name"].lower()
    return "hand_over" if "memcpy" in name and "d2d" in name.replace("dtod", "d2d") else "target"


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (begin, end) spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def split(events: Iterable[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """How the time of a traced window splits.

    Args:
        events: of the trace.
        seconds: wall time of the window by the host's clock, everything finished at both its ends.

    Returns:
        Shares of `seconds` in which a kernel of `target`, `hand_over` and `draft` ran, `idle` = none of them did; the
        kernels counted; and the programs' milliseconds by name. Empty where no GPU was traced.
    """
    found = kernels(events)
    if not found:
        return {}
    spans = [(e["ts"], e["ts"] + e["dur"]) for e in found]
    owners = [owner(e) for e in found]
    shares = {
        name: covered(span for span, whose in zip(spans, owners) if whose == name) / 1e6 / seconds
        for name in ("target", "hand_over", "draft")
    }
    programs: dict[str, float] = {}
    for event in found:
        name = event.get("args", {}).get("hlo_module")
        if name:
            programs[name] = programs.get(name, 0.0) + event["dur"] / 1e3
    return {
        **shares,
        "idle": 1.0 - covered(spans) / 1e6 / seconds,
        "kernels": {name: owners.count(name) for name in ("target", "hand_over", "draft")},
        "program_ms": {name: round(value, 2) for name, value in sorted(programs.items(), key=lambda item: -item[1])},
    }


def longest(events: Sequence[Mapping[str, Any]], whose: str, count: int = 12) -> list[dict[str, Any]]:
    """The kernels of an owner that took longest altogether: name, milliseconds, calls."""
    total: dict[str, list[float]] = {}
    for event in kernels(events):
        if owner(event) == whose:
            total.setdefault(event["name"][:80], []).append(event["dur"] / 1e3)
    ranked = sorted(total.items(), key=lambda item: -sum(item[1]))[:count]
    return [{"name": name, "ms": round(sum(times), 3), "calls": len(times)} for name, times in ranked]
