"""SGLang's ModelRunner in this process: forwards, the KV pools behind them, and their limits.

Everything SGLang would only refuse obscurely (or not at all) is refused here, before it sees the request.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from target_bridge.fence import torch_done
from target_bridge.sglang.adapter import Adapter, Start, prepare_process, round_up
from target_bridge.sglang.facts import EngineFacts
from target_bridge.sglang.request import Computed, Request, match_rows
from target_bridge.sglang.startup import start_adapter
from target_bridge.sglang.versions import installed_version, make_adapter
from target_bridge.sglang.world import Peers
from target_bridge.target import TargetError, check_ids

#: Engines alive in this process: SGLang keeps its configuration and process groups in globals.
_ALIVE: list[Engine] = []


class Engine:
    """One engine; at most one at a time in a process.

    Args:
        start: everything resolved.
        vocab_size: V, logical.
        hidden_size: D.
        max_length: most tokens of one request.

    Attributes:
        facts: see `EngineFacts`.
        epoch: number of resets so far: requests begun before the last one are void.
        forwards: forwards so far.
        peers: the ranks that share the model, or None. All of them must ask the engine for the same things.

    Raises:
        TargetError: another engine is alive, an unsupported version, a model without a capture hook, or SGLang
            could not start.
    """

    def __init__(self, start: Start, *, vocab_size: int, hidden_size: int, max_length: int) -> None:
        if _ALIVE:
            raise TargetError("an SGLang engine is already running in this process; close it first: engine.close()")
        version = installed_version()
        self._start = start
        self._adapter: Adapter | None = make_adapter()
        prepare_process(start.device)
        _ALIVE.append(self)
        try:
            hook = start_adapter(self._adapter, start, version)
            self._tree = self._adapter.new_tree()
        except BaseException:
            with contextlib.suppress(Exception):  # half of what is to be taken down may never have stood
                self.close()
            raise
        runner = self._adapter.runner
        self.peers = Peers() if start.tp_size > 1 else None
        self.epoch = 0
        self.forwards = 0
        self._numbers = itertools.count()
        self._holders: list[Callable[[], None]] = []
        self.facts = EngineFacts(
            version=version,
            hook=hook,
            page_size=start.page_size,
            pool_tokens=int(runner.token_to_kv_pool_allocator.available_size()),
            max_requests=int(runner.req_to_token_pool.available_size()),
            context_length=max_length,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            num_taps=len(start.layer_ids),
        )

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._start.device

    @property
    def model(self) -> Any:
        """SGLang's model object."""
        return self._open().runner.model

    @property
    def free_tokens(self) -> int:
        """KV slots nobody holds."""
        return int(self._open().runner.token_to_kv_pool_allocator.available_size())

    @property
    def evictable_tokens(self) -> int:
        """KV slots the tree holds and would give up."""
        self._open()
        return int(self._tree.evictable_size())

    @property
    def protected_tokens(self) -> int:
        """KV slots of the tree that requests under way have locked."""
        self._open()
        return int(self._tree.protected_size())

    @property
    def free_requests(self) -> int:
        """Requests that can still be run before one is finished."""
        return int(self._open().runner.req_to_token_pool.available_size())

    @property
    def takes_tokens_back(self) -> bool:
        """Whether its KV is plain slots, one per token; a sliding window's or a recurrent state's pools are not."""
        runner = self._open().runner
        pools = (type(runner.req_to_token_pool).__name__, type(runner.token_to_kv_pool_allocator).__name__)
        return pools[0] == "ReqToTokenPool" and pools[1] in ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator")

    def begin(self, ids: Sequence[int] | np.ndarray, *, reuse: bool | str, name: str | None = None) -> Request:
        """Make a request.

        Args:
            ids: the whole text.
            reuse: match what earlier requests left in the tree (`finish(keep)`): whole pages, at most all tokens
                but one. The matched prefix is locked until `finish` or `abandon`. A string: only what requests with
                the same one left there. False: never matches.
            name: for messages.

        Raises:
            TargetError: an id outside the vocabulary, no ids, or more than `context_length`.
        """
        adapter = self._open()
        number = next(self._numbers)
        name = name or f"request {number}"
        array = check_ids(ids, self.facts.vocab_size, name)
        self._check_length(name, array.size)
        # A key of its own is a tree of its own: nothing to match, whatever other requests left behind.
        key = f"text-{reuse}" if isinstance(reuse, str) else None if reuse else f"once-{number}"
        handle = adapter.begin(f"draft-jax-{number}", array.tolist(), self._tree, key)
        return Request(name, array, adapter.prefix_length(handle), handle, self.epoch)

    def forward(self, requests: Sequence[Request]) -> list[Computed]:
        """Run the suffixes of all requests in one forward.

        Returns:
            One entry per request, in order: views into the forward's own tensors, which no later forward and no
            reset touches.

        Raises:
            TargetError: no requests, more than the engine has rows for, more tokens than the pool can hold even
                after eviction (nothing has run then), or states that do not match the requests. An error inside
                the engine, or of the last kind, resets it: all requests are void.
        """
        adapter = self._open()
        self._admit(requests)
        try:
            packed = adapter.forward([request.handle for request in requests], self._tree)
            computed = match_rows(
                requests,
                packed,
                num_taps=self.facts.num_taps,
                hidden_size=self.facts.hidden_size,
                vocab_size=self.facts.vocab_size,
            )
        except BaseException:
            self.reset()
            raise
        self.forwards += 1
        return computed

    def rewind(self, request: Request, keep: int) -> Request:
        """Free the KV of all but the first `keep` tokens after a forward; the request goes on holding those.

        Args:
            request: has been run, or holds its prefix.
            keep: at least 1, and not less than the prefix.

        Returns:
            The request, of the kept tokens alone: to `grow` or to `finish`.
        """
        adapter = self._open()
        self._require_current(request)
        if not max(1, request.prefix) <= keep <= len(request.ids):
            raise TargetError(
                f"{request.name}: cannot go back to {keep} tokens; its prefix has {request.prefix} and it has"
                f" {len(request.ids)}"
            )
        adapter.rewind(request.handle, self._tree, keep)
        return Request(request.name, request.ids[:keep], keep, request.handle, self.epoch, held=True)

    def grow(self, request: Request, ids: Sequence[int] | np.ndarray) -> Request:
        """More text for a request that was rewound: only `ids` will be computed.

        Raises:
            TargetError: an id outside the vocabulary, no ids, or more than `context_length` altogether.
        """
        adapter = self._open()
        self._require_current(request)
        more = check_ids(ids, self.facts.vocab_size, request.name)
        if not request.held or request.suffix:
            raise TargetError(f"{request.name} cannot grow: only a request that was rewound can")
        text = np.concatenate([request.ids, more])
        self._check_length(request.name, len(text))
        adapter.grow(request.handle, text)
        return Request(request.name, text, request.prefix, request.handle, self.epoch, held=True)

    def add_holder(self, give_back: Callable[[], None]) -> None:
        """Name someone who holds KV between forwards and can do without it: asked to when room is short."""
        self._holders.append(give_back)

    def remove_holder(self, give_back: Callable[[], None]) -> None:
        """Undo `add_holder`."""
        self._holders.remove(give_back)

    def relieve(self) -> None:
        """Ask all holders to give back what they can do without."""
        for give_back in self._holders:
            give_back()

    def new_slots(self, request: Request) -> int:
        """KV slots its forward will take: the pages its suffix does not share with its prefix."""
        page = self.facts.page_size
        return round_up(len(request.ids), page) - round_up(request.prefix, page)

    def finish(self, request: Request, keep: int = 0) -> None:
        """Give a request's KV back after its forward.

        Args:
            request: has been run or rewound, and not finished.
            keep: its first so many tokens stay in the tree, for later requests with `reuse`; all other KV is freed.

        Raises:
            TargetError: `keep` is outside prefix..T (or 0), or the request is void.
        """
        adapter = self._open()
        self._require_current(request)
        if keep and not request.prefix <= keep <= len(request.ids):
            raise TargetError(
                f"{request.name}: cannot keep {keep} tokens; {request.prefix} came from the tree and it has"
                f" {len(request.ids)}"
            )
        adapter.release(request.handle, self._tree, keep)

    def abandon(self, request: Request) -> None:
        """Give back a request that was begun and never run."""
        adapter = self._open()
        self._require_current(request)
        adapter.unlock(request.handle, self._tree)

    def reset(self) -> None:
        """Empty the tree and both pools, after everything torch has under way is finished. Requests are void."""
        adapter = self._open()
        torch_done(self.device)
        self._tree.reset()
        adapter.runner.req_to_token_pool.clear()
        adapter.runner.token_to_kv_pool_allocator.clear()
        self.epoch += 1

    def close(self) -> None:
        """Take the engine down; another may be built afterwards. Tensors already handed out stay valid."""
        adapter, self._adapter = self._adapter, None
        if self in _ALIVE:
            _ALIVE.remove(self)
        if adapter is None:
            return
        torch_done(self.device)
        self._tree = None
        adapter.stop()

    def _open(self) -> Adapter:
        if self._adapter is None:
            raise TargetError("this SGLang engine is closed")
        return self._adapter

    def _check_length(self, name: str, length: int) -> None:
        if length > self.facts.context_length:
            raise TargetError(f"{name} has {length} tokens, but the target takes at most {self.facts.context_length}")

    def _require_current(self, request: Request) -> None:
        if request.epoch != self.epoch:
            raise TargetError(f"{request.name} is void: the engine was reset after it was begun; begin it again")

    def _admit(self, requests: Sequence[Request]) -> None:
        if not requests:
            raise TargetError("the engine was asked to run no requests: the list is empty")
        for request in requests:
            self._require_current(request)
        rows = sum(not request.held for request in requests)
        needed = sum(self.new_slots(request) for request in requests)
        if rows > self.free_requests or needed > self.free_tokens + self.evictable_tokens:
            self.relieve()
        if rows > self.free_requests:
            raise TargetError(
                f"{len(requests)} requests in one forward, but the engine has room for {self.free_requests} of its"
                f" {self.facts.max_requests}; finish some first or raise target.sglang.max_running_requests"
            )
        if needed > self.free_tokens + self.evictable_tokens:
            raise TargetError(
                f"{len(requests)} requests need {needed} KV slots (pages of {self.facts.page_size}), but"
                f" {self.free_tokens} of {self.facts.pool_tokens} are free and {self.evictable_tokens} can be evicted;"
                " finish requests first or raise target.sglang.max_total_tokens"
            )


@atexit.register
def close_all() -> None:
    """Close every engine of this process: also at its end, since SGLang's process groups complain otherwise."""
    for engine in list(_ALIVE):
        engine.close()
