"""What orch costs before the first training step: `orch run` beside `ssh HOST torchrun ...` typed on both hosts.

    .venv/bin/python tests/bench/launch.py [PAIRS]

One lab of two hosts, both ways alternating, the first of a pair by turns. Every time runs from typing the command: to
the start of torchrun on the last host, and to the end of the first step of the slowest rank, read from the ranks' own
records (the hosts of a lab share one clock and one machine's cores: the second figure suffers from whatever else it
does). Needs root, as the lab does. What orch costs to start by itself: `startup.py`.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.lab import Lab, lab
from tests.support.terminal import Person

ROOT = Path(__file__).resolve().parents[2]
INVENTORY = """
cluster: launch
defaults: {device: cpu, bandwidth: 2.5Gbps, env: {OMP_NUM_THREADS: "1"}}
nodes:
  - {name: alpha, host: 10.77.3.1}
  - {name: beta, host: 10.77.3.2}
"""
SETTINGS = {"data": "synthetic", "steps": "1", "batch": "8", "num_workers": "0", "eval_every": "0"}
MASTER = "10.77.3.1"
HOSTS = ("alpha", "beta")


class Times(NamedTuple):
    """Seconds since the command was typed."""

    torchrun: float
    first_step: float


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as folder, lab(INVENTORY) as hosts:
        person = Person(hosts, Path(folder, "home"), Path(folder))
        person.types("up", str(hosts.inventory))
        copy_trainer(hosts)
        ways: dict[str, Callable[[int], Times]] = {
            "orch run": lambda _: by_orch(person),
            "ssh + torchrun": lambda number: by_hand(hosts, number),
        }
        for way in ways.values():  # one of each to warm caches, thrown away
            way(99)
        times: dict[str, list[Times]] = {name: [] for name in ways}
        for number in range(pairs):
            for name in sorted(ways, reverse=bool(number % 2)):
                times[name].append(ways[name](number))
                newest = times[name][-1]
                print(f"{name:15} torchrun {newest.torchrun:5.2f} s, first step {newest.first_step:5.2f} s", flush=True)
    show_machine()
    print(f"{pairs} pairs, from typing the command, in seconds:")
    for what in Times._fields:
        values = {name: [getattr(one, what) for one in all_] for name, all_ in times.items()}
        values["overhead"] = [a - b for a, b in zip(*values.values(), strict=True)]
        for name, one in values.items():
            print(f"to {what:11} {name:15} median {statistics.median(one):5.2f}, {min(one):.2f} to {max(one):.2f}")


def by_orch(person: Person) -> Times:
    settings = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    started = time.time()
    run = person.starts("run", "--exp", "mnist_lenet", *settings)  # as typed: `types` forks one with all imported
    said = run.communicate()[0]
    assert run.returncode == 0, said
    job = person.asks("jobs")["jobs"][0]["id"]
    folders = {node: f".orch/jobs/{job}" for node in HOSTS}
    began = max(born(person.lab, node, f"{folder}/torchrun.log") for node, folder in folders.items())
    files = {node: f"{folder}/rank-{rank}/metrics.jsonl" for rank, (node, folder) in enumerate(folders.items())}
    return Times(began - started, first_step(person.lab, files) - started)


def by_hand(hosts: Lab, number: int) -> Times:
    settings = " ".join(f"--{key} {value}" for key, value in {**SETTINGS, "device": "cpu"}.items())
    started = time.time()
    running = []
    for rank in range(len(HOSTS)):
        line = (
            f"cd by-hand && touch {number}.began && "
            f"ORCH_METRICS=$PWD/{number}.jsonl OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0 "
            f"torchrun --nnodes 2 --node-rank {rank} --nproc-per-node 1 --rdzv-backend static "
            f"--master-addr {MASTER} --master-port {29700 + number} -m trainer --exp mnist_lenet {settings}"
        )
        where = ["-i", str(hosts.key), "-o", f"UserKnownHostsFile={hosts.known_hosts}", f"lab@10.77.3.{rank + 1}"]
        running.append(hosts.popen(["ssh", "-F", "none", *where, line], stderr=subprocess.PIPE))
    for process in running:
        said = process.communicate()
        assert process.returncode == 0, said
    began = max(born(hosts, node, f"by-hand/{number}.began") for node in HOSTS)
    return Times(began - started, first_step(hosts, {node: f"by-hand/{number}.jsonl" for node in HOSTS}) - started)


def born(hosts: Lab, node: str, file: str) -> float:
    """When this file was made, in seconds since the epoch."""
    return float(hosts.host_exec(node, ["stat", "-c", "%.W", f"/home/lab/{file}"], check=True).stdout)


def first_step(hosts: Lab, files: dict[str, str]) -> float:
    """When the last rank ended its first step, in seconds since the epoch."""
    ends = []
    for node, file in files.items():
        lines = hosts.host_exec(node, ["cat", f"/home/lab/{file}"], check=True).stdout.splitlines()
        events = [json.loads(line) for line in lines]
        ends.append(next(event["wall"] for event in events if event["event"] == "step"))
    return max(ends)


def show_machine() -> None:
    """What the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "fabric", "paramiko", "pydantic"))
    ssh = subprocess.run(["ssh", "-V"], capture_output=True, text=True).stderr.split(",")[0]
    commit = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True)
    print(f"\n{os.cpu_count()} cores {cpu}, load {os.getloadavg()[1]:.1f} over 5 min, Linux {platform.release()}")
    print(f"Python {platform.python_version()}, {packages}, {ssh}, orch {commit.stdout.strip() or 'unversioned'}")


def copy_trainer(hosts: Lab) -> None:
    packed = subprocess.run(["tar", "-C", str(ROOT), "-c", "trainer"], capture_output=True, check=True).stdout
    for node in HOSTS:
        unpack = ["sh", "-c", "mkdir -p by-hand && tar -C by-hand -x"]
        hosts.host_exec(node, unpack, as_user=True, input=packed, text=False, check=True)


if __name__ == "__main__":
    main()
