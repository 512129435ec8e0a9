"""Comparing trees of arrays."""

import jax
import numpy as np


def assert_close(ours, theirs, tolerance=1e-5):
    """Equal within `tolerance` of the largest magnitude of each leaf (or of 1)."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs)):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1.0, np.abs(b).max(initial=0)), err_msg=str(path))
