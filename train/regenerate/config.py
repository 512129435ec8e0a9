"""What `draft-jax regenerate` may be told."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

#: Fields of a request that the program itself decides; --extra-body may not.
RESERVED = frozenset({
    "model", "messages", "tools", "tool_choice", "seed", "stream", "n", "temperature", "top_p", "max_tokens",
    "max_completion_tokens", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "chat_template_kwargs",
})  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """How the target writes an answer. None = not sent: the server's own default holds.

    Attributes:
        temperature: 0 = greedy.
        max_tokens: longest answer, reasoning included.
        top_p, top_k, min_p: as servers name them; top_k and min_p are no part of OpenAI's interface.
        presence_penalty, frequency_penalty, repetition_penalty: the same; three different quantities.
        template: variables of the chat template (`chat_template_kwargs`), as data.template_options.
        extra: further fields of the request, as they are.
    """

    temperature: float
    max_tokens: int = 4096
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        _require(0 <= self.temperature <= 2, "temperature", self.temperature, "give a number from 0 to 2")
        _require(self.max_tokens >= 1, "max-tokens", self.max_tokens, "give at least 1")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            _require(value is None or 0 <= value <= 1, name.replace("_", "-"), value, "give a number from 0 to 1")
        taken = sorted(RESERVED & set(self.extra))
        _require(not taken, "extra-body", taken, "these are options of their own or decided by the program")

    def fields(self) -> dict[str, Any]:
        """The part of a request that says how to sample; what every row records."""
        named = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("template", "extra")}
        sent = {name: value for name, value in named.items() if value is not None}
        if self.template:
            sent["chat_template_kwargs"] = dict(self.template)
        return sent | dict(self.extra)


@dataclass(frozen=True)
class LoopRule:
    """When an answer counts as a loop, see `loops`.

    Attributes:
        ngram: words (characters of scripts without blanks) of a repeated piece.
        count: how often it must occur.
        share: least share of the last words that such pieces cover.
    """

    ngram: int = 8
    count: int = 4
    share: float = 0.5

    def __post_init__(self):
        _require(self.ngram >= 1, "loop-ngram", self.ngram, "give at least 1")
        _require(self.count >= 2, "loop-count", self.count, "give at least 2")
        _require(0 < self.share <= 1, "loop-share", self.share, "give a number above 0, at most 1")


@dataclass(frozen=True)
class Network:
    """How servers are spoken to; changes no answer.

    Attributes:
        endpoints: base URLs that end in /v1.
        concurrency: requests in flight in each.
        retries: further tries of a request that failed for a reason that may pass.
        backoff, max_backoff: seconds before the first of them, doubled each time up to the latter.
        request_timeout: seconds for one answer, from sending to its last byte.
        connect_timeout: seconds for a connection.
        start_timeout: seconds that servers have at the start until they answer.
        outage: seconds without any server that answers until the run stops.
        api_key: sent as a bearer token; never written anywhere.
    """

    endpoints: tuple[str, ...]
    concurrency: int = 32
    retries: int = 5
    backoff: float = 1.0
    max_backoff: float = 60.0
    request_timeout: float = 600.0
    connect_timeout: float = 10.0
    start_timeout: float = 60.0
    outage: float = 600.0
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self):
        _require(bool(self.endpoints), "endpoint", "missing", "give http://HOST:PORT/v1")
        for url in self.endpoints:
            _require(url.startswith(("http://", "https://")), "endpoint", url, "give http://HOST:PORT/v1")
        twice = sorted({url for url in self.endpoints if self.endpoints.count(url) > 1})
        _require(not twice, "endpoint", twice, "give each server once")
        _require(self.concurrency >= 1, "concurrency", self.concurrency, "give at least 1")
        _require(self.retries >= 0, "retries", self.retries, "give 0 or more")
        for name in ("backoff", "max_backoff", "request_timeout", "connect_timeout", "start_timeout", "outage"):
            value = getattr(self, name)
            _require(value > 0, name.replace("_", "-"), value, "give seconds above 0")


@dataclass(frozen=True)
class RegenerateConfig:
    """One run.

    Attributes:
        input: as data.path.
        output: the .jsonl file of answered rows.
        sampling: of every answer.
        network: the servers.
        model: its name in the servers; None = the only one they serve.
        seed: a request's seed is made of it, the row's id and the turn; None = none is sent.
        reasoning: keep = in `reasoning_content` of the row and of later requests; drop = nowhere.
        tool_turns: turns that call tools. keep = they stay as the source has them; regenerate = the target writes
            them too, and the conversation goes on while it calls what the source called; drop = such rows are
            left out.
        truncated, loops: what becomes of a row with an answer that reached max_tokens, or that repeats itself:
            keep = as if nothing were, mark = with a flag, drop = into the errors file. Counted in any case.
        loop_rule: what a loop is.
        ids: own = the row's `id`, its place without one; place = file and line in any case.
        row_format, leading_assistant: as data.format and data.leading_assistant.
        limit: read at most so many rows; None = all.
        resume: go on with what the output holds.
        retry_errors: ask again for rows that ended in an error.
        max_error_share: a larger share of errors stops the run.
    """

    input: str
    output: str
    sampling: Sampling
    network: Network
    model: str | None = None
    seed: int | None = 0
    reasoning: Literal["keep", "drop"] = "keep"
    tool_turns: Literal["keep", "regenerate", "drop"] = "keep"
    truncated: Literal["keep", "mark", "drop"] = "mark"
    loops: Literal["keep", "mark", "drop"] = "drop"
    loop_rule: LoopRule = field(default_factory=LoopRule)
    ids: Literal["own", "place"] = "own"
    row_format: Literal["auto", "messages", "sharegpt"] = "auto"
    leading_assistant: Literal["drop", "refuse"] = "drop"
    limit: int | None = None
    resume: bool = False
    retry_errors: bool = False
    max_error_share: float = 0.1

    def __post_init__(self):
        _require(self.output.endswith(".jsonl"), "output", self.output, "give a .jsonl file: train reads it as it is")
        _require(self.limit is None or self.limit >= 1, "limit", self.limit, "give at least 1")
        _require(0 < self.max_error_share <= 1, "max-error-share", self.max_error_share, "give above 0, at most 1")
        _require(self.resume or not self.retry_errors, "retry-errors", True, "it goes with --resume")

    def identity(self, model: str) -> dict[str, Any]:
        """What the answers depend on, flat and plain: a run goes on only under the same."""
        named = ("seed", "reasoning", "tool_turns", "truncated", "loops", "ids", "row_format", "leading_assistant")
        found = {"model": model} | {name: getattr(self, name) for name in named}
        found |= {f"sampling.{name}": value for name, value in self.sampling.fields().items()}
        return found | {f"loop_rule.{name}": value for name, value in dataclasses.asdict(self.loop_rule).items()}


def _require(condition: bool, name: str, value: Any, remedy: str) -> None:
    if not condition:
        raise ValueError(f"--{name} is {value!r}; {remedy}")
