"""Markov and confidence heads of the reference, one slot at a time (dspark_spec 1.4, 1.5)."""

import torch
from torch import Tensor, nn

from .torch_spec import ReferenceSpec


class MarkovHead(nn.Module):
    """Logit bias of a slot from the token before it and, if gated or rnn, its state (dspark_spec 1.4)."""

    def __init__(self, spec: ReferenceSpec):
        super().__init__()
        rank, hidden = spec.markov_rank, spec.hidden_size
        self.kind, self.rank = spec.markov_kind, rank
        self.markov_w1 = nn.Embedding(spec.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, spec.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)
        elif self.kind != "vanilla":
            raise ValueError(f"the reference knows no Markov head {self.kind!r}")

    def initial_state(self) -> Tensor:
        return torch.zeros(self.rank, dtype=self.markov_w2.weight.dtype)

    def step(self, state: Tensor, hidden: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """One slot: state ``[R]``, hidden ``[D]``, previous token -> (next state ``[R]``, bias ``[V]``)."""
        embedded = self.markov_w1(previous)
        if self.kind == "vanilla":
            return state, self.markov_w2(embedded)
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded])))
            return state, self.markov_w2(gate * embedded)
        keep, candidate, out = self.joint_proj(torch.cat([state, embedded, hidden])).split(self.rank)
        keep = torch.sigmoid(keep)
        # `out` was made from the state before this slot; the new state serves the next slot only.
        return keep * state + (1 - keep) * torch.tanh(candidate), self.markov_w2(torch.tanh(out))

    def block(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Biases of one block: hidden ``[K, D]``, previous ``[K]`` -> ``[K, V]``."""
        state, biases = self.initial_state(), []
        for slot in range(hidden.shape[0]):
            state, bias = self.step(state, hidden[slot], previous[slot])
            biases.append(bias)
        return torch.stack(biases)


class ConfidenceHead(nn.Module):
    """Logit of the slot's conditional acceptance from ``[h ; W1[prev]]`` or ``h`` (dspark_spec 1.5)."""

    def __init__(self, spec: ReferenceSpec):
        super().__init__()
        width = spec.hidden_size + (spec.markov_rank if spec.confidence_with_markov else 0)
        self.proj = nn.Linear(width, 1)
