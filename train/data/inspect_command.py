"""`draft-jax inspect`: training rows as the model sees them, and whether a server would send the same."""

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .command_line import CONFIG_HELP, load_tokenizer, read_arguments
from .config import DataConfig
from .inspect_page import write_page
from .inspect_text import record_text
from .inspection import Inspector, RecordView, SampleView, choose, token_views
from .prepared import is_prepared, open_prepared
from .samples import Judged
from .sources import open_source
from .summary import DataError


def parser() -> argparse.ArgumentParser:
    """The options of `draft-jax inspect`."""
    made = argparse.ArgumentParser(
        prog="draft-jax inspect", description=__doc__, epilog=CONFIG_HELP, allow_abbrev=False
    )
    made.add_argument("--rows", type=int, default=50, help="records on the page, chosen at random (default: 50)")
    made.add_argument("--rows-seed", type=int, default=0, help="of that choice (default: 0)")
    made.add_argument("--scan", type=int, default=20_000, help="choose among the first so many (default: 20000)")
    made.add_argument("--place", action="append", help="FILE:LINE: look at this record instead; may be repeated")
    made.add_argument("--output", default="inspect.html", help="page to write (default: inspect.html)")
    made.add_argument("--print", type=int, default=1, dest="shown", help="records shown here as well (default: 1)")
    made.add_argument("--colour", choices=("auto", "always", "never"), default="auto")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `draft-jax inspect`. Returns 0.

    Raises:
        DataError, TemplateError, ConfigError: there is nothing to look at, or the template is unfit.
    """
    options, config = read_arguments(parser(), sys.argv[2:] if argv is None else argv)
    tokenizer, vocab_size = load_tokenizer(config)
    if is_prepared(config.data.path):
        records, how = _prepared_records(config.data, tokenizer, options)
    else:
        records, how = _records(config.data, tokenizer, vocab_size, options)
    colour = options.colour == "always" or (options.colour == "auto" and sys.stdout.isatty())
    for record in records[: options.shown]:
        print(record_text(record, colour), end="\n\n")
    output = Path(options.output)
    switches = dict(config.data.template_options)
    if config.data.enable_thinking is not None:
        switches["enable_thinking"] = config.data.enable_thinking
    served = (
        "Held against the prompts that the tokenizer's own template gives"
        + (f" with {switches}" if switches else ", no template option set")
        + ": stock servers send these."
    )
    write_page(output, records, [how, served])
    turns = [turn for record in records for turn in record.served]
    matched = sum(turn.row is not None for turn in turns)
    print(
        f"wrote {output}: {len(records)} records; {matched} of {len(turns)} answers stand behind the prompt as served"
    )
    return 0


def _records(
    config: DataConfig, tokenizer: Any, vocab_size: int, options: argparse.Namespace
) -> tuple[list[RecordView], str]:
    source = open_source(config.path).records()
    if options.place:
        wanted = set(options.place)
        found = {str(place): (place, record) for place, record in source if str(place) in wanted}
        if missing := sorted(wanted - set(found)):
            raise DataError(f"{config.path} holds no record {', '.join(missing)}; places are FILE:LINE")
        chosen = [found[place] for place in options.place]
        how = f"Records of {config.path} that were asked for."
    else:
        chosen = choose(source, options.rows, options.rows_seed, options.scan)
        how = (
            f"{len(chosen)} records of {config.path}, chosen at random among the first {options.scan:,} (seed"
            f" {options.rows_seed})."
        )
    if not chosen:
        raise DataError(f"data.path {config.path} holds no rows")
    inspector = Inspector(config, tokenizer, vocab_size)
    return [inspector.look(place, record) for place, record in chosen], how


def _prepared_records(config: DataConfig, tokenizer: Any, options: argparse.Namespace) -> tuple[list[RecordView], str]:
    if options.place:
        raise DataError("--place names a line of a file; a prepared folder has none, name the original data")
    samples, _ = open_prepared(Path(config.path))
    chosen = sorted(random.Random(options.rows_seed).sample(range(len(samples)), min(options.rows, len(samples))))
    special = set(tokenizer.added_tokens_decoder) if tokenizer is not None else set()
    records = []
    for index in chosen:
        sample = samples[index]
        tokens = token_views(tokenizer, sample.input_ids, sample.loss_mask, special)
        view = SampleView(sample.id, tokens, Judged(sample, False, None), len(sample.input_ids), {})
        records.append(RecordView(f"sample {index}", [view], []))
    how = f"{len(chosen)} samples of {config.path}, chosen at random (seed {options.rows_seed}). Prepared data hold no"
    return records, how + " conversations, so there is nothing to hold against a server's prompts."
