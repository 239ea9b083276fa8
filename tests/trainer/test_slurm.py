"""Ranks that are tasks of Slurm: from the variables that Slurm 22.05 sets, and on a real cluster of it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support import forks
from trainer.__main__ import starting
from trainer.ranks import hosts_in, ranks_variables, read_rank_info, task_counts
from trainer.shared import SettingsError, TrainError

ROOT = Path(__file__).parents[2]
LOGIN = {"SLURM_LAUNCH_NODE_IPADDR": "10.77.0.1", "SLURM_SRUN_COMM_HOST": "10.77.0.1"}
STEP = {
    **LOGIN,
    "SLURMD_NODENAME": "a2000",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "a[16,2000],v100",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)",
}
UNEQUAL = {
    **STEP,
    "SLURM_JOB_NODELIST_PACK_GROUP_0": "v100",
    "SLURM_JOB_NODELIST_PACK_GROUP_1": "a16",
    "SLURM_STEP_NODELIST": "a16,v100",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
"""A heterogeneous job, whose first component is v100: Slurm sorts the hosts by name all the same."""
ON_V100 = {"SLURMD_NODENAME": "v100", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
ON_A16 = {"SLURMD_NODENAME": "a16", "SLURM_PROCID": "2", "SLURM_LOCALID": "1"}
BATCH_SCRIPT = {"SLURM_JOB_ID": "8", "SLURM_PROCID": "0", "SLURM_NTASKS": "3", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environment", "rank", "local", "on_this_host", "world", "master"),
    [
        (STEP, 2, 0, 1, 4, "a16:20010"),
        ({**STEP, **ON_A16, "SLURM_PROCID": "1"}, 1, 1, 2, 4, "a16:20010"),
        ({**STEP, "SLURM_STEP_ID": "3"}, 2, 0, 1, 4, "a16:20013"),
        ({**UNEQUAL, **ON_V100}, 0, 0, 1, 3, "v100:20010"),
        ({**UNEQUAL, **ON_A16}, 2, 1, 2, 3, "v100:20010"),
        ({**STEP, "MASTER_ADDR": "v100", "SLURM_DISTRIBUTION": "arbitrary"}, 2, 0, 1, 4, "v100:20010"),
        ({**STEP, "MASTER_PORT": "29400"}, 2, 0, 1, 4, "a16:29400"),
    ],
)
def test_a_task_of_slurm_is_a_rank(
    environment: dict[str, str], rank: int, local: int, on_this_host: int, world: int, master: str
) -> None:
    found = read_rank_info({**environment})
    assert (found.rank, found.local_rank, found.local_world_size) == (rank, local, on_this_host)
    assert (found.world_size, found.master) == (world, master)


def test_ranks_of_one_host_meet_there() -> None:
    one = {"SLURM_STEP_NODELIST": "a2000", "SLURM_STEP_TASKS_PER_NODE": "4"}
    assert read_rank_info({**STEP, **one}).master == "127.0.0.1:20010"


def test_libraries_find_the_variables_of_torchrun() -> None:
    environment = {**STEP}
    read_rank_info(environment)
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["LOCAL_RANK"]) == ("2", "4", "0")


@pytest.mark.parametrize(
    "environment",
    [{}, BATCH_SCRIPT, {**STEP, "SLURM_STEP_NUM_TASKS": "1"}, {**STEP, "RANK": "0", "WORLD_SIZE": "1"}],
    ids=["no Slurm", "batch script", "one task", "torchrun in a task"],
)
def test_other_processes_are_no_tasks(environment: dict[str, str]) -> None:
    assert ranks_variables(environment) == {}
    assert read_rank_info({**environment}).world_size == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"SLURM_DISTRIBUTION": "arbitrary"},
        {**ON_V100, "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "1(x3)"},
    ],
    ids=["arbitrary", "rank 0 elsewhere"],
)
def test_a_master_that_slurm_does_not_tell_has_to_be_named(wrong: dict[str, str]) -> None:
    with pytest.raises(TrainError, match=r"rank 0 may not run on a16, .*: set MASTER_ADDR"):
        read_rank_info({**STEP, **wrong})


def test_variables_that_contradict_each_other_are_named() -> None:
    with pytest.raises(TrainError, match="contradict each other: login in "):
        ranks_variables({**STEP, "SLURMD_NODENAME": "login"})


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a16", ["a16"]),
        ("a[16,2000],v100", ["a16", "a2000", "v100"]),
        ("n[08-11,20],m", ["n08", "n09", "n10", "n11", "n20", "m"]),
        ("r[1-2]n[3-4]-ib", ["r1n3-ib", "r1n4-ib", "r2n3-ib", "r2n4-ib"]),
        ("", []),
    ],
)
def test_a_list_of_hosts_is_read_as_scontrol_reads_it(text: str, hosts: list[str]) -> None:
    assert hosts_in(text) == hosts


def test_tasks_of_each_host_are_counted() -> None:
    assert task_counts("2,1(x2),10") == [2, 1, 1, 10]


def test_srun_is_a_way_to_start_ranks_but_not_within_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    assert starting(["--srun", "2", "--exp", "mnist_lenet"]) == ("--srun", 2, ["--exp", "mnist_lenet"])
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    for way in ("spawn", "srun"):
        with pytest.raises(SettingsError, match=f"srun has started this rank already; leave --{way} out"):
            starting([f"--{way}", "2"])


def test_a_host_without_slurm_says_so_in_one_line(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "trainer", "--srun", "2", "--exp", "mnist_lenet"]
    done = subprocess.run(words, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "error: srun cannot be started (No such file or directory): is this host a node of Slurm?\n"


def test_a_port_in_use_is_reported_with_its_remedy() -> None:
    one = {"SLURM_STEP_NODELIST": "v100", "SLURM_STEP_TASKS_PER_NODE": "4", **ON_V100}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ["--exp", "mnist_lenet", "--data", "synthetic", "--device", "cpu"]
        done = forks.run(forks.TRAINER, words, cwd=ROOT, env={**os.environ, **STEP, **one, "MASTER_PORT": port})
    assert done.returncode == 1
    assert f"cannot join 4 ranks at 127.0.0.1:{port} (" in done.stderr
    assert "give all ranks another MASTER_PORT" in done.stderr


# ---- on a real cluster -----------------------------------------------------------------------------------------------

NODES = "a2000:a2000:1:1:2500mbit v100:v100:1:1:2500mbit a16:a16:2:2:2500mbit"
SCRIPT = """
import os, torch, trainer
ranks = trainer.join(steps=1)
total = torch.tensor([ranks.rank + 1.0])
torch.distributed.all_reduce(total)
place = [os.environ[name] for name in ("SLURMD_NODENAME", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")]
print("rank", ranks.rank, "of", ranks.world_size, *place, "sum", total.item(), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with pytest.importorskip("tests.support.slurm_lab").slurm_lab(NODES=NODES) as lab:
        (lab.work / "join.py").write_text(SCRIPT)
        (lab.work / "join.py").chmod(0o644)
        yield lab


def typed(lab: Any, *words: str) -> str:
    variables = ["env", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1", f"ORCH_METRICS={lab.work}/{{rank}}.jsonl"]
    return str(lab.exec(*variables, *words, timeout=240))


def test_a_script_joins_the_tasks_of_equal_and_unequal_hosts(cluster: Any) -> None:
    script = (cluster.python, f"{cluster.work}/join.py")
    equal = typed(cluster, "srun", "--ntasks=4", "--kill-on-bad-exit=1", *script)
    assert sorted(re.findall(r"rank .*", equal)) == [
        "rank 0 of 4 a16 0 2 a16 sum 10.0",
        "rank 1 of 4 a16 1 2 a16 sum 10.0",
        "rank 2 of 4 a2000 0 1 a16 sum 10.0",
        "rank 3 of 4 v100 0 1 a16 sum 10.0",
    ]
    first, second = ("-n1", "-wv100", "--kill-on-bad-exit=1"), ("-n2", "-wa16")
    unequal = typed(cluster, "srun", *first, *script, ":", *second, *script)
    assert sorted(re.findall(r"rank .*", unequal)) == [
        "rank 0 of 3 v100 0 1 v100 sum 6.0",
        "rank 1 of 3 a16 0 2 v100 sum 6.0",
        "rank 2 of 3 a16 1 2 v100 sum 6.0",
    ]


def test_the_trainer_trains_on_tasks(cluster: Any) -> None:
    settings = ["--exp=mnist_lenet", "--data=synthetic", "--device=cpu", "--num_workers=0", "--steps=2"]
    trainer = (cluster.python, "-m", "trainer", *settings, "--eval_every=0")
    printed = typed(cluster, "srun", "--chdir", str(cluster.work), "--nodes=2", "--ntasks=2", *trainer)
    assert "over 2 ranks" in printed and "done: 2 steps" in printed
