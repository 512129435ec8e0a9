"""A model in SGLang's engine as a target."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from target_bridge.hf_source import load_tokenizer
from target_bridge.probe_reference import LayerStates
from target_bridge.sglang.batches import plan_batches
from target_bridge.sglang.check import check_engine
from target_bridge.sglang.engine import Engine
from target_bridge.sglang.head import frozen_head
from target_bridge.sglang.layers import engine_layer_states
from target_bridge.sglang.session import SGLangSession
from target_bridge.sglang.share import share_documents
from target_bridge.sglang_hooks import Serving, class_serving
from target_bridge.target import Capture, TargetError, TargetInfo, check_documents


class SGLangTarget:
    """A `Target` over a running engine. Use `load_sglang_target`.

    Args:
        engine: with nothing under way; it belongs to the target now.
        config: the text part of the model's config.json.
        layer_ids: taps the engine captures.
        name: folder or hub name.
        dtype: of weights and states.
        budget: most tokens of one forward.
        asked_pool: KV slots the pool should have.
        revision: on the hub.
        trust_remote_code: run Python code that comes with the model.

    Raises:
        TargetError: see `load_sglang_target`.
    """

    def __init__(
        self,
        engine: Engine,
        config: dict[str, Any],
        layer_ids: tuple[int, ...],
        *,
        name: str,
        dtype: str,
        budget: int,
        asked_pool: int,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if engine.facts.pool_tokens < asked_pool:
            raise TargetError(
                f"target {name}: the engine's KV pool holds {engine.facts.pool_tokens} tokens, {asked_pool} were"
                " needed; lower target.sglang.max_total_tokens or give the engine more memory (docs/sglang.md, memory)"
            )
        self._engine = engine
        self._budget = budget
        self._revision = revision
        self._trust_remote_code = trust_remote_code
        self._tokenizer: Any = None
        self._name = name
        self._embedding, self._head = frozen_head(engine, name)
        check_engine(engine, self._embedding, self._head, config, name=name)
        self._info = TargetInfo(
            name=name,
            hidden_size=engine.facts.hidden_size,
            num_layers=int(config["num_hidden_layers"]),
            vocab_size=engine.facts.vocab_size,
            max_length=min(engine.facts.context_length, engine.facts.pool_tokens),
            layer_ids=layer_ids,
            dtype=dtype,
            config=config,
            eos_token_ids=self._find_eos(config),
        )

    @property
    def info(self) -> TargetInfo:
        """Facts about the model; `max_length` is also limited by the KV pool."""
        return self._info

    @property
    def engine(self) -> Engine:
        """The engine behind it."""
        return self._engine

    @property
    def device(self) -> torch.device:
        """Where it runs, and where captured states are."""
        return self._engine.device

    @property
    def tokenizer(self) -> Any:
        """The model's own tokenizer, loaded on first use.

        Raises:
            TargetError: the folder has none.
        """
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(
                self._name, revision=self._revision, trust_remote_code=self._trust_remote_code
            )
        return self._tokenizer

    def capture(self, documents: Sequence[np.ndarray]) -> Capture:
        """Hidden states of every document; see `target_bridge.target.Target`.

        Every document is a request of its own, as long as it is: nothing is padded, no prefix is shared, and its KV
        is given back before the next forward.

        With tensor parallelism every rank calls this the same number of times, each with the documents of its own
        rows, or none: all ranks run all of them together and each keeps the states of its own.

        Returns:
            States in the model's dtype on its device: views into each forward's own tensors (copies of the own rows
            with tensor parallelism).

        Raises:
            TargetError: see `check_documents`; the engine has seen nothing then. Also when another rank's were
                refused.
        """
        share = share_documents(documents, self._info.vocab_size, self._info.max_length, self._engine.peers)
        engine = self._engine
        context: list[torch.Tensor] = []
        last: list[torch.Tensor] = []
        for batch in plan_batches(
            [len(ids) for ids in share.documents],
            max_tokens=self._budget,
            # Sessions that are open may hold some.
            pool_tokens=engine.free_tokens + engine.evictable_tokens,
            max_requests=engine.free_requests,
            page_size=engine.facts.page_size,
        ):
            requests = [engine.begin(share.documents[i], reuse=False, name=share.name(i)) for i in batch]
            computed = engine.forward(requests)
            for index, states in zip(batch, computed):
                if share.is_own(index):
                    context.append(share.keep(states.context))
                    last.append(share.keep(states.last))
            for request in requests:
                engine.finish(request)
        return Capture(context_hidden=context, last_hidden=last)

    @property
    def lockstep(self) -> bool:
        """Whether `capture` must be called as often as on the ranks that share the target, documents or none."""
        return self._engine.peers is not None

    def own_logits(self, documents: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """[V] per document: the logits after its last token, by the engine's own head and whatever it does to them.

        A forward is what `capture` of the document alone makes of it: with ranks that share the target, which must all
        ask for the same documents, one request for each of them.
        """
        checked = check_documents(documents, self._info.vocab_size, self._info.max_length)
        peers, engine = self._engine.peers, self._engine
        rank, size = (peers.rank, peers.size) if peers is not None else (0, 1)
        logits = []
        for index, ids in enumerate(checked):
            requests = [engine.begin(ids, reuse=False, name=f"document {index}") for _ in range(size)]
            computed = engine.forward(requests)
            for request in requests:
                engine.finish(request)
            logits.append(computed[rank].logits)
        return logits

    def layer_states(self, documents: Sequence[np.ndarray]) -> LayerStates | None:
        """What the engine's own layers put out; see `target_bridge.probe`.

        None when the layers are split over ranks: what one hands to the next may then be a part of a sum.
        """
        checked = check_documents(documents, self._info.vocab_size, self._info.max_length)
        if self._engine.peers is not None:
            return None
        return engine_layer_states(self._engine, checked, self._info.layer_ids, self._info.num_layers)

    @property
    def serving(self) -> Serving:
        """What this SGLang can serve for the loaded model's class."""
        return class_serving(type(self._engine.model), self._engine.facts.version)

    def open_session(self, max_length: int, max_sequences: int = 1) -> SGLangSession:
        """A decoding session; see `target_bridge.target.Target`. Several may be open, and captures run in between.

        Ranks that share the target must all open it and make the same calls of it.
        """
        return SGLangSession(
            self._engine,
            self._head,
            self._info,
            max_length=max_length,
            max_sequences=max_sequences,
            max_tokens=self._budget,
        )

    def frozen_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(embedding [V, D], LM head [V, D]): the engine's own memory without its padding rows; one object if tied."""
        return self._embedding, self._head

    def close(self) -> None:
        """Take the engine down. States and head that were handed out stay valid."""
        self._engine.close()

    def _find_eos(self, config: dict[str, Any]) -> tuple[int, ...]:
        from transformers import GenerationConfig

        found = None
        with contextlib.suppress(OSError):  # many folders have no generation_config.json
            found = GenerationConfig.from_pretrained(self._name, revision=self._revision or "main").eos_token_id
        if found is None:
            with contextlib.suppress(TargetError):  # whoever needs the tokenizer will be told
                found = self.tokenizer.eos_token_id
        if found is None:
            found = config.get("eos_token_id")
        if found is None:
            return ()
        return tuple(dict.fromkeys(int(i) for i in (found if isinstance(found, (list, tuple)) else [found])))
