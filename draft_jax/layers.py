"""The building blocks of a draft: linear, embedding, RMSNorm, rotary rotation, SwiGLU.

Parameters are kept in their own dtype (fp32 in training); `dtype` is what a block computes in.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from draft_jax.residuals import DtypeOf


@jax.custom_vjp
def weight_product(
    x: Float[Array, "*rows in"], kernel: Float[Array, "in out"], rounded: Float[Array, "in out"]
) -> Float[Array, "*rows out"]:
    """`x @ rounded`, whose gradient by the weight goes to `kernel`, in fp32.

    The weight's gradient leaves its product in fp32, as it was accumulated: rounding it to the compute dtype would
    lose digits and cost a pass over memory before it is added to a sum kept in fp32.

    Args:
        x: in the compute dtype.
        kernel: the fp32 master; its values are not read.
        rounded: the same weight in the compute dtype; gets no gradient.
    """
    return _contract(x, rounded, x.ndim - 1, 0)


def _contract(left: Array, right: Array, left_axis: int, right_axis: int, **options: Any) -> Array:
    """Product over one axis of each. `jnp.einsum` may swap its operands, and the result then lies transposed in
    memory, with everything elementwise that follows."""
    return jax.lax.dot_general(left, right, (((left_axis,), (right_axis,)), ((), ())), **options)


def _row_major(rows: Float[Array, "rows features"]) -> Float[Array, "rows features"]:
    """The same, kept row by row in memory. A GPU compiler likes to lay out a factor of a weight's gradient by
    columns, and then everything elementwise before it too, up to look-ups that read tables across rows."""
    return with_layout_constraint(rows, Layout((0, 1)))


def _product_forward(x: Array, kernel: Array, rounded: Array) -> tuple[Array, tuple]:
    return weight_product(x, kernel, rounded), (x, rounded, DtypeOf(kernel.dtype))


def _product_backward(residual: tuple, gradient: Array) -> tuple[Array, Array, None]:
    x, rounded, like = residual
    by_x = _contract(gradient, rounded, gradient.ndim - 1, 1)
    rows, gradient = (_row_major(values.reshape(-1, values.shape[-1])) for values in (x, gradient))
    by_kernel = _contract(rows, gradient, 0, 0, preferred_element_type=jnp.float32)
    return by_x, by_kernel.astype(like.dtype), None


weight_product.defvjp(_product_forward, _product_backward)


class Linear(nnx.Linear):
    """Bias-free (unless asked) linear layer; `kernel` is `[in, out]`, drawn from N(0, `init_std`).

    Attributes:
        rounded: the kernel in the compute dtype if the caller keeps such a copy (see `bind`), else None.
    """

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
        self.rounded: nnx.Variable[Array] | None = nnx.data(None)

    def __call__(self, inputs: Float[Array, "*rows in"], out_sharding: None = None) -> Float[Array, "*rows out"]:
        kernel = self.kernel[...]
        rounded = kernel.astype(self.dtype) if self.rounded is None else self.rounded[...]
        output = weight_product(inputs.astype(self.dtype), kernel, jax.lax.stop_gradient(rounded))
        return output if self.bias is None else output + self.bias[...].astype(self.dtype)


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
