"""A controller that is killed at its n-th write point: a program of `test_controller_crash.py`, alone in its process.

It is forked from `forks_server.py`, or starts by itself:

python crash_driver.py ACTION HOME FOLDER KILL_AT

Write points lie before and after whatever changes something: every rename, fsync, folder and removal here, and every
request to a host. KILL_AT is a point's number, 0 for none, or `go`: before the first request of that name. Prints the
points passed when a job was launched, and on its last line those of all.
"""

import os
import signal
import sys
import threading
from pathlib import Path

from orchestrator.controller import Controller
from orchestrator.hosts import Connections, load_inventory
from orchestrator.paths import Home
from orchestrator.planning import LaunchPlan
from orchestrator.store import Store
from orchestrator.transport import ask


class Killer:
    """Counts the points that are passed, and kills this process at one of them."""

    def __init__(self, kill_at: str) -> None:
        self.points = 0
        self._kill_at, self._counting = kill_at, threading.Lock()

    def point(self):
        with self._counting:
            self.points += 1
            if str(self.points) == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, owner, name):
        real = getattr(owner, name)

        def wrapper(*words, **options):
            if any(isinstance(word, dict) and word.get("action") == self._kill_at for word in words):
                os.kill(os.getpid(), signal.SIGKILL)
            self.point()
            answer = real(*words, **options)
            self.point()
            return answer

        setattr(owner, name, wrapper)


def main(words):
    action, home, folder = words[0], Home(Path(words[1])), Path(words[2])
    killer = Killer(words[3])
    for name in ("replace", "rename", "fsync", "mkdir", "unlink"):
        killer.watch(os, name)
    killer.watch(ask, "ask")
    killer.watch(ask, "open_stream")
    with Connections(home) as connections:
        act(action, Controller(Store(home), connections), folder, killer)
    print(killer.points)


def act(action, controller, folder, killer):
    if action == "up":
        controller.clusters.up(load_inventory(folder / "inventory.yaml"))
    elif action == "jobs":
        controller.jobs.all()
    elif action == "run":
        plan = LaunchPlan.model_validate_json((folder / "plan.json").read_bytes())
        job = controller.launch(plan, (folder / "blob").read_bytes())
        print(killer.points, flush=True)
        for _ in job.follow():
            pass
    elif action == "cancel":
        controller.jobs.find("latest").cancel()
    elif action == "collect":
        controller.collect(controller.jobs.find("latest"), folder / "runs")


if __name__ == "__main__":
    main(sys.argv[1:])
