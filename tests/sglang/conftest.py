"""The real SGLang on a CPU: what it needs in this process before it, or Transformers, is imported.

The whole folder is skipped where SGLang is not installed: `make test-sglang` makes an environment that has it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

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
