"""The draft's side of the decoding loop: the target's states go in, proposals come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from draft_jax.batch import FrozenHead
from draft_jax.config import DraftConfig
from draft_jax.decode import Drafter, cut, make_drafter
from target_bridge import fence, handoff

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ProposalError(RuntimeError):
    """The draft proposed something that is no distribution; the message says where."""


@dataclass(frozen=True)
class ProposedBlocks:
    """Proposals on the torch side, one row for each slot asked for.

    Attributes:
        tokens: int64 [n, K]: the drafted ids.
        probs: fp32 [n, K, V]: the distributions they were drawn from, on the target's device; None when greedy,
            where verification needs none.
        confidence_logits: fp32 [n, K], or None without a confidence head.
    """

    tokens: np.ndarray
    probs: torch.Tensor | None
    confidence_logits: np.ndarray | None


class DraftRunner:
    """One `Drafter` for a whole evaluation: compiled once, its slots reset for every prompt.

    Args:
        config: the draft.
        params: its parameters.
        frozen: the target's embedding and head.
        max_context: most committed tokens of a prompt and its output.
        batch: slots.
        dtype: compute dtype, "float32" or "bfloat16".
        device: torch device of the target; proposals come back to it.
        sample_dtype: dtype of the distribution tokens are drawn from; "bfloat16" only to reproduce DeepSpec's.
    """

    def __init__(
        self,
        config: DraftConfig,
        params: Any,
        frozen: FrozenHead,
        *,
        max_context: int,
        batch: int,
        dtype: str,
        device: torch.device,
        sample_dtype: str = "float32",
    ) -> None:
        self.config = config
        self.batch = batch
        self.max_context = max_context
        self._device = device
        self._dtype = TORCH_DTYPES[dtype]
        self._drafter: Drafter = make_drafter(
            config,
            jnp.dtype(dtype),
            params=params,
            frozen=frozen,
            max_context=max_context,
            batch=batch,
            sample_dtype=jnp.dtype(sample_dtype),
        )
        self._jax_device = next(iter(self._drafter.cache.k.devices()))

    @property
    def compile_count(self) -> int:
        """Programs compiled for this evaluation; it does not grow while it runs."""
        return self._drafter.compile_count

    def reset(self, slot: int) -> None:
        """Forgets the slot's context: a new prompt begins."""
        self._drafter.reset(slot)

    def extend(self, states: dict[int, torch.Tensor]) -> None:
        """Takes in the target's states of newly committed tokens.

        Args:
            states: slot -> [T, M*D], any T, on any device.
        """
        slots = sorted(states)
        packed = torch.cat([states[slot] for slot in slots])
        counts = np.zeros(self.batch, np.int64)
        counts[slots] = [len(states[slot]) for slot in slots]
        start = 0
        for size, width in cut(len(packed), self._drafter.widths):
            # A fresh tensor of a compiled width: JAX reads it in place, and DLPack keeps it alive meanwhile.
            padded = torch.zeros((width, packed.shape[1]), dtype=self._dtype, device=packed.device)
            padded[:size] = packed[start : start + size]
            fence.torch_done(padded.device)
            array = jax.device_put(handoff.to_jax(padded), self._jax_device)
            upto = np.cumsum(counts)
            piece = np.clip(upto, start, start + size) - np.clip(upto - counts, start, start + size)
            self._drafter.extend(array, piece)
            start += size

    def propose(self, anchors: dict[int, int], uniforms: np.ndarray, temperature: float) -> ProposedBlocks:
        """Drafts a block after the anchor of each slot.

        Args:
            anchors: slot -> the last committed token.
            uniforms: fp32 [n, K] in [0, 1), in the order of `anchors`.
            temperature: 0 = greedy.

        Raises:
            ProposalError: the draft's probabilities are not finite.
        """
        slots = list(anchors)
        places = self._drafter.places(slots)
        proposal = self._drafter.propose(np.array(list(anchors.values())), uniforms, temperature, slots)
        fence.jax_done((proposal.tokens, proposal.probs, proposal.confidence_logits))
        finite = np.asarray(proposal.finite)[places]
        if not finite.all():
            row, place = np.argwhere(~finite)[0]
            raise ProposalError(
                f"the draft's probabilities at slot {place} are not finite after "
                f"{int(self._drafter.lengths[slots[row]])} context tokens: its weights or the target's states are bad"
            )
        probs = None
        if temperature != 0:
            probs = handoff.to_torch(proposal.probs).to(self._device)
            probs = probs if len(places) == len(probs) else probs[places]
        confidence = proposal.confidence_logits
        return ProposedBlocks(
            np.asarray(proposal.tokens, np.int64)[places],
            probs,
            None if confidence is None else np.asarray(confidence, np.float32)[places],
        )
