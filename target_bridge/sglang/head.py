"""The engine's embedding and LM head, which the draft borrows."""

from __future__ import annotations

import torch

from target_bridge.sglang.engine import Engine
from target_bridge.target import TargetError


def frozen_head(engine: Engine, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(embedding [V, D], LM head [V, D]), detached, cut to the logical vocabulary; one object if tied.

    On one GPU both are views of the engine's own memory: rows past V are padding and lie at the end. With tensor
    parallelism every rank holds its part of the rows; the draft needs all of them, so they are joined once and each
    rank keeps a copy of its own.

    Args:
        engine: running.
        name: of the target.

    Raises:
        TargetError: the model class does not hand the matrices out, or they are not plain matrices.
    """
    model = engine.model
    if not hasattr(model, "get_embed_and_head"):
        raise TargetError(
            f"target {name}: SGLang's {type(model).__name__} does not hand out its embedding and LM head"
            " (get_embed_and_head), which the draft borrows; give target.bridge: hf"
        )
    embedding, head = model.get_embed_and_head()
    for what, matrix in (("embedding", embedding), ("LM head", head)):
        if not isinstance(matrix, torch.Tensor) or matrix.ndim != 2:
            raise TargetError(
                f"target {name}: its {what} in SGLang is no plain [vocabulary, hidden] matrix but"
                f" {type(matrix).__name__}; the draft borrows that matrix, so this model cannot be a target"
            )
    whole = _whole(engine, embedding)
    tied = head.data_ptr() == embedding.data_ptr() and head.shape == embedding.shape
    return whole, whole if tied else _whole(engine, head)


def _whole(engine: Engine, matrix: torch.Tensor) -> torch.Tensor:
    matrix = matrix.detach()
    # A head may be kept whole on every rank; a part has too few rows.
    if engine.peers is not None and matrix.shape[0] < engine.facts.vocab_size:
        matrix = engine.peers.join_rows(matrix)
    return matrix[: engine.facts.vocab_size]
