"""Cases of the parity tests: one set of numbers, as torch rows for the reference and as draft_jax types.

Imports of ``draft_jax`` stand inside the functions: the reference is testable without it.
"""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .torch_dspark import ReferenceDSpark
from .torch_objective import ReferenceObjective, ReferenceSums, row_sums
from .torch_spec import ReferenceRow, ReferenceSpec

#: head kind of a case -> (markov kind or None, confidence head, confidence sees the Markov embedding)
HEADS = {
    "vanilla": ("vanilla", True, True),
    "gated": ("gated", True, False),
    "rnn": ("rnn", True, True),
    "none": (None, True, False),
    "vanilla_only": ("vanilla", False, False),
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "num_taps": 3,
    "block_size": 4,
    "mask_token_id": 60,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
}
MARKOV_RANK = 6
LENGTH = 20
#: The frozen head has more rows than the vocabulary, as a padded target has.
PADDED_VOCAB = 64
ROPE_SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@dataclass(frozen=True, eq=False)
class Case:
    """One draft and one batch, seen from both sides.

    Attributes:
        arrays: the numpy fields of the batch, ``[B, L, ...]``.
        anchors, keep: ``[B, N]``, the same for both sides; never sampled.
        tensors: parameters by DeepSpec name, fp32 torch layout.
    """

    spec: ReferenceSpec
    model: ReferenceDSpark
    rows: list[ReferenceRow]
    arrays: dict[str, np.ndarray]
    anchors: np.ndarray
    keep: np.ndarray
    embedding: np.ndarray
    lm_head: np.ndarray

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        return {name: p.detach().numpy().copy() for name, p in self.model.named_parameters()}

    def sums(
        self,
        objective: ReferenceObjective,
        rows: list[int] | None = None,
        context_valid: np.ndarray | None = None,
        last_valid: np.ndarray | None = None,
    ) -> ReferenceSums:
        """The reference's sums over the rows asked for (all by default)."""
        total = None
        for b in range(len(self.rows)) if rows is None else rows:
            sums = row_sums(
                self.model,
                self.rows[b],
                list(self.anchors[b]),
                list(self.keep[b]),
                torch.from_numpy(self.embedding),
                torch.from_numpy(self.lm_head),
                objective,
                None if context_valid is None else context_valid[b].tolist(),
                None if last_valid is None else last_valid[b].tolist(),
            )
            total = sums if total is None else total.add(sums)
        return total

    def with_arrays(self, arrays: dict[str, np.ndarray]) -> "Case":
        """The same draft and anchors over other fields, for both sides."""
        return dataclasses.replace(self, rows=torch_rows(arrays), arrays=arrays)

    def with_rows(self, rows: list[ReferenceRow], anchors: list[list[int]], keep: list[list[bool]]) -> "Case":
        """The same draft over other rows (the reference's side only); blocks per row may differ."""
        return dataclasses.replace(self, rows=rows, anchors=anchors, keep=keep)

    # The JAX side, built when first asked for.
    @functools.cached_property
    def config(self):
        """The same draft as a `DraftConfig`."""
        return draft_config(self.spec)

    @functools.cached_property
    def params(self):
        """The reference's weights as draft_jax parameters, through the name table of `draft_jax.weights`."""
        from draft_jax import weights

        return weights.from_torch_layout(self.tensors, self.config, dtype=np.float32)

    @functools.cached_property
    def batch(self):
        return jax_batch(self.arrays)

    @functools.cached_property
    def frozen(self):
        from draft_jax.batch import FrozenHead

        return FrozenHead(embedding=jnp.asarray(self.embedding), lm_head=jnp.asarray(self.lm_head))

    def blocks(self, gamma: float | None = 4.0, last_valid: np.ndarray | None = None):
        """`draft_jax.anchors.Blocks` of this case's anchors."""
        from draft_jax import anchors

        valid = np.ones(self.arrays["input_ids"].shape, bool) if last_valid is None else last_valid
        make = jax.jit(anchors.make_blocks, static_argnums=(3, 4))
        return make(self.batch, self.anchors, self.keep, self.spec.block_size, gamma, valid)

    def forward(self, context_valid: np.ndarray | None = None, attention: str = "xla"):
        """Outputs of every block through `DSparkDraft`, compiled once per case and attention.

        Returns:
            hidden ``[B, N, K, D]``, corrected logits ``[B, N, K, V]``, confidence ``[B, N, K]`` or None.
        """
        valid = np.ones(self.arrays["input_ids"].shape, bool) if context_valid is None else context_valid
        return self._forward(attention)(self.params, self.batch, self.blocks(), self.frozen, valid)

    @functools.cache  # noqa: B019 (cases live as long as the session)
    def _forward(self, attention: str):
        from draft_jax.models import dspark

        def forward(params, batch, blocks, frozen, context_valid):
            draft = dspark.bind(self.config, params, np.float32)
            assert (draft.markov is None) == (self.spec.markov_kind is None)
            assert (draft.confidence is None) == (not self.spec.confidence)
            hidden = draft(batch, blocks, frozen, context_valid, attention=attention)
            logits = hidden @ frozen.lm_head[: self.spec.vocab_size].T
            embedded = confidence = None
            if draft.markov is not None:
                logits = logits + draft.markov.states(hidden, blocks.prev) @ draft.markov.w2().T
            if self.spec.confidence_with_markov:
                embedded = draft.markov.embed(blocks.prev)
            if draft.confidence is not None:
                confidence = draft.confidence(hidden, embedded)
            return hidden, logits, confidence

        return jax.jit(forward)

    def objective(self, config, blocks=None, implementation: str = "chunked", batch=None):
        """`loss_sums` and its gradient, compiled once per case, options and implementation.

        Returns:
            the numerator, the sums as numpy arrays, and the numerator's gradient by safetensors name.
        """
        from draft_jax import weights

        program = self._objective(config, implementation)
        blocks = self.blocks(config.gamma) if blocks is None else blocks
        (numerator, sums), grads = program(self.params, self.frozen, batch or self.batch, blocks)
        sums = {name: np.asarray(value) for name, value in sums.items()}
        return float(numerator), sums, weights.to_torch_layout(grads, self.config, dtype=np.float32)

    @functools.cache  # noqa: B019
    def _objective(self, config, implementation: str):
        from draft_jax.objective import loss

        def numerator(params, frozen, batch, blocks):
            options = {"dtype": np.float32, "implementation": implementation}
            return loss.loss_sums(params, frozen, batch, blocks, self.config, config, **options)

        return jax.jit(jax.value_and_grad(numerator, has_aux=True))


