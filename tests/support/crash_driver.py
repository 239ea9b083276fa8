"""A controller that is killed at its n-th write point: a program of `test_controller_crash.py`, alone in its process.

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
from orchestrator.hosts.connections import Connections
from orchestrator.hosts.inventory_file import load_inventory
from orchestrator.paths import Home
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.store import Store
from orchestrator.transport import ask

action, home, folder, kill_at = sys.argv[1], Home(Path(sys.argv[2])), Path(sys.argv[3]), sys.argv[4]
counting, points = threading.Lock(), 0


def point():
    global points
    with counting:
        points += 1
        if str(points) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def watched(owner, name):
    real = getattr(owner, name)

    def wrapper(*words, **options):
        if any(isinstance(word, dict) and word.get("action") == kill_at for word in words):
            os.kill(os.getpid(), signal.SIGKILL)
        point()
        answer = real(*words, **options)
        point()
        return answer

    setattr(owner, name, wrapper)


for name in ("replace", "rename", "fsync", "mkdir", "unlink"):
    watched(os, name)
watched(ask, "ask")
watched(ask, "open_stream")

with Connections(home) as connections:
    controller = Controller(Store(home), connections)
    if action == "up":
        controller.clusters.up(load_inventory(folder / "inventory.yaml"))
    elif action == "jobs":
        controller.jobs()
    elif action == "run":
        plan = LaunchPlan.model_validate_json((folder / "plan.json").read_bytes())
        job = controller.launch(plan, (folder / "blob").read_bytes())
        print(points, flush=True)
        for _ in job.follow():
            pass
    elif action == "cancel":
        controller.job("latest").cancel()
    elif action == "collect":
        controller.collect(controller.job("latest"), folder / "runs")
print(points)
