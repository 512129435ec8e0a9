"""The server's side: stock `sglang.Engine` behind two pipes, in a process of its own.

Run as a file by any interpreter that has sglang (`python -P engine_process.py IN_FD OUT_FD`); it imports nothing
of draft-jax, so SGLang may live in an environment with other pins than ours. One JSON object a line, in and out:

    in   {"engine": {...}}                        first: keyword arguments of sglang.Engine
    out  {"event": "imported", ...}, {"event": "ready", ...}
    in   {"generate": {...}}                      keyword arguments of Engine.generate, input_ids a list of lists
    out  {"event": "generated", "outputs": [...], "seconds": s}
    in   {"flush": true}  ->  out {"event": "flushed"}
    in   {"stop": true}   ->  out {"event": "stopped"}, exit 0

A failure is answered {"event": "error", "phase", "type", "message"} and ends the process with exit code 1. When
the input ends without "stop", whoever started us is gone: the process group, which is ours alone, is killed.
"""

import json
import os
import queue
import signal
import sys
import threading
import time
import traceback

#: What travels back of a request's meta_info, beside every key that starts with "spec_".
META = (
    "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "num_retractions", "output_top_logprobs",
)  # fmt: skip
#: Resolved server arguments worth showing.
FACTS = (
    "attention_backend", "speculative_algorithm", "speculative_draft_attention_backend",
    "speculative_num_draft_tokens", "sampling_backend", "disable_cuda_graph", "disable_radix_cache", "page_size",
    "mem_fraction_static", "max_running_requests", "context_length", "dtype", "device", "tp_size",
)  # fmt: skip


def read_requests(descriptor: int, requests: queue.Queue) -> None:
    """Feeds requests to the main thread; the end of the input without a stop kills the process group."""
    with os.fdopen(descriptor, encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            requests.put(request)
            if "stop" in request:
                return
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def reduced(output: dict) -> dict:
    """The part of an answer that is measured."""
    meta = output.get("meta_info") or {}
    return {
        "output_ids": [int(token) for token in output["output_ids"]],
        "meta": {key: value for key, value in meta.items() if key in META or key.startswith("spec_")},
    }


def serve(requests: queue.Queue, answer) -> None:
    """Imports, starts and asks the engine. Errors are tagged with the phase they came in."""
    phase, begin = "import", time.monotonic()
    try:
        import sglang

        answer(
            event="imported",
            version=str(sglang.__version__),
            python=sys.version.split()[0],
            seconds=time.monotonic() - begin,
        )
        phase, arguments = "start", requests.get()["engine"]
        begin = time.monotonic()
        engine = sglang.Engine(**arguments)
        resolved = getattr(engine, "server_args", None)
        facts = {name: getattr(resolved, name, None) for name in FACTS}
        answer(event="ready", facts=json.loads(json.dumps(facts, default=str)), seconds=time.monotonic() - begin)
        while "stop" not in (request := requests.get()):
            phase = "generate" if "generate" in request else "flush"
            begin = time.monotonic()
            if phase == "generate":
                outputs = engine.generate(**request["generate"])
                seconds = time.monotonic() - begin
                answer(event="generated", outputs=[reduced(output) for output in outputs], seconds=seconds)
            else:
                engine.flush_cache()
                answer(event="flushed", seconds=time.monotonic() - begin)
        phase = "stop"
        engine.shutdown()
        answer(event="stopped")
    except BaseException as error:
        traceback.print_exc()
        answer(event="error", phase=phase, type=type(error).__name__, message=str(error))
        raise SystemExit(1) from error


def main() -> None:
    incoming, outgoing = int(sys.argv[1]), int(sys.argv[2])
    for descriptor in (incoming, outgoing):  # the engine's own processes must not hold our pipes open
        os.set_inheritable(descriptor, False)
    lock = threading.Lock()

    def answer(**record) -> None:
        line = (json.dumps(record) + "\n").encode()
        with lock:
            while line:
                line = line[os.write(outgoing, line) :]

    requests: queue.Queue = queue.Queue()
    threading.Thread(target=read_requests, args=(incoming, requests), daemon=True).start()
    serve(requests, answer)


if __name__ == "__main__":  # SGLang spawns processes that import this file again
    main()
