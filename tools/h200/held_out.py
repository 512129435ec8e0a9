"""Splits conversations by the hash of their id: 5 % held out for evaluation, the rest for training.

    python3 tools/h200/held_out.py CONVERSATIONS.jsonl.gz OUT_DIR [PROMPTS]

Writes OUT_DIR/train.jsonl and OUT_DIR/held_out.jsonl (PROMPTS rows at most, in the order of the hash, so that fewer
are a part of more).
"""

import gzip
import hashlib
import json
import sys
from pathlib import Path

SHARE = 20  # one in so many


def main(source: str, folder: str, prompts: str = "200") -> None:
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    held: list[tuple[str, str]] = []
    kept = 0
    with gzip.open(source, "rt") as lines, (out / "train.jsonl").open("w") as train:
        for line in lines:
            digest = hashlib.sha256(str(json.loads(line)["id"]).encode()).hexdigest()
            if int(digest, 16) % SHARE == 0:
                held.append((digest, line))
            else:
                train.write(line)
                kept += 1
    held.sort()
    (out / "held_out.jsonl").write_text("".join(line for _, line in held[: int(prompts)]))
    print(json.dumps({"train": kept, "held_out": len(held), "prompts": min(len(held), int(prompts))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
