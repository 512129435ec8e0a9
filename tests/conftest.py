"""Tests run on the CPU, also on a machine with a GPU: fp32 tolerances and bit equality are promises about that.

`DRAFT_JAX_TEST_GPU=1 pytest` runs instead, on the GPU, what is marked `gpu` (needs one) or `gpu_too` (holds on both).
"""

import os
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
#: Files that take longest, CPU seconds of most, longest first (`--durations=0` names them). A file is one worker's, so
#: one that starts late would leave the other core idle at the end.
LONGEST_FIRST = (
    "train/test_multi_process.py",
    "sglang/test_dspark_on_cpu.py",
    "sglang/test_engine_server.py",
    "sglang/test_training.py",
    "train/test_step.py",
    "train/evaluate/test_command.py",
    "draft_jax/test_objective.py",
    "train/evaluate/test_protocol.py",
    "draft_jax/test_attention_triton.py",
    "draft_jax/test_decode.py",
    "draft_jax/test_terms.py",
    "train/serve_check/test_command.py",
    "train/data/test_prepare.py",
)

ON_GPU = os.environ.get("DRAFT_JAX_TEST_GPU") == "1"

if not ON_GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place = {TESTS / name: i for i, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))  # stable: the rest as collected
    if ON_GPU:
        chosen = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("gpu_too")]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU and DRAFT_JAX_TEST_GPU=1"))
