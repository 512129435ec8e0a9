"""Tests run on the CPU, also on a machine with a GPU: fp32 tolerances and bit equality are promises about that.

`DRAFT_JAX_TEST_GPU=1 pytest` runs instead, on the GPU, what is marked `gpu` (needs one) or `gpu_too` (holds on both).
"""

import os

import pytest

ON_GPU = os.environ.get("DRAFT_JAX_TEST_GPU") == "1"

if not ON_GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if ON_GPU:
        chosen = [item for item in items if item.get_closest_marker("gpu") or item.get_closest_marker("gpu_too")]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU and DRAFT_JAX_TEST_GPU=1"))
