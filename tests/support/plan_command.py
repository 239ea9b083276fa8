"""`orch plan` and `orch run --dry-run` in this process, on the lab's A2000 and V100 as a store remembers them."""

from __future__ import annotations

import json

from click.testing import CliRunner

from orchestrator.cli import main
from orchestrator.hosts import Cluster, load_inventory
from orchestrator.paths import Home
from orchestrator.planning import LaunchPlan
from orchestrator.store import Store
from tests.support.plans import INVENTORY, host

RESNET = ("--exp", "resnet152_cifar")


def remember(tmp_path, name, **facts):
    found = load_inventory(INVENTORY / name)
    cluster = Cluster(
        name=found.cluster,
        file=str(INVENTORY / name),
        nodes=found.nodes,
        facts={"a2000": host(41, **facts), "v100": host(42, **facts)},
    )
    store = Store(Home(tmp_path / "home"))
    store.save_cluster(cluster, current=True)
    return store


def orch(*words, code=0):
    done = CliRunner().invoke(main, words, catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


def planned(*words):
    return json.loads(orch("plan", *RESNET, *words, "--json").stdout)


def dry_run(*words):
    printed = orch("run", *RESNET, *words, "--dry-run", "--json").stdout
    return LaunchPlan.model_validate_json(printed)


def lab_home(folder, monkeypatch):
    """A2000 and V100 of the lab, probed, nothing measured: the store of who types commands in this folder."""
    monkeypatch.setenv("ORCH_HOME", str(folder / "home"))
    monkeypatch.chdir(folder)
    return remember(folder, "lab_a2000_v100.yaml", gpus=0)
