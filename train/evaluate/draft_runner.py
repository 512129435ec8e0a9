"""The draft's side of the decoding loop: the target's states go in, a proposal comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from draft_jax.batch import FrozenHead
from draft_jax.config import DraftConfig
from draft_jax.decode import Drafter, make_drafter
from target_bridge import fence, handoff

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ProposalError(RuntimeError):
    """The draft proposed something that is no distribution; the message says where."""


@dataclass(frozen=True)
class ProposedBlock:
    """A proposal on the torch side.

    Attributes:
        tokens: the K drafted ids.
        probs: fp32 [K, V]: the distributions they were drawn from, on the target's device.
        confidence: fp32 [K] predicted acceptance probabilities, or None without a confidence head.
    """

    tokens: list[int]
    probs: torch.Tensor
    confidence: np.ndarray | None


class DraftRunner:
    """One `Drafter` for a whole evaluation: compiled once, reset for every prompt.

    Args:
        config: the draft.
        params: its parameters.
        frozen: the target's embedding and head.
        max_context: most committed tokens of a prompt and its output.
        dtype: compute dtype, "float32" or "bfloat16".
        device: torch device of the target; proposals come back to it.
    """

    def __init__(
        self,
        config: DraftConfig,
        params: Any,
        frozen: FrozenHead,
        *,
        max_context: int,
        dtype: str,
        device: torch.device,
    ) -> None:
        self.config = config
        self._device = device
        self._dtype = TORCH_DTYPES[dtype]
        self._drafter: Drafter = make_drafter(
            config, jnp.dtype(dtype), params=params, frozen=frozen, max_context=max_context
        )
        self._jax_device = next(iter(self._drafter.cache.k.devices()))

    @property
    def compile_count(self) -> int:
        """Programs compiled for this evaluation; it does not grow while it runs."""
        return self._drafter.compile_count

    def reset(self) -> None:
        """Forgets the context: a new prompt begins."""
        self._drafter.reset()

    def extend(self, states: torch.Tensor) -> None:
        """Takes in the target's states of newly committed tokens.

        Args:
            states: [T, M*D], any T, on any device.
        """
        narrow, wide = self._drafter.widths[0], self._drafter.widths[-1]
        start = 0
        while start < len(states):
            left = len(states) - start
            width = narrow if left <= narrow else wide
            piece = states[start : start + width]
            # A fresh tensor of a compiled width: JAX reads it in place, and DLPack keeps it alive meanwhile.
            padded = torch.zeros((1, width, states.shape[1]), dtype=self._dtype, device=states.device)
            padded[0, : len(piece)] = piece
            fence.torch_done(padded.device)
            array = jax.device_put(handoff.to_jax(padded), self._jax_device)
            self._drafter.extend(array, np.array([len(piece)]))
            start += width

    def propose(self, anchor: int, uniforms: np.ndarray, temperature: float) -> ProposedBlock:
        """Drafts a block after `anchor`.

        Args:
            anchor: the last committed token.
            uniforms: fp32 [K] in [0, 1).
            temperature: 0 = greedy.

        Raises:
            ProposalError: the draft's probabilities are not finite.
        """
        proposal = self._drafter.propose(anchor, uniforms, temperature)
        fence.jax_done((proposal.tokens, proposal.probs, proposal.confidence_logits))
        probs = handoff.to_torch(proposal.probs[0]).to(self._device)
        if not bool(torch.isfinite(probs).all()):
            slot = int((~torch.isfinite(probs)).any(-1).nonzero()[0])
            raise ProposalError(
                f"the draft's probabilities at slot {slot} are not finite after "
                f"{int(self._drafter.lengths[0])} context tokens: its weights or the target's states are bad"
            )
        confidence = None
        if proposal.confidence_logits is not None:
            confidence = 1.0 / (1.0 + np.exp(-np.asarray(proposal.confidence_logits[0], np.float32)))
        return ProposedBlock([int(t) for t in np.asarray(proposal.tokens[0])], probs, confidence)
