"""Where tests look for what is too large to ship; a test that needs a missing one skips and says how to get it."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def public_draft() -> Path:
    """A DSpark draft for SmolLM2 that DeepSpec's trainer made: $DRAFT_JAX_SHARED, or `shared` beside the checkout."""
    base = os.environ.get("DRAFT_JAX_SHARED") or ROOT.parent / "shared"
    folder = Path(base) / "data" / "dspark_smollm2_deepspec"
    if not (folder / "model.safetensors").is_file():
        pytest.skip(f"{folder} is not here: set DRAFT_JAX_SHARED to a folder with data/dspark_smollm2_deepspec")
    return folder


def public_conversations() -> Path:
    """The conversations the quickstart's were chosen from, in the same place."""
    path = public_draft().parent / "smollm2_conversations.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    return path


def small_target() -> Path:
    """SmolLM2-135M-Instruct where `make test` and `make quickstart` put it."""
    from target_bridge.small_target import COMPLETE, default_folder

    folder = default_folder()
    if not (folder / COMPLETE).is_file():
        pytest.skip(f"SmolLM2-135M-Instruct is not in {folder}: `make small-target` fetches it")
    return folder
