"""A stand-in for the package `sglang`, for tests of what surrounds a server where none can run (DSPARK wants a GPU).

`Engine` has the interface of the real one and replays rounds of decoding that a test wrote down: the JSON file
$FAKE_SGLANG maps temperature and prompt ("0|1,2,3") to "first", "rounds" (each [drafts, accepted, next]) and
"plain" ids. Stopping and accounting follow SGLang 0.5.16/0.5.23 as read in its scheduler; tests/sglang checks
`replay` against that very code. "fail" in the file makes it misbehave, for tests of what is said then.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

SCRIPT = json.loads(Path(os.environ["FAKE_SGLANG"]).read_text()) if "FAKE_SGLANG" in os.environ else {}
FAIL = SCRIPT.get("fail")
if FAIL == "import":
    raise ImportError(SCRIPT["message"])

__version__ = "0.5.16+fake"


def stops(tokens, new, budget, stop, stop_first):
    """How many of `tokens` stay once the last `new` of them arrived, and the reason; None while it goes on.

    0.5.16 looks at the budget first, so a step that passes both keeps tokens after a stop id; 0.5.23 looks at
    the stop ids first, and a stop past the budget is a finish by length.
    """
    by_length = (budget, {"type": "length", "length": budget}) if len(tokens) >= budget else None
    if by_length and not stop_first:
        return by_length
    for index in range(len(tokens) - new, len(tokens)):
        if tokens[index] in stop:
            return by_length if index >= budget else (index + 1, {"type": "stop", "matched": tokens[index]})
    return by_length


def replay(first, rounds, budget, stop, block_size, stop_first=False):
    """(output ids, meta_info) of a request whose prefill gave `first` and whose rounds are [drafts, accepted, next]."""
    tokens, histogram = [first], []
    end = stops(tokens, 1, budget, stop, stop_first)
    remaining = iter(rounds)
    while end is None:
        drafts, accepted, bonus = next(remaining)
        assert len(drafts) == block_size
        histogram += [0] * (accepted + 1 - len(histogram))
        histogram[accepted] += 1
        tokens += [*drafts[:accepted], bonus]
        end = stops(tokens, accepted + 1, budget, stop, stop_first)
    kept, reason = end
    meta = {"finish_reason": reason, "completion_tokens": kept, "cached_tokens": 0, "num_retractions": 0}
    verified = sum(histogram)
    if verified:
        meta |= {
            "spec_verify_ct": verified,
            "spec_accept_length": kept / verified,
            "spec_num_correct_drafts": sum(count * size for size, count in enumerate(histogram)),
            "spec_correct_drafts_histogram": histogram,
            "spec_accept_histogram": histogram,
        }
    return tokens[:kept], meta


class Engine:
    def __init__(self, **arguments):
        for name in ("model_path", "skip_tokenizer_init", "max_running_requests", "context_length"):
            assert name in arguments, name
        print("fake engine starts", arguments, flush=True)
        if FAIL == "start":
            raise ValueError(SCRIPT["message"])
        if FAIL == "plain" and "speculative_algorithm" not in arguments:
            raise RuntimeError(SCRIPT["message"])
        if FAIL == "crash":  # as a scheduler does: its own words in the log, then the group goes down
            print(SCRIPT["message"], file=sys.stderr, flush=True)
            os.kill(os.getpid(), 9)
        if FAIL == "hang":  # with a child, as a real engine has
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with open(SCRIPT["pid_file"], "w") as file:
                file.write(f"{os.getpid()} {child.pid}")
            time.sleep(600)
        self.server_args = SimpleNamespace(attention_backend="fake", dtype=arguments["dtype"], **{
            name: arguments.get(name)
            for name in ("max_running_requests", "speculative_algorithm", "speculative_draft_attention_backend")
        })  # fmt: skip
        self.block_size = arguments.get("speculative_dspark_block_size")

    def generate(self, input_ids, sampling_params, return_logprob=False, top_logprobs_num=0):
        if FAIL == "generate":
            raise RuntimeError(SCRIPT["message"])
        answers = [self._answer(ids, given, top_logprobs_num) for ids, given in zip(input_ids, sampling_params)]
        return answers[:-1] if FAIL == "lose" else answers

    def _answer(self, ids, given, top_logprobs_num):
        stop, budget = set(given.get("stop_token_ids") or ()), given["max_new_tokens"]
        if top_logprobs_num:
            tops = [[[-0.25, 7, None], [-1.5, 8, None]][:top_logprobs_num]]
            finish = {"type": "length", "length": 1}
            meta = {"finish_reason": finish, "completion_tokens": 1, "output_top_logprobs": tops}
            return {"output_ids": [7], "meta_info": meta}
        script = SCRIPT["prompts"][f"{given['temperature']:g}|{','.join(map(str, ids))}"]
        if self.block_size is None:
            first, *rest = script["plain"]
            rounds = [[[], 0, token] for token in rest]
        else:
            first, rounds = script["first"], script["rounds"]
        tokens, meta = replay(first, rounds, budget, stop, self.block_size or 0)
        if self.block_size is None:
            meta = {key: value for key, value in meta.items() if not key.startswith("spec_")}
        return {"output_ids": tokens, "meta_info": meta | {"prompt_tokens": len(ids)}}

    def flush_cache(self):
        pass

    def shutdown(self):
        print("fake engine stops", flush=True)
