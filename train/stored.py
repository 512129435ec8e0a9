"""The arrays of a checkpoint on the disk: compared by name, shape and dtype before they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from .complete import damage


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or does not belong to this run; the message names what differs."""


def load(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Read the wanted parts of a checkpoint, which `check_tensors` has compared."""
    try:
        return ocp.load_checkpointables(folder, wanted)
    except Exception as error:
        raise CheckpointError(f"{folder} cannot be read: {' '.join(str(error).split())[:500]}") from error


def metadata(folder: Path) -> Any:
    """What orbax knows of a checkpoint without its arrays."""
    try:
        return ocp.checkpointables_metadata(folder.absolute())
    except Exception as error:
        raise CheckpointError(f"{folder} cannot be read: {' '.join(str(error).split())[:500]}") from error


def check_tensors(folder: Path, wanted: dict[str, Any]) -> None:
    """Compare names, shapes and dtypes before reading: orbax would cast another dtype without a word."""
    if harm := damage(folder):
        raise CheckpointError(f"{folder} is not a complete checkpoint: it {harm}")
    found_trees = metadata(folder).metadata
    problems = []
    for part, tree in wanted.items():
        if found_trees.get(part) is None:  # orbax only warns
            raise CheckpointError(f"{folder} cannot be read: the files of its {part} are damaged")
        expected, found = _tensors(tree), _tensors(found_trees[part])
        problems += [f"{part}.{name} is missing" for name in expected if name not in found]
        problems += [f"{part}.{name} is unknown to this draft" for name in found if name not in expected]
        for name in expected.keys() & found.keys():
            for what, has, needs in zip(("shape", "dtype"), found[name], expected[name]):
                if has != needs:
                    problems.append(f"{part}.{name} has {what} {has}, this run needs {needs}")
    if problems:
        shown = "\n  ".join(sorted(problems)[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise CheckpointError(f"{folder} does not fit:\n  {shown}{more}")


def _tensors(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Dotted name -> (shape, dtype) of every leaf that has a shape."""
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: hasattr(node, "dtype"))[0]
    return {
        ".".join(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path): (
            tuple(leaf.shape),
            str(jnp.dtype(leaf.dtype)),
        )
        for path, leaf in leaves
        if hasattr(leaf, "dtype")
    }
