"""Ranks that Slurm starts, one task of `srun` each: `srun --ntasks=2 python -m trainer --exp mnist_lenet`.

ranks_variables(os.environ)     {"RANK": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "a16", "MASTER_PORT": "20031", ...}
"""
# Slurm names no master. SLURM_LAUNCH_NODE_IPADDR is the host on which srun was typed: on clusters the login host.

from __future__ import annotations

import os
import re
import select
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from trainer.shared.errors import TrainError

FIRST_PORT, PORTS = 20_000, 10_000
"""Linux gives clients ports from 32768 on."""
FULL_QUEUE_S = 60
_OF_SRUN = "ORCH_SRUN"
"""Its process, and whether it has an allocation of its own."""
_LIST = re.compile(r",(?![^\[]*\])")
_BRACKETS = re.compile(r"([^\[]*)\[([^\[\]]+)\](.*)")
_GROUP_0 = ("SLURM_JOB_NODELIST_HET_GROUP_0", "SLURM_JOB_NODELIST_PACK_GROUP_0")
"""The first component's hosts: rank 0 is there. The second name is that of Slurm before version 23."""


def is_task(environment: Mapping[str, str]) -> bool:
    """Whether this process is one of several tasks. A batch script has SLURM_PROCID, too, but no step."""
    return environment.get("SLURM_STEP_NUM_TASKS", "1") != "1" and "SLURM_PROCID" in environment


def ranks_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables for such a task; {} for other processes, and if a launcher within the task has set them.
    Raises TrainError.
    """
    if not is_task(environment) or {"RANK", "WORLD_SIZE"} & environment.keys():
        return {}
    hosts = hosts_in(environment.get("SLURM_STEP_NODELIST", ""))
    own = environment.get("SLURMD_NODENAME", "")
    counts = task_counts(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if own not in hosts or len(counts) != len(hosts):
        raise TrainError(f"Slurm's variables contradict each other: {own or 'no node'} in {hosts}, tasks {counts}")
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(counts[hosts.index(own)]),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or _master(environment, hosts, own),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(_port(environment)),
    }


def _master(environment: Mapping[str, str], hosts: Sequence[str], own: str) -> str:
    if len(hosts) == 1:
        return "127.0.0.1"
    first = next((hosts_in(environment[name])[0] for name in _GROUP_0 if environment.get(name)), hosts[0])
    is_arbitrary = environment.get("SLURM_DISTRIBUTION") == "arbitrary"
    if is_arbitrary or (environment["SLURM_PROCID"] == "0" and own != first):
        raise TrainError(
            f"rank 0 may not run on {first}, the first host of this step: set MASTER_ADDR to the host that it runs on"
        )
    return first


def _port(environment: Mapping[str, str]) -> int:
    numbers = [environment.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    job, step = (int(text) if text.isdecimal() else 0 for text in numbers)
    return FIRST_PORT + (10 * job + step) % PORTS


def hosts_in(text: str) -> list[str]:
    """`a[16,2000],n[01-03]` as a16, a2000, n01, n02, n03."""
    found = list[str]()
    for part in filter(None, _LIST.split(text)):
        brackets = _BRACKETS.fullmatch(part)
        if brackets is None:
            found.append(part)
            continue
        begin, numbers, end = brackets.groups()
        for piece in numbers.split(","):
            low, _, high = piece.partition("-")
            between = range(int(low), int(high or low) + 1)
            found += [f"{begin}{number:0{len(low)}}{rest}" for number in between for rest in hosts_in(end) or [""]]
    return found


def task_counts(text: str) -> list[int]:
    """`2,1(x2)` as 2, 1, 1."""
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in pairs for _ in range(int(times or 1))]


def become_srun(ranks: int, arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by an `srun` that starts ranks on this host. Raises TrainError without Slurm."""
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    # In the allocation that this process is in, or in a new one with all cores, which torchrun gives its ranks, too.
    is_new = "SLURM_JOB_ID" not in os.environ
    place = ["--exclusive", f"--immediate={FULL_QUEUE_S}"] if is_new else ["--overlap"]
    gpus = [f"--gres=gpu:{ranks}"] if os.environ.get("CUDA_VISIBLE_DEVICES") else []
    options = ["--nodes=1", f"--ntasks={ranks}", f"--nodelist={host}", "--kill-on-bad-exit=1", "--export=ALL"]
    os.environ[_OF_SRUN] = f"{os.getpid()} {'new' if is_new else ''}"
    try:
        words = ["srun", *options, *place, *gpus, sys.executable, "-m", "trainer", *arguments]
        os.execvp("srun", words)  # noqa: S606
    except OSError as error:
        raise TrainError(f"srun cannot be started ({error.strerror}): is this host a node of Slurm?") from error


def end_with_srun() -> None:
    """Ends this task with the srun of `become_srun`, however that ends: Slurm lets tasks of a killed srun run on."""
    pid, _, is_new = os.environ.pop(_OF_SRUN, "").partition(" ")
    with suppress(OSError, ValueError):  # no such call before Linux 5.3, or another namespace
        srun = os.pidfd_open(int(pid))

        def wait() -> None:
            select.select([srun], [], [])
            if is_new:
                with suppress(OSError):
                    os.execlp("scancel", "scancel", os.environ["SLURM_JOB_ID"])  # noqa: S606
            os._exit(1)

        threading.Thread(target=wait, daemon=True).start()
