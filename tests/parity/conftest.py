"""Fixtures of the parity tests. They run on the CPU: fp32 there is fp32, not TF32."""

import functools
import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import pytest
import torch

from tests.places import public_draft

from .cases import Case, build_case

torch.set_num_threads(1)


@pytest.fixture(scope="package", autouse=True)
def compile_fast():
    """Many small programs are compiled and each runs once: the compiler's optimisations only cost time."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


@pytest.fixture(scope="session")
def make_case() -> Callable[..., Case]:
    """`build_case` with memory: a case keeps its compiled programs. Cases are read-only."""
    remembered = functools.lru_cache(maxsize=None)(build_case)

    def make(heads: str = "vanilla", rope: str | None = None) -> Case:
        return remembered(heads, rope)

    return make


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """The folder whose data/ holds the public draft; skips where there is none."""
    return public_draft().parents[1]


@pytest.fixture
def gradients_of() -> Callable[..., dict[str, np.ndarray]]:
    """Gradients of a torch scalar by parameter name; zeros where nothing flows."""

    def gradients(case: Case, scalar: torch.Tensor) -> dict[str, np.ndarray]:
        names, parameters = zip(*case.model.named_parameters(), strict=True)
        found = torch.autograd.grad(scalar, parameters, allow_unused=True)
        return {
            name: (torch.zeros_like(p) if g is None else g).numpy()
            for name, p, g in zip(names, parameters, found, strict=True)
        }

    return gradients
