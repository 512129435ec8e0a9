"""DSpark in eager torch, written from the specification alone: the reference the JAX draft is held against.

Nothing here is shared with ``draft_jax``. The method is deliberately another one: every row of a batch is run
by itself, the visibility of keys is one dense boolean matrix ``[N*K, S+N*K]`` over context and all blocks,
query heads are a Python loop, and the Markov head walks its block slot by slot. Module and parameter names
are DeepSpec's (dspark_spec 3.3), so ``state_dict`` keys are the names of a draft's safetensors file.

Symbols: L tokens of a row, N anchors, K block, D hidden, M taps, V vocabulary, H/G query/kv heads, C head
dim, R Markov rank, S context tokens that survive ``context_valid``.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from .torch_heads import ConfidenceHead, MarkovHead
from .torch_spec import ReferenceRow, ReferenceSpec


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight


def inverse_frequencies(spec: ReferenceSpec) -> Tensor:
    """Rotary inverse frequencies ``[C/2]`` in float64: ``theta^(-2i/C)``, scaled if the config says so."""
    frequencies = []
    for i in range(spec.head_dim // 2):
        frequency = spec.rope_theta ** (-2.0 * i / spec.head_dim)
        scaling = spec.rope_scaling
        if scaling is None or scaling["rope_type"] == "default":
            pass
        elif scaling["rope_type"] == "linear":
            frequency /= scaling["factor"]
        elif scaling["rope_type"] == "llama3":
            # Long waves are stretched by `factor`, short ones kept, those between interpolated.
            turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            blend = min(max((turns - low) / (high - low), 0.0), 1.0)
            frequency = blend * frequency + (1 - blend) * frequency / scaling["factor"]
        else:
            raise ValueError(f"the reference knows no rope type {scaling['rope_type']!r}")
        frequencies.append(frequency)
    return torch.tensor(frequencies, dtype=torch.float64)


def rotate(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Turn pairs ``(x_i, x_{i+C/2})`` of ``x [T, C]`` by ``positions [T] * frequency_i`` (neox pairing)."""
    # Angles in fp32 from fp32 frequencies: what dspark_spec 8.2.1 asks for on both sides.
    angles = positions.to(torch.float32)[:, None] * frequencies.to(torch.float32)[None, :]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def visibility(
    anchors: Sequence[int],
    keep: Sequence[bool],
    starts: Sequence[int],
    context_rows: Sequence[int],
    block_size: int,
) -> Tensor:
    """Dense mask ``[N*K, S + N*K]``, true where the key may be seen (dspark_spec 1.3.5).

    Args:
        context_rows: row position of each of the S context keys.
        starts: first position of the anchor's document, one per block.
    """
    num_context, num_blocks = len(context_rows), len(anchors)
    seen = torch.zeros(num_blocks * block_size, num_context + num_blocks * block_size, dtype=torch.bool)
    for block, (anchor, kept, start) in enumerate(zip(anchors, keep, starts, strict=True)):
        if not kept:
            continue
        own = range(block * block_size, (block + 1) * block_size)
        for query in own:
            for column, position in enumerate(context_rows):
                seen[query, column] = bool(start <= position < anchor)
            for key in own:
                seen[query, num_context + key] = True
    return seen


