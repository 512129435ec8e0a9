"""One request to one server, and what its failure means."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2

from .answer import Answer, BadReply, parse_reply
from .config import Network

#: Statuses behind which another try may succeed; so may any 5xx.
_PASSING = (408, 409, 425, 429)
_JSON = {"Content-Type": "application/json"}


class Unreachable(Exception):
    """No connection: nothing was asked, the server is away."""


#: Reasons of a `Passing` that leave open who answers at this address.
CONNECTION_LOST = "connection lost"
ANOTHER_MODEL = "another model answered"


class Passing(Exception):
    """A failure that another try may mend. `reason` is what is counted, `wait` the seconds the server asked for."""

    def __init__(self, reason: str, detail: str = "", wait: float | None = None):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
        self.wait = wait


class Refused(Exception):
    """The server will not answer this request, now or later."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class ServerError(RuntimeError):
    """Servers that cannot be used for this run at all; the message says which and why."""


@dataclass(frozen=True)
class Served:
    """A model as a server lists it: its name, where its weights are and its context length, where told."""

    name: str
    root: str | None = None
    context: int | None = None


class Client:
    """Speaks to OpenAI-compatible servers. `async with Client(network) as client`."""

    def __init__(self, network: Network):
        self._network = network
        key = {"Authorization": f"Bearer {network.api_key}"} if network.api_key else {}
        slots = network.concurrency * len(network.endpoints)
        self._http = httpx2.AsyncClient(
            headers=key,
            timeout=httpx2.Timeout(None, connect=network.connect_timeout),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=slots),
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def chat(self, endpoint: str, body: Mapping[str, Any]) -> tuple[Answer, bool]:
        """Asks for one turn.

        Returns:
            The answer, and whether a connection was opened for it. Behind a new connection may be another server than
            before: one that was started anew closes those it had, and nothing fails if they were idle.

        Raises:
            Unreachable, Passing, Refused: see there.
            ServerError: the server wants another key.
        """
        opened: list[str] = []

        async def trace(event: str, info: Mapping[str, Any]) -> None:
            if event == "connection.connect_tcp.complete":
                opened.append(event)

        url = f"{endpoint}/chat/completions"
        reply = await self._json("POST", url, self._network.request_timeout, body, {"trace": trace})
        try:
            return parse_reply(reply), bool(opened)
        except BadReply as error:
            raise Passing("reply is no answer", str(error)) from error

    async def models(self, endpoint: str) -> list[Served]:
        """What a server says it serves; raises as :meth:`chat` does."""
        reply = await self._json("GET", f"{endpoint}/models", max(self._network.connect_timeout, 10.0))
        found = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(found, list) or not all(isinstance(m, dict) and isinstance(m.get("id"), str) for m in found):
            raise Passing("list of models has another form", str(reply)[:200])
        return [Served(m["id"], m.get("root"), m.get("max_model_len")) for m in found]

    async def _json(
        self,
        method: str,
        url: str,
        timeout: float,
        body: Mapping[str, Any] | None = None,
        extensions: dict[str, Any] | None = None,
    ) -> Any:
        data = None if body is None else json.dumps(body).encode()  # ASCII: takes broken Unicode, the server judges it
        try:
            async with asyncio.timeout(timeout):
                response = await self._http.request(method, url, content=data, headers=_JSON, extensions=extensions)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise Unreachable(f"{url}: {error or type(error).__name__}") from error
        except TimeoutError as error:
            raise Passing("no answer in time", f"{timeout:g} s") from error
        except httpx2.HTTPError as error:  # cut connections, broken transfer encodings, ...
            raise Passing(CONNECTION_LOST, f"{type(error).__name__} {error}") from error
        status = response.status_code
        if status in (401, 403):
            raise ServerError(f"{url} refuses us (HTTP {status}): name the variable that holds its key, --api-key-env")
        if status in _PASSING or status >= 500:
            raise Passing(f"HTTP {status}", response.text[:200], _retry_after(response.headers.get("retry-after")))
        if status != 200:
            raise Refused(f"HTTP {status}", response.text[:500])
        try:
            return json.loads(response.content)
        except (ValueError, RecursionError) as error:
            raise Passing("reply is not JSON", response.text[:200]) from error


def _retry_after(value: str | None) -> float | None:
    """Seconds until the time of a Retry-After header, which is a number of seconds or a date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
