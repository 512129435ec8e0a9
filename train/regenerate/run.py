"""The run: rows are read as workers become free, answered, and written as they finish."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from train.data.files import Place
from train.data.formats import Conversation, Message, RowRefused, parse_row
from train.data.sources import Record, Source, open_source

from .account import Account
from .answer import Answer
from .client import ANOTHER_MODEL, CONNECTION_LOST, Client, Passing, Refused, Unreachable
from .config import RegenerateConfig
from .conversation import RowDropped, answer_conversation, source_digest, turn_seed
from .id_set import IdSet
from .output import Output, OutputError
from .pool import Pool, Server, agree_on_model
from .progress import Progress, RowCount

# What a row is made of anew; other plain values of the source are carried over.
_OURS = {"id", "messages", "conversations", "tools", "system", "text", "input_ids", "loss_mask", "regenerated"}
#: A server may ask for this many seconds of patience at most.
_LONGEST_WAIT = 600.0
#: Rows before the share of errors says something.
_ENOUGH = 50


class TooManyErrors(RuntimeError):
    """So many rows fail that something is wrong with all of them."""


class _RowFailed(Exception):
    def __init__(self, reason: str, detail: str):
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


async def regenerate(config: RegenerateConfig, account: Account, say: Callable[[str], None], every: float) -> Account:
    """Runs to the end of the input. Cancelling it loses the rows in flight and nothing else.

    Args:
        account: filled as the run goes.
        say: takes lines for the user.
        every: seconds between lines of progress.

    Raises:
        OutputError, ServerError, TooManyErrors, DataError: see there.
    """
    source = open_source(config.input)
    if source.root is not None and Path(config.output).resolve() in [(source.root / p).resolve() for p in source.parts]:
        raise OutputError(f"--output {config.output} is part of --input {config.input}; write it elsewhere")
    for name in source.ignored:
        say(f"note: {name} is not read, no reader for its kind")
    async with Client(config.network) as client:
        model = await agree_on_model(client, config.network, config.model, say)
        say(f"{len(config.network.endpoints)} servers of {model.name}, {config.network.concurrency} requests in each")
        told = {"input": config.input, "endpoints": list(config.network.endpoints), "root": model.root}
        output = Output(
            config.output, config.identity(model.name), told, account, say,
            resume=config.resume, retry_errors=config.retry_errors,
        )  # fmt: skip
        try:
            if account.settled:
                say(f"{account.settled:,} rows are settled already")
            pool = Pool(client, config.network, model, say)
            count = RowCount(source, config.limit)
            speaker = asyncio.create_task(Progress(account, count, say, every).run())
            try:
                await _Run(config, model.name, client, pool, output).go(source)
            finally:
                count.stop()
                speaker.cancel()
                await pool.close()
        finally:
            output.close()
    return account


class _Run:
    def __init__(self, config: RegenerateConfig, model: str, client: Client, pool: Pool, output: Output):
        self._config = config
        self._model = model
        self._client = client
        self._pool = pool
        self._output = output
        self._account = output.account
        self._sampling = config.sampling.fields()
        self._begun = {"answered": self._account.answered, "error": self._account.number("error")}

    async def go(self, source: Source) -> None:
        rows = self._rows(source)
        turn = asyncio.Lock()

        async def work() -> None:
            while True:
                async with turn:
                    item = await anext(rows, None)
                if item is None:
                    return
                await self._settle(*item)

        workers = self._config.network.concurrency * len(self._config.network.endpoints)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(work())
        except BaseExceptionGroup as errors:  # the first is what stopped the others
            raise errors.exceptions[0] from None

    async def _rows(self, source: Source) -> AsyncIterator[tuple[Conversation, str, dict[str, Any]]]:
        """Conversations that are still to be answered, with the name of what they say and what is carried over."""
        seen = IdSet()
        for number, (place, record) in enumerate(_limited(source, self._config.limit)):
            if number % 64 == 0:
                await asyncio.sleep(0)  # long stretches without work must not hold up answers and signals
            self._account.read += 1
            try:
                conversation = self._conversation(record, place)
            except RowRefused as refused:
                entry = {"id": str(place), "kind": "refused", "reason": refused.reason, "detail": refused.detail}
                self._output.write_left_out(entry)
                continue
            if not seen.add(conversation.id):
                self._account.twice.add(f"{conversation.id} at {place}")
                continue
            digest = source_digest(conversation)
            if self._output.settled(conversation.id, digest):
                self._account.resumed += 1
                continue
            if conversation.leading_dropped:
                name = "assistant and tool turns before the first user turn, left out"
                self._account.note(name, conversation.id, conversation.leading_dropped)
            yield conversation, digest, _carried(record)

    def _conversation(self, record: Record, place: Place) -> Conversation:
        row = parse_row(
            record, place, row_format=self._config.row_format, leading_assistant=self._config.leading_assistant,
            unanswered=True, vocab_size=1 << 31,
        )  # fmt: skip
        if not isinstance(row, Conversation):
            raise RowRefused("row has no turns to answer", f"it is a {type(row).__name__}")
        if self._config.ids == "place":
            return Conversation(str(place), place, row.messages, row.tools, row.leading_dropped)
        return row

    async def _settle(self, conversation: Conversation, digest: str, carried: Mapping[str, Any]) -> None:
        """Answers one row and writes what became of it."""
        last: list[Server] = []
        seeds: list[int] = []

        async def ask(messages: Sequence[Message], tools: list[dict] | None, turn: int) -> Answer:
            body = {"model": self._model, "messages": messages, **self._sampling}
            if tools:
                body["tools"] = tools
            if self._config.seed is not None:
                body["seed"] = turn_seed(self._config.seed, conversation.id, turn)
                seeds.append(body["seed"])
            return await self._ask(conversation.id, body, last)

        def left_out(kind: str, reason: str, detail: str) -> None:
            entry = {"id": conversation.id, "kind": kind, "reason": reason, "detail": detail, "source": digest}
            self._output.write_left_out(entry)

        try:
            answered = await answer_conversation(conversation, ask, self._config)
        except RowDropped as dropped:
            left_out("dropped", dropped.reason, dropped.detail)
            return
        except _RowFailed as failed:
            left_out("error", failed.reason, failed.detail)
            self._check_errors()
            return
        for name, times in answered.notes.items():
            self._account.note(name, conversation.id, times)
        if not answered.turns:
            left_out("dropped", "no turn to answer: every assistant turn calls tools", "")
            return
        row = {"id": conversation.id, "messages": answered.messages}
        if conversation.tools:
            row["tools"] = conversation.tools
        made = {"model": self._model, "sampling": self._sampling} | ({"seeds": seeds} if seeds else {})
        row |= dict(carried) | {"regenerated": made | {"turns": answered.turns, "source": digest}}
        self._output.write_row(row)

    async def _ask(self, row_id: str, body: Mapping[str, Any], last: list[Server]) -> Answer:
        """One turn from whichever server gives it; `last` holds the server that gave this row's turn before."""
        network = self._config.network
        failures, avoid = 0, None
        while True:
            server = await self._pool.take(prefer=last[0] if last else None, avoid=avoid)
            failed, connected, wait = False, True, None
            try:
                answer, new_connection = await self._client.chat(server.url, body)
                if new_connection and (problem := await self._pool.problem(server)):
                    raise Passing(ANOTHER_MODEL, problem)
                server.answers += 1
                last[:] = [server]
                self._account.generated += answer.completion_tokens or 0
                return answer
            except Unreachable:  # nothing was asked: no try is used up, the pool leaves the server out
                connected = False
                self._account.retry("server not reached", row_id)
                continue
            except Refused as refused:
                raise _RowFailed(refused.reason, refused.detail) from refused
            except Passing as passing:
                failures += 1
                failed = passing.reason != "HTTP 429"  # a busy server is no broken one
                connected = passing.reason not in (CONNECTION_LOST, ANOTHER_MODEL)
                if failures > network.retries:
                    raise _RowFailed(passing.reason, f"{failures} tries; {passing.detail}") from passing
                self._account.retry(passing.reason, row_id)
                wait = passing.wait
            finally:
                self._pool.give(server, failed=failed, connected=connected)
            avoid = server
            step = min(network.backoff * 2 ** (failures - 1), network.max_backoff)
            patience = step * random.uniform(0.5, 1.0) if wait is None else min(wait, _LONGEST_WAIT)
            await asyncio.sleep(patience)

    def _check_errors(self) -> None:
        errors = self._account.number("error") - self._begun["error"]
        finished = errors + self._account.answered - self._begun["answered"]
        share = errors / finished
        if finished >= _ENOUGH and share > self._config.max_error_share:
            table = self._account.left_out["error"]
            reason = max(table, key=lambda name: table[name].count)
            raise TooManyErrors(
                f"{errors} of {finished} rows ended in an error, most often: {reason} (first: row "
                f"{table[reason].example}, see {self._output.errors_path}). Mend it and go on with --resume "
                "--retry-errors, or allow more with --max-error-share"
            )


def _limited(source: Source, limit: int | None) -> Iterator[tuple[Place, Record]]:
    for number, item in enumerate(source.records()):
        if number == limit:
            return
        yield item


def _carried(record: Record) -> dict[str, Any]:
    """Plain values of a row that say where it comes from (`source`, `subset`, ...)."""
    row = json.loads(record.decode("utf-8-sig")) if isinstance(record, bytes) else record
    return {k: v for k, v in row.items() if k not in _OURS and isinstance(v, str | int | float)}
