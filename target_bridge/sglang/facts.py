"""What a started engine is: its version, its limits and the sizes of what it hands out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineFacts:
    """What an engine is, once it stands.

    Attributes:
        version: of SGLang.
        hook: setter of the model class that capture goes through.
        page_size: KV slots allocated together.
        pool_tokens: KV slots altogether.
        max_requests: requests that can hold KV at the same time.
        context_length: most tokens of one request.
        vocab_size: V, logical; ids are below it.
        hidden_size: D.
        num_taps: M.
    """

    version: str
    hook: str
    page_size: int
    pool_tokens: int
    max_requests: int
    context_length: int
    vocab_size: int
    hidden_size: int
    num_taps: int
