"""First light of the SGLang bridge on a GPU: capture, hand-over, 300 steps, fenced against deep-copied.

    PYTHONPATH=/tmp/sglang_bundle/transformers:/tmp/sglang_bundle/rest:/tmp/site:$PWD \\
        python3 tools/h200/sglang_smoke.py TARGET [--steps 300] [--rows 8] [--length 512] [--device cuda]

TARGET is a model folder (SmolLM2-135M-Instruct); `random` makes one of its shape with random weights. After each part
one JSON line is printed: {"part", "s", "ok", ...}. A part that fails says so and the next one runs; the exit code is 1
then. Stock SGLang comes from tools/sglang_bundle (docs/sglang.md).
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from random_target import random_target, write_rows  # beside this script

TAPS = (1, 8, 15, 22, 28)
DRAFT = {"layers": 2, "target_layer_ids": list(TAPS), "block_size": 7, "mask_token_id": 18, "markov_rank": 64}
_begin = time.perf_counter()
_failed: list[str] = []


def say(part: str, **facts: Any) -> None:
    print(json.dumps({"part": part, "s": round(time.perf_counter() - _begin, 1), **facts}), flush=True)


def attempt(part: str, measure: Callable[[], dict[str, Any]], **facts: Any) -> None:
    """Say what a part measured, or what went wrong in it: what comes after is still worth running."""
    try:
        measured = measure()
    except Exception as error:
        traceback.print_exc()
        measured = {"ok": False, "error": f"{type(error).__name__}: {str(error)[:600]}"}
    say(part, **facts, **measured)
    if not measured["ok"]:
        _failed.append(part)


def compare(target: Any, documents: list[Any], folder: Path) -> dict[str, Any]:
    """Largest relative norm of any document's difference from Transformers, per tap and for the final state.

    In bfloat16 nobody is exact. The engine passes where it is as near to Transformers in float32 as Transformers in
    bfloat16 is, within half as much again.
    """
    import torch

    from target_bridge.hf import load_hf_target

    def gaps(captured: Any, truth: Any) -> list[float]:
        width, largest = target.info.hidden_size, [0.0] * (len(TAPS) + 1)
        for i in range(len(documents)):
            pieces = [*captured.context_hidden[i].split(width, -1), captured.last_hidden[i]]
            expected = [*truth.context_hidden[i].split(width, -1), truth.last_hidden[i]]
            for slot, (ours, theirs) in enumerate(zip(pieces, expected)):
                gap = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
                largest[slot] = max(largest[slot], gap)
        return [round(gap, 5) for gap in largest]

    captured = target.capture(documents)
    truths: dict[str, Any] = {}
    facts: dict[str, list[float]] = {}
    for dtype in ("bfloat16", "float32"):
        reference = load_hf_target(str(folder), TAPS, dtype=dtype, device=str(target.device))
        truths[dtype] = reference.capture(documents)
        facts[f"vs_transformers_{dtype}"] = gaps(captured, truths[dtype])
        if dtype == "bfloat16":
            embedding, _ = reference.frozen_head()
            ours_embedding, ours_head = target.frozen_head()
            equal = bool(torch.equal(embedding[: target.info.vocab_size], ours_embedding))
            tied = ours_head is ours_embedding
        del reference
        if target.device.type == "cuda":
            torch.cuda.empty_cache()
    facts["transformers_bfloat16_vs_float32"] = gaps(truths["bfloat16"], truths["float32"])
    rounding = zip(facts["vs_transformers_float32"], facts["transformers_bfloat16_vs_float32"])
    close = all(ours <= 1.5 * theirs + 0.003 for ours, theirs in rounding)
    ok = close and equal and pool_full(target)
    return {"ok": ok, **facts, "head_equals_transformers": equal, "tied": tied, "pool_full": pool_full(target)}


def pool_full(target: Any) -> bool:
    return target.engine.free_tokens == target.engine.facts.pool_tokens


def resets(target: Any, documents: list[Any], cycles: int) -> dict[str, Any]:
    """Captures, each followed by a reset of the pools: nothing is lost, and states are the same bits."""
    import torch

    first = target.capture(documents)
    same = True
    for _ in range(cycles):
        target.engine.reset()
        again = target.capture(documents)
        same = same and all(torch.equal(a, b) for a, b in zip(first.last_hidden, again.last_hidden))
    return {"ok": pool_full(target), "cycles": cycles, "pool_full": pool_full(target), "same_bits": same}


def capture_speed(target: Any, rows: int, length: int) -> dict[str, Any]:
    import numpy as np

    from target_bridge.fence import torch_done

    rng = np.random.default_rng(1)
    documents = [rng.integers(20, 49152, length) for _ in range(rows)]
    target.capture(documents)
    torch_done(target.device)
    begin = time.perf_counter()
    for _ in range(10):
        target.capture(documents)
    torch_done(target.device)
    seconds = (time.perf_counter() - begin) / 10
    return {"ok": True, "capture_ms": round(seconds * 1e3, 2), "tokens_per_s": round(rows * length / seconds)}


def hand_over(target: Any) -> dict[str, Any]:
    """Addresses on both sides."""
    import numpy as np

    from target_bridge.handoff import frozen_to_jax, to_jax
    from target_bridge.staging import StagingRing

    embedding, head = target.frozen_head()
    frozen = frozen_to_jax(embedding, head)
    facts: dict[str, Any] = {
        "embedding_same_pointer": frozen.embedding.unsafe_buffer_pointer() == embedding.data_ptr(),
        "head_same_pointer": frozen.lm_head.unsafe_buffer_pointer() == head.data_ptr(),
        "engine_same_pointer": embedding.data_ptr() == target.engine.model.get_embed_and_head()[0].data_ptr(),
    }
    captured = target.capture([np.arange(20, 84)])
    states = captured.context_hidden[0]
    array = to_jax(states, zero_copy=True)
    facts["captured_same_pointer"] = array.unsafe_buffer_pointer() == states.data_ptr()
    facts["captured_same_values"] = bool(np.array_equal(np.asarray(array).astype(np.float32), states.float().cpu()))
    ring = StagingRing(1, 2, 64, states.shape[1], target.info.hidden_size, states.dtype, states.device)
    with ring.lease() as slot:
        slot.fill(0, 0, states, captured.last_hidden[0])
        seen: list[int] = []

        def views(context: Any, last: Any) -> tuple[Any, Any]:
            seen.extend((context.data_ptr(), last.data_ptr()))
            return to_jax(context, zero_copy=True), to_jax(last, zero_copy=True)

        context, last = slot.hand_over(views)
        facts["slot_same_pointer"] = [context.unsafe_buffer_pointer(), last.unsafe_buffer_pointer()] == seen
        slot.fence(context + 1)
    return {"ok": all(facts.values()), **facts}


def run_config(folder: Path, data: Path, run_dir: Path, args: argparse.Namespace, steps: int) -> Any:
    from train.config_file import build

    return build(
        {
            "target": {
                "path": str(folder),
                "bridge": "sglang",
                "device": args.device,
                "probe": run_dir.name == "fenced" and args.target != "random",
            },
            "data": {"path": str(data), "format": "tokens", "max_length": args.length},
            "draft": DRAFT,
            "objective": {"num_anchors": 64},
            "train": {"steps": steps, "batch_rows": args.rows, "memory_fraction": 0.3},
            "checkpoint": {"every": 0, "keep_best": 0},
            "logging": {"progress": False, "every": 1},
            "run_dir": str(run_dir),
        }
    )


def training(config: Any, target: Any) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a run."""
    from train.loop import run

    run(config, target=target)
    return [json.loads(line) for line in (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()]


def deep_copies() -> Any:
    """Hand-overs that share nothing with torch; returns what undoes it."""
    import jax
    import numpy as np

    from train import feeding

    real = feeding.handoff.to_batch

    def copied(*arguments: Any, **options: Any) -> Any:
        batch = jax.block_until_ready(real(*arguments, **options))
        return jax.tree.map(lambda x: jax.device_put(np.array(x, copy=True), x.sharding), batch)

    feeding.handoff.to_batch = copied
    return lambda: setattr(feeding.handoff, "to_batch", real)


def parameters(config: Any) -> list[Any]:
    import jax
    import numpy as np

    from train.checkpoint import load_trained

    return [np.asarray(leaf) for leaf in jax.tree.leaves(load_trained(Path(config.run_dir))[1])]


def largest_gap(a: list[Any], b: list[Any]) -> float:
    import numpy as np

    return max(float(np.abs(x.astype(np.float64) - y.astype(np.float64)).max()) for x, y in zip(a, b, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    for name, default in (("--steps", 300), ("--rows", 8), ("--length", 512), ("--compared", 8), ("--cycles", 50)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--device", default="cuda", help="cpu = a dry run of this script")
    parser.add_argument("--no-exact", action="store_true", help="XLA's own choice of algorithms; bits may then differ")
    args = parser.parse_args()
    on_gpu = args.device != "cpu"

    import os

    if not args.no_exact:  # equal runs shall have equal bits
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true"
    from train.runtime import prepare_environment

    prepare_environment(0.1)
    import jax
    import numpy as np

    work = Path(tempfile.mkdtemp())
    jax.config.update("jax_compilation_cache_dir", str(work / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    assert (jax.default_backend() == "gpu") == on_gpu, jax.default_backend()
    jax.block_until_ready(jax.numpy.zeros(()))  # reserves JAX's share
    import torch

    free, total = torch.cuda.mem_get_info() if on_gpu else (0, 0)
    say(
        "jax", jax=jax.__version__, torch=torch.__version__, free_gib=round(free / 2**30, 1), of=round(total / 2**30, 1)
    )
    folder = random_target(work / "target") if args.target == "random" else Path(args.target)

    from target_bridge.sglang.load import load_sglang_target
    from target_bridge.sglang.options import EngineOptions

    say("imported")
    rng = np.random.default_rng(0)
    documents = [rng.integers(20, 49152, n) for n in (5, 300, 1, 64, 511, 128, 17, 33)]
    common: dict[str, Any] = {"dtype": "bfloat16", "device": args.device, "longest": args.length}

    def load(**options: Any) -> Any:
        chosen: dict[str, Any] = {"mem_fraction_static": 0.6} if on_gpu else {}  # others may be taking memory meanwhile
        return load_sglang_target(
            str(folder), TAPS, options=EngineOptions(**chosen, **options), step_tokens=args.rows * args.length, **common
        )

    def first_light(page_size: int) -> dict[str, Any]:
        target = load(page_size=page_size, max_tokens_per_forward=1024)
        try:
            say("start", facts=vars(target.engine.facts))
            facts = compare(target, documents, folder)
            cycles = resets(target, documents, args.cycles)
            return {**facts, **cycles, "ok": facts["ok"] and cycles["ok"]}
        finally:
            target.close()

    for page_size in (16, 1):
        attempt("capture", functools.partial(first_light, page_size), page_size=page_size)
    target = load()
    attempt("capture_speed", lambda: capture_speed(target, args.rows, args.length), rows=args.rows, length=args.length)
    attempt("hand_over", lambda: hand_over(target))

    data = write_rows(work / "rows.jsonl", 400, args.length)

    def fenced_equals_copied() -> dict[str, Any]:
        runs = {}
        for name in ("fenced", "fenced_again", "copied"):
            undo = deep_copies() if name == "copied" else (lambda: None)
            config = run_config(folder, data, work / name, args, args.compared)
            lines = training(config, target)
            undo()
            runs[name] = ([line["loss"] for line in lines], parameters(config))
            say("equality_run", name=name, losses=[round(loss, 6) for loss in runs[name][0]])
        first, again, copied = (runs[name] for name in ("fenced", "fenced_again", "copied"))
        losses_equal, gap = first[0] == copied[0], largest_gap(first[1], copied[1])
        return {
            "ok": losses_equal and gap == 0,
            "steps": args.compared,
            "losses_equal": losses_equal,
            "parameter_gap_copied": gap,
            "parameter_gap_again": largest_gap(first[1], again[1]),
        }

    attempt("fenced_equals_copied", fenced_equals_copied)

    def long_run() -> dict[str, Any]:
        lines = training(run_config(folder, data, work / "long", args, args.steps), target)
        late = lines[len(lines) // 2 :]
        finite = bool(np.isfinite([line["loss"] for line in lines]).all())
        return {
            "ok": finite and len(lines) == args.steps and pool_full(target),
            "steps": len(lines),
            "first_loss": lines[0]["loss"],
            "last_loss": lines[-1]["loss"],
            "finite": finite,
            "ms_per_step": round(1e3 * sum(line["seconds_per_step"] for line in late) / len(late), 2),
            "tokens_per_s": round(sum(line["tokens_per_second"] for line in late) / len(late)),
            "pool_full": pool_full(target),
            "memory_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2) if on_gpu else 0,
        }

    attempt("train", long_run)
    target.close()
    say("done", ok=not _failed, failed=_failed)
    raise SystemExit(1 if _failed else 0)


if __name__ == "__main__":
    main()
