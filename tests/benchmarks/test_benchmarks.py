"""The benchmarks' own arithmetic: sizes by name, summaries, plots, and a step that runs where only JAX is."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import grow, loop, measure, shapes
from draft_jax.cost import Shape, layer_parameters, step_flops, step_memory

ROOT = Path(__file__).resolve().parents[2]


def draft(*arguments):
    parser = argparse.ArgumentParser()
    shapes.add_arguments(parser)
    return shapes.sizes_of(parser.parse_args(arguments)).draft()


def test_sizes_by_name_and_by_number():
    """The published counts of dspark_spec 1.7, and options that win over the name."""
    qwen = draft("--shape", "qwen3-8b")
    assert layer_parameters(qwen) * 5 == pytest.approx(964.7e6, rel=1e-3)
    assert (qwen.block_size, qwen.num_taps, qwen.markov_rank) == (7, 5, 256)
    changed = draft("--shape", "qwen3-8b", "--vocab", "1000", "--layers", "2", "--markov-rank", "0")
    assert (changed.vocab_size, changed.num_hidden_layers, changed.markov_rank) == (1000, 2, 0)
    for name in shapes.TARGETS:
        assert draft("--shape", name).hidden_size == shapes.TARGETS[name]["hidden"]


def test_operations_of_the_published_step():
    """dspark_spec 8.1: 39.5 TFLOP at 4096 tokens; at 1024 fewer target rows than draft rows."""
    qwen = draft("--shape", "qwen3-8b")
    flops = step_flops(qwen, Shape(1, 4096, 512))
    assert sum(flops.values()) == pytest.approx(39.5e12, rel=0.01)
    short = step_flops(qwen, Shape(1, 1024, 512))
    assert short["vocabulary, target"] / flops["vocabulary, target"] == pytest.approx(1024 / 3584)
    assert short["vocabulary, draft"] == flops["vocabulary, draft"]


#: GiB of temporaries of programs compiled for an H200 without a GPU (jax 0.10.2, triton attention, bf16).
COMPILED = {
    ("qwen3-8b", 4096, 512): 4.483,
    ("qwen3-8b", 1024, 512): 4.292,
    ("qwen3-8b", 4096, 128): 2.559,
    ("glm-5.2", 4096, 512): 5.033,
    ("qwen3-8b, layers again", 4096, 512): 2.791,  # jax 0.11.2
    ("qwen3-4b", 4096, 512): 3.800,
}


@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_memory_formula(case):
    name, length, anchors = case
    name, _, again = name.partition(", ")
    parts = step_memory(draft("--shape", name), Shape(1, length, anchors, rematerialise=bool(again)), "triton")
    assert sum(parts.values()) / 2**30 == pytest.approx(COMPILED[case], rel=0.15)


def test_summary_weighs_steps_by_their_time():
    lines = [
        {"seconds_per_step": 1.0, "tokens_per_second": 100.0, "capture_share": 0.5, "draft_share": 0.5},
        {"seconds_per_step": 3.0, "tokens_per_second": 20.0, "capture_share": 0.1, "draft_share": 0.5},
    ]
    summary = loop.summarize(lines, rows_per_step=8)
    assert summary["tokens_per_second"] == pytest.approx((100 + 60) / 4)
    assert summary["rows_per_second"] == pytest.approx(16 / 4)
    assert summary["target_share"] == pytest.approx(0.2)
    assert summary["idle_share"] == pytest.approx(0.3)


def test_growth_compiles_every_point_once_and_measures_each(monkeypatch, capsys):
    """A point that two axes share is one run; one that fails is named and left out; all share one cache."""
    runs = []

    def run(options, environment):
        runs.append((list(options), environment["JAX_COMPILATION_CACHE_DIR"]))
        if "--compile-only" in options:
            return subprocess.CompletedProcess(options, 0, "", "")
        values = {name[2:]: int(value) for name, value in zip(options[2::2], options[3::2])}
        if values["anchors"] == 1024:
            return subprocess.CompletedProcess(options, 1, "", "warning\nout of memory")
        return subprocess.CompletedProcess(options, 0, json.dumps(values) + "\n", "")

    monkeypatch.setattr(grow, "_run", run)
    axes = {"length": (1024, 4096), "anchors": (512, 1024), "vocab": (1000,)}
    lines = grow.measure_points(axes, grow.FIXED, ["--shape", "qwen3-8b"], jobs=2)
    assert [(line["axis"], line["value"], line["length"], line["anchors"]) for line in lines] == [
        ("length", 1024, 1024, 512),
        ("length", 4096, 4096, 512),
        ("anchors", 512, 4096, 512),
        ("vocab", 1000, 4096, 512),
    ]
    assert len(runs) == 8
    assert sum("--compile-only" in options for options, _ in runs) == 4
    assert len({cache for _, cache in runs}) == 1
    assert "--anchors 1024 --length 4096: out of memory" in capsys.readouterr().err


def test_growth_plot(tmp_path):
    lines = [
        {
            "axis": axis,
            "value": v,
            "accumulate_ms": 10.0 + v,
            "tflop": 1.0 + v,
            "temporary_gib": 2.0,
            "tflop_per_s": 5.0,
        }
        | {"shape": "qwen3-8b", "device": "cpu", "dtype": "bfloat16"}
        for axis in ("length", "anchors")
        for v in (2, 1)
    ]
    path = tmp_path / "growth.png"
    grow.plot(lines, path)
    assert path.stat().st_size > 5000
    assert grow.table(lines).splitlines()[2] == "| length 2 | 12.0 | 3.0 | 5 | 2.0 |"


def test_relative_error_and_medians():
    assert measure.relative_error(np.array([3.0, 4.0]), np.array([3.0, 0.0])) == pytest.approx(4 / 3)
    calls = []
    assert measure.median_ms(lambda: calls.append(0) or np.zeros(1), repeats=3, warm_up=2) >= 0
    assert len(calls) == 5


def test_a_step_is_measured():
    """The command of RESULTS.md at a tiny size prints one JSON line with every number."""
    sizes = "--vocab 128 --hidden 32 --mlp 64 --heads 2 --kv-heads 1 --head-dim 16 --layers 1 --taps 2 --markov-rank 8"
    command = [sys.executable, "-m", "benchmarks.step", "--shape", "smollm2", *sizes.split()]
    command += ["--length", "32", "--anchors", "4", "--repeats", "2", "--dtype", "float32", "--attention", "xla"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [json.loads(text) for text in done.stdout.splitlines()]
    for name in ("accumulate_ms", "apply_ms", "tflop_per_s", "share_of_product_rate", "temporary_gib", "compile_s"):
        assert line[name] > 0, name
    assert line["chunk_rows"] == 28
