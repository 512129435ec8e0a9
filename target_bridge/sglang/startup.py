"""Starting an adapter: quietly, and with errors in our words."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

from target_bridge.sglang.adapter import Adapter, Start
from target_bridge.sglang.world import larger_world_allowed
from target_bridge.target import TargetError


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """SGLang without its remarks about models and kernels that nobody asked for; a level set by the user stays."""
    logger = logging.getLogger("sglang")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def start_adapter(adapter: Adapter, start: Start, version: str) -> str:
    """Start an adapter and return the name of its capture hook.

    Args:
        adapter: not yet started.
        start: everything resolved.
        version: of SGLang, for messages.

    Raises:
        TargetError: SGLang cannot be imported or cannot start; the message has its first line.
    """
    try:
        with _quiet(), larger_world_allowed():
            return adapter.start(start)
    except TargetError:
        raise
    except ModuleNotFoundError as error:
        raise TargetError(
            f"SGLang {version} could not be imported: {error}. docs/sglang.md lists what it needs on"
            f" {'a CPU' if start.device.type == 'cpu' else 'a GPU'}"
        ) from error
    except Exception as error:
        first = (str(error).strip() or repr(error)).split("\n")[0]
        raise TargetError(
            f"SGLang {version} could not start target {start.model_path} on {start.device}:"
            f" {type(error).__name__}: {first}"
        ) from error
