"""`ObjectiveConfig`, and how many rows of logits may exist at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax

#: Bytes of ONE fp32 [chunk, vocab] buffer, by platform. A chunk holds at most three of them (draft logits, target
#: logits, gradient). On a CPU longer chunks only fall out of the caches; on a GPU every product of a chunk reads
#: the whole LM head, which costs as much as the arithmetic of about 180 rows (H200), so a chunk needs many more.
CHUNK_BYTES = {"cpu": 64 * 2**20, "gpu": 640 * 2**20}

#: Below so many rows a product with the LM head is not cheaper: reading the head is what it costs (H200).
LEAST_TARGET_ROWS = 160


@dataclass(frozen=True)
class ObjectiveConfig:
    """Weights and options of the training objective (dspark_spec 2.1 to 2.3).

    Attributes:
        num_anchors: `N`, anchors drawn per row.
        anchors_per_document: most anchors drawn in one document of a row; None = no bound but the row's `N`.
        gamma: slot `j` weighs `exp(-j / gamma)`; None or <= 0 means no decay.
        ce_alpha: weight of the cross entropy with the true next token.
        l1_alpha: weight of the L1 distance to the target's distribution.
        confidence_alpha: weight of the confidence head's BCE; without that head there is no such term.
        confidence_detach: stop the confidence loss from training anything but the confidence head.
        normalization: "window": sum of numerators / sum of weights over the whole optimizer step.
            "micro_step": each micro-step a ratio, then their mean (DeepSpec's recipe).
        chunk_rows: rows of vocabulary logits alive at once; None lets `chunk_rows_for` choose.
        sanitize: mask out non-finite target states; False leaves them, to be reported as an error.
        supervised_anchors_only: an anchor's own token must be supervised too (DeepSpec's rule); by default
            only its next token must, so that the first token of an answer is learned.
    """

    num_anchors: int = 512
    anchors_per_document: int | None = None
    gamma: float | None = 4.0
    ce_alpha: float = 0.1
    l1_alpha: float = 0.9
    confidence_alpha: float = 1.0
    confidence_detach: bool = False
    normalization: Literal["window", "micro_step"] = "window"
    chunk_rows: int | None = None
    sanitize: bool = True
    supervised_anchors_only: bool = False

    def __post_init__(self) -> None:
        if self.num_anchors < 1:
            raise ValueError(f"objective.num_anchors is {self.num_anchors}; it must be at least 1")
        if self.anchors_per_document is not None and self.anchors_per_document < 1:
            raise ValueError(
                f"objective.anchors_per_document is {self.anchors_per_document}; it must be at least 1, or null"
            )
        if self.gamma is not None and not math.isfinite(self.gamma):
            raise ValueError(f"objective.gamma is {self.gamma}; use a finite number, or null for no decay")
        for name in ("ce_alpha", "l1_alpha", "confidence_alpha"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"objective.{name} is {value}; it must be finite and not negative")
        if self.ce_alpha == self.l1_alpha == self.confidence_alpha == 0:
            raise ValueError("objective: ce_alpha, l1_alpha and confidence_alpha are all 0; nothing would be learned")
        if self.normalization not in ("window", "micro_step"):
            raise ValueError(f"objective.normalization is {self.normalization!r}; choose 'window' or 'micro_step'")
        if self.chunk_rows is not None and self.chunk_rows < 1:
            raise ValueError(f"objective.chunk_rows is {self.chunk_rows}; it must be at least 1, or null")


def chunk_rows_for(rows: int, vocab: int, *, platform: str | None = None, limit_bytes: int | None = None) -> int:
    """Rows per chunk, so that one fp32 [chunk, vocab] buffer stays within a bound.

    The chunks are made nearly equal, and a multiple of 8 rows unless the bound allows fewer. Peak memory of the
    vocabulary stage is about three such buffers (draft logits, target logits, gradient).

    Args:
        rows: draft rows of one device, `B_local * N * K`.
        vocab: `V`.
        platform: "cpu", "gpu", ...; None asks JAX. Anything that is not "cpu" counts as an accelerator.
        limit_bytes: bytes of one buffer; None takes `CHUNK_BYTES` of the platform.

    Returns:
        Rows per chunk, at least 1 and at most `rows` rounded up to a multiple of 8.
    """
    if limit_bytes is None:
        platform = jax.default_backend() if platform is None else platform
        limit_bytes = CHUNK_BYTES["cpu" if platform == "cpu" else "gpu"]
    most = max(1, limit_bytes // (4 * vocab))
    if most >= 8:
        most -= most % 8
    even = -(-rows // -(-rows // most))  # rows over the number of chunks needed
    return min(most, -(-even // 8) * 8)


def target_sizes_for(chunk_rows: int) -> tuple[int, ...]:
    """Sizes a chunk's product for target logits may have, ascending up to `chunk_rows`.

    A chunk uses the smallest that holds its different positions. Each size is compiled, so there are few; and none
    where a product with the head would cost no less.
    """
    eighths = (-(-chunk_rows * part // 64) * 8 for part in (2, 3, 4, 6))
    return (*sorted({size for size in eighths if LEAST_TARGET_ROWS <= size < chunk_rows}), chunk_rows)
