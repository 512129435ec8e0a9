"""The building blocks of a draft: linear, embedding, RMSNorm, rotary rotation, SwiGLU.

Parameters are kept in their own dtype (fp32 in training); `dtype` is what a block computes in.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


class Linear(nnx.Linear):
    """Bias-free (unless asked) linear layer; `kernel` is `[in, out]`, drawn from N(0, `init_std`)."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = False,
        init_std: float,
        dtype: DTypeLike,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            kernel_init=jax.nn.initializers.normal(init_std),
            bias_init=jax.nn.initializers.zeros,
            rngs=rngs,
        )


class Embedding(nnx.Module):
    """A table `[rows, features]`.

    Rows are cast after the look-up, so neither the table nor its gradient (a scatter-add) is ever rounded to
    the compute dtype.
    """

    def __init__(
        self,
        rows: int,
        features: int,
        *,
        init_std: float,
        dtype: DTypeLike,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        init = jax.nn.initializers.normal(init_std)
        self.embedding = nnx.Param(init(rngs.params(), (rows, features), param_dtype))
        self.dtype = dtype

    def __call__(self, ids: Int[Array, "*ids"]) -> Float[Array, "*ids features"]:
        return self.embedding[...][ids].astype(self.dtype)


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + eps) * scale` over the last axis; statistics and product in fp32, then one
    rounding."""

    def __init__(self, features: int, *, eps: float, dtype: DTypeLike, param_dtype: DTypeLike = jnp.float32) -> None:
        self.scale = nnx.Param(jnp.ones((features,), param_dtype))
        self.eps = eps
        self.dtype = dtype

    def __call__(self, x: Float[Array, "*rows features"]) -> Float[Array, "*rows features"]:
        x = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return (x * inverse * self.scale[...].astype(jnp.float32)).astype(self.dtype)


class SwiGLU(nnx.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(
        self,
        features: int,
        width: int,
        *,
        init_std: float,
        dtype: DTypeLike,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        linear = functools.partial(Linear, init_std=init_std, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.gate_proj = linear(features, width)
        self.up_proj = linear(features, width)
        self.down_proj = linear(width, features)

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


def rotary_angles(positions: Int[Array, "*rows"], frequencies: np.ndarray) -> tuple[Array, Array]:
    """Cosine and sine of every position's rotary angles.

    Args:
        positions: absolute positions.
        frequencies: fp32 `[C / 2]`, radians per position, from `rope.inverse_frequencies`.

    Returns:
        `(cos, sin)`, each fp32 `[*rows, C / 2]`, whatever the compute dtype (dspark_spec 8.2).
    """
    phase = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(phase), jnp.sin(phase)


def rotate(
    heads: Float[Array, "*rows X C"], cos: Float[Array, "*rows c"], sin: Float[Array, "*rows c"]
) -> Float[Array, "*rows X C"]:
    """Rotates the pairs `(i, i + C/2)` of each of `X` heads (neox style), in fp32, returning fp32."""
    first, second = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
