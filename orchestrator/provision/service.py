"""Runs `orch data push` and `orch setup` on the hosts of a remembered cluster."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from orchestrator.clusters import Clusters, Up
from orchestrator.errors import HostError, UsageError
from orchestrator.hosts.checks import wants_cuda
from orchestrator.hosts.cluster import Cluster, Venv
from orchestrator.hosts.connections import Connections
from orchestrator.hosts.facts import NodeFacts
from orchestrator.hosts.grammar import NAME, folder_of_ours
from orchestrator.hosts.inventory import Node
from orchestrator.hosts.inventory_file import with_secrets
from orchestrator.owner import read_owner
from orchestrator.provision import push, venvs
from orchestrator.provision.push import DataSets, Manifest, Pushed
from orchestrator.provision.venvs import Made, WantedVersions
from orchestrator.store import Store
from orchestrator.transport.fanout import errors_by_node, values
from trainer.shared.config import begun_with

DATA_FOLDER: str = begun_with("mnist_lenet")["data_dir"]
"""Default data folder of a training."""

INDEXES = {"PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CONFIG_FILE"}
"""Variables that point pip to other wheels than its default ones."""


@dataclass(frozen=True)
class Setup:
    """outcomes: by node. up: a new probe of the changed hosts."""

    outcomes: Mapping[str, Made | HostError]
    up: Up | None


class Provision:
    def __init__(self, store: Store, connections: Connections) -> None:
        self._store, self._connections = store, connections
        self._clusters = Clusters(store, connections)

    def push(
        self,
        nodes: Sequence[Node],
        manifest: Manifest,
        folder: str,
        show: Callable[[push.PushProgress], None] = lambda _: None,
    ) -> dict[str, Pushed | HostError]:
        """folder: on the hosts, from `data_folder`."""
        found = self._connections.open(nodes)
        return {
            **push.push(values(found), manifest, folder, show, self._connections.reopen),
            **errors_by_node(found),
        }

    def data_sets(self, nodes: Sequence[Node], folder: str, *, remove: bool = False) -> dict[str, DataSets | HostError]:
        """Data sets that were pushed into this folder, or directly below it; remove: as far as they were removed."""
        action = partial(push.data_sets, folder=folder, remove=remove)
        return self._connections.each(nodes, action, deadline_s=push.SETS_S)

    def set_up(
        self,
        cluster: Cluster,
        nodes: Sequence[Node],
        wanted: WantedVersions,
        show: Callable[[venvs.SetupProgress], None] = lambda _: None,
    ) -> Setup:
        """Makes missing environments, lets the cluster use them, and probes these hosts again."""
        bare = cluster.with_venvs({})
        base = [bare.node(node.name) for node in nodes]
        own = {node.name: node for node in with_secrets(self._store.home, cluster, base)}
        found = self._connections.open(list(own.values()))
        envs = {name: node.env for name, node in own.items()}
        owner = read_owner(self._store.home)
        made_there = venvs.set_up(values(found), wanted, envs, show, owner=owner, cluster=cluster.name)
        outcomes = {**made_there, **errors_by_node(found)}
        changed = {name: _venv(made, own[name].python) for name, made in values(outcomes).items()}
        return Setup(outcomes, self._clusters.set_venvs(cluster.name, changed) if changed else None)


def gpu_hosts(cluster: Cluster, picked: Sequence[Node]) -> list[NodeFacts]:
    """Active and picked hosts that train on GPUs with wheels from pip's default index."""
    nodes = {node.name: node for node in (*cluster.active(), *picked)}.values()
    known = [(node, cluster.facts[node.name]) for node in nodes if node.name in cluster.facts]
    return [facts for node, facts in known if wants_cuda(node, facts) and not INDEXES & node.env.keys()]


def data_folder(to: str | None) -> str:
    """The remote folder for `--to`: a name is a subfolder of DATA_FOLDER. Raises UsageError."""
    if not to:
        return DATA_FOLDER
    if re.fullmatch(NAME, to):
        return f"{DATA_FOLDER}/{to}"
    try:
        return folder_of_ours(to)
    except ValueError as error:
        raise UsageError(
            f"--to: {error}", f"a name inside {DATA_FOLDER}, or a path that begins with / or ~/"
        ) from error


def _venv(made: Made, base_python: str) -> Venv | None:
    if made.state == "own":
        return None
    return Venv(python=made.python, base_python=base_python, torch=made.torch, torchvision=made.torchvision)
