"""The launch scripts, run with stand-ins for what a cluster has: what they start is what torchrun and we understand."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.places import ROOT

LAUNCH = ROOT / "examples" / "launch"
SCRIPTS = sorted(path.name for path in LAUNCH.iterdir() if path.suffix in (".sh", ".sbatch"))

#: Prints its arguments and what a launcher sets, as one line of JSON, and ends with $CODE.
RECORDER = """#!/usr/bin/env python3
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
names += ("JAX_PLATFORMS", "http_proxy")
if sys.argv[1:] == ["--help"]:
    print(os.environ.get("TORCHRUN_HELP", ""))
    sys.exit(0)
line = {"argv": sys.argv[1:], "environment": {name: os.environ[name] for name in names if name in os.environ}}
os.write(1, (json.dumps(line) + "\\n").encode())
sys.exit(int(os.environ.get("CODE", "0")))
"""

#: Slurm of two nodes: every task's command runs here, one after another.
SRUN = """#!/usr/bin/env bash
while [[ "$1" == --* ]]; do shift; done
code=0
for ((node = 0; node < SLURM_NNODES; node++)); do SLURM_NODEID=$node "$@" || code=$?; done
exit "$code"
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then printf 'gpu07\\ngpu08\\n'; else echo "SCONTROL $*"; fi
"""
SQUEUE = """#!/usr/bin/env bash
date -d "$TIME_LEFT seconds" +%Y-%m-%dT%H:%M:%S
"""

#: Arguments with a space in one: they must arrive as they are.
GIVEN = ["--config", "a file.yaml", "--run_dir=/shared/run"]


@pytest.fixture
def launch(tmp_path):
    """Run a script with stand-ins first in the path; returns exit code, the recorded calls and the whole output."""
    for name, text in (
        ("torchrun", RECORDER), ("draft-jax", RECORDER), ("srun", SRUN), ("scontrol", SCONTROL), ("squeue", SQUEUE),
        ("nvidia-smi", "#!/usr/bin/env bash\nfor i in 0 1 2 3; do echo GPU $i; done\n"),
    ):  # fmt: skip
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(script: str, **environment: str) -> tuple[int, list[dict], str]:
        path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
        unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "JAX_PLATFORMS")
        env = {name: value for name, value in os.environ.items() if name not in unset} | {"PATH": path} | environment
        done = subprocess.run(
            ["bash", str(LAUNCH / script), *GIVEN], env=env, capture_output=True, text=True, timeout=60, check=False
        )
        calls = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return done.returncode, calls, done.stdout + done.stderr

    return run


def torchrun_reads(argv: list[str]) -> dict:
    """What torchrun itself makes of a command line."""
    from torch.distributed.run import get_args_parser

    read = vars(get_args_parser().parse_args(argv))
    assert read["module"]
    assert [read["training_script"], *read["training_script_args"]] == [
        "train.cli", "train", "--resume", "auto", *GIVEN
    ]  # fmt: skip
    return read


SLURM = {
    "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "6001", "http_proxy": "http://p:1"
}  # fmt: skip


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_shell_reads_it(script):
    subprocess.run(["bash", "-n", str(LAUNCH / script)], check=True)
    checker = shutil.which("shellcheck")
    if checker:
        subprocess.run([checker, str(LAUNCH / script)], check=True)


def test_one_host(launch):
    code, [call], _ = launch("one_host.sh")
    read = torchrun_reads(call["argv"])
    assert (code, read["standalone"], read["nproc_per_node"]) == (0, True, "4")
    _, [call], _ = launch("one_host.sh", GPUS="2", CODE="0")
    assert torchrun_reads(call["argv"])["nproc_per_node"] == "2"
    assert launch("one_host.sh", CODE="3")[0] == 3


def test_each_host(launch):
    code, [call], _ = launch("each_host.sh", FIRST_HOST="10.0.0.1", NODES="4", NODE_RANK="3")
    read = torchrun_reads(call["argv"])
    assert (code, read["nnodes"], read["node_rank"], read["nproc_per_node"]) == (0, "4", 3, "4")
    assert (read["master_addr"], read["master_port"]) == ("10.0.0.1", 29500)
    code, calls, output = launch("each_host.sh", FIRST_HOST="10.0.0.1", NODES="4")
    assert (code != 0, calls) == (True, [])
    assert "NODE_RANK: 0 .. NODES-1" in output


def test_slurm_with_torchrun_per_node(launch):
    code, calls, output = launch("slurm_torchrun.sbatch", **SLURM, TIME_LEFT="9000", TORCHRUN_HELP="--shutdown-timeout")
    assert code == 0
    assert "requeue" not in output
    for node, call in enumerate(calls):
        assert call["argv"].pop(2) == "--shutdown-timeout=280"
        read = torchrun_reads(call["argv"])
        assert (read["nnodes"], read["node_rank"], read["nproc_per_node"]) == ("2", node, "8")
        assert (read["master_addr"], read["master_port"]) == ("gpu07", 20002)
        assert "http_proxy" not in call["environment"]
    assert len(calls) == 2
    # Older torchruns have no such option, and a failure long before the end is none of the time limit's.
    code, calls, output = launch("slurm_torchrun.sbatch", **SLURM, TIME_LEFT="9000", CODE="1")
    assert (code, len(calls)) == (1, 2)
    torchrun_reads(calls[0]["argv"])
    assert "requeue" not in output
    code, _, output = launch("slurm_torchrun.sbatch", **SLURM, TIME_LEFT="200", CODE="1")
    assert "SCONTROL requeue 6001" in output


def test_plain_slurm(launch):
    code, calls, output = launch("slurm_plain.sbatch", **SLURM)
    assert (code, [call["argv"] for call in calls]) == (0, [["train", "--resume", "auto", *GIVEN]] * 2)
    assert "requeue" not in output
    code, _, output = launch("slurm_plain.sbatch", **SLURM, CODE="143")
    assert code == 143
    assert "SCONTROL requeue 6001" in output
    assert "requeue" not in launch("slurm_plain.sbatch", **SLURM, CODE="1")[2]


def test_by_hand(launch):
    from train.topology import Topology

    code, calls, _ = launch("by_hand.sh")
    assert code == 0
    found = sorted((Topology.from_environment(call["environment"], "here") for call in calls), key=lambda t: t.rank)
    assert [(t.rank, t.local_rank, t.world_size, t.master_port) for t in found] == [(0, 0, 2, 29500), (1, 1, 2, 29500)]
    assert all(call["argv"] == ["train", *GIVEN] for call in calls)
    assert {call["environment"]["JAX_PLATFORMS"] for call in calls} == {"cpu"}
    assert launch("by_hand.sh", CODE="5")[0] == 5


def test_jobset():
    """As many torchruns as pods, as many processes as GPUs, and time to save after SIGTERM."""
    [job] = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())["spec"]["replicatedJobs"]
    job = job["template"]["spec"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    shell, option, command = container["command"]
    assert (shell, option) == ("bash", "-c")
    assert command.startswith("exec torchrun ")
    from torch.distributed.run import get_args_parser

    argv = command.replace("$JOB_COMPLETION_INDEX", "3").split()[2:]
    read = vars(get_args_parser().parse_args(argv))
    assert int(read["nnodes"]) == job["parallelism"] == job["completions"]
    assert int(read["nproc_per_node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert (read["node_rank"], read["module"], read["training_script"]) == (3, True, "train.cli")
    assert job["completionMode"] == "Indexed"
    assert pod["terminationGracePeriodSeconds"] >= 300


def test_files_that_are_named_exist():
    texts = {path.name: path.read_text() for path in LAUNCH.iterdir()}
    named = {name for text in texts.values() for name in re.findall(r"configs/[\w.-]+\.yaml", text)}
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []
    documented = set(re.findall(r"examples/launch/([\w.]+)", (ROOT / "docs" / "multi_host.md").read_text()))
    assert documented == set(texts)
    assert Path(LAUNCH / "one_host.sh").stat().st_mode & 0o100
