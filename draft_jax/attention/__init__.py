"""Block attention: one operation, several implementations chosen by name, the same tests for all.

The query rows of a block see two sets of keys: the context `[start, anchor)` of their own document, and the
`K` slots of their own block, in both directions. Blocks never see each other, and no score between two blocks
is ever computed (dspark_spec 1.3, step 5).
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

from jaxtyping import Array, Bool, Float, Int

from draft_jax.attention.triton import block_attention as _triton
from draft_jax.attention.triton import unsupported as _triton_unsupported
from draft_jax.attention.xla import block_attention as _xla


class BlockAttention(Protocol):
    """What an implementation provides; see `block_attention`."""

    def __call__(
        self,
        q: Array,
        k_context: Array,
        v_context: Array,
        k_block: Array,
        v_block: Array,
        anchors: Array,
        starts: Array,
        keep: Array,
        context_valid: Array,
    ) -> Array: ...


#: `triton-interpreted` runs the kernels of `triton` in Pallas' interpreter: for tests, on any device, slowly.
IMPLEMENTATIONS: dict[str, BlockAttention] = {
    "xla": _xla,
    "triton": _triton,
    "triton-interpreted": functools.partial(_triton, interpret=True),
}


def choose_implementation(name: str, platform: str, device_kind: str, dtype: Any, head_dim: int) -> str:
    """The implementation to run for a configured name: `auto` takes the kernel where it can run, else `xla`.

    Args:
        name: `auto` or a name in `IMPLEMENTATIONS`.
        platform: `platform` of the devices, such as `gpu`.
        device_kind: their `device_kind`, such as `NVIDIA H200`.
        dtype: compute dtype of the draft.
        head_dim: of the draft.

    Raises:
        ValueError: unknown name, or a kernel asked for by name that cannot run here; the message says why.
    """
    if name not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"attention implementation {name!r} is unknown; available: auto, {_available()}")
    if name not in ("auto", "triton"):
        return name
    reason = _triton_unsupported(dtype, head_dim)
    if reason is None and not (platform == "gpu" and device_kind.startswith("NVIDIA")):
        reason = f"needs an NVIDIA GPU, not {device_kind} ({platform})"
    if reason is None:
        return "triton"
    if name == "auto":
        return "xla"
    raise ValueError(f"attention implementation 'triton' {reason}; use 'xla' or 'auto'")


def _available() -> str:
    return ", ".join(sorted(IMPLEMENTATIONS))


def block_attention(
    q: Float[Array, "B N K H C"],
    k_context: Float[Array, "B L G C"],
    v_context: Float[Array, "B L G C"],
    k_block: Float[Array, "B N K G C"],
    v_block: Float[Array, "B N K G C"],
    anchors: Int[Array, "B N"],
    starts: Int[Array, "B N"],
    keep: Bool[Array, "B N"],
    context_valid: Bool[Array, "B L"],
    *,
    implementation: str = "xla",
) -> Float[Array, "B N K H C"]:
    """Softmax attention of every block over its context and itself, scaled by `C ** -0.5`, softmax in fp32.

    Query head `h` reads key/value head `h // (H / G)`.

    Args:
        q: queries, rotated.
        k_context: context keys, rotated; finite everywhere, also where not valid.
        v_context: context values; finite everywhere.
        k_block: keys of the block's own slots, rotated.
        v_block: values of the block's own slots.
        anchors: row index of each block's anchor; context stops before it.
        starts: row index of the first token of the anchor's document.
        keep: False for dummy blocks; their output rows are exactly zero, with zero gradient.
        context_valid: False hides a context position from every block.
        implementation: a name in `IMPLEMENTATIONS`.

    Returns:
        Attention output, dtype of `q`.

    Raises:
        ValueError: unknown implementation.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"attention implementation {implementation!r} is unknown; available: {_available()}")
    return IMPLEMENTATIONS[implementation](
        q, k_context, v_context, k_block, v_block, anchors, starts, keep, context_valid
    )
