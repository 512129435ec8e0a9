"""First light of the SGLang bridge on a GPU: capture, hand-over, 300 steps, fenced against deep-copied.

    PYTHONPATH=/tmp/sglang_bundle/transformers:/tmp/sglang_bundle/rest:/tmp/site:$PWD \\
        python3 tools/h200/sglang_smoke.py TARGET [--steps 300] [--rows 8] [--length 512] [--device cuda]

TARGET is a model folder (SmolLM2-135M-Instruct); `random` makes one of its shape with random weights. After each part
one JSON line is printed: {"part", "s", ...}. Stock SGLang comes from tools/sglang_bundle (docs/sglang.md).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TAPS = (1, 8, 15, 22, 28)
DRAFT = {"layers": 2, "target_layer_ids": list(TAPS), "block_size": 7, "mask_token_id": 18, "markov_rank": 64}
_begin = time.perf_counter()


def say(part: str, **facts: Any) -> None:
    print(json.dumps({"part": part, "s": round(time.perf_counter() - _begin, 1), **facts}), flush=True)


def random_target(folder: Path) -> Path:
    """SmolLM2's shape, random weights; states differ visibly from layer to layer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True, rope_theta=100000.0,
        initializer_range=0.05,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: int, longest: int) -> Path:
    """Rows of random ids, ragged; the second two thirds are supervised."""
    import numpy as np

    rng = np.random.default_rng(0)
    with path.open("w") as file:
        for index in range(rows):
            length = int(rng.integers(longest // 4, longest + 1))
            mask = [0] * (length // 3) + [1] * (length - length // 3)
            ids = rng.integers(20, 49152, length).tolist()
            file.write(json.dumps({"id": str(index), "input_ids": ids, "loss_mask": mask}) + "\n")
    return path


def compare(target: Any, documents: list[Any], folder: Path) -> dict[str, Any]:
    """Largest relative norm of any document's difference, per tap and for the final state."""
    import torch

    from target_bridge.hf import load_hf_target

    captured = target.capture(documents)
    facts: dict[str, Any] = {}
    for dtype in ("bfloat16", "float32"):
        reference = load_hf_target(str(folder), TAPS, dtype=dtype, device=str(target.device))
        truth = reference.capture(documents)
        width = target.info.hidden_size
        gaps = [0.0] * (len(TAPS) + 1)
        for i in range(len(documents)):
            pieces = [*captured.context_hidden[i].split(width, -1), captured.last_hidden[i]]
            expected = [*truth.context_hidden[i].split(width, -1), truth.last_hidden[i]]
            for slot, (ours, theirs) in enumerate(zip(pieces, expected)):
                gap = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
                gaps[slot] = max(gaps[slot], gap)
        facts[f"vs_transformers_{dtype}"] = [round(gap, 5) for gap in gaps]
        if dtype == "bfloat16":
            embedding, _ = reference.frozen_head()
            ours_embedding, ours_head = target.frozen_head()
            facts["head_equals_transformers"] = bool(torch.equal(embedding[: target.info.vocab_size], ours_embedding))
            facts["tied"] = ours_head is ours_embedding
        del reference, truth
        if target.device.type == "cuda":
            torch.cuda.empty_cache()
    engine = target.engine
    facts["pool_full"] = engine.free_tokens == engine.facts.pool_tokens
    return facts


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
    return {"capture_ms": round(seconds * 1e3, 2), "tokens_per_s": round(rows * length / seconds)}


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
    return facts


def run_config(folder: Path, data: Path, run_dir: Path, args: argparse.Namespace, steps: int) -> Any:
    from train.config_file import build

    return build(
        {
            "target": {
                "path": str(folder),
                "bridge": "sglang",
                "device": args.device,
                "probe": run_dir.name == "fenced",
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
    for name, default in (("--steps", 300), ("--rows", 8), ("--length", 512), ("--compared", 8)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--device", default="cuda", help="cpu = a dry run of this script")
    args = parser.parse_args()
    on_gpu = args.device != "cpu"

    import os

    # Equal runs shall have equal bits.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true"
    from train.runtime import prepare_environment

    prepare_environment(0.3)
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

    rng = np.random.default_rng(0)
    documents = [rng.integers(20, 49152, n) for n in (5, 300, 1, 64, 511, 128, 17, 33)]
    common: dict[str, Any] = {"dtype": "bfloat16", "device": args.device, "longest": args.length}
    for page_size in (16, 1):
        options = EngineOptions(page_size=page_size, max_tokens_per_forward=1024)
        target = load_sglang_target(str(folder), TAPS, options=options, **common)
        say("start", page_size=page_size, facts=vars(target.engine.facts))
        say("capture", page_size=page_size, **compare(target, documents, folder))
        target.close()
    step_tokens = args.rows * args.length
    target = load_sglang_target(str(folder), TAPS, step_tokens=step_tokens, **common)
    say("capture_speed", rows=args.rows, length=args.length, **capture_speed(target, args.rows, args.length))
    say("hand_over", **hand_over(target))

    data = write_rows(work / "rows.jsonl", 400, args.length)
    runs = {}
    for name in ("fenced", "fenced_again", "copied"):
        undo = deep_copies() if name == "copied" else (lambda: None)
        config = run_config(folder, data, work / name, args, args.compared)
        lines = training(config, target)
        undo()
        runs[name] = ([line["loss"] for line in lines], parameters(config))
        say("equality_run", name=name, losses=[round(loss, 6) for loss in runs[name][0]])
    first = runs["fenced"]
    say(
        "fenced_equals_copied",
        steps=args.compared,
        losses_equal=first[0] == runs["copied"][0],
        parameter_gap_copied=largest_gap(first[1], runs["copied"][1]),
        parameter_gap_again=largest_gap(first[1], runs["fenced_again"][1]),
    )

    lines = training(run_config(folder, data, work / "long", args, args.steps), target)
    late = lines[len(lines) // 2 :]
    say(
        "train",
        steps=len(lines),
        first_loss=lines[0]["loss"],
        last_loss=lines[-1]["loss"],
        finite=bool(np.isfinite([line["loss"] for line in lines]).all()),
        ms_per_step=round(1e3 * sum(line["seconds_per_step"] for line in late) / len(late), 2),
        tokens_per_s=round(sum(line["tokens_per_second"] for line in late) / len(late)),
        pool_full=target.engine.free_tokens == target.engine.facts.pool_tokens,
        memory_gib=round(torch.cuda.max_memory_reserved() / 2**30, 2) if on_gpu else 0,
    )
    target.close()
    say("done")


if __name__ == "__main__":
    main()
