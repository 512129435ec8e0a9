"""How a recorded window is divided: by hand-made kernels, and a folder that is only a target's shape."""

import gzip
import json

import pytest

from benchmarks import dummy_target, timeline
from draft_jax.config import DraftConfig

GPU, HOST = 1, 7


def name(what, value, pid=GPU, tid=None):
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "args": {"name": value}} | (
        {} if tid is None else {"tid": tid}
    )


def kernel(begin, duration, called, *, tid=14, pid=GPU, program=None):
    args = {"hlo_module": program} if program else {}
    return {"ph": "X", "pid": pid, "tid": tid, "ts": begin, "dur": duration, "name": called, "args": args}


EVENTS = [
    name("process", "/device:GPU:0"),
    name("thread", "Stream #14(Compute,MemcpyD2D)", tid=14),
    name("thread", "Stream #20(Compute)", tid=20),
    name("thread", "XLA Modules", tid=99),
    name("process", "/host:CPU", pid=HOST),
    name("thread", "Stream #1", pid=HOST, tid=14),
    kernel(0, 300, "_fwd_kernel"),
    kernel(200, 200, "nvjet_tst", tid=20),  # over the one before on another stream: 400 together
    kernel(400, 50, "MemcpyD2D"),
    kernel(500, 200, "loop_fusion", program="jit_accumulate"),
    kernel(600, 200, "nvjet_tst", program="jit_accumulate", tid=20),
    kernel(800, 10, "MemcpyD2D", program="jit_apply"),
    kernel(0, 1000, "jit_accumulate", tid=99, program="jit_accumulate"),  # a derived line
    kernel(0, 1000, "python", pid=HOST),
]


def test_a_window_is_divided_by_whose_kernels_ran(tmp_path):
    found = timeline.split(EVENTS, 1000e-6)
    assert found["target"] == pytest.approx(0.4)
    assert found["hand_over"] == pytest.approx(0.05)
    assert found["draft"] == pytest.approx(0.31)
    assert found["idle"] == pytest.approx(0.24)
    assert found["kernels"] == {"target": 2, "hand_over": 1, "draft": 3}
    assert found["program_ms"] == {"jit_accumulate": 0.4, "jit_apply": 0.01}
    assert timeline.longest(EVENTS, "target", 1) == [{"name": "_fwd_kernel", "ms": 0.3, "calls": 1}]
    assert timeline.split(EVENTS[4:6], 1.0) == {}  # nothing but the host was traced
    with pytest.raises(FileNotFoundError, match="holds no trace"):
        timeline.read_trace(tmp_path)
    below = tmp_path / "plugins" / "host.trace.json.gz"
    below.parent.mkdir()
    below.write_bytes(gzip.compress(json.dumps({"traceEvents": EVENTS}).encode()))
    assert timeline.read_trace(tmp_path) == EVENTS


@pytest.mark.parametrize("spans", [[], [(0, 1)], [(3, 4), (0, 2), (1, 2), (2, 2.5)]])
def test_covered(spans):
    fine = 1000
    by_hand = len({i for begin, end in spans for i in range(int(begin * fine), int(end * fine))}) / fine
    assert timeline.covered(spans) == pytest.approx(by_hand)


def test_a_target_that_is_only_a_shape(tmp_path):
    dummy_target.write(tmp_path, "qwen3-8b", rows=3, length=20)
    config = json.loads((tmp_path / "config.json").read_text())
    draft = DraftConfig.from_target(
        config, num_hidden_layers=5, target_layer_ids=(1, 9, 17, 25, 33), block_size=7, mask_token_id=151669
    )
    assert (draft.hidden_size, draft.num_target_layers, draft.head_dim, draft.vocab_size) == (4096, 36, 128, 151936)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [len(row["input_ids"]) for row in rows] == [20] * 3
    assert max(max(row["input_ids"]) for row in rows) < 151936 - dummy_target.RESERVED
