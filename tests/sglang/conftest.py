"""The real SGLang on a CPU: what it needs in this process before it, or Transformers, is imported.

The whole folder is skipped where SGLang is not installed: `make test-sglang` makes an environment that has it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

STANDIN = Path(__file__).parent / "standin"

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    os.environ.setdefault("SGLANG_NCCL_SO_PATH", "/nonexistent")  # a CUDA build of torch would load NCCL for gloo
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # else the first tp forward compiles for seconds
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if importlib.metadata.version("sglang") == "0.5.16":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # its paged allocator is a Triton kernel, on a CPU too
    for path in (str(STANDIN),) if importlib.util.find_spec("sgl_kernel") is None else ():
        sys.path.append(path)
        # For child processes: SGLang's own, and those of the tests.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), path)))
    import torchvision_schemas

    torchvision_schemas.install()


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folder of a random model, made once for the same arguments."""
    from tests.sglang.models import save_model

    made: dict[str, Path] = {}

    def make(kind: str, **changes: object) -> Path:
        key = repr((kind, sorted(changes.items())))
        if key not in made:
            made[key] = save_model(kind, tmp_path_factory.mktemp(kind), **changes)
        return made[key]

    return make


@pytest.fixture
def documents() -> list[np.ndarray]:
    """Ragged token ids below 70; one of a single token, one of exactly two pages of 16."""
    rng = np.random.default_rng(3)
    return [rng.integers(0, 70, size=count).astype(np.int32) for count in (5, 40, 1, 23, 32, 7)]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(tokens not computed, tokens of the text) of every request that is run from here on."""
    from target_bridge.sglang.engine import Engine

    seen: list[tuple[int, int]] = []
    forward = Engine.forward

    def watched(self, requests):
        made = forward(self, requests)
        seen.extend((len(request.ids) - len(part.last), len(request.ids)) for request, part in zip(requests, made))
        return made

    monkeypatch.setattr(Engine, "forward", watched)
    return seen
