"""First light of a machine: stock SGLang starts with the draft and answers at temperature 0 and 1.

It also fills the kernel caches that later servers start with.

    python3 tools/h200/serve_smoke.py TARGET DRAFT [options of draft-jax serve-check for the server]

Prints one JSON line: version, seconds of every step, accept length of a few requests.
"""

import json
import sys
import time
from pathlib import Path

from target_bridge.serving.server import EngineServer, ServerSettings
from train.serve_check.accounting import read_served, served_statistics
from train.serve_check.command import parser, serve_config
from train.serve_check.serving import sampling_parameters

#: Two chats of SmolLM2's template, as ids (<|im_start|> is 1, <|im_end|> is 2).
CHATS = ([1, 4093, 198, 1780, 338, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
         [1, 4093, 198, 24751, 253, 2526, 563, 253, 2644, 30, 2, 198, 1, 520, 9531, 198])  # fmt: skip
EOS, TOKENS = [2], 48


def main(target: str, draft: str, *options: str) -> None:
    args = parser().parse_args(["--draft", draft, "--target", target, *options])
    config = serve_config(args)
    block = int(json.loads((Path(draft) / "config.json").read_text())["block_size"])
    engine = config.engine(target, "bfloat16", 2048, draft=draft, block_size=block, trust=False)
    log = Path(args.output or "/tmp/serve_smoke") / "server.log"
    record: dict = {"step": "smoke"}
    begin = time.monotonic()
    settings = ServerSettings(engine, log, config.python, config.pythonpath, {"HF_HUB_OFFLINE": "1"}, config.deadlines)
    with EngineServer(settings) as server:
        record |= {"version": server.version, "start_s": round(server.start_seconds, 1), "facts": server.facts}
        for temperature in (0.0, 1.0):
            for attempt in ("first", "second"):
                ids = [list(chat) for chat in CHATS * 8]
                outputs, seconds = server.generate(ids, [sampling_parameters(temperature, TOKENS, EOS)] * len(ids))
                samples = [read_served(str(i), item, EOS, TOKENS, block) for i, item in enumerate(outputs)]
                name = f"t{temperature:g}_{attempt}"
                record[name] = {
                    "s": round(seconds, 2), "accept_length": served_statistics(samples, block).accept_length,
                    "meta": outputs[0].meta if attempt == "first" else None,
                }  # fmt: skip
                print(name, record[name]["s"], record[name]["accept_length"], file=sys.stderr, flush=True)
    record["total_s"] = round(time.monotonic() - begin, 1)
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