def jax_batch(arrays: dict[str, np.ndarray]):
    """A `DraftBatch` of numpy fields."""
    from draft_jax.batch import DraftBatch

    return DraftBatch(**{name: jnp.asarray(value) for name, value in arrays.items()})


def draft_config(spec: ReferenceSpec):
    """`DraftConfig` of a reference spec, through the config's own reading of a DeepSpec config.json."""
    from draft_jax.config import DraftConfig

    return DraftConfig.from_hf(
        {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "hidden_size": spec.hidden_size,
            "intermediate_size": spec.intermediate_size,
            "num_hidden_layers": spec.num_layers,
            "num_attention_heads": spec.num_heads,
            "num_key_value_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "vocab_size": spec.vocab_size,
            "num_target_layers": 12,
            "target_layer_ids": [1, 4, 9][: spec.num_taps],
            "block_size": spec.block_size,
            "mask_token_id": spec.mask_token_id,
            "rms_norm_eps": spec.rms_norm_eps,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": spec.rope_theta,
                **(spec.rope_scaling or {}),
            },
            "max_position_embeddings": 4096,
            "attention_bias": False,
            "num_anchors": 4,
            "markov_rank": spec.markov_rank,
            "markov_head_type": spec.markov_kind or "vanilla",
            "enable_confidence_head": spec.confidence,
            "confidence_head_with_markov": spec.confidence_with_markov,
            "initializer_range": 0.02,
        }
    )


def batch_arrays(spec: ReferenceSpec, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Three rows of 20 tokens: a document with a user turn inside and padding; two packed documents; nothing.

    Blocks run into a user turn, into the end of a document with another one behind it, and into the end of
    the row. One block of the second row is a dummy, and so is the whole last row.

    Returns:
        the fields ``[3, 20, ...]``, anchors ``[3, 4]`` and keep ``[3, 4]``.
    """
    rng = np.random.default_rng(seed)
    start = np.zeros((3, LENGTH), np.int32)
    start[0, 15:] = 15
    start[1, 9:] = 9
    mask = np.zeros((3, LENGTH), np.int32)
    mask[0, 4:10] = mask[0, 12:15] = 1
    # The second document is supervised from its first token on: only the border itself ends a block there.
    mask[1, 3:20] = 1
    states = rng.normal(size=(3, LENGTH, spec.num_taps * spec.hidden_size))
    arrays = {
        "input_ids": rng.integers(0, spec.vocab_size - 1, (3, LENGTH)).astype(np.int32),
        "loss_mask": mask,
        "positions": (np.arange(LENGTH)[None] - start).astype(np.int32),
        "document_start": start,
        "context_hidden": states.astype(np.float32),
        "last_hidden": rng.normal(size=(3, LENGTH, spec.hidden_size)).astype(np.float32),
    }
    anchors = np.array([[4, 6, 8, 12], [4, 7, 17, 0], [0, 0, 0, 0]], np.int32)
    keep = np.array([[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0]], bool)
    return arrays, anchors, keep


def torch_rows(arrays: dict[str, np.ndarray]) -> list[ReferenceRow]:
    """The rows of a batch for the reference."""
    fields = {name: torch.from_numpy(value.copy()) for name, value in arrays.items()}
    for name in ("input_ids", "positions", "document_start"):
        fields[name] = fields[name].long()
    count = arrays["input_ids"].shape[0]
    return [ReferenceRow(**{name: value[b] for name, value in fields.items()}) for b in range(count)]


def build_case(heads: str = "vanilla", rope: str | None = None) -> Case:
    """A case of one head kind and one rotary scaling; the batch is the same for all."""
    kind, confidence, with_markov = HEADS[heads]
    spec = ReferenceSpec(
        **SIZES,
        rope_scaling=ROPE_SCALINGS[rope] if rope else None,
        markov_rank=MARKOV_RANK if kind else 0,
        markov_kind=kind,
        confidence=confidence,
        confidence_with_markov=with_markov,
    )
    arrays, anchors, keep = batch_arrays(spec, seed=0)
    rng = np.random.default_rng(100)
    embedding, head = rng.normal(size=(2, PADDED_VOCAB, spec.hidden_size)).astype(np.float32)
    # Logits of a few units: neither a flat nor a one-hot target.
    head *= np.float32(2 / np.sqrt(spec.hidden_size))
    model = ReferenceDSpark(spec).randomize(seed=11)
    return Case(spec, model, torch_rows(arrays), arrays, anchors, keep, embedding, head)
