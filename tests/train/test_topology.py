"""Who a process is, as each launcher says it; half an environment is an error, not a guess."""

import pytest

from train.topology import Topology, TopologyError

TORCHRUN = {
    "RANK": "11",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "12",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[007-009],login2",
    "SLURM_TASKS_PER_NODE": "8,2(x2)",
}


def read(env, host="here"):
    return Topology.from_environment(env, host)


def test_nothing_set_is_a_single_process():
    one = read({})
    assert (one.rank, one.world_size, one.local_rank, one.launcher, one.is_first) == (0, 1, 0, "single", True)


def test_torchrun():
    topology = read(TORCHRUN)
    assert topology == Topology(11, 16, 3, 8, "node0", 29500, "torchrun", "here")
    assert topology.coordinator == "node0:29501"  # torch's store owns 29500
    assert not topology.is_first


def test_srun():
    topology = read(SLURM)
    assert (topology.rank, topology.world_size) == (9, 12)
    assert (topology.local_rank, topology.local_world_size) == (1, 2)
    assert (topology.master_address, topology.launcher) == ("gpu007", "slurm")
    assert topology == read({**SLURM, "SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": "gpu[007-009]"})
    other = read({**SLURM, "SLURM_JOB_ID": "123457"})
    assert abs(other.master_port - topology.master_port) >= 2  # each job needs two ports


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("n[1,3-4]", "n1"), ("n[01-12]-ib,x", "n01-ib"), ("rack3-n7", "rack3-n7")],
)
def test_first_host_of_a_node_list(nodes, first):
    assert read({**SLURM, "SLURM_STEP_NODELIST": nodes}).master_address == first


def test_torchrun_under_srun_counts_torchruns_processes():
    assert read({**SLURM, **TORCHRUN}).launcher == "torchrun"


def test_a_shell_in_an_allocation_is_a_single_process():
    assert read({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16"}).launcher == "single"
    assert read({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}).launcher == "single"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0"}, "host here: RANK is set, but WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are not"),
        ({**TORCHRUN, "MASTER_PORT": ""}, "but MASTER_PORT is not; launch with torchrun"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', which is no whole number"),
        ({**TORCHRUN, "RANK": "16"}, r"host here, launched by torchrun: rank 16 is outside 0\.\.15"),
        ({**TORCHRUN, "LOCAL_RANK": "8"}, r"local rank 8 is outside 0\.\.7"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "32"}, "32 processes on this host, but only 16 in all"),
        ({**TORCHRUN, "MASTER_PORT": "65535"}, "master port 65535"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "many"}, "SLURM_TASKS_PER_NODE is 'many'"),
        ({**SLURM, "SLURM_NODEID": "5"}, "SLURM_NODEID is 5"),
    ],
)
def test_half_an_environment_is_refused(env, message):
    with pytest.raises(TopologyError, match=message):
        read(env)


def test_by_hand_on_one_host_local_world_size_may_be_left_out():
    env = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"}
    assert read({**env, "RANK": "3"}).local_world_size == 16
