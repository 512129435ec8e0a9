"""Faults of SGLang itself that change what a draft accepts, and that its own output does not tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: The first version seen without the fault of the Triton draft backend.
TRITON_DRAFT_RIGHT = (0, 5, 23)


def known_fault(version: str, facts: Mapping[str, Any]) -> str | None:
    """What is known to be wrong with a server that serves a DSpark draft; None when nothing is.

    Args:
        version: SGLang's.
        facts: resolved server arguments (`EngineServer.facts`).
    """
    backend = facts.get("speculative_draft_attention_backend")
    if backend == "triton" and _numbers(version) < TRITON_DRAFT_RIGHT:
        return (
            f"SGLang {version} with the Triton backend for the draft: it lays the draft's K rows a request out as if "
            "they were K + 1 (the target's verify window), so drafts read other rows and memory beyond them "
            "(sgl-project/sglang issue 30555; 0.5.16 has it, 0.5.23 no longer). Outputs stay right, accept lengths do "
            "not. Give --draft-attention-backend flashinfer or fa3"
        )
    return None


def _numbers(version: str) -> tuple[int, ...]:
    digits = version.split("+")[0].split(".")[:3]
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in digits)
