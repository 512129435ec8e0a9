"""Which checkpoints of a folder are complete, down to the size of every file; and setting others aside."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

#: What orbax leaves in a folder whose save came to its end.
_PARTS = ("_CHECKPOINT_METADATA", "params", "optimizer")
#: Sizes of all files of a checkpoint, written when its save has come to its end. A run killed in between leaves a
#: complete checkpoint without it, of which only the parts are looked at.
_SIZES = "draft_jax_files.json"


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, ascending. Leftovers of interrupted saves do not count."""
    if not folder.is_dir():
        return []
    return sorted(int(entry.name) for entry in folder.iterdir() if _is_step(entry) and not damage(entry))


def record_files(checkpoint: Path) -> None:
    """Write down the sizes of all files of a checkpoint that is complete."""
    sizes = {
        str(path.relative_to(checkpoint)): path.stat().st_size
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file()
    }
    temporary = checkpoint / f"{_SIZES}.tmp"
    temporary.write_text(json.dumps(sizes), encoding="utf-8")
    temporary.replace(checkpoint / _SIZES)


def damage(checkpoint: Path) -> str:
    """What a checkpoint lacks, in words; empty if it is complete as this host sees it."""
    if missing := [part for part in _PARTS if not (checkpoint / part).exists()]:
        return f"lacks {', '.join(missing)}"
    try:
        sizes = json.loads((checkpoint / _SIZES).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ""
    except ValueError:
        return f"has a damaged {_SIZES}"
    for name, size in sizes.items():
        path = checkpoint / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            return f"has {name} {'missing' if found is None else f'with {found} of {size} bytes'}"
    return ""


def set_aside(folder: Path, steps: Iterable[int] | None = None, why: str = "", name: str = "incomplete") -> None:
    """Rename checkpoints to `STEP.incomplete`, with a line saying so: orbax would take one of them for the latest.

    Args:
        folder: of the checkpoints.
        steps: which; None = those that are not complete: something else's, or damaged.
        why: for the line.
        name: what they become.
    """
    for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not _is_step(entry):
            continue
        found = damage(entry) if steps is None else ""
        if (steps is None and not found) or (steps is not None and int(entry.name) not in steps):
            continue
        aside = folder / f"{entry.name}.{name}"
        shutil.rmtree(aside, ignore_errors=True)
        entry.rename(aside)
        print(f"checkpoint {entry} {why or found}; set aside as {aside.name}", flush=True)


def _is_step(path: Path) -> bool:
    return path.is_dir() and re.fullmatch(r"\d+", path.name) is not None
