"""First light of a target over two GPUs: own rows' states, the joined head, SGLang's and JAX's collectives in turn.

    torchrun --nproc-per-node 2 tools/h200/sglang_tp_smoke.py TARGET [--turns 1000] [--device cuda]

with the PYTHONPATH of tools/h200/sglang_smoke.py. Rank 0 prints one JSON line per part; any rank that is not content
stops all. On a CPU (--device cpu) it is a dry run of this script.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

TAPS = (1, 8, 15, 22, 28)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    on_gpu = args.device != "cpu"

    from train.distributed import World, start_jax
    from train.runtime import prepare_environment
    from train.topology import Topology

    begin = time.perf_counter()
    topology = Topology.from_environment()
    rank, size = topology.rank, topology.world_size

    def say(part: str, **facts: Any) -> None:
        if rank == 0:
            print(json.dumps({"part": part, "s": round(time.perf_counter() - begin, 1), **facts}), flush=True)

    prepare_environment(0.3)
    import torch

    if on_gpu:
        torch.cuda.set_device(topology.local_rank)
    else:
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(size)))
    start_jax(topology)
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    assert (jax.default_backend() == "gpu") == on_gpu
    assert jax.device_count() == size
    jax.block_until_ready(jnp.zeros(()))
    world = World(topology)  # initialises torch.distributed; the target forms its groups in there
    say("world", size=size, jax=jax.__version__, torch=torch.__version__)

    from target_bridge.hf import load_hf_target
    from target_bridge.sglang.load import load_sglang_target
    from target_bridge.sglang.options import EngineOptions

    target = load_sglang_target(
        args.target,
        TAPS,
        options=EngineOptions(tp_size=size, page_size=16, max_tokens_per_forward=1024),
        dtype="bfloat16",
        device=args.device,
        longest=1024,
    )
    say("start", facts=vars(target.engine.facts))
    rng = np.random.default_rng(rank)
    documents = [rng.integers(20, 49152, n) for n in (5 + rank, 300, 1, 128)[: 4 - rank]]
    captured = target.capture(documents)
    reference = load_hf_target(args.target, TAPS, dtype="bfloat16", device=args.device)
    truth = reference.capture(documents)
    gaps = [
        float((ours.float() - theirs.float()).norm() / theirs.float().norm())
        for ours, theirs in zip(
            (*captured.context_hidden, *captured.last_hidden), (*truth.context_hidden, *truth.last_hidden)
        )
    ]
    heads_equal = all(
        torch.equal(ours, theirs[: target.info.vocab_size])
        for ours, theirs in zip(target.frozen_head(), reference.frozen_head())
    )
    assert max(gaps) < 0.1, (rank, gaps)
    assert heads_equal, rank
    weights = dict(target.engine.model.named_parameters())
    shard = list(next(value for name, value in weights.items() if "layers.0" in name and "qkv" in name).shape)
    say("capture", largest_gap=round(max(gaps), 5), heads_equal=heads_equal, qkv_of_this_rank=shard)
    del reference, truth

    # In turn: the layers' all-reduces of torch, then one of JAX over the captured states, with both fences.
    from target_bridge.handoff import to_global
    from target_bridge.staging import StagingRing

    mesh = jax.sharding.Mesh(np.array(sorted(jax.devices(), key=lambda d: d.process_index)), ("rows",))
    rows = NamedSharding(mesh, PartitionSpec("rows"))
    total = jax.jit(
        lambda states: jnp.sum(states.astype(jnp.float32), axis=(0, 1)),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )
    ring = StagingRing(1, 1, 64, len(TAPS) * target.info.hidden_size, target.info.hidden_size, torch.bfloat16,
                       target.device)  # fmt: skip
    document = rng.integers(20, 49152, 64)
    gap, turn_begin = 0.0, time.perf_counter()
    for turn in range(args.turns):
        own = target.capture([document])
        with ring.lease() as slot:
            slot.fill(0, 0, own.context_hidden[0], own.last_hidden[0])
            result = slot.hand_over(lambda context, last: total(to_global([context], rows)))
            slot.fence(result)
            seen = np.asarray(result.addressable_data(0)).copy()
        # What JAX summed over both ranks, against what each rank's torch had, told over the host.
        sums = target.engine.peers.gather(own.context_hidden[0].double().sum(0).cpu().numpy())
        gap = max(gap, float(np.abs(seen - sum(sums)).max() / np.abs(sum(sums)).max()))
        assert gap < 1e-3, (rank, turn, gap)
    seconds = time.perf_counter() - turn_begin
    full = target.engine.free_tokens == target.engine.facts.pool_tokens
    assert full, rank
    say("in_turn", turns=args.turns, ms_per_turn=round(1e3 * seconds / max(args.turns, 1), 2), gap=gap, pool_full=full)
    target.close()
    torch.distributed.barrier()
    say("done")
    del world


if __name__ == "__main__":
    main()
