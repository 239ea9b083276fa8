"""Kills a collect at its write points, one after another, and looks that each time the next one makes it whole.

    python collect_driver.py PLAN.json FOLDER STEP        STEP=1 takes every write point, 5 every fifth

A write point is an event of Python's own audit (PEP 578) that opens for writing, renames or removes something in the
run folder. The collect runs in a fork, which kills itself right before the point: what was written until then is all
there is. After it every file has to be a beginning of its host's; the next collect has to make all of them whole.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from orchestrator.jobs import claimed, names_of
from orchestrator.jobs.collect import collect
from orchestrator.paths import RunFolder
from orchestrator.planning import LaunchPlan
from orchestrator.transport import ConnectedHost, LocalTransport

WRITING = os.O_WRONLY | os.O_RDWR


class Points:
    """Counts the write points in a folder, and dies at one of them."""

    def __init__(self, folder: Path, deadly: int | None) -> None:
        self._folder, self._deadly, self.count = str(folder), deadly, 0
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple) -> None:
        if event not in ("open", "os.rename", "os.remove", "os.truncate", "os.mkdir"):
            return
        if not str(arguments[0]).startswith(self._folder) or (event == "open" and not arguments[2] & WRITING):
            return
        self.count += 1
        if self.count == self._deadly:
            os.kill(os.getpid(), signal.SIGKILL)


def pull(plan: LaunchPlan, run: RunFolder) -> list[str]:
    """One whole collect; what went wrong with it."""
    hosts = {
        node.name: ConnectedHost(LocalTransport(node.name), node.python, None, node.workdir) for node in plan.nodes
    }
    with claimed(run):
        done = collect(plan, hosts, run)
    return [*map(str, done.errors.values()), *done.notices]


def pull_in_a_fork(plan: LaunchPlan, run: RunFolder, deadly: int | None) -> int | None:
    """How many write points there were; None where it was killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        points = Points(run.root, deadly)
        failed = pull(plan, run)
        os.write(write, f"{points.count}\n{failed}".encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        count, _, failed = pipe.read().partition("\n")
    assert failed in ("", "[]"), failed
    return int(count) if count else None


def files(plan: LaunchPlan, run: RunFolder) -> dict[str, tuple[bytes, bytes]]:
    """By node and name: the bytes here, and on the host."""
    found = {}
    for node in plan.nodes:
        for name in names_of(node.rank_numbers):
            here, there = run.node(node.name) / name, Path(node.workdir, "jobs", plan.job, name)
            found[f"{node.name}/{name}"] = (
                here.read_bytes() if here.exists() else b"",
                there.read_bytes() if there.exists() else b"",
            )
    return found


def main() -> None:
    plan, folder, step = LaunchPlan.model_validate_json(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), sys.argv[3]
    total = pull_in_a_fork(plan, RunFolder(folder / "whole"), None)
    assert total
    killed = 0
    for deadly in range(1, total + 1, int(step)):
        run = RunFolder(folder / str(deadly))
        killed += pull_in_a_fork(plan, run, deadly) is None
        torn = [name for name, (here, there) in files(plan, run).items() if not there.startswith(here)]
        assert not torn, f"killed at {deadly}: {torn} are no beginnings of their hosts' files"
        assert pull_in_a_fork(plan, run, None) is not None
        changed = [name for name, (here, there) in files(plan, run).items() if here != there]
        assert not changed, f"killed at {deadly}: {changed} are not whole"
        left = [path for path in run.root.rglob("*") if path.name.endswith(".previous")]
        assert not left, f"killed at {deadly}: {left}"
    print(f"killed at {killed} of {total} write points: every file whole")


if __name__ == "__main__":
    main()
