"""What the two halves of a custom derivative hand each other beside arrays."""

from dataclasses import dataclass

import jax
import numpy as np


@jax.tree_util.register_static
@dataclass(frozen=True)
class DtypeOf:
    """The dtype a gradient has to have, kept out of the program.

    An empty array would carry it too, but jaxlib 0.11.2 ends the process (a segmentation fault in the partitioner's
    canonicalisation) when it meets one inside a `shard_map` over several devices.
    """

    dtype: np.dtype
