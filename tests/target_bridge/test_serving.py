"""A server process: what goes in and out, what is said when it fails, and that nothing of it survives."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from target_bridge.serving.diagnosis import REMEDIES, diagnose, log_tail
from target_bridge.serving.known_faults import known_fault
from target_bridge.serving.server import Deadlines, EngineServer, ServerFailure, ServerSettings
from tests.fake_sglang import FOLDER

ENGINE = {
    "model_path": "target", "skip_tokenizer_init": True, "max_running_requests": 4, "context_length": 64,
    "dtype": "float32", "speculative_algorithm": "DSPARK", "speculative_dspark_block_size": 2,
}  # fmt: skip
GREEDY = {"temperature": 0.0, "max_new_tokens": 5, "stop_token_ids": [9]}
SCRIPT = {"prompts": {"0|1,2": {"first": 3, "rounds": [[[4, 5], 2, 6], [[7, 8], 0, 7]], "plain": [3, 4, 5, 6, 7]}}}


@pytest.fixture
def settings(tmp_path):
    """Settings of a server that replays a script."""

    def make(script=SCRIPT, engine=ENGINE, environment=None, **options):
        path = tmp_path / "script.json"
        path.write_text(json.dumps(script))
        variables = {"FAKE_SGLANG": str(path), **(environment or {})}
        options = {"deadlines": Deadlines(start=20, request=20, stop=10), "pythonpath": (str(FOLDER),)} | options
        return ServerSettings(engine, tmp_path / "logs" / "server.log", environment=variables, **options)

    return make


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def gone(*pids: int) -> bool:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def test_ids_in_ids_out(settings):
    with EngineServer(settings()) as server:
        pid = server._process.pid
        assert server.version == "0.5.16+fake"
        assert server.facts["speculative_algorithm"] == "DSPARK"
        outputs, seconds = server.generate([[1, 2]] * 3, [GREEDY] * 3)
        server.flush()
        again, _ = server.generate([[1, 2]], [{**GREEDY, "max_new_tokens": 2}])
    assert [output.tokens for output in outputs] == [[3, 4, 5, 6, 7]] * 3
    assert outputs[0].meta["spec_correct_drafts_histogram"] == [1, 0, 1]
    assert outputs[0].meta["finish_reason"]["type"] == "length"
    assert again[0].tokens == [3, 4]
    assert 0 <= seconds < 20
    assert gone(pid)
    assert "fake engine stops" in server.settings.log.read_text(), "an orderly end, not a kill"


def test_top_logprobs_are_asked_for(settings):
    with EngineServer(settings()) as server:
        outputs, _ = server.generate([[1, 2]], [GREEDY], top_logprobs=2)
    assert outputs[0].meta["output_top_logprobs"] == [[[-0.25, 7, None], [-1.5, 8, None]]]


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("DSpark speculative decoding only supports CUDA device.", "machine with a CUDA GPU"),
        ("DSpark requires mask_token_id to be set in the draft model config.", "draft-jax export --check"),
        ("Not enough memory. Please try to increase --mem-fraction-static.", "--server-memory"),
        ("Capture cuda graph failed: CUDA error", "disable_cuda_graph=true"),
        ("__init__() got an unexpected keyword argument 'speculative_dspark_block_size'", "0.5.16 or newer"),
        ("'Foo' object has no attribute 'set_dflash_layers_to_capture'", "draft-jax probe"),
        ("We couldn't connect to 'https://huggingface.co' to load the files", "local folder"),
    ],
)
def test_a_refused_start_tells_cause_and_remedy(settings, message, remedy):
    with pytest.raises(ServerFailure) as caught, EngineServer(settings({"fail": "start", "message": message})):
        pass
    text = str(caught.value)
    assert f"failed to start the engine: ValueError: {message}" in text or "TypeError" in text
    assert remedy in text
    assert "fake engine starts" in text, "the end of the log is shown"
    assert "exit code 1" in text


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("No module named 'sglang'", "--server-python"),
        ("libcuda.so.1: cannot open shared object file", "nvidia-smi"),
        ("common_ops.abi3.so: undefined symbol: _ZN3c10", "--attention-backend triton"),
    ],
)
def test_a_failing_import(settings, message, remedy):
    with pytest.raises(ServerFailure, match="failed to import sglang") as caught:
        EngineServer(settings({"fail": "import", "message": message})).__enter__()
    assert remedy in str(caught.value)


def test_an_interpreter_without_sglang(settings):
    bare = [sys.executable, "-c", "import sglang"]
    if subprocess.run(bare, capture_output=True, cwd="/", check=False).returncode == 0:
        pytest.skip("this interpreter has sglang")
    with pytest.raises(ServerFailure, match="No module named 'sglang'") as caught:
        EngineServer(settings(pythonpath=())).__enter__()
    assert "--server-python" in str(caught.value)


def test_no_such_interpreter(settings):
    with pytest.raises(ServerFailure, match=r"cannot run /no/python.*--server-python"):
        EngineServer(settings(python="/no/python")).__enter__()


def test_a_crash_is_read_from_the_log(settings):
    script = {"fail": "crash", "message": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB"}
    with pytest.raises(ServerFailure, match="ended while it was to start the engine") as caught:
        EngineServer(settings(script)).__enter__()
    assert "exit code -9" in str(caught.value)
    assert "the GPU's memory does not suffice" in str(caught.value)


def test_a_kill_without_words_is_want_of_host_memory(settings):
    with pytest.raises(ServerFailure, match="killed, most likely by the system for want of memory"):
        EngineServer(settings({"fail": "crash", "message": ""})).__enter__()


def test_a_hang_ends_at_the_deadline_with_its_children(settings, tmp_path):
    script = {"fail": "hang", "pid_file": str(tmp_path / "pids")}
    begin = time.monotonic()
    with pytest.raises(ServerFailure, match=r"took longer than 3 s to start the engine") as caught:
        EngineServer(settings(script, deadlines=Deadlines(start=3))).__enter__()
    assert time.monotonic() - begin < 15
    assert "exit code" not in str(caught.value), "it was we who killed it"
    assert gone(*map(int, (tmp_path / "pids").read_text().split()))


def test_a_failing_request_and_a_lost_answer(settings):
    script = SCRIPT | {"fail": "generate", "message": "boom"}
    with EngineServer(settings(script)) as server, pytest.raises(ServerFailure, match=r"RuntimeError: boom"):
        server.generate([[1, 2]], [GREEDY])
    with EngineServer(settings(SCRIPT | {"fail": "lose"})) as server:
        with pytest.raises(ServerFailure, match="1 answers to 2 requests"):
            server.generate([[1, 2]] * 2, [GREEDY] * 2)
        with pytest.raises(ValueError, match="2 prompts with 1 sampling"):
            server.generate([[1, 2]] * 2, [GREEDY])


def test_an_error_of_ours_stops_the_server_too(settings):
    server = EngineServer(settings())

    def fail():
        with server:
            pids.append(server._process.pid)
            raise KeyError("ours")

    pids: list[int] = []
    with pytest.raises(KeyError):
        fail()
    (pid,) = pids
    assert gone(pid)


def test_the_server_goes_when_we_are_killed(settings, tmp_path):
    """Killed with -9 we cannot clean up: the server notices that its input ended."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"fail": "hang", "pid_file": str(tmp_path / "pids")}))
    code = (
        "import sys; from pathlib import Path; from target_bridge.serving.server import *\n"
        f"EngineServer(ServerSettings({ENGINE!r}, Path({str(tmp_path / 'log')!r}), pythonpath=({str(FOLDER)!r},), "
        f"environment={{'FAKE_SGLANG': {str(script)!r}}})).__enter__()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=FOLDER.parents[1])
    end = time.monotonic() + 20
    while not (tmp_path / "pids").is_file() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.2)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(alive(pid) for pid in pids)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert gone(*pids)


