"""The servers of a run: which serve the model, which are up, and who takes the next request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from .client import Client, Passing, Refused, Served, ServerError, Unreachable
from .config import Network

#: Failures in a row, whatever the request, that make a server count as away.
_FAILURES = 8


@dataclass
class Server:
    """One server: its requests in flight, failures in a row, whether requests go to it, answers it gave."""

    url: str
    in_flight: int = 0
    failures: int = 0
    up: bool = True
    answers: int = 0


class Pool:
    """Gives each request a server with room. One that cannot be reached is left out until it answers again, with the
    same model."""

    def __init__(self, client: Client, network: Network, model: Served, say: Callable[[str], None]):
        self._client = client
        self._network = network
        self._model = model
        self._say = say
        self._changed = asyncio.Event()
        self._away_since: float | None = None
        self._revivals: set[asyncio.Task] = set()
        self.servers = [Server(url) for url in network.endpoints]

    async def take(self, prefer: Server | None = None, avoid: Server | None = None) -> Server:
        """Waits for room in a server: the preferred one (it has the conversation cached), else the least busy.

        Args:
            avoid: one that has just failed; taken only if there is no other.

        Raises:
            ServerError: no server has served the model for `outage` seconds.
        """
        while True:
            free = [s for s in self.servers if s.up and s.in_flight < self._network.concurrency]
            free = [s for s in free if s is not avoid] or ([] if self._others_up(avoid) else free)
            if free:
                chosen = prefer if prefer in free else min(free, key=lambda s: (s.in_flight, s.answers))
                chosen.in_flight += 1
                return chosen
            self._check_outage()
            try:
                async with asyncio.timeout(0.5):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def give(self, server: Server, *, failed: bool = False, connected: bool = True) -> None:
        """Ends a request.

        Args:
            failed: it failed for a reason that may lie in the server.
            connected: False = no connection was had, or it broke. Whoever answers there next may be another server:
                it gets requests once it has said that it serves the model.
        """
        server.in_flight -= 1
        server.failures = server.failures + 1 if failed or not connected else 0
        if server.up and (not connected or server.failures >= _FAILURES):
            server.up = False
            if not any(s.up for s in self.servers):
                self._away_since = time.monotonic()
            task = asyncio.create_task(self._revive(server))
            self._revivals.add(task)
            task.add_done_callback(self._revivals.discard)
        self._wake()

    async def close(self) -> None:
        """Stops looking after servers that are away."""
        for task in list(self._revivals):
            task.cancel()
        await asyncio.gather(*self._revivals, return_exceptions=True)

    def _others_up(self, avoid: Server | None) -> bool:
        return any(s.up and s is not avoid for s in self.servers)

    def _check_outage(self) -> None:
        if self._away_since is not None and time.monotonic() - self._away_since > self._network.outage:
            servers = ", ".join(self._network.endpoints)
            raise ServerError(
                f"no server has served {self._model.name} for {self._network.outage:g} s ({servers}); "
                "start them and go on with --resume"
            )

    async def _revive(self, server: Server) -> None:
        said, wait = None, self._network.backoff
        while True:
            problem = await self.problem(server)
            if problem is None:
                break
            if problem != said:
                self._say(f"{problem}; it gets no requests until it serves {self._model.name}")
            said = problem
            await asyncio.sleep(wait)
            wait = min(2 * wait, self._network.max_backoff)
        server.up, server.failures, self._away_since = True, 0, None
        if said:
            self._say(f"{server.url} answers again")
        self._wake()

    async def problem(self, server: Server) -> str | None:
        """Asks a server what it serves; why it cannot answer for the model now, or None."""
        try:
            served = await self._client.models(server.url)
        except (Unreachable, Passing, Refused, ServerError):
            return f"{server.url} is away"
        return _difference(server.url, served, self._model)

    def _wake(self) -> None:
        self._changed.set()
        self._changed.clear()


async def agree_on_model(client: Client, network: Network, name: str | None, say: Callable[[str], None]) -> Served:
    """Asks every server what it serves.

    Args:
        name: the model wanted; None = the only one served.

    Raises:
        ServerError: a server does not answer in `start_timeout`, lacks the model, or serves another one than the rest.
    """
    found = await asyncio.gather(*(_first_list(client, network, url) for url in network.endpoints))
    lists = dict(zip(network.endpoints, found))
    for url, served in lists.items():
        names = [m.name for m in served]
        if name is None and len(names) != 1:
            raise ServerError(f"{url} serves {len(names)} models ({', '.join(names)}); name one with --model")
        if name is not None and name not in names:
            raise ServerError(f"{url} does not serve {name!r}; it serves {', '.join(names) or 'nothing'}")
    first_url, *others = lists
    model = next(m for m in lists[first_url] if name in (None, m.name))
    for url in others:
        if problem := _difference(url, lists[url], model):
            raise ServerError(f"{problem}, as {first_url} does; every server must serve the same model")
        other = next(m for m in lists[url] if m.name == model.name)
        if other.root != model.root:
            say(f"note: {model.name} is {model.root} in {first_url} and {other.root} in {url}: are they the same?")
    return model


def _difference(url: str, served: list[Served], model: Served) -> str | None:
    """Why a server cannot stand in for another, or None."""
    same = next((m for m in served if m.name == model.name), None)
    if same is None:
        return f"{url} serves {', '.join(m.name for m in served) or 'nothing'} and not {model.name}"
    if same.context != model.context:
        return f"{url} serves {model.name} with a context of {same.context} and not {model.context}"
    return None


async def _first_list(client: Client, network: Network, url: str) -> list[Served]:
    deadline = time.monotonic() + network.start_timeout
    while True:
        try:
            return await client.models(url)
        except Refused as error:
            raise ServerError(f"{url}/models: {error}; an endpoint is a base URL that ends in /v1") from error
        except (Unreachable, Passing) as error:
            if time.monotonic() >= deadline:
                raise ServerError(
                    f"{url} does not say what it serves after {network.start_timeout:g} s ({error}); start it, leave "
                    "it out, or give it longer with --start-timeout"
                ) from error
        await asyncio.sleep(min(1.0, network.start_timeout / 4))
