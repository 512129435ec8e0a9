"""Tests only: lets PyPI's torchvision, which is built for CUDA, load beside a CPU build of torch.

Its compiled library cannot load there, and its Python part then misses the schemas of two operations that nothing
here calls. SGLang and Transformers import torchvision when it is installed, and SGLang demands it.
"""

import importlib.abc
import sys
from typing import Any


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for operation in ("nms", "qnms") if torch.version.cuda is None else ():
                if not hasattr(torch.ops.torchvision, operation):
                    schema = "(Tensor dets, Tensor scores, float threshold) -> Tensor"
                    torch.library.define(f"torchvision::{operation}", schema)


def install() -> None:
    """Declare the schemas when torchvision is first imported."""
    sys.meta_path.insert(0, _Finder())
