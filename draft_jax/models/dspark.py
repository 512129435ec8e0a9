"""DSpark: a draft that reads the target's hidden states and proposes a block of tokens at once (dspark_spec
1)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from draft_jax.attention import block_attention
from draft_jax.batch import DraftBatch, FrozenHead
from draft_jax.config import DraftConfig
from draft_jax.layers import Linear, RMSNorm, SwiGLU, rotary_angles, rotate
from draft_jax.models.heads import ConfidenceHead, MarkovHead
from draft_jax.rope import inverse_frequencies
from draft_jax.sequence import all_tokens, own_tokens

if TYPE_CHECKING:
    from draft_jax.anchors import Blocks

# Nested dict with string keys; leaves are arrays. The path spells the module, e.g.
# layers/0/self_attn/q_proj/kernel.
Params = Mapping[str, Any]
# Attention with everything but q and the block's own keys and values filled in.
Attend = Callable[[Array, Array, Array], Array]
Angles = tuple[Array, Array]


class SelfAttention(nnx.Module):
    """Grouped-query attention with per-head RMSNorm on queries and keys.

    The same `k_proj`, `v_proj` and `k_norm` serve the block's own rows and the injected context.
    """

    def __init__(self, config: DraftConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        D, C = config.hidden_size, config.head_dim
        query, kv = config.num_attention_heads * C, config.num_key_value_heads * C
        linear = functools.partial(
            Linear, init_std=config.initializer_range, dtype=dtype, param_dtype=param_dtype, rngs=rngs
        )
        self.q_proj = linear(D, query)
        self.k_proj = linear(D, kv)
        self.v_proj = linear(D, kv)
        self.o_proj = linear(query, D)
        # The normed heads stay fp32 until they are rotated, so there is one rounding instead of two.
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=jnp.float32, param_dtype=param_dtype)
        self.q_norm = norm(C)
        self.k_norm = norm(C)
        self.head_dim = C
        self.dtype = dtype

    def _heads(self, projected: Array) -> Array:
        return projected.reshape(*projected.shape[:-1], -1, self.head_dim)

    def queries(self, x: Float[Array, "*rows D"], angles: Angles) -> Float[Array, "*rows H C"]:
        """Normed and rotated queries."""
        return rotate(self.q_norm(self._heads(self.q_proj(x))), *angles).astype(self.dtype)

    def keys_values(
        self, x: Float[Array, "*rows D"], angles: Angles
    ) -> tuple[Float[Array, "*rows G C"], Float[Array, "*rows G C"]]:
        """Normed and rotated keys, and values, of block rows or of context features."""
        keys = rotate(self.k_norm(self._heads(self.k_proj(x))), *angles).astype(self.dtype)
        return keys, self._heads(self.v_proj(x))


class DecoderLayer(nnx.Module):
    """Pre-norm attention and SwiGLU. Only block rows pass through `input_layernorm`; the context does not."""

    def __init__(self, config: DraftConfig, *, dtype: DTypeLike, param_dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype, param_dtype=param_dtype)
        self.input_layernorm = norm(config.hidden_size)
        self.self_attn = SelfAttention(config, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.post_attention_layernorm = norm(config.hidden_size)
        self.mlp = SwiGLU(
            config.hidden_size,
            config.intermediate_size,
            init_std=config.initializer_range,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )

    def __call__(self, h: Float[Array, "B N K D"], angles: Angles, attend: Attend) -> Float[Array, "B N K D"]:
        """One layer over all block rows.

        Args:
            h: residual stream.
            angles: rotary angles of the block rows.
            attend: `(q, k_block, v_block) -> output`, closed over this layer's context keys and values.
        """
        with jax.named_scope("self_attn"):
            x = self.input_layernorm(h)
            output = attend(self.self_attn.queries(x, angles), *self.self_attn.keys_values(x, angles))
            h = h + self.self_attn.o_proj(output.reshape(*h.shape[:-1], -1))
        with jax.named_scope("mlp"):
            return h + self.mlp(self.post_attention_layernorm(h))


class DSparkDraft(nnx.Module):
    """The draft's trainable part. Embedding and LM head are the target's and arrive as a `FrozenHead`.

    Attributes:
        markov: the Markov head, `None` when `markov_rank` is 0.
        confidence: the confidence head, `None` when not enabled.
    """

    def __init__(
        self, config: DraftConfig, *, dtype: DTypeLike, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        D = config.hidden_size
        options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        self.config = config
        self.dtype = dtype
        self.fc = Linear(config.num_taps * D, D, init_std=config.initializer_range, rngs=rngs, **options)
        self.hidden_norm = RMSNorm(D, eps=config.rms_norm_eps, **options)
        # String keys: a parameter's path is then the same in memory, in a checkpoint and in a rule.
        self.layers = nnx.Dict(
            {str(i): DecoderLayer(config, rngs=rngs, **options) for i in range(config.num_hidden_layers)}
        )
        self.norm = RMSNorm(D, eps=config.rms_norm_eps, **options)
        self.markov = MarkovHead(config, rngs=rngs, **options) if config.markov_rank else None
        self.confidence = (
            ConfidenceHead(config, param_dtype=param_dtype, rngs=rngs) if config.enable_confidence_head else None
        )

    @property
    def frequencies(self) -> np.ndarray:
        """Rotary frequencies, fp32 `[C / 2]`."""
        return inverse_frequencies(self.config.head_dim, self.config.rope_theta, self.config.rope_scaling)

    def ordered_layers(self) -> list[DecoderLayer]:
        """The decoder layers, first to last."""
        return [self.layers[str(i)] for i in range(self.config.num_hidden_layers)]

    @jax.named_scope("context")
    def context(self, context_hidden: Float[Array, "B L MD"]) -> Float[Array, "B L D"]:
        """Context features `hidden_norm(fc(taps))`: computed once, injected into every layer (1.3 step 1)."""
        return self.hidden_norm(self.fc(context_hidden.astype(self.dtype)))

    def context_keys_values(
        self, context: Float[Array, "B L D"], positions: Int[Array, "B L"]
    ) -> list[tuple[Float[Array, "B L G C"], Float[Array, "B L G C"]]]:
        """Each layer's keys and values of the context features, rotated to absolute positions."""
        angles = rotary_angles(positions, self.frequencies)
        with jax.named_scope("context_kv"):
            return [layer.self_attn.keys_values(context, angles) for layer in self.ordered_layers()]

    def run_blocks(
        self,
        anchor_tokens: Int[Array, "B N"],
        keep: Bool[Array, "B N"],
        anchor_positions: Int[Array, "B N"],
        embedding: Float[Array, "W D"],
        attends: Sequence[Attend],
        rematerialise: bool = False,
    ) -> Float[Array, "B N K D"]:
        """The backbone over blocks `[anchor, mask, mask, ...]` at positions `p, p + 1, ..`; after the final
        norm.

        Training and decoding both end here; they differ only in where the context keys and values come from.

        Args:
            anchor_tokens: token of each anchor; ignored (mask instead) where `keep` is False.
            keep: False for dummy blocks.
            anchor_positions: absolute position of each anchor.
            embedding: the target's embedding.
            attends: one per layer, see `DecoderLayer`.
            rematerialise: keep only each layer's input for the backward pass, which computes the layer again.
        """
        K = self.config.block_size
        slots = jnp.arange(K, dtype=anchor_tokens.dtype)
        is_anchor = (slots == 0) & keep[..., None]
        ids = jnp.where(is_anchor, anchor_tokens[..., None], self.config.mask_token_id)
        with jax.named_scope("embed"):
            h = embedding[ids].astype(self.dtype)
        angles = rotary_angles(anchor_positions[..., None] + slots, self.frequencies)
        for i, (layer, attend) in enumerate(zip(self.ordered_layers(), attends, strict=True)):
            run: Callable[[Array], Array] = functools.partial(layer, angles=angles, attend=attend)
            with jax.named_scope(f"layer_{i}"):
                h = jax.checkpoint(run)(h) if rematerialise else run(h)
        with jax.named_scope("norm"):
            return self.norm(h)

    def __call__(
        self,
        batch: DraftBatch,
        blocks: Blocks,
        frozen: FrozenHead,
        context_valid: Bool[Array, "B L"],
        attention: str = "xla",
        sequence_axis: str | None = None,
        rematerialise: bool = False,
    ) -> Float[Array, "B N K D"]:
        """Hidden state of every slot of every block, after the final norm.

        Args:
            batch: the captured rows.
            blocks: anchors, their tokens, which are real, and where their documents start.
            frozen: the target's embedding (its LM head is not used here).
            context_valid: False hides a position from every block, whatever its state holds (NaN included).
            attention: name of the attention implementation.
            sequence_axis: mesh axis over which `batch.context_hidden` is split (`draft_jax.sequence`); everything
                else is of whole rows.
            rematerialise: see `run_blocks`.
        """
        visible, positions = context_valid, batch.positions
        if sequence_axis is not None:
            visible, positions = own_tokens(visible, sequence_axis), own_tokens(positions, sequence_axis)
        # Hidden positions must not reach fc: 0 * NaN in its gradient would be NaN.
        context = self.context(jnp.where(visible[..., None], batch.context_hidden, 0))
        keys_values = self.context_keys_values(context, positions)
        if sequence_axis is not None:
            keys_values = [(all_tokens(k, sequence_axis), all_tokens(v, sequence_axis)) for k, v in keys_values]
        attends = [
            functools.partial(
                _attend, keys, values, blocks.anchors, blocks.start, blocks.keep, context_valid, attention
            )
            for keys, values in keys_values
        ]
        positions = jnp.take_along_axis(batch.positions, blocks.anchors, axis=1)
        return self.run_blocks(blocks.tokens, blocks.keep, positions, frozen.embedding, attends, rematerialise)


