"""Evaluation speed: word problems at temperature 1 with many prompts side by side, then a few one by one.

    eval_speed.py DRAFT TARGET FOLDER [PROMPTS 500] [BATCH 64] [ONE_BY_ONE 20] [NEW_TOKENS 512]

Both are `draft-jax eval` runs; their results and a JSON line each are written to FOLDER as soon as they are there.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path


def main(draft: str, target: str, folder: str, *numbers: str) -> None:
    """Runs both, in this process: the second finds everything imported."""
    prompts, batch, few, tokens = [int(text) for text in numbers] + [500, 64, 20, 512][len(numbers) :]
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    problems = out / "word_problems.jsonl"
    maker = Path(__file__).with_name("word_problems.py")
    problems.write_bytes(subprocess.run([sys.executable, maker, str(prompts)], check=True, capture_output=True).stdout)
    from train.evaluate.command import main as evaluate

    for limit, side_by_side in ((prompts, batch), (few, 1)):
        result = out / f"eval_batch{side_by_side}.json"
        start = time.perf_counter()
        code = evaluate(
            [
                *("--draft", draft, "--target", target, "--prompts", str(problems), "--limit", str(limit)),
                *("--temperature", "1", "--max-new-tokens", str(tokens), "--batch-size", str(side_by_side)),
                *("--memory-fraction", "0.1", "--output", str(result)),
            ]
        )
        found = json.loads(result.read_text())
        names = ("accept_length", "tokens_per_second_draft", "tokens_per_second_plain", "speedup", "seconds")
        line = {name: found.get(name) for name in (*names, "plain_seconds", "platform")}
        line |= {"batch": side_by_side, "prompts": limit, "exit_code": code, "wall_s": time.perf_counter() - start}
        with (out / "eval_speed.jsonl").open("a") as lines:
            lines.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
