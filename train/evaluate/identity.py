"""What two measurements must share to be comparable: the same prompts, and the same draft, told by their content.

A path says nothing: a file changes under its name, and one draft has many folders. The digests go into every
evaluation's settings, and whoever puts two evaluations side by side compares them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from draft_jax.config import DraftConfig

#: Fields of a draft's configuration that change none of its outputs.
_RECORDED_ONLY = frozenset({
    "bos_token_id", "eos_token_id", "pad_token_id", "target_name", "initializer_range", "num_anchors",
})  # fmt: skip


def prompts_digest(prompts: Iterable[tuple[str, np.ndarray, int]]) -> str:
    """Digest of what was asked: per prompt its id, its token ids and how many tokens it may generate.

    Args:
        prompts: (id, int [T] input ids, most new tokens), in the order they are decoded. The order does not
            count: neither evaluation nor serving depends on it.
    """
    lines = sorted(json.dumps([name, np.asarray(ids).tolist(), int(budget)]) for name, ids, budget in prompts)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def draft_digest(config: DraftConfig, params: Any) -> str:
    """Digest of a draft's configuration and of its tensors as they are served: rounded to bf16.

    A run and its export therefore have the same digest, although the run's masters are fp32.
    """
    import ml_dtypes

    from draft_jax import weights

    fields = {name: value for name, value in dataclasses.asdict(config).items() if name not in _RECORDED_ONLY}
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode())
    for name, tensor in sorted(weights.to_torch_layout(params, config, dtype=ml_dtypes.bfloat16).items()):
        digest.update(f"{name} {tensor.shape}".encode())
        digest.update(np.ascontiguousarray(tensor).view(np.uint16).tobytes())
    return digest.hexdigest()
