"""One rank of test_parallel: parallel_rank.py RANK WORLD TP PAGE PORT TARGET DOCUMENTS OUT

Every rank has documents of its own. Writes what it captured, its head and what it was told to OUT.
"""

import sys

import numpy as np
import torch

from target_bridge.sglang.load import load_sglang_target
from target_bridge.sglang.options import EngineOptions
from target_bridge.target import TargetError
from tests.sglang.models import TAPS, require_full


def main() -> None:
    rank, world, tp, page_size, port = map(int, sys.argv[1:6])
    folder, documents_file, out = sys.argv[6:]
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )  # as the trainer does, before any target
    with np.load(documents_file) as file:
        documents = [file[name] for name in file.files if name.startswith(f"rank{rank}_")]
    options = EngineOptions(tp_size=tp, page_size=page_size, max_tokens_per_forward=48, max_running_requests=4)
    facts: dict[str, np.ndarray] = {}
    for turn in range(2):  # the second engine stands in the same world as the first
        target = load_sglang_target(folder, TAPS, options=options, dtype="float32", device="cpu")
        captured = target.capture(documents)
        for index, (context, last) in enumerate(zip(captured.context_hidden, captured.last_hidden)):
            facts[f"context{turn}_{index}"], facts[f"last{turn}_{index}"] = context.numpy(), last.numpy()
        if tp > 1:
            # Ranks other than 0 have nothing this time, and must still take part.
            again = target.capture(documents[:1] if rank % tp == 0 else [])
            assert len(again) == (1 if rank % tp == 0 else 0)
            assert len(target.capture([])) == 0
        try:
            target.capture([[1, 2], [70]] if rank % tp == tp - 1 else documents)
        except TargetError as error:
            facts["refused"] = np.array(str(error))
        require_full(target)
        embedding, head = target.frozen_head()
        facts["embedding"], facts["head"] = embedding.numpy(), head.numpy()
        weights = dict(target.engine.model.named_parameters())
        facts["qkv_rows"] = np.array(weights["model.layers.0.self_attn.qkv_proj.weight"].shape[0])
        (logits,) = target.own_logits([[5, 6, 7]])
        facts["logits"] = logits.numpy()
        target.close()
        assert torch.distributed.is_initialized(), "the world belongs to the trainer"
        torch.distributed.barrier()
    np.savez(out, **facts)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
