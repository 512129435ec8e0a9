"""What `sglang` is replaced by where no server can run; see `sglang/__init__.py`."""

import importlib.util
from pathlib import Path

FOLDER = Path(__file__).parent


def load():
    """The stand-in as a module of another name, so that a real sglang stays importable."""
    spec = importlib.util.spec_from_file_location("fake_sglang_module", FOLDER / "sglang" / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
