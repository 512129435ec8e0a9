"""What sits on top of a draft's backbone: Markov head, confidence head, and the frozen vocabulary product."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from draft_jax.config import DraftConfig
from draft_jax.layers import Embedding, Linear


def vocabulary_logits(
    hidden: Float[Array, "*rows D"], lm_head: Float[Array, "W D"], vocab_size: int
) -> Float32[Array, "*rows V"]:
    """`hidden @ lm_head.T`, accumulated and returned in fp32, for the first `vocab_size` rows of the head.

    The product runs over all `W` rows of a padded head and is cut afterwards: cutting the head first would
    copy it.
    """
    logits = jnp.einsum("...d,vd->...v", hidden, lm_head.astype(hidden.dtype), preferred_element_type=jnp.float32)
    return logits[..., :vocab_size]


class MarkovHead(nnx.Module):
    """Adds to the logits of a slot a bias that depends on the token before it (dspark_spec 1.4).

    The bias is `z @ w2().T` with a low-rank state `z [.., R]`; the kinds differ in how `z` is made from the
    previous token's embedding `e`, the backbone's output `h` and, for "rnn", a state `s` carried along the
    block:

    * vanilla: `z = e`
    * gated: `z = sigmoid(gate_proj([h, e])) * e`
    * rnn: `g, c, o = split(joint_proj([s, e, h]))`; `z = tanh(o)`; `s <- sigmoid(g) * s + (1 - sigmoid(g)) *
      tanh(c)`

    Both tables are `[V, R]`, as on disk.
    """

    def __init__(
        self, config: DraftConfig, *, dtype: DTypeLike, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        D, R = config.hidden_size, config.markov_rank
        options: dict[str, Any] = {
            "init_std": config.initializer_range,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "rngs": rngs,
        }
        self.kind = config.markov_head_type
        self.rank = R
        self.dtype = dtype
        self.markov_w1 = Embedding(config.vocab_size, R, **options)
        self.markov_w2 = Embedding(config.vocab_size, R, **options)
        if self.kind == "gated":
            self.gate_proj = Linear(D + R, R, use_bias=True, **options)
        if self.kind == "rnn":
            self.joint_proj = Linear(2 * R + D, 3 * R, use_bias=True, **options)

    def w2(self) -> Float[Array, "V R"]:
        """The output table, in the parameters' own dtype (its gradient is accumulated there)."""
        return self.markov_w2.embedding[...]

    def embed(self, prev: Int[Array, "*ids"]) -> Float[Array, "*ids R"]:
        """`e`: the row of each previous token."""
        return self.markov_w1(prev)

    def initial_carry(self, batch_shape: tuple[int, ...]) -> Float32[Array, "*batch R"] | tuple[()]:
        """State before slot 0: zeros for "rnn", nothing for the other kinds."""
        if self.kind != "rnn":
            return ()
        return jnp.zeros((*batch_shape, self.rank), jnp.float32)

    @jax.named_scope("markov_step")
    def step(
        self, carry: Array | tuple[()], hidden: Float[Array, "*batch D"], prev: Int[Array, "*batch"]
    ) -> tuple[Array | tuple[()], Float[Array, "*batch R"]]:
        """One slot of a block, for decoding.

        Args:
            carry: from `initial_carry` or the slot before.
            hidden: backbone output of this slot.
            prev: token before this slot (the anchor for slot 0).

        Returns:
            The carry for the next slot, and `z`.
        """
        embedding = self.embed(prev)
        if self.kind == "rnn":
            return self._rnn_step(carry, self._rnn_input(hidden, embedding))
        return carry, self._memoryless(hidden, embedding)

    @jax.named_scope("markov_states")
    def states(self, hidden: Float[Array, "*blocks K D"], prev: Int[Array, "*blocks K"]) -> Float[Array, "*blocks K R"]:
        """`z` of every slot of every block, given the true previous tokens (training)."""
        embedding = self.embed(prev)
        if self.kind != "rnn":
            return self._memoryless(hidden, embedding)
        # Everything that does not depend on the state is one product for all slots; only `s` is walked.
        inputs = jnp.moveaxis(self._rnn_input(hidden, embedding), -2, 0)
        _, z = jax.lax.scan(self._rnn_step, self.initial_carry(prev.shape[:-1]), inputs)
        return jnp.moveaxis(z, 0, -2)

    def _memoryless(self, hidden: Array, embedding: Array) -> Array:
        if self.kind == "vanilla":
            return embedding
        gate = jax.nn.sigmoid(self.gate_proj(jnp.concatenate([hidden, embedding], axis=-1)))
        return gate * embedding

    def _rnn_input(self, hidden: Array, embedding: Array) -> Array:
        """The part of `joint_proj([s, e, h])` that does not need `s`, in fp32."""
        kernel = self.joint_proj.kernel[...][self.rank :].astype(self.dtype)
        assert self.joint_proj.bias is not None
        bias = self.joint_proj.bias[...]
        features = jnp.concatenate([embedding, hidden], axis=-1)
        product = jnp.einsum("...i,io->...o", features, kernel, preferred_element_type=jnp.float32)
        return product + bias.astype(jnp.float32)

    def _rnn_step(self, state: Any, inputs: Array) -> tuple[Any, Array]:
        kernel = self.joint_proj.kernel[...][: self.rank].astype(self.dtype)
        recurrent = jnp.einsum("...i,io->...o", state.astype(self.dtype), kernel, preferred_element_type=jnp.float32)
        gate, candidate, output = jnp.split(inputs + recurrent, 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        # z reads the state from before this slot; the new one serves the next slot only.
        return gate * state + (1 - gate) * jnp.tanh(candidate), jnp.tanh(output).astype(self.dtype)


class ConfidenceHead(nnx.Module):
    """Predicts, per slot, the chance that its token is accepted given that all before it were (dspark_spec
    1.5)."""

    def __init__(self, config: DraftConfig, *, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs) -> None:
        # fp32 whatever the draft computes in: the result is one number a row, and serving keeps this head in
        # fp32.
        self.with_markov = config.confidence_head_with_markov
        self.proj = Linear(
            config.confidence_features,
            1,
            use_bias=True,
            init_std=config.initializer_range,
            dtype=jnp.float32,
            param_dtype=param_dtype,
            rngs=rngs,
        )

    @jax.named_scope("confidence")
    def __call__(
        self, hidden: Float[Array, "*rows D"], prev_embedding: Float[Array, "*rows R"] | None = None
    ) -> Float32[Array, "*rows"]:
        """Confidence logits; their sigmoid is the predicted conditional acceptance.

        Args:
            hidden: backbone output.
            prev_embedding: `MarkovHead.embed` of the token before each slot; exactly when the head was
                configured with Markov features.

        Raises:
            ValueError: `prev_embedding` given or missing against the configuration.
        """
        if (prev_embedding is not None) != self.with_markov:
            raise ValueError(
                "the confidence head was configured "
                + ("with Markov features: pass prev_embedding" if self.with_markov else "without Markov features")
            )
        features = hidden.astype(jnp.float32)
        if prev_embedding is not None:
            features = jnp.concatenate([features, prev_embedding.astype(jnp.float32)], axis=-1)
        return self.proj(features)[..., 0]
