"""Which SGLang versions the bridge knows, and the adapter for the installed one."""

from __future__ import annotations

import importlib
import importlib.metadata

from target_bridge.sglang.adapter import Adapter
from target_bridge.target import TargetError

#: version -> module of its adapter. SGLang's internals move with every release, so each is written and tested apart.
SUPPORTED = {
    "0.5.23": "target_bridge.sglang.v0_5_23",
    "0.5.16": "target_bridge.sglang.v0_5_16",
}


def installed_version() -> str:
    """Version of the installed sglang distribution.

    Raises:
        TargetError: there is none.
    """
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as error:
        raise TargetError(
            f"target.bridge is sglang, but SGLang is not installed: install one of {', '.join(SUPPORTED)} as"
            " docs/sglang.md says, or give target.bridge: hf"
        ) from error


def adapter_name(version: str) -> str:
    """Module of the adapter for a version.

    Raises:
        TargetError: the version is not supported; the message lists those that are.
    """
    module = SUPPORTED.get(version)
    if module is None:
        raise TargetError(
            f"SGLang {version} is installed; the bridge supports exactly {', '.join(SUPPORTED)} (its internals change"
            " with every release). Install one of them, or give target.bridge: hf"
        )
    return module


def make_adapter() -> Adapter:
    """The adapter for the installed version. Imports no part of sglang yet."""
    return importlib.import_module(adapter_name(installed_version())).make()
