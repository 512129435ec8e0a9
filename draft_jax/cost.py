"""What a micro-step costs: operations and memory from shapes alone. One source for `--plan` and the benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

from draft_jax.config import DraftConfig
from draft_jax.objective.config import chunk_rows_for

#: Operations of attention's backward pass in units of its forward pass: five products instead of two.
ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class Shape:
    """What one device works on in one micro-step.

    Attributes:
        rows: `B`, rows of tokens.
        length: `L`, tokens of a row.
        num_anchors: `N`, anchors of a row; of those, the share of this device.
        dtype_bytes: bytes of a number in the compute dtype: 2 or 4.
        platform: "cpu", "gpu", ...: decides the chunk of the objective.
        chunk_rows: rows of a chunk of the objective; None: chosen as the objective does.
        rematerialise: layers are computed again in the backward pass instead of kept.
        sequence_parts: devices that share a row, each with that part of its captured states (draft_jax.sequence).
    """

    rows: int
    length: int
    num_anchors: int
    dtype_bytes: int = 2
    platform: str = "gpu"
    chunk_rows: int | None = None
    rematerialise: bool = False
    sequence_parts: int = 1

    def draft_rows(self, draft: DraftConfig) -> int:
        """Slots of all blocks, `B * N * K`."""
        return self.rows * self.num_anchors * draft.block_size

    def chunk(self, draft: DraftConfig) -> int:
        """Rows of logits that exist at once."""
        rows = self.draft_rows(draft)
        return min(rows, self.chunk_rows or chunk_rows_for(rows, draft.vocab_size, platform=self.platform))


def layer_parameters(draft: DraftConfig) -> int:
    """Numbers in the kernels of one decoder layer."""
    query, kv = _widths(draft)
    d = draft.hidden_size
    return d * (query + 2 * kv) + query * d + 3 * d * draft.intermediate_size


def step_flops(draft: DraftConfig, shape: Shape, context_keys: float | None = None) -> dict[str, float]:
    """Floating-point operations of a micro-step, forward and backward (dspark_spec 8.1); a multiply-add is 2.

    Only matrix products count. Every slot is taken to be supervised, and every position of a row to be predicted by
    some slot if there are enough of them.

    Args:
        draft: the model.
        shape: what it works on.
        context_keys: context positions an anchor attends to, on average; None: half a row.

    Returns:
        Operations by part.
    """
    tokens, rows = shape.rows * shape.length // shape.sequence_parts, shape.draft_rows(draft)
    d, v, layers = draft.hidden_size, draft.vocab_size, draft.num_hidden_layers
    query, kv = _widths(draft)
    keys = (shape.length / 2 if context_keys is None else context_keys) + draft.block_size
    again = 1.0 if shape.rematerialise else 0.0
    # Of a layer computed again nobody asks for the last product: what it adds to is the next layer's input, and kept.
    again_layer = again * (1 - d * draft.intermediate_size / layer_parameters(draft))
    parts = {
        # name: (operations forward, what the backward pass costs in units of the forward)
        "fc": (2.0 * tokens * draft.num_taps * d * d, 1.0),
        "context keys and values": (2.0 * tokens * d * 2 * kv * layers, 2.0),
        "block layers": (2.0 * rows * layer_parameters(draft) * layers, 2.0 + again_layer),
        "attention": (4.0 * rows * keys * query * layers, ATTENTION_BACKWARD + again),
        "vocabulary, draft": (2.0 * rows * d * v, 1.0),
        "vocabulary, target": (2.0 * min(rows, shape.rows * shape.length) * d * v, 0.0),
        "Markov head": (2.0 * rows * draft.markov_rank * v, 2.0),
    }
    return {name: forward * (1 + backward) for name, (forward, backward) in parts.items()}


def step_memory(draft: DraftConfig, shape: Shape, attention: str) -> dict[str, int]:
    """Temporary memory of a micro-step at its peak, in bytes, by what it is for.

    Parameters, sums of gradients, target and batch are arguments of the step and not in it. Weight gradients are not
    either: their products add to the sums directly. Within 20 % of what the compiler reserves on an H200
    (benchmarks/RESULTS.md).

    Args:
        draft: the model.
        shape: what it works on.
        attention: implementation; "xla" keeps scores, a kernel does not.
    """
    rows, tokens, item = shape.draft_rows(draft), shape.rows * shape.length, shape.dtype_bytes
    d, v, layers = draft.hidden_size, draft.vocab_size, draft.num_hidden_layers
    query, kv = _widths(draft)
    # Kept for the backward pass of one layer: residual stream and its normed form, twice; projections, normed and
    # rotated heads, attention's output; gate, up and their product.
    layer = item * (4 * d + 3 * query + 3 * kv + 3 * draft.intermediate_size)
    tables = draft.markov_rank * v
    parts = {
        "layers, for the backward pass": rows * (layer + layers * item * d if shape.rematerialise else layers * layer),
        # Keys and values are of whole rows, what they are made from is this device's part.
        "context": tokens * item * ((draft.num_taps * d + d) // shape.sequence_parts + 2 * kv * layers),
        "block states and their gradients": rows * (4 + 3 * item) * d,
        "objective's chunk": (4 + 4 + item) * shape.chunk(draft) * v,
        "gradients of the Markov tables": (4 + 4 + item) * tables,
    }
    heads = rows * draft.num_attention_heads
    kept = 1 if shape.rematerialise else layers
    if attention == "xla":
        parts["attention scores"] = heads * (shape.length + draft.block_size) * ((4 + item) * kept + 8)
    else:
        parts["attention's log-sum-exps"] = heads * 4 * kept
    return parts


def _widths(draft: DraftConfig) -> tuple[int, int]:
    """Widths of all query heads and of all key/value heads."""
    return draft.num_attention_heads * draft.head_dim, draft.num_key_value_heads * draft.head_dim
