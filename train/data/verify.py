"""Checks a tokenizer, its template and our masks against each other on real rows.

    python -m train.data.verify TOKENIZER_FOLDER conversations.jsonl.gz --rows 5000

Of every row the ids are compared with `apply_chat_template`, and every supervised run of tokens is decoded and compared
with the answer it should hold. Where the template chosen has marks and the tokenizer's special tokens are of a known
family, the masks of both readings are compared, too.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from .agreement import Agreement, choose_template, template_variables
from .encoding import Encoded, Encoder
from .formats import Conversation, RowRefused, parse_row
from .sources import open_source
from .templates import TemplateError


@dataclass
class Verdict:
    """What was found.

    Attributes:
        conversations, refused: conversations read, and those that are no sample.
        rows: rows made of them.
        ids_equal: rows whose ids are those of `apply_chat_template`; all that could be compared, or it would have
            stopped.
        runs, runs_exact: supervised runs, and those that decode to exactly an answer and the token that ends it.
        runs_holding: runs that decode to more than that (reasoning, tool calls) but hold the answer.
        shared: tokens the header and an answer share, so that the answer's first token is not supervised.
        read_twice, read_equal: rows masked by marks and by special tokens, and those with equal masks.
        wrong: what does not hold, first cases.
    """

    template: str = ""
    conversations: int = 0
    refused: int = 0
    rows: int = 0
    ids_equal: int = 0
    runs: int = 0
    runs_exact: int = 0
    runs_holding: int = 0
    shared: int = 0
    read_twice: int = 0
    read_equal: int = 0
    wrong: list[str] = field(default_factory=list)

    def format(self) -> str:
        lines = [
            f"template        {self.template}",
            f"conversations   {self.conversations:,}, refused {self.refused:,}; rows {self.rows:,}",
            f"ids             {self.ids_equal:,} rows equal to apply_chat_template",
            f"supervised runs {self.runs:,}: {self.runs_exact:,} are an answer and its end, {self.runs_holding:,} hold "
            f"one; {self.shared:,} tokens shared with the header",
            f"read twice      {self.read_equal:,} of {self.read_twice:,} rows have equal masks by marks and by tokens",
            *(f"WRONG           {text}" for text in self.wrong[:5]),
            "all as it should be" if not self.wrong else f"{len(self.wrong):,} faults",
        ]
        return "\n".join(lines)


def verify(
    tokenizer: Any,
    path: str,
    *,
    rows: int,
    template: str = "auto",
    thinking: bool | None = None,
    history: str = "fan_out",
) -> Verdict:
    """Checks the first rows of a dataset.

    Args:
        tokenizer: of the target, fast, with a chat template.
        path: see DataConfig.path.
        rows: how many records to read.
        template, thinking, history: see DataConfig.

    Raises:
        TemplateError: ids or text of a row differ from the tokenizer's own.
    """
    variables = template_variables(tokenizer, thinking)
    chosen = choose_template(template, tokenizer, variables=variables)
    agreement = Agreement(chosen, tokenizer, variables=variables, every_id=True)
    size = len(tokenizer)
    encoder = Encoder(chosen, tokenizer, size, agreement, history=history)
    second = _second_reading(chosen.marked, tokenizer, variables, history)
    verdict = Verdict()
    for batch in _conversations(path, rows, size, verdict):
        results = encoder.encode(batch)
        others = second.encode(batch) if second else [None] * len(batch)
        for conversation, result, other in zip(batch, results, others):
            if isinstance(result, RowRefused):
                verdict.refused += 1
                continue
            for row in result:
                _check_runs(tokenizer, conversation, row, verdict)
            if isinstance(other, list):
                verdict.read_twice += len(result)
                equal = sum(
                    np.array_equal(a.input_ids, b.input_ids) and np.array_equal(a.loss_mask, b.loss_mask)
                    for a, b in zip(result, other)
                )
                verdict.read_equal += equal
                if equal != len(result) or len(result) != len(other):
                    verdict.wrong.append(f"{conversation.place}: marks and special tokens tell different masks")
    verdict.ids_equal = agreement.ids
    verdict.template = agreement.describe()
    return verdict


def _second_reading(marked: bool, tokenizer: Any, variables: dict[str, Any], history: str) -> Encoder | None:
    if not marked:
        return None
    try:
        own = choose_template("own", tokenizer, variables=variables)
    except TemplateError:
        return None  # no known family
    return Encoder(own, tokenizer, len(tokenizer), None, history=history) if own.family else None


def _conversations(path: str, rows: int, size: int, verdict: Verdict) -> Iterator[list[Conversation]]:
    records = islice(open_source(path).records(), rows)
    while batch := list(islice(records, 256)):
        parsed = []
        for place, record in batch:
            try:
                row = parse_row(record, place, vocab_size=size)
            except RowRefused:
                verdict.refused += 1
                continue
            if isinstance(row, Conversation):
                parsed.append(row)
        verdict.conversations += len(batch)
        yield parsed


def _check_runs(tokenizer: Any, conversation: Conversation, row: Encoded, verdict: Verdict) -> None:
    """Each supervised run must be one of the answers, in their order, and end in a special token."""
    verdict.rows += 1
    shared = row.notes.get("tokens shared by an answer and what surrounds it (not supervised)", 0)
    verdict.shared += shared
    normalizer = tokenizer.backend_tokenizer.normalizer  # some compose accents before they tokenise
    normalize = normalizer.normalize_str if normalizer is not None else str
    answers = iter([message for message in conversation.messages if message["role"] == "assistant"])
    edges: np.ndarray = np.flatnonzero(np.diff(row.loss_mask, prepend=0, append=0))
    for start, end in edges.reshape(-1, 2):
        verdict.runs += 1
        text = tokenizer.decode(row.input_ids[start : end - 1], clean_up_tokenization_spaces=False)
        ended = int(row.input_ids[end - 1]) in tokenizer.added_tokens_decoder
        for message in answers if ended else ():
            content = normalize(message["content"])
            before, found, _ = text.rpartition(content.rpartition("</think>")[2].strip())
            if text == content:
                verdict.runs_exact += 1
                break
            if found and (not before.strip() or "</think>" in before or message.get("reasoning_content")):
                verdict.runs_holding += 1
                break
            if shared and content.endswith(text):
                break  # its first characters belong to the token it shares with the header
            if message.get("tool_calls"):
                verdict.runs_holding += 1
                break
        else:
            verdict.wrong.append(f"{conversation.place}: {text[-80:]!r} is none of the answers that are left")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the verdict; 0 if nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m train.data.verify", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("tokenizer", help="folder or hub name of the target")
    parser.add_argument("path", help="conversations, as data.path")
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--template", default="auto")
    parser.add_argument("--thinking", choices=("on", "off"))
    parser.add_argument("--history", default="fan_out")
    options = parser.parse_args(arguments)
    from transformers import AutoTokenizer

    verdict = verify(
        AutoTokenizer.from_pretrained(options.tokenizer),
        options.path,
        rows=options.rows,
        template=options.template,
        thinking=None if options.thinking is None else options.thinking == "on",
        history=options.history,
    )
    print(verdict.format())
    return int(bool(verdict.wrong))


if __name__ == "__main__":
    sys.exit(main())