@jax.named_scope("attention")
def _attend(
    k_context: Array,
    v_context: Array,
    anchors: Array,
    starts: Array,
    keep: Array,
    context_valid: Array,
    implementation: str,
    q: Array,
    k_block: Array,
    v_block: Array,
) -> Array:
    return block_attention(
        q, k_context, v_context, k_block, v_block, anchors, starts, keep, context_valid,
        implementation=implementation,
    )  # fmt: skip


def init_params(config: DraftConfig, key: Array, dtype: DTypeLike = jnp.float32) -> dict[str, Any]:
    """Fresh parameters: weights N(0, initializer_range), biases 0, norms 1 (dspark_spec 1.6).

    Args:
        config: the draft.
        key: a typed PRNG key (`jax.random.key`).
        dtype: of the parameters; fp32 for training.

    Returns:
        Nested dict with string keys.
    """
    draft = DSparkDraft(config, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(key))
    return nnx.to_pure_dict(nnx.state(draft, nnx.Param))


def abstract_params(config: DraftConfig, dtype: DTypeLike = jnp.float32) -> dict[str, Any]:
    """The tree of `init_params` with `jax.ShapeDtypeStruct` leaves; costs no memory."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0), dtype))


def rounded_kernels(params: Params, dtype: DTypeLike) -> dict[str, Array]:
    """The kernels of linear layers that compute in `dtype`, rounded to it: path -> array.

    Made once per optimizer step they spare every micro-step from reading the fp32 masters. The confidence head is
    not among them, it computes in fp32; nor are tables, of which a step reads some rows only.

    Args:
        params: fp32 parameters, arrays or shapes.
        dtype: compute dtype; float32 needs no copies, and there are none.
    """
    dtype = jnp.dtype(dtype)
    if dtype == jnp.float32:
        return {}
    named = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    return {
        name: leaf.astype(dtype)
        for name, leaf in named.items()
        if name.endswith("/kernel") and not name.startswith("confidence/")
    }


def bind(
    config: DraftConfig, params: Params, dtype: DTypeLike, rounded: Mapping[str, Array] | None = None
) -> DSparkDraft:
    """The module holding `params`, computing in `dtype`. Meant to be called inside a jitted function.

    Args:
        config: the draft.
        params: parameters; gradients are taken with respect to them.
        dtype: compute dtype.
        rounded: from `rounded_kernels` of the same parameters, to be read instead of rounding them here.

    Raises:
        ValueError: `params` is not the tree `config` describes; the message names the first path or shape at
            fault.
    """
    graph, tree, shapes = _structure(config, jnp.dtype(dtype))
    given = {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    for name in shapes:
        if name not in given:
            raise ValueError(f"parameters lack {name}, which the draft config describes")
    for name, leaf in given.items():
        if name not in shapes:
            raise ValueError(f"parameters hold {name}, which the draft config does not describe")
        if leaf.shape != shapes[name]:
            raise ValueError(f"parameter {name} has shape {leaf.shape}, the draft config says {shapes[name]}")
    draft = nnx.merge(graph, jax.tree.unflatten(tree, [given[name] for name in shapes]))
    for name, kernel in (rounded or {}).items():
        *path, _ = name.split("/")
        layer = functools.reduce(getattr, path, draft)
        layer.rounded = nnx.Variable(kernel)
    return draft


def path_name(path: tuple[Any, ...]) -> str:
    """A parameter's path as text: `layers/0/self_attn/q_proj/kernel`."""
    return "/".join(str(entry.key) for entry in path)


@functools.lru_cache(maxsize=32)
def _structure(config: DraftConfig, dtype: np.dtype) -> tuple[Any, Any, dict[str, tuple[int, ...]]]:
    """What `bind` needs and tracing need not redo: graph, tree, and name -> shape in the tree's own leaf
    order."""
    draft = nnx.eval_shape(lambda: DSparkDraft(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(draft, nnx.Param)
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(state))
    shapes = {path_name(path): leaf.shape for path, leaf in leaves}
    return graph, jax.tree.structure(state), shapes
