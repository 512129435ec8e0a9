"""Optimizer steps in torch: AdamW, global-norm clip and DeepSpec's schedule (dspark_spec 3)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .torch_dspark import ReferenceDSpark
from .torch_objective import ReferenceObjective, ReferenceSums, loss_of_window


@dataclass(frozen=True)
class ReferenceOptimizer:
    """AdamW options; ``total_steps`` shapes the schedule."""

    total_steps: int
    learning_rate: float = 6e-4
    warmup_ratio: float = 0.04
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


def learning_rate(step: int, options: ReferenceOptimizer) -> float:
    """Rate of 0-based ``step``: linear over ``int(ratio * total)`` steps to the peak, then half a cosine."""
    warmup = int(options.warmup_ratio * options.total_steps)
    if step < warmup:
        return options.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / (options.total_steps - warmup)
    return options.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class ReferenceStep:
    """What one optimizer step did."""

    loss: float
    grad_norm: float
    learning_rate: float


def train(
    model: ReferenceDSpark,
    windows: Sequence[Sequence[Callable[[], ReferenceSums]]],
    objective: ReferenceObjective,
    options: ReferenceOptimizer,
) -> list[ReferenceStep]:
    """Take one optimizer step per window: a list of micro-steps that give their sums when called."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters,
        lr=options.learning_rate,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
    )
    history = []
    for step, window in enumerate(windows):
        rate = learning_rate(step, options)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = loss_of_window([micro_step() for micro_step in window], objective)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, options.max_grad_norm)
        optimizer.step()
        history.append(ReferenceStep(float(loss.detach()), float(norm), rate))
    return history
