"""Documents of all ranks that share a tensor-parallel target.

Tensor parallelism splits each layer, so every rank must run every document. The draft is trained data-parallel: every
rank has rows of its own. So the ranks run the union of their documents, and each keeps the states of its own; no rank
drafts for another's rows, and the global batch is what it would be with as many separate targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from target_bridge.sglang.world import Peers
from target_bridge.target import TargetError, check_documents


@dataclass(frozen=True)
class Share:
    """The documents to run, and which of them are this rank's.

    Attributes:
        documents: int64 arrays; of all ranks, in the order of the ranks.
        begin: index of the first own one.
        end: index behind the last own one.
        counts: documents of each rank.
    """

    documents: list[np.ndarray]
    begin: int
    end: int
    counts: tuple[int, ...]

    def is_own(self, index: int) -> bool:
        """Whether a document is this rank's."""
        return self.begin <= index < self.end

    def name(self, index: int) -> str:
        """How messages call a document."""
        if len(self.counts) == 1:
            return f"document {index}"
        rank = 0
        while index >= self.counts[rank]:
            index -= self.counts[rank]
            rank += 1
        return f"document {index} of rank {rank}"

    def keep(self, states: torch.Tensor) -> torch.Tensor:
        """Own states, without the memory of the others' that a view would hold on to."""
        return states if len(self.counts) == 1 else states.clone()


def share_documents(documents: Sequence[np.ndarray], vocab_size: int, max_length: int, peers: Peers | None) -> Share:
    """Check this rank's documents and join them with those of its peers.

    Args:
        documents: of this rank; with peers there may be none.
        vocab_size: see `check_documents`.
        max_length: see `check_documents`.
        peers: the ranks that share the target, or None.

    Raises:
        TargetError: see `check_documents`. If one rank's documents are refused, all ranks raise; nobody waits.
    """
    if peers is None:
        checked = check_documents(documents, vocab_size, max_length)
        return Share(checked, 0, len(checked), (len(checked),))
    own: list[np.ndarray] = []
    refused: TargetError | None = None
    try:
        own = check_documents(documents, vocab_size, max_length) if len(documents) else []
    except TargetError as error:
        refused = error
    gathered = peers.gather((own, None if refused is None else str(refused)))
    if refused is not None:
        raise refused
    for rank, (_, reason) in enumerate(gathered):
        if reason is not None:
            raise TargetError(f"rank {rank} of the {peers.size} that share the target was refused: {reason}")
    counts = tuple(len(theirs) for theirs, _ in gathered)
    begin = sum(counts[: peers.rank])
    return Share([ids for theirs, _ in gathered for ids in theirs], begin, begin + len(own), counts)
