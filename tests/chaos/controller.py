"""A controller in a process of its own, so that it can be killed at any moment.

python -m tests.chaos.controller launch|follow|stay|collect FOLDER INVENTORY

`stay` follows as `orch run` does, until the job has ended, and prints what it then knows of it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from orchestrator.hosts import Connections, load_inventory
from orchestrator.jobs import JobRecord, RunningJob, claimed
from orchestrator.jobs.collect import collect
from orchestrator.jobs.follow import watch
from orchestrator.jobs.launch import launch
from orchestrator.paths import Home, RunFolder
from orchestrator.planning import LaunchPlan
from orchestrator.store import Store
from orchestrator.transport import ConnectedHost


def main() -> None:
    action, folder, inventory = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    plan = LaunchPlan.model_validate_json((folder / "plan.json").read_text())
    names = {node.name for node in plan.nodes}
    nodes = [node for node in load_inventory(inventory).nodes if node.name in names]
    with Connections(Home(folder / "home")) as connections:
        hosts = connections.open(nodes)
        assert all(isinstance(host, ConnectedHost) for host in hosts.values()), hosts
        if action == "launch":
            launch(plan, hosts, (folder / "blob").read_bytes())
        elif action == "follow":
            for _ in watch(plan, hosts, offsets={}, follow=True):
                pass
        elif action == "stay":
            stay(plan, hosts, connections, Store(Home(folder / "home")))
        else:
            while True:
                with claimed(RunFolder(folder / "run")):
                    collect(plan, hosts, RunFolder(folder / "run"))
                time.sleep(0.01)


def stay(plan: LaunchPlan, hosts: dict[str, ConnectedHost], connections: Connections, store: Store) -> None:
    nodes = tuple(node.name for node in plan.nodes)
    store.save_job(JobRecord(id=plan.job, state="running", exp=plan.exp, cluster=plan.cluster, nodes=nodes), plan)
    for number, _ in enumerate(RunningJob(plan, store, connections, hosts).follow()):
        if not number:
            print("following", flush=True)
    print(store.job_record(plan.job).model_dump_json(), flush=True)


if __name__ == "__main__":
    main()
