"""`draft-jax tasks`: which tasks there are, and their files from the public sources."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from train.evaluate.converters import SOURCES, ConvertError, Row, file_rows, hub_rows, write_task
from train.evaluate.task_folder import find_tasks

FOLDER = "eval_tasks"


def parser() -> argparse.ArgumentParser:
    """The options of `draft-jax tasks`."""
    made = argparse.ArgumentParser(prog="draft-jax tasks", description=__doc__)
    commands = made.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="known tasks, their sources and licences, and what a folder holds")
    get = commands.add_parser("get", help="make task files from the Hugging Face hub (needs network)")
    get.add_argument("names", nargs="+", metavar="NAME", help=f"all, or of: {', '.join(SOURCES)}")
    convert = commands.add_parser("convert", help="make a task's file from its original files")
    convert.add_argument("name", choices=SOURCES)
    convert.add_argument("files", nargs="+", metavar="FILE", help=".jsonl, .jsonl.gz, .json or .parquet, in order")
    for command in (listing, get, convert):
        command.add_argument("--folder", default=FOLDER, help=f"folder of the task files (default: {FOLDER})")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `draft-jax tasks`.

    Returns:
        Exit code: 0, or 1 when a task could not be had from the hub (the others are made all the same).

    Raises:
        ConvertError, ValueError: nothing was made; the message says why.
    """
    args = parser().parse_args(argv)
    if args.command == "list":
        print(listing(Path(args.folder)))
        return 0
    if args.command == "convert":
        _make(args.name, file_rows(args.files), args.folder)
        return 0
    names = list(SOURCES) if args.names == ["all"] else args.names
    if unknown := [name for name in names if name not in SOURCES]:
        raise ValueError(f"unknown task(s) {', '.join(unknown)}; known: {', '.join(SOURCES)}")
    failed = 0
    for name in names:
        try:
            _make(name, hub_rows(name), args.folder)
        except ConvertError as error:
            failed += 1
            print(f"draft-jax tasks: {error}", file=sys.stderr)
    return 1 if failed else 0


def _make(name: str, rows: Iterable[Row], folder: str) -> None:
    path, count = write_task(name, rows, folder)
    source = SOURCES[name]
    print(f"{path}: {count} prompts from {source.hub} (licence: {source.licence})")
    if count != source.rows:
        print(
            f"WARNING: DeepSpec's {name} has {source.rows} rows, this source {count}: other prompts will be chosen, "
            "figures can be set beside the paper's only loosely",
            file=sys.stderr,
        )


def listing(folder: Path) -> str:
    """The known tasks as a table, and what else the folder holds."""
    from train.report import terminal_table

    there = {task.name: task for task in find_tasks(folder)} if _holds_files(folder) else {}
    rows = [
        (name, source.rows, source.cap, source.hub, source.licence, "yes" if name in there else "no")
        for name, source in SOURCES.items()
    ]
    lines = [terminal_table([("task", "rows", "asked", "source", "licence", f"in {folder}"), *rows])]
    if others := [name for name in there if name not in SOURCES]:
        lines.append(f"Also in {folder}: {', '.join(others)} (asked whole, in the file's order)")
    return "\n".join(lines)


def _holds_files(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("*.jsonl*"))
