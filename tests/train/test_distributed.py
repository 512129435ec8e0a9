"""Real processes that agree, disagree, fail alone or never come: no hang, and a message that names the host."""

from __future__ import annotations

import pytest

from tests.train.processes import run_processes
from train.distributed import World, versions
from train.topology import Topology

START = """
    import sys
    from dataclasses import replace
    from train.distributed import World, DistributedError, start_jax, stop_jax, check_devices
    from train.topology import Topology
    topology = Topology.from_environment()
    topology = replace(topology, host="host%d" % topology.rank)
"""


def test_a_single_process_needs_nobody():
    world = World(Topology())
    assert world.gather(3) == [3]
    assert world.first("x") == "x"
    assert world.any(True)
    world.agree("anything", {"a": 1})
    world.barrier("end")
    with pytest.raises(OSError, match="mine"):
        world.attempt("reading", lambda: (_ for _ in ()).throw(OSError("mine")))
    assert "jax" in versions()
    assert versions()["draft-jax"] != "not installed"


def test_processes_agree_and_a_failure_of_one_reaches_all():
    code = (
        START
        + """
    world = World(topology, timeout=60)
    rank = world.rank
    assert world.gather(rank * 10) == [0, 10, 20]
    assert world.first({"from": rank}) == {"from": 0}
    assert world.any(rank == 2) and not world.any(False)
    world.agree("the settings", {"lr": 1e-3, "steps": 5})
    try:
        world.agree("the settings", {"lr": 1e-3 * (1 + (rank == 1)), "steps": 5})
    except DistributedError as error:
        print("DIFFERS", error)
    def action():
        if rank == 1:
            raise FileNotFoundError("tasks/gsm8k.jsonl is not here")
        return rank
    assert world.attempt("nothing special", lambda: rank) == rank
    try:
        world.attempt("opening the tasks", action)
    except FileNotFoundError as error:
        print("OWN", error)
    except DistributedError as error:
        print("OTHER", error, sorted(error.kinds))
    world.close()  # leaving with gloo's threads at work can end in an abort
    print("done")
    """
    )
    for rank, ended in enumerate(run_processes(code, 3)):
        assert ended.code == 0, ended.output
        assert "the settings differs between the processes" in ended.output
        assert "lr: 0.001 on rank 0 (host0), rank 2 (host2)" in ended.output
        assert "lr: 0.002 on rank 1 (host1)" in ended.output
        assert "steps" not in ended.output
        if rank == 1:
            assert "OWN tasks/gsm8k.jsonl is not here" in ended.output
        else:
            assert "opening the tasks failed on another process" in ended.output
            assert "rank 1 on host1: FileNotFoundError: tasks/gsm8k.jsonl is not here" in ended.output
            assert "['FileNotFoundError']" in ended.output


def test_a_process_that_dies_ends_the_others_with_a_message():
    code = (
        START
        + """
    world = World(topology, timeout=20)
    if world.rank == 1:
        import os
        os._exit(7)
    world.barrier("the next evaluation")
    """
    )
    first, second = run_processes(code, 2, limit=60)
    assert second.code == 7
    assert first.code == 1, first.output
    assert "host host0, rank 0: waiting for the other processes at 'the next evaluation' ended" in first.output


def test_a_process_that_never_comes_is_an_error_not_a_hang():
    code = (
        START
        + """
    if topology.rank == 0:
        World(topology, timeout=5)
    """
    )
    first, _ = run_processes(code, 2, limit=60)
    assert first.code == 1, first.output
    assert "host host0, rank 0: the 2 processes did not meet at 127.0.0.1:" in first.output
    assert "within 5 s" in first.output


def test_both_frameworks_in_the_same_processes():
    """JAX's collectives and torch's in turn; devices in the order of the ranks."""
    code = (
        START
        + """
    start_jax(topology)
    import jax, jax.numpy as jnp, numpy as np, torch, torch.distributed as dist
    from jax.sharding import NamedSharding, PartitionSpec as P
    world = World(topology, timeout=60)
    devices = check_devices(world, 2)
    assert [d.process_index for d in devices] == [0, 0, 1, 1]
    from train.sharding import make_mesh, batch_sharding
    mesh = make_mesh(devices)
    for turn in range(20):
        local = np.full((2, 3), world.rank + turn, np.float32)
        array = jax.make_array_from_process_local_data(batch_sharding(mesh), local)
        total = jax.jit(jnp.sum)(array)
        assert float(total) == 6 * (2 * turn + 1)
        tensor = torch.tensor([float(world.rank + turn)])
        dist.all_reduce(tensor)
        assert float(tensor) == 2 * turn + 1
    try:
        check_devices(world, 5)
    except DistributedError as error:
        print(error)
    world.close()
    stop_jax(topology)
    """
    )
    for ended in run_processes(code, 2, extra={"JAX_NUM_CPU_DEVICES": "4"}):
        assert ended.code == 0, ended.output
        assert "train.devices is 5 for each process, but rank 0 on host0 sees 4; rank 1 on host1 sees 4" in ended.output
