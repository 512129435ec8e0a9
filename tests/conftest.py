"""Tests run on the CPU, also on a machine with a GPU: fp32 tolerances and bit equality are promises about that.

`DRAFT_JAX_TEST_GPU=1 pytest` runs instead, on the GPU, what is marked `gpu` (needs one) or `gpu_too` (holds on both).
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
#: Files that take longest, CPU seconds of most, longest first (`--durations=0` names them). A file is one worker's, so
#: one that starts late would leave the other core idle at the end.
LONGEST_FIRST = (
    "train/test_multi_process.py",
    "train/test_resume.py",
    "train/test_many_devices.py",
    "sglang/test_dspark_on_cpu.py",
    "sglang/test_engine_server.py",
    "sglang/test_training.py",
    "train/test_loop.py",
    "train/test_step.py",
    "draft_jax/test_objective.py",
    "train/evaluate/test_protocol.py",
    "train/test_in_loop.py",
    "draft_jax/test_attention_triton.py",
    "draft_jax/test_terms.py",
    "train/evaluate/test_command.py",
    "train/serve_check/test_command.py",
)

ON_GPU = os.environ.get("DRAFT_JAX_TEST_GPU") == "1"

if not ON_GPU:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gone = [name for name in LONGEST_FIRST if not (TESTS / name).is_file()]
    if gone:
        raise pytest.UsageError(f"LONGEST_FIRST in {__file__} names {', '.join(gone)}, which is not there")
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


@pytest.fixture(scope="session")
def compiled_programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JAX's cache of programs for one worker's tests."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def quick_compilation(compiled_programs: Path) -> Iterator[None]:
    """Most of a test of a tiny draft is compilation: less optimised, and each program only once for all modules that
    use this and the processes they start.

    Not for what is about the compiled program itself (memory, kernels, operations), nor for the loss row by row
    (test_terms.py), attention and the run that ends in an export: those are compiled as they are in use.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    options: dict[str, object] = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": str(compiled_programs),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in options}

    def apply(values: dict[str, object]) -> None:
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    apply(options)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in options.items():
            patch.setenv(name.upper(), str(value))
        yield
    apply(before)