def test_what_would_change_the_measurement_is_not_inherited(settings, monkeypatch):
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "5")
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "compact")
    monkeypatch.setenv("SGLANG_ENABLE_JIT_DEEPGEMM", "1")
    monkeypatch.setenv("PYTHONPATH", "/inherited")
    environment = EngineServer(settings(environment={"HF_HUB_OFFLINE": "1"}))._environment()
    assert "SGLANG_SIMULATE_ACC_LEN" not in environment
    assert environment["SGLANG_RAGGED_VERIFY_MODE"] == "static"
    assert environment["SGLANG_ENABLE_JIT_DEEPGEMM"] == "1", "what changes no number stays the user's"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["PYTHONPATH"] == f"{FOLDER}:/inherited"


def test_deadlines_are_positive():
    with pytest.raises(ValueError, match="deadline start is 0"):
        Deadlines(start=0)


def test_a_cause_is_read_from_the_error_not_from_the_list_of_arguments(tmp_path):
    """As seen: a scheduler's log begins with all server arguments, whose names occur in known errors."""
    log = tmp_path / "log"
    arguments = "server_args=ServerArgs(mem_fraction_static=None, speculative_algorithm='DSPARK', markov_rank=1)"
    log.write_text(f"{arguments}\nTraceback (most recent call last):\nNotImplementedError: some_kernel\n")
    assert diagnose(log, 1) is None
    log.write_text(f"{arguments}\nTraceback (most recent call last):\nValueError: Not enough memory. Please ...\n")
    assert "--server-memory" in diagnose(log, 1).action


def test_an_error_is_shown_although_the_dying_server_talks_on(tmp_path):
    log = tmp_path / "log"
    frames = "".join(f'  File "x.py", line {i}, in f\n    g({i})\n' for i in range(40))
    log.write_text(f"begin\nTraceback (most recent call last):\n{frames}RuntimeError: the cause\n" + "waiting\n" * 60)
    shown = log_tail(log, lines=10).splitlines()
    assert shown[9] == "  | RuntimeError: the cause"
    assert shown[10] == "  | ... 60 more line(s)"
    assert len(shown) == 11
    assert diagnose(log, -9) is None, "it killed itself: that is no want of memory"


def test_unknown_causes_are_not_invented(tmp_path):
    log = tmp_path / "log"
    log.write_text("INFO: all is well\n")
    assert diagnose(log, 1, "something new") is None
    assert log_tail(log) == "  | INFO: all is well"
    assert log_tail(tmp_path / "none") == "  (the server wrote no log)"
    assert len({remedy.action for remedy in REMEDIES}) == len(REMEDIES)


@pytest.mark.parametrize(
    ("version", "backend", "faulty"),
    [
        ("0.5.16", "triton", True),
        ("0.5.16.post1", "triton", True),
        ("0.5.22", "triton", True),
        ("0.5.23", "triton", False),
        ("0.5.23rc1", "triton", False),
        ("0.6.0", "triton", False),
        ("0.5.16", "flashinfer", False),
        ("0.5.16", None, False),
    ],
)
def test_the_triton_draft_backend_of_old_versions_is_told(version, backend, faulty):
    fault = known_fault(version, {"speculative_draft_attention_backend": backend})
    assert bool(fault) == faulty
    assert fault is None or "--draft-attention-backend flashinfer" in fault