class Attention(nn.Module):
    """Grouped-query attention of block rows over context and block keys (the context is injected)."""

    def __init__(self, spec: ReferenceSpec):
        super().__init__()
        self.spec = spec
        self.q_proj = nn.Linear(spec.hidden_size, spec.num_heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(spec.hidden_size, spec.num_kv_heads * spec.head_dim, bias=False)
        self.v_proj = nn.Linear(spec.hidden_size, spec.num_kv_heads * spec.head_dim, bias=False)
        self.o_proj = nn.Linear(spec.num_heads * spec.head_dim, spec.hidden_size, bias=False)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)

    def forward(self, normed: Tensor, context: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        """Attend.

        Args:
            normed: block rows after the input norm ``[N*K, D]``.
            context: context features ``[S, D]``, NOT normed again.
            positions: positions of context then block rows ``[S + N*K]``.
            seen: mask ``[N*K, S + N*K]``.
        """
        spec = self.spec
        source = torch.cat([context, normed], dim=0)
        keys = self.k_proj(source).split(spec.head_dim, dim=-1)
        values = self.v_proj(source).split(spec.head_dim, dim=-1)
        queries = self.q_proj(normed).split(spec.head_dim, dim=-1)
        frequencies = inverse_frequencies(spec)
        has_key = seen.any(dim=-1)
        outputs = []
        for head, query in enumerate(queries):
            group = head // (spec.num_heads // spec.num_kv_heads)
            query = rotate(self.q_norm(query), positions[-normed.shape[0] :], frequencies)
            key = rotate(self.k_norm(keys[group]), positions, frequencies)
            scores = query @ key.T / math.sqrt(spec.head_dim)
            scores = scores.masked_fill(~seen, float("-inf"))
            # A row that sees nothing (dummy block) must give zeros, and no NaN in the backward pass either.
            scores = torch.where(has_key[:, None], scores, torch.zeros_like(scores))
            probabilities = scores.softmax(dim=-1) * has_key[:, None]
            outputs.append(probabilities @ values[group])
        return self.o_proj(torch.cat(outputs, dim=-1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, spec: ReferenceSpec):
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        return self.down_proj(gate * torch.sigmoid(gate) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm layer on block rows."""

    def __init__(self, spec: ReferenceSpec):
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec)

    def forward(self, h: Tensor, context: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
        h = h + self.self_attn(self.input_layernorm(h), context, positions, seen)
        return h + self.mlp(self.post_attention_layernorm(h))


class ReferenceDSpark(nn.Module):
    """The trainable part. Embedding and LM head ``[V, D]`` are arguments: they belong to the target."""

    def __init__(self, spec: ReferenceSpec):
        super().__init__()
        self.spec = spec
        self.fc = nn.Linear(spec.num_taps * spec.hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.markov_head = MarkovHead(spec) if spec.markov_kind else None
        self.confidence_head = ConfidenceHead(spec) if spec.confidence else None

    def randomize(self, seed: int, scale: float = 0.3) -> "ReferenceDSpark":
        """Draw every parameter, norms and biases included: no term may hide behind a 0 or a 1."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                if name.endswith("norm.weight"):
                    parameter.copy_(1 + 0.2 * noise)
                elif parameter.ndim == 2 and "markov_w1" not in name:
                    # Outputs of order one whatever the width: softmaxes neither flat nor one-hot.
                    parameter.copy_(noise * (2 * scale) / math.sqrt(parameter.shape[1] / 4))
                else:
                    parameter.copy_(scale * noise)
        return self

    def block_hidden(
        self,
        row: ReferenceRow,
        anchors: Sequence[int],
        keep: Sequence[bool],
        embedding: Tensor,
        context_valid: Sequence[bool] | None = None,
    ) -> Tensor:
        """Hidden states of all blocks of one row after the final norm, ``[N, K, D]`` (dspark_spec 1.3).

        Args:
            anchors: N row positions.
            keep: N flags; a dummy block keeps the mask token in slot 0 and sees no key.
            context_valid: L flags; a position that is false is taken out of the keys altogether.
        """
        spec, size = self.spec, self.spec.block_size
        context_rows = [t for t in range(row.length) if context_valid is None or context_valid[t]]
        context = self.hidden_norm(self.fc(row.context_hidden[context_rows]))
        ids, block_positions = [], []
        for anchor, kept in zip(anchors, keep, strict=True):
            ids.append(int(row.input_ids[anchor]) if kept else spec.mask_token_id)
            ids.extend([spec.mask_token_id] * (size - 1))
            block_positions.extend(int(row.positions[anchor]) + slot for slot in range(size))
        starts = [int(row.document_start[anchor]) for anchor in anchors]
        seen = visibility(anchors, keep, starts, context_rows, size)
        positions = torch.cat([row.positions[context_rows].long(), torch.tensor(block_positions)])
        h = embedding[torch.tensor(ids)].to(context.dtype)
        for layer in self.layers:
            h = layer(h, context, positions, seen)
        return self.norm(h).reshape(len(anchors), size, spec.hidden_size)

    def block_logits(self, hidden: Tensor, previous: Tensor, lm_head: Tensor) -> Tensor:
        """Corrected logits of one block: hidden ``[K, D]``, previous tokens ``[K]`` -> ``[K, V]``."""
        logits = hidden @ lm_head[: self.spec.vocab_size].to(hidden.dtype).T
        if self.markov_head is not None:
            logits = logits + self.markov_head.block(hidden, previous)
        return logits

    def block_confidence(self, hidden: Tensor, previous: Tensor, detach: bool = False) -> Tensor:
        """Confidence logits of one block ``[K]``; ``detach`` cuts the gradient into the features."""
        features = hidden
        if self.spec.confidence_with_markov:
            features = torch.cat([hidden, self.markov_head.markov_w1(previous)], dim=-1)
        if detach:
            features = features.detach()
        return self.confidence_head.proj(features)[:, 0]

    def propose(
        self,
        context_hidden: Tensor,
        anchor_token: int,
        embedding: Tensor,
        lm_head: Tensor,
        forced: Sequence[int] | None = None,
    ) -> tuple[list[int], Tensor, Tensor | None]:
        """One drafting round after S committed tokens (dspark_spec 5.1 steps 2 and 3), without any cache.

        Args:
            context_hidden: ``[S, M*D]``; the anchor token sits at position S and has no state.
            forced: tokens to go on with instead of the greedy ones (K of them).

        Returns:
            tokens K, corrected logits ``[K, V]``, confidence logits ``[K]`` or None.
        """
        with torch.no_grad():
            length = context_hidden.shape[0]
            # The anchor's own state does not exist yet; NaN there proves that nothing reads it.
            states = torch.cat([context_hidden, torch.full_like(context_hidden[:1], float("nan"))])
            row = ReferenceRow(
                input_ids=torch.tensor([0] * length + [anchor_token]),
                loss_mask=torch.zeros(length + 1),
                positions=torch.arange(length + 1),
                document_start=torch.zeros(length + 1, dtype=torch.long),
                context_hidden=states,
                last_hidden=torch.zeros(length + 1, self.spec.hidden_size),
            )
            valid = [True] * length + [False]
            hidden = self.block_hidden(row, [length], [True], embedding, valid)[0]
            state = self.markov_head.initial_state() if self.markov_head is not None else None
            tokens: list[int] = []
            previous_tokens: list[int] = []
            rows = []
            previous = anchor_token
            for slot in range(self.spec.block_size):
                previous_tokens.append(previous)
                logits = lm_head[: self.spec.vocab_size].to(hidden.dtype) @ hidden[slot]
                if self.markov_head is not None:
                    state, bias = self.markov_head.step(state, hidden[slot], torch.tensor(previous))
                    logits = logits + bias
                previous = int(logits.argmax()) if forced is None else int(forced[slot])
                tokens.append(previous)
                rows.append(logits)
            confidence = None
            if self.confidence_head is not None:
                confidence = self.block_confidence(hidden, torch.tensor(previous_tokens))
            return tokens, torch.stack(rows), confidence


def linear_logits(states: Tensor, lm_head: Tensor, vocab_size: int) -> Tensor:
    """The target's own logits from its last states; rows past ``vocab_size`` are padding."""
    return functional.linear(states, lm_head[:vocab_size].to(states.dtype))
