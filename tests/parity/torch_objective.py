"""The DSpark objective and its metrics in eager torch, slot by slot, from dspark_spec 2.1 to 2.4.

Only supervised slots are ever computed: a slot that does not count is left out of every sum instead of being
multiplied by zero, so whatever stands there (padding, another document, NaN) cannot matter.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import softplus

from .torch_dspark import ReferenceDSpark, linear_logits
from .torch_spec import ReferenceRow


@dataclass(frozen=True)
class ReferenceObjective:
    """Options of the loss; ``gamma`` None or <= 0 means no decay over the slots."""

    gamma: float | None = 4.0
    ce_alpha: float = 0.1
    l1_alpha: float = 0.9
    confidence_alpha: float = 1.0
    confidence_detach: bool = False
    normalization: str = "window"
    supervised_anchors_only: bool = False


@dataclass(frozen=True)
class ReferenceBlock:
    """Labels of one block (dspark_spec 2.2): K entries each."""

    labels: list[int]
    previous: list[int]
    valid: list[bool]
    weight: list[float]
    target_rows: list[int]


def candidates(row: ReferenceRow, supervised_anchors_only: bool) -> list[int]:
    """Positions that may start a block: their successor is supervised and of the same document.

    dspark_spec 2.1 (DeepSpec) wants the anchor token supervised too; case T16 wants it not to matter, so that
    the first token of an answer is learned. The flag says which.
    """
    found = []
    for p in range(row.length - 1):
        same_document = int(row.document_start[p]) == int(row.document_start[p + 1])
        anchor_ok = row.loss_mask[p] > 0.5 or not supervised_anchors_only
        if anchor_ok and row.loss_mask[p + 1] > 0.5 and same_document:
            found.append(p)
    return found


def decay(slot: int, gamma: float | None) -> float:
    """Weight of a slot before masking, ``exp(-j / gamma)``."""
    return 1.0 if gamma is None or gamma <= 0 else math.exp(-slot / gamma)


def label_block(
    row: ReferenceRow,
    anchor: int,
    kept: bool,
    block_size: int,
    gamma: float | None,
    last_valid: Sequence[bool] | None = None,
) -> ReferenceBlock:
    """Labels, previous tokens, contiguous validity and weights of the block that starts at ``anchor``.

    A slot is valid while every slot up to it has a supervised label inside the row and the anchor's document,
    and a usable target state at ``anchor + j``.
    """
    labels, previous, valid, weight, target_rows = [], [int(row.input_ids[anchor])], [], [], []
    unbroken = bool(kept)
    for slot in range(block_size):
        position = anchor + 1 + slot
        if unbroken:
            unbroken = (
                position < row.length
                and bool(row.loss_mask[position] > 0.5)
                and int(row.document_start[position]) == int(row.document_start[anchor])
                and (last_valid is None or bool(last_valid[position - 1]))
            )
        clamped = min(position, row.length - 1)
        labels.append(int(row.input_ids[clamped]))
        previous.append(labels[-1])
        valid.append(unbroken)
        weight.append(decay(slot, gamma) if unbroken else 0.0)
        target_rows.append(min(anchor + slot, row.length - 1))
    return ReferenceBlock(labels, previous[:block_size], valid, weight, target_rows)


@dataclass
class ReferenceSums:
    """Unreduced numerators and denominators of a set of rows. Tensors carry the graph."""

    ce: Tensor | float = 0.0
    l1: Tensor | float = 0.0
    confidence: Tensor | float = 0.0
    weight: float = 0.0
    accept_num: list[float] = field(default_factory=list)
    accept_den: list[float] = field(default_factory=list)
    tau_num: float = 0.0
    tau_den: float = 0.0
    confidence_abs_error: float = 0.0
    confidence_bias: float = 0.0
    confidence_cumprod_bias: float = 0.0
    valid_anchors: int = 0
    sampled_anchors: int = 0
    supervised_tokens: int = 0

    def add(self, other: "ReferenceSums") -> "ReferenceSums":
        """Sums of both; a new object."""
        total = ReferenceSums()
        for name, value in vars(self).items():
            theirs = getattr(other, name)
            if isinstance(value, list):
                setattr(total, name, [a + b for a, b in zip(value, theirs, strict=True)])
            else:
                setattr(total, name, value + theirs)
        return total

    def numerator(self, objective: ReferenceObjective) -> Tensor:
        """``sum of alpha * N`` over the three terms."""
        total = objective.ce_alpha * self.ce + objective.l1_alpha * self.l1
        return torch.as_tensor(total + objective.confidence_alpha * self.confidence)


def row_sums(
    model: ReferenceDSpark,
    row: ReferenceRow,
    anchors: Sequence[int],
    keep: Sequence[bool],
    embedding: Tensor,
    lm_head: Tensor,
    objective: ReferenceObjective,
    context_valid: Sequence[bool] | None = None,
    last_valid: Sequence[bool] | None = None,
) -> ReferenceSums:
    """All sums of one row, its anchors given (2.3, 2.4)."""
    size, vocab = model.spec.block_size, model.spec.vocab_size
    sums = ReferenceSums(accept_num=[0.0] * size, accept_den=[0.0] * size)
    sums.valid_anchors = len(candidates(row, objective.supervised_anchors_only))
    sums.sampled_anchors = sum(bool(k) for k in keep)
    hidden = model.block_hidden(row, anchors, keep, embedding, context_valid)
    for index, (anchor, kept) in enumerate(zip(anchors, keep, strict=True)):
        block = label_block(row, anchor, kept, size, objective.gamma, last_valid)
        if not any(block.valid):
            continue
        previous = torch.tensor(block.previous)
        logits = model.block_logits(hidden[index], previous, lm_head)
        confidence = None
        if model.confidence_head is not None:
            confidence = model.block_confidence(hidden[index], previous, objective.confidence_detach)
        survival, chance, expected = 1.0, 1.0, 1.0
        for slot in range(size):
            if not block.valid[slot]:
                break
            weight = block.weight[slot]
            log_draft = logits[slot] - torch.logsumexp(logits[slot], dim=-1)
            with torch.no_grad():
                state = row.last_hidden[block.target_rows[slot]]
                target = linear_logits(state, lm_head, vocab).softmax(dim=-1)
            distance = (log_draft.exp() - target).abs().sum()
            accept = min(max(1.0 - 0.5 * float(distance.detach()), 0.0), 1.0)
            sums.ce = sums.ce - weight * log_draft[block.labels[slot]]
            sums.l1 = sums.l1 + weight * distance
            sums.weight += weight
            sums.accept_num[slot] += accept
            sums.accept_den[slot] += 1
            sums.supervised_tokens += 1
            survival *= accept
            expected += survival
            if confidence is not None:
                logit = confidence[slot]
                # -a log sigmoid(c) - (1-a) log sigmoid(-c)
                cross = accept * softplus(-logit) + (1 - accept) * softplus(logit)
                sums.confidence = sums.confidence + weight * cross
                predicted = float(torch.sigmoid(logit.detach()))
                chance *= predicted
                sums.confidence_abs_error += weight * abs(predicted - accept)
                sums.confidence_bias += weight * (predicted - accept)
                sums.confidence_cumprod_bias += weight * (chance - survival)
        sums.tau_num += expected
        sums.tau_den += 1
    return sums


def loss_of_window(micro_steps: Sequence[ReferenceSums], objective: ReferenceObjective) -> Tensor:
    """Loss of one optimizer step (design 4, dspark_spec 2.3).

    ``window``: sum of numerators / sum of weights. ``micro_step``: the mean of the micro-steps' own ratios.
    """
    if objective.normalization == "window":
        weight = sum(sums.weight for sums in micro_steps)
        return sum(sums.numerator(objective) for sums in micro_steps) / (weight + 1e-6)
    ratios = [sums.numerator(objective) / (sums.weight + 1e-6) for sums in micro_steps]
    return sum(ratios) / len(ratios)


def metrics(sums: ReferenceSums, objective: ReferenceObjective) -> dict[str, float]:
    """Scalars of dspark_spec 2.4 for a set of rows."""
    out = {
        "loss": float(sums.numerator(objective).detach()) / (sums.weight + 1e-6),
        "ce_loss": float(torch.as_tensor(sums.ce).detach()) / sums.weight,
        "l1_loss": float(torch.as_tensor(sums.l1).detach()) / sums.weight,
        "confidence_loss": float(torch.as_tensor(sums.confidence).detach()) / sums.weight,
        "tau_probabilistic": sums.tau_num / sums.tau_den,
        "confidence_abs_error": sums.confidence_abs_error / sums.weight,
        "confidence_bias": sums.confidence_bias / sums.weight,
        "confidence_cumprod_bias": sums.confidence_cumprod_bias / sums.weight,
    }
    for slot, (num, den) in enumerate(zip(sums.accept_num, sums.accept_den, strict=True)):
        if den:
            out[f"accept_rate@{slot}"] = num / den
    return out
