"""CPU seconds that commands take to start: `orch --help`, and `orch jobs` with 300 ended jobs beside it.

    .venv/bin/python tests/bench/startup.py [TIMES]

All commands alternate; each figure is the median of TIMES (default 9) runs, their user and system time together. Output
goes to a file, for which `orch jobs` prints all 300 lines; every fifth job has failed. Needs no root and no host.
"""

from __future__ import annotations

import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from orchestrator.jobs import FirstFailure, JobRecord
from orchestrator.paths import Home
from orchestrator.store import Store
from tests.support.plans import a2000_v100
from tests.support.remembered import cluster

ROOT = Path(__file__).resolve().parents[2]
JOBS = 300
ORCH = (sys.executable, "-m", "orchestrator.cli")
COMMANDS = {
    "import click": (sys.executable, "-c", "import click"),
    "import orchestrator.controller": (sys.executable, "-c", "import orchestrator.controller"),
    "orch --help": (*ORCH, "--help"),
    "orch jobs": (*ORCH, "jobs"),
    "orch jobs --json": (*ORCH, "jobs", "--json"),
}
OUT_OF_MEMORY = FirstFailure(node="v100", rank=1, exit_code=1, reason="rank 1 ended with exit code 1: out of memory")


def main() -> None:
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    with tempfile.TemporaryDirectory() as folder:
        remember_jobs(Store(Home(Path(folder))))
        environment = {**os.environ, "ORCH_HOME": folder, "PYTHONPATH": str(ROOT)}
        found: dict[str, list[float]] = {name: [] for name in COMMANDS}
        for _ in range(times):
            for name, command in COMMANDS.items():
                found[name].append(cpu_s(command, environment, Path(folder)))
    print(f"{platform.python_implementation()} {platform.python_version()}, load {os.getloadavg()[0]:.1f}")
    for name, values in found.items():
        shown = f"{statistics.median(values):5.3f} CPU s, {min(values):.3f} to {max(values):.3f}"
        ratio = statistics.median(values) / statistics.median(found["orch --help"])
        print(f"{name:31} median of {times}: {shown}, {ratio:.1f} x `orch --help`")


def remember_jobs(store: Store) -> None:
    store.save_cluster(cluster("a2000-v100"), current=True)
    plan = a2000_v100()
    for number in range(1, JOBS + 1):
        one = plan.model_copy(update={"job": f"resnet152_cifar-20261121-{number:04d}-k3f"})
        record = JobRecord.of(one, "succeeded").model_copy(update={"number": number, "ended": one.created})
        if number % 5 == 0:
            failed = {"state": "failed", "exit_code": 1, "first_failure": OUT_OF_MEMORY}
            record = record.model_copy(update=failed)
        store.save_job(record, one)


def cpu_s(command: tuple[str, ...], environment: dict[str, str], folder: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with open(folder / "output", "w") as output:
        subprocess.run(command, env=environment, cwd=folder, stdout=output, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
