"""Tests only: takes the place of the CPU build of sgl_kernel, which no package index carries.

On a CPU some modules of SGLang import operations by name from it while they load; all of them serve speculative
decoding and retraction, which these tests never reach. Each name is given a function that fails when called.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if not name.endswith("_cpu"):
        raise AttributeError(f"the tests' sgl_kernel has no {name}")

    def unavailable(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} was called, but only the tests' stand-in is installed")

    return unavailable
