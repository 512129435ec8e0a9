"""Processor time of decoding with a draft on a CPU, by how many texts are side by side; one JSON line for each.

    python -m benchmarks.decoding DRAFT TARGET --prompts 32 --tokens 128 --batch 16 1

Processor time, compiling included, and not the clock's: it can be compared on a machine that does other work too.
Set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import json
import time

from draft_jax.weights import load_folder
from target_bridge.hf import load_hf_target
from train.evaluate.config import EvalConfig
from train.evaluate.protocol import evaluate
from train.evaluate.tasks import load_prompts


def main() -> None:
    """Measures what the command line asks for, on the shipped prompts, temperature 0, float32."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft", help="folder of a DSpark draft")
    parser.add_argument("target", help="folder of its target")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="most new tokens of a prompt")
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 1], help="texts side by side")
    given = parser.parse_args()
    config, params, _ = load_folder(given.draft)
    target = load_hf_target(given.target, config.target_layer_ids, dtype="float32", device="cpu")
    prompts = load_prompts(None, target.tokenizer, limit=given.prompts).prompts
    for batch in given.batch:
        begin = time.process_time()
        options = EvalConfig(max_new_tokens=given.tokens, batch_size=batch, plain=False)
        result = evaluate(target, config, params, None, prompts, options)
        line = {
            "batch": batch,
            "prompts": len(prompts),
            "cpu_seconds": round(time.process_time() - begin, 1),
            "accept_length": result.accept_length,
            "rounds": result.rounds,
            "tokens": result.tokens,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
