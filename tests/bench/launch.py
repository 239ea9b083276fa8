"""What orch costs before the first training step: `orch run` beside `ssh HOST torchrun ...` typed on both hosts.

    .venv/bin/python tests/bench/launch.py [PAIRS]

One lab of two hosts, both ways alternating; every time runs from typing the command to the end of the first step of the
slowest rank, read from the ranks' own records (the hosts of a lab share one clock). Also `orch --help` beside the bare
`python -c "import click"`. Needs root, as the lab does.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab import Lab, lab
from person import ORCH, Person

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


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as folder, lab(INVENTORY) as hosts:
        person = Person(hosts, Path(folder, "home"), Path(folder))
        person.types("up", str(hosts.inventory))
        copy_trainer(hosts)
        ways: dict[str, Callable[[int], float]] = {
            "orch run": lambda _: by_orch(person),
            "ssh + torchrun": lambda number: by_hand(hosts, number),
        }
        for way in ways.values():  # one of each to warm caches, thrown away
            way(99)
        times = {name: [] for name in ways}
        for number in range(pairs):
            for name, way in ways.items():
                times[name].append(way(number))
                print(f"{name:15} {times[name][-1]:6.2f} s", flush=True)
    print(f"\n{platform.processor() or platform.machine()}, Python {platform.python_version()}, {pairs} pairs")
    for name, values in times.items():
        print(f"{name:15} median {statistics.median(values):5.2f} s, {min(values):.2f} to {max(values):.2f}")
    over = [a - b for a, b in zip(*times.values(), strict=True)]
    print(f"{'overhead':15} median {statistics.median(over):5.2f} s, {min(over):.2f} to {max(over):.2f}")
    show_help_times()


def by_orch(person: Person) -> float:
    settings = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    started = time.time()
    person.types("run", "--exp", "mnist_lenet", *settings)
    job = person.asks("jobs")["jobs"][0]["id"]
    files = {"alpha": f".orch/jobs/{job}/rank-0/metrics.jsonl", "beta": f".orch/jobs/{job}/rank-1/metrics.jsonl"}
    return first_step(person.lab, files) - started


def by_hand(hosts: Lab, number: int) -> float:
    settings = " ".join(f"--{key} {value}" for key, value in {**SETTINGS, "device": "cpu"}.items())
    started = time.time()
    running = []
    for rank in (0, 1):
        line = (
            f"cd by-hand && ORCH_METRICS=$PWD/{number}.jsonl OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0 "
            f"torchrun --nnodes 2 --node-rank {rank} --nproc-per-node 1 --rdzv-backend static "
            f"--master-addr {MASTER} --master-port {29700 + number} -m trainer --exp mnist_lenet {settings}"
        )
        where = ["-i", str(hosts.key), "-o", f"UserKnownHostsFile={hosts.known_hosts}", f"lab@10.77.3.{rank + 1}"]
        running.append(hosts.popen(["ssh", "-F", "none", *where, line], stderr=subprocess.PIPE))
    for process in running:
        said = process.communicate()
        assert process.returncode == 0, said
    files = {node: f"by-hand/{number}.jsonl" for node in ("alpha", "beta")}
    return first_step(hosts, files) - started


def first_step(hosts: Lab, files: dict[str, str]) -> float:
    """When the last rank ended its first step, in seconds since the epoch."""
    ends = []
    for node, file in files.items():
        lines = hosts.host_exec(node, ["cat", f"/home/lab/{file}"], check=True).stdout.splitlines()
        events = [json.loads(line) for line in lines]
        ends.append(next(event["wall"] for event in events if event["event"] == "step"))
    return max(ends)


def copy_trainer(hosts: Lab) -> None:
    packed = subprocess.run(["tar", "-C", str(ROOT), "-c", "trainer"], capture_output=True, check=True).stdout
    for node in ("alpha", "beta"):
        unpack = ["sh", "-c", "mkdir -p by-hand && tar -C by-hand -x"]
        hosts.host_exec(node, unpack, as_user=True, input=packed, text=False, check=True)


def show_help_times() -> None:
    commands = {"orch --help": [*ORCH, "--help"], "import click": [sys.executable, "-c", "import click"]}
    times = {name: [] for name in commands}
    for _ in range(11):
        for name, command in commands.items():
            started = time.perf_counter()
            subprocess.run(command, capture_output=True, check=True)
            times[name].append(time.perf_counter() - started)
    for name, values in times.items():
        print(f"{name:15} median {statistics.median(values):5.3f} s")


if __name__ == "__main__":
    main()
