"""The plan on paper: its formulas against small cases done by hand, and its tables."""

import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.scale import (
    MODES,
    WORK,
    Links,
    Traffic,
    half_ring,
    main,
    memory,
    micro_step_traffic,
    update,
    update_traffic,
)
from tests.places import ROOT

LINKS = Links(nvlink=100.0, network=10.0, per_host=4, nvlink_hop=0.0, network_hop=0.0, agree_hop=0.0)


def simulated_ring(members: int, size: int) -> list[int]:
    """Bytes each member sends in a reduce-scatter of `size` bytes, by passing its pieces round."""
    piece = size // members
    sent = [0] * members
    has = [[{member} for _ in range(members)] for member in range(members)]  # contributions per piece
    for step in range(members - 1):
        moved = []
        for member in range(members):
            index = (member - step) % members
            moved.append(((member + 1) % members, index, has[member][index]))
            sent[member] += piece
        for receiver, index, contributions in moved:
            has[receiver][index] = has[receiver][index] | contributions
    for member in range(members):
        assert has[member][(member + 1) % members] == set(range(members))
    return sent


@pytest.mark.parametrize("members", [2, 4, 8])
def test_a_ring_done_by_hand(members):
    assert set(simulated_ring(members, 64)) == {half_ring(members, 64)}
    assert half_ring(1, 64) == 0


def test_traffic_of_an_update():
    """64 bytes of sums. 4 GPUs in a host: 3/4 of them out and back. 3 such hosts: each GPU all-reduces its quarter."""
    assert update_traffic(1, 64, "replicated", LINKS) == Traffic()
    assert update_traffic(4, 64, "replicated", LINKS) == Traffic(96, 0, 6, 0)
    found = update_traffic(12, 64, "replicated", LINKS)
    assert (found.nvlink, found.network) == (96, pytest.approx(2 * 2 / 3 * 16))
    assert (found.nvlink_hops, found.network_hops) == (6, 4)
    assert update_traffic(12, 64, "sharded_moments", LINKS) == found
    sharded = update_traffic(12, 64, "fully_sharded", LINKS)
    assert (sharded.nvlink, sharded.network) == (0, found.network)
    assert micro_step_traffic(12, 64, "replicated", LINKS) == Traffic()
    assert micro_step_traffic(12, 64, "fully_sharded", LINKS) == Traffic(96, 0, 6, 0)
    # Together it is what one ring over all 12 would send: the hierarchy only keeps most of it within the hosts.
    assert found.nvlink + found.network == pytest.approx(2 * half_ring(12, 64))


def test_seconds_are_bytes_by_rate_and_hops():
    links = replace(LINKS, nvlink_hop=0.5, network_hop=2.0)
    assert Traffic(200.0, 30.0, 2, 1).seconds(links) == 2.0 + 3.0 + 1.0 + 2.0


def test_an_update_done_by_hand():
    """Ten micro-steps of 20 + 30 ms, 8 ms for the optimizer; 2 GPUs exchange the sums of 1,126,422,017 parameters."""
    work = replace(WORK["qwen3-8b"], micro_ms=30.0, apply_ms=8.0)
    links = replace(LINKS, nvlink=4.0 * 1_126_422_017, agree_hop=0.001)
    found = update(work, 2, 10, "replicated", links, 20.0)
    assert found.alone == pytest.approx(0.508)
    assert found.exchange == pytest.approx(1.0 + 0.002)  # half of the bytes, twice; two hops of the agreement
    assert found.seconds == pytest.approx(1.51)
    # Fully sharded: that second in each micro-step, none in the optimizer step.
    assert update(work, 2, 10, "fully_sharded", links, 20.0).exchange == pytest.approx(10.002)


def test_sizes_are_the_published_ones():
    assert WORK["qwen3-8b"].parameters == 1_126_422_017
    assert WORK["qwen3-8b"].target_ms == pytest.approx(2 * 6.95e9 * 4096 / 550e12 * 1e3)
    draft = WORK["glm-5.2"].draft
    assert (draft.hidden_size, draft.vocab_size, draft.num_hidden_layers) == (6144, 154_880, 5)


def test_memory_of_the_modes():
    """16 bytes per parameter whole; moments over all GPUs; everything over the GPUs of a host, gathered in use."""
    work, links = WORK["qwen3-8b"], Links()
    state = ("parameters", "moments", "sums of gradients")
    count = {mode: {name: memory(work, 64, mode, links)[name] for name in state} for mode in MODES}
    p = work.parameters
    assert count["replicated"] == {"parameters": 4 * p, "moments": 8 * p, "sums of gradients": 4 * p}
    assert count["sharded_moments"] == {"parameters": 4 * p, "moments": p / 8, "sums of gradients": 4 * p}
    assert count["fully_sharded"] == {"parameters": p / 2, "moments": p, "sums of gradients": p / 2}
    assert memory(work, 64, "fully_sharded", links)["gathered parameters and gradients"] == 8 * p
    assert "gathered parameters and gradients" not in memory(work, 1, "fully_sharded", links)
    # One copy of the target for each GPU, or for eight.
    assert memory(work, 8, "replicated", links)["target's weights"] == 16.4e9
    assert memory(WORK["glm-5.2"], 8, "replicated", links)["target's weights"] == 93e9


def test_the_documented_command_prints_the_documented_tables(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scale"])
    main()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    document = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8").splitlines()
    assert len(printed) > 40
    assert [line for line in printed if line not in document] == []


def test_a_number_of_gpus_that_fills_no_host_is_refused():
    command = [sys.executable, "-m", "benchmarks.scale", "--devices", "12"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "--devices 12 is no multiple of --per-host 8" in done.stderr
