"""Compiles, by using them, FlashInfer's kernels that SGLang 0.5.16 needs for SmolLM2's draft, into its cache.

    python3 tools/h200/warm_flashinfer.py     in SGLang's environment; prints a JSON line per kernel

Paged prefill (9 query and 3 kv heads of 64, bfloat16, not causal) is the draft's attention; softmax is the acceptance
test's at temperature 1.
"""

import json
import time

import torch

HEADS, KV_HEADS, DIM, ROWS, BATCH, CONTEXT = 9, 3, 64, 7, 2, 32


def prefill() -> float:
    """Largest difference from plain attention."""
    import flashinfer

    def integers(*values):
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    query = torch.randn(BATCH * ROWS, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    keys, values = (
        torch.randn(BATCH * CONTEXT, 1, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2)
    )
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    wrapper.plan(
        integers(0, ROWS, 2 * ROWS), integers(0, CONTEXT, 2 * CONTEXT), integers(*range(BATCH * CONTEXT)),
        integers(1, 1), HEADS, KV_HEADS, DIM, 1, causal=False, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    out = wrapper.run(query, (keys, values)).float().view(BATCH, ROWS, HEADS, DIM)
    q = query.float().view(BATCH, ROWS, HEADS, DIM).transpose(1, 2)
    k, v = (
        x.float().view(BATCH, CONTEXT, KV_HEADS, DIM).repeat_interleave(HEADS // KV_HEADS, 2).transpose(1, 2)
        for x in (keys, values)
    )
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    return float((out - expected).abs().max())


def softmax() -> float:
    """Largest difference from torch's."""
    from flashinfer.sampling import softmax as compiled

    logits = torch.randn(16, 49152, device="cuda")
    temperature = torch.full((16,), 0.7, device="cuda")
    return float((compiled(logits, temperature=temperature) - torch.softmax(logits / 0.7, -1)).abs().max())


if __name__ == "__main__":
    for kernel in (prefill, softmax):
        begin = time.monotonic()
        try:
            record = {"difference": kernel()}
        except Exception as error:  # the other one is still worth compiling
            record = {"error": f"{type(error).__name__}: {str(error)[-300:]}"}
        print(json.dumps({"kernel": kernel.__name__, **record, "s": round(time.monotonic() - begin, 1)}), flush=True)
