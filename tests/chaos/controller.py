"""A controller in a process of its own, so that it can be killed at any moment.

python -m tests.chaos.controller launch|follow|collect FOLDER INVENTORY
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from orchestrator import job
from orchestrator.call import Host
from orchestrator.collect import claimed, collect
from orchestrator.connections import Connections
from orchestrator.inventory import load_inventory
from orchestrator.paths import Home, RunFolder
from orchestrator.records import LaunchPlan


def main() -> None:
    action, folder, inventory = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    plan = LaunchPlan.model_validate_json((folder / "plan.json").read_text())
    names = {node.name for node in plan.nodes}
    nodes = [node for node in load_inventory(inventory).nodes if node.name in names]
    with Connections(Home(folder / "home")) as connections:
        hosts = connections.open(nodes)
        assert all(isinstance(host, Host) for host in hosts.values()), hosts
        if action == "launch":
            job.launch(plan, hosts, (folder / "blob").read_bytes())
        elif action == "follow":
            for _ in job.watch(plan, hosts, offsets={}, follow=True):
                pass
        else:
            while True:
                with claimed(RunFolder(folder / "run")):
                    collect(plan, hosts, RunFolder(folder / "run"))
                time.sleep(0.01)


if __name__ == "__main__":
    main()
