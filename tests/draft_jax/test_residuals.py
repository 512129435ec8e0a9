"""Custom derivatives keep dtypes, and keep them out of the program: jaxlib 0.11.2 crashes on empty arrays there."""

import re

import jax
import jax.numpy as jnp
import pytest

from draft_jax.layers import weight_product
from draft_jax.objective.terms import vocab_terms

ROWS, WIDTH, VOCAB = 4, 8, 11


def empty_arrays(function, *arguments):
    """Shapes with a zero among all values of the traced function, inner programs included."""
    return re.findall(r"\w+\[(?:\d+,)*0(?:,\d+)*\]", str(jax.make_jaxpr(function)(*arguments)))


def product(dtype):
    kernel = jnp.ones((WIDTH, WIDTH))

    def scanned(x):
        """As a stack of layers is: what the forward pass keeps becomes an operand of a loop."""

        def layer(x, _):
            return weight_product(x, kernel, kernel.astype(dtype)), None

        return jax.lax.scan(layer, x, length=2)[0].astype(jnp.float32).sum()

    return scanned, jnp.ones((ROWS, WIDTH), dtype)


def terms(dtype):
    hidden = jnp.ones((1, ROWS, WIDTH), dtype)
    head = jnp.ones((VOCAB, WIDTH), dtype)
    places = jnp.zeros((1, ROWS), jnp.int32)
    weights = jnp.ones((1, ROWS))
    options = {"vocab_size": VOCAB, "ce_alpha": 0.1, "l1_alpha": 0.9, "chunk_rows": 2}

    def numerator(hidden):
        rows = (hidden, None, None, head, hidden, places, places, weights, weights > 0)
        return vocab_terms(*rows, **options).numerator

    return numerator, hidden


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", [product, terms])
def test_no_empty_array_and_the_gradient_has_its_dtype(case, dtype):
    function, argument = case(dtype)
    _, pullback = jax.vjp(function, argument)
    assert empty_arrays(lambda x: jax.vjp(function, x), argument) == []
    assert pullback(jnp.float32(1))[0].dtype == dtype


def test_the_check_sees_an_empty_array():
    assert empty_arrays(lambda x: (x, jnp.zeros((0,)), jnp.zeros((2, 0))), jnp.ones(2))


def test_gradient_of_masters_is_theirs():
    """The fp32 kernel beside bf16 products gets an fp32 gradient."""
    kernel = jnp.ones((WIDTH, WIDTH))
    x = jnp.ones((ROWS, WIDTH), jnp.bfloat16)
    gradient = jax.grad(lambda kernel: weight_product(x, kernel, kernel.astype(jnp.bfloat16)).sum().astype(jnp.float32))
    assert gradient(kernel).dtype == jnp.float32
