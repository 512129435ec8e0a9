"""`draft-jax prepare`: tokenise a run's data once, in parallel, and account for every row."""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from .command_line import CONFIG_HELP, load_tokenizer, read_arguments
from .config import DataConfig
from .prepare import prepare
from .retention import retention
from .sources import open_source
from .summary import Summary


def parser() -> argparse.ArgumentParser:
    """The options of `draft-jax prepare`."""
    made = argparse.ArgumentParser(
        prog="draft-jax prepare", description=__doc__, epilog=CONFIG_HELP, allow_abbrev=False
    )
    made.add_argument("--output", help="folder to make (default: one under data.prepared, where training finds it)")
    made.add_argument("--workers", type=int, help="processes that tokenise (default: one a core; 0: this one alone)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `draft-jax prepare`. Returns 0; raises what the data or the configuration raise."""
    options, config = read_arguments(parser(), sys.argv[2:] if argv is None else argv)
    tokenizer, vocab_size = load_tokenizer(config)
    begin = time.perf_counter()
    shown = config.logging.progress
    hidden = None if shown is None else not shown  # None: on a terminal alone
    with tqdm(total=_known_rows(config.data), unit=" rows", disable=hidden, smoothing=0.05) as bar:

        def report(summary: Summary, records: int) -> None:
            bar.update(records)
            bar.set_postfix_str(f"{100 * retention(summary):.1f} % kept, {summary.tokens / 1e6:.1f} M tokens")

        folder, summary = prepare(
            config.data, tokenizer, vocab_size, folder=options.output, workers=options.workers, report=report
        )
    print(summary.format())
    size = sum(file.stat().st_size for file in folder.glob("*.arrow"))
    print(
        f"prepared  {folder} ({size / 2**20:.1f} MiB) in {time.perf_counter() - begin:.1f} s; training with these data"
        f" and options uses it, so does --data.path={folder}"
    )
    return 0


def _known_rows(config: DataConfig) -> int | None:
    """Rows of the dataset where the files tell without being read: Parquet alone."""
    source = open_source(config.path)
    if source.root is None or not all(name.endswith(".parquet") for name in source.parts):
        return config.limit
    import pyarrow.parquet

    try:
        rows = sum(pyarrow.parquet.read_metadata(Path(source.root) / name).num_rows for name in source.parts)
    except (pyarrow.ArrowException, OSError):
        return config.limit  # a broken file is named by who reads it
    return rows if config.limit is None else min(rows, config.limit)
