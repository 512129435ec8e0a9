"""The real SGLang on a CPU: what it needs in this process before it, or Transformers, is imported.

The whole folder is skipped where SGLang is not installed; `make test-sglang` makes an environment that has it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("SGLANG_NCCL_SO_PATH", "/nonexistent")  # a CUDA build of torch would load NCCL for gloo
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # else the first tp forward compiles for seconds
    import torch

    if torch.version.cuda is None:
        # PyPI's torchvision is built for CUDA: beside a CPU build of torch its library cannot load, and its Python
        # part then misses the schemas of two operations. Nothing here calls them.
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
    if importlib.util.find_spec("sgl_kernel") is None:
        sys.path.append(str(Path(__file__).parent / "standin"))
