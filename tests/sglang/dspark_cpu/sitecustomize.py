"""Tests only: lets the server processes of SGLang 0.5.23 serve a DSpark draft on a CPU.

Stock SGLang refuses that. With this folder on PYTHONPATH (and TRITON_INTERPRET=1) its scheduler, DSpark worker, Triton
attention, acceptance and accounting run as they are, interpreted, slowly; changed are three things around them:

- the device check of the argument handler, which is shown a CUDA device;
- `Tensor.bfloat16`, by which the model runner casts a draft's input embeddings: left as they are, since Triton's
  interpreter computes wrong attention in bfloat16, and float32 also makes equality exact;
- `Tensor.record_stream`, which a CPU tensor does not know.
"""

import importlib.abc
import importlib.util
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "standin"))
import torchvision_schemas

torchvision_schemas.install()
import torch  # noqa: E402

torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
torch.Tensor.bfloat16 = lambda self, **options: self  # type: ignore[method-assign,assignment]
HANDLER = "sglang.srt.arg_groups.speculative_hook"


class _OnCuda:
    """Resolved server arguments that name a CUDA device."""

    def __init__(self, arguments):
        self._arguments = arguments

    def __getattr__(self, name):
        return "cuda" if name == "device" else getattr(self._arguments, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the argument handler's module when it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != HANDLER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_wrap(module):
            execute(module)
            handle, view = module._handle_dspark, module.resolving_view

            def wrapped(server_args):
                module.resolving_view = lambda arguments: _OnCuda(view(arguments))
                try:
                    return handle(server_args)
                finally:
                    module.resolving_view = view

            module._handle_dspark = wrapped

        spec.loader.exec_module = execute_and_wrap
        return spec


sys.meta_path.insert(0, _Finder())
