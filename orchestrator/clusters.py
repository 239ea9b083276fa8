"""The hosts of a cluster, from an inventory to what is remembered of them, and what lies on them afterwards.

inventory → connect → probe → checks → election → (cluster remembered)          up, node, master
remembered cluster → nodes that are ready, their facts, a master                for a plan
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any, TypeVar

from orchestrator.doctor.judge import Finding, judge
from orchestrator.doctor.quick import AT_UP
from orchestrator.doctor.seen import Host, Seen
from orchestrator.errors import HostError, HostsError, OrchError, ProbeError, StateError, UnlikeError, UsageError
from orchestrator.hosts import belongings, checks
from orchestrator.hosts.belongings import Cleared, Mended, Reaped, Survey, Who
from orchestrator.hosts.cluster import Cluster, Problem, Venv
from orchestrator.hosts.connections import Connections
from orchestrator.hosts.election import Election, elect
from orchestrator.hosts.facts import NodeFacts
from orchestrator.hosts.file_again import extra_again, with_secrets
from orchestrator.hosts.inventory import Inventory, Node
from orchestrator.hosts.probe import look, probe
from orchestrator.jobs.record import ENDED
from orchestrator.owner import read_owner
from orchestrator.planning.nccl import GpuHost, unlike_versions
from orchestrator.store import Store
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import errors, errors_by_node, values

PROBE_S = 90.0
GPUS_S = 15.0
"""For a look at who is on them, where somebody waits at the screen."""

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Up:
    """What `orch up` found."""

    cluster: Cluster
    election: Election | None
    """None where no host is usable."""
    problems: Mapping[str, HostError]
    warnings: tuple[str, ...]
    unlike: UnlikeError | None = None
    """Why the usable hosts cannot train together, though some of them can."""
    findings: tuple[Finding, ...] = ()
    """What of the problems and warnings `orch doctor` has a check for."""


@dataclass(frozen=True)
class Ready:
    """What a plan is made of: nodes that can take part, with their facts, and the master among them."""

    nodes: Sequence[Node]
    facts: Mapping[str, NodeFacts]
    election: Election


class Clusters:
    def __init__(self, store: Store, connections: Connections) -> None:
        self.store, self.connections = store, connections

    def up(self, inventory: Inventory) -> Up:
        """Connects to every host at once, probes, elects, remembers. Hosts that fail are remembered as such."""
        known, forgotten = None, tuple[str, ...]()
        try:
            known = self.store.known_cluster(inventory.cluster)
        except StateError as error:
            forgotten = (f"{error.message}: what `orch node` and `orch master` had changed is forgotten",)
        nodes, file = inventory.nodes, os.path.abspath(inventory.file)
        if known and known.file != file:
            forgotten += self._takes_over(known, inventory)
        if known:
            known = known.model_copy(update={"extra": extra_again(known, inventory)})
            nodes = tuple(node for node in nodes if node.name not in known.removed)
            nodes += tuple(node for node in known.extra if node.name not in {n.name for n in nodes})
        cluster = Cluster(schema=1, name=inventory.cluster, file=file, nodes=nodes, defaults=inventory.defaults)
        if known:
            kept = ("added", "probed", "released", "removed", "extra", "extra_keys", "master_pin")
            cluster = cluster.model_copy(update={name: getattr(known, name) for name in kept})
            own = {node.name: node.python for node in nodes}  # of the file as it is now
            venvs = {name: venv for name, venv in known.venvs.items() if name in own}
            cluster = cluster.with_venvs(
                {name: venv.model_copy(update={"base_python": own[name]}) for name, venv in venvs.items()}
            )
        up = self._look(cluster, cluster.nodes)
        return replace(up, warnings=(*forgotten, *inventory.warnings, *up.warnings))

    def _takes_over(self, known: Cluster, inventory: Inventory) -> tuple[str, ...]:
        """What to say where another file takes the place of a cluster that is known by the same name. Raises UsageError
        where that would put jobs out of reach that have not ended.
        """
        here = {_place(node) for node in inventory.nodes}
        elsewhere = [node.name for node in known.nodes if _place(node) not in here]
        if not elsewhere:
            return ()
        whose = f"cluster {known.name} is that of {known.file} until now, with other hosts ({', '.join(elsewhere)})"
        running = [job.id for job in self.store.jobs() if job.cluster == known.name and job.state not in ENDED]
        if running:
            raise UsageError(
                f"{whose} and jobs that have not ended: {', '.join(running[:3])}",
                f"give {inventory.file} another `cluster:` name, or first `orch down --cluster {known.name}`",
            )
        return (f"{whose}: this file takes its place",)

    def add_node(self, cluster: Cluster, keys: Mapping[str, Any], node: Node) -> Up:
        """keys: those of `node` that it does not have from the defaults. Raises UsageError where it is there already,
        HostError where it cannot be reached: it is not added then.
        """
        if node.name in {other.name for other in cluster.nodes}:
            raise UsageError(f"{node.name} is already in cluster {cluster.name}", "choose another name")
        changed = {
            "nodes": (*cluster.nodes, node),
            "extra": (*cluster.extra, node),
            "extra_keys": {**cluster.extra_keys, node.name: dict(keys)},
            "removed": tuple(name for name in cluster.removed if name != node.name),
        }
        found = self._found(cluster.model_copy(update=changed), (node,))
        if node.name not in found.cluster.facts:
            raise _not_added(found.problems[node.name])
        return self._remembered(found)

    def set_venvs(self, name: str, venvs: Mapping[str, Venv | None]) -> Up:
        """Has these nodes run their environment's Python from now on (None: their own), and probes them."""
        cluster = self.store.cluster(name)  # read again: making environments took its time
        there = {node: venv for node, venv in venvs.items() if node in {known.name for known in cluster.nodes}}
        kept = {**_without(cluster.venvs, set(there)), **{node: venv for node, venv in there.items() if venv}}
        cluster = cluster.with_venvs(kept)
        return self._look(cluster, [cluster.node(node) for node in there])

    def remove_node(self, cluster: Cluster, name: str) -> Cluster:
        node = cluster.node(name)
        if len(cluster.nodes) == 1:
            raise UsageError(f"{name} is the last node of cluster {cluster.name}", "a cluster needs one")
        update = {
            "nodes": tuple(other for other in cluster.nodes if other is not node),
            "extra": tuple(other for other in cluster.extra if other.name != name),
            "extra_keys": _without(cluster.extra_keys, {name}),
            "removed": (*cluster.removed, name),
            "facts": {key: value for key, value in cluster.facts.items() if key != name},
            "problems": {key: value for key, value in cluster.problems.items() if key != name},
            "venvs": _without(cluster.venvs, {name}),
            "master_pin": None if cluster.master_pin == name else cluster.master_pin,
        }
        return self._elected(cluster.model_copy(update=update))

    def release_node(self, cluster: Cluster, name: str, *, restore: bool) -> Cluster:
        cluster.node(name)
        released = tuple(other for other in cluster.released if other != name)
        if not restore and not {node.name for node in cluster.active()} - {name} - cluster.problems.keys():
            raise UsageError(f"{name} is the only usable host of cluster {cluster.name}", "restore another one first")
        return self._elected(cluster.model_copy(update={"released": released if restore else (*released, name)}))

    def pin_master(self, cluster: Cluster, name: str | None) -> Cluster:
        """name: None gives the choice back to the election."""
        if name:
            cluster.node(name)
        return self._elected(cluster.model_copy(update={"master_pin": name}))

    def on_gpus(self, cluster: Cluster, without: Collection[str] = ()) -> dict[str, NodeFacts]:
        """What the nodes that train on GPUs say of these at this moment, as far as they do so in time. Nothing of it is
        remembered. without: nodes that are known not to answer.
        """
        known = {node.name: node for node in cluster.nodes if node.name in cluster.facts and node.name not in without}
        asked = [node for name, node in known.items() if checks.wants_cuda(node, cluster.facts[name])]

        def look(host: ConnectedHost) -> NodeFacts:
            return probe(host, (), torch=False, timeout_s=GPUS_S)

        return values(self.connections.each(asked, look, deadline_s=GPUS_S)) if asked else {}

    def _look(self, cluster: Cluster, nodes: Sequence[Node]) -> Up:
        """Connects to these nodes, probes them, elects among all, remembers."""
        return self._remembered(self._found(cluster, nodes))

    def _remembered(self, found: Up) -> Up:
        self.store.save_cluster(found.cluster, current=True)
        return found

    def _found(self, cluster: Cluster, nodes: Sequence[Node]) -> Up:
        peers = {node.name: _peers(node, cluster.nodes) for node in nodes}

        by_name = {node.name: node for node in nodes}

        def see(host: ConnectedHost) -> Host:
            facts, health = look(host, peers[host.node], torch=True, timeout_s=PROBE_S)
            link = host.transport
            return Host(by_name[host.node], facts, health, login_s=link.login_s, logins_tried=link.logins_tried)

        probed = self.connections.each(nodes, see, deadline_s=PROBE_S + 5)
        facts, problems = {name: host.facts for name, host in values(probed).items()}, errors_by_node(probed)
        findings = judge(Seen(tuple(values(probed).values()), errors_by_node(probed)), AT_UP).findings
        for node in nodes:
            if node.name in facts and (blocked := _unusable(node, facts[node.name], findings)):
                problems[node.name] = blocked
        looked = {node.name for node in nodes}
        now = now_utc()
        cluster = cluster.model_copy(
            update={
                "facts": {**_without(cluster.facts, looked), **facts},
                "problems": {**_without(cluster.problems, looked), **{n: _problem(n, e) for n, e in problems.items()}},
                "added": {node.name: cluster.added.get(node.name, now) for node in cluster.nodes},
                "probed": {**cluster.probed, **dict.fromkeys(looked, now)},
            }
        )
        warnings = [finding.line for finding in findings if finding.level == "warn"]
        election = None
        try:
            election = self._elect(cluster, cluster.active())
        except OrchError as error:
            if not problems:  # else these say it, host by host
                warnings.append(str(error))
        elected = _with_election(cluster, election)
        return Up(elected, election, problems, tuple(warnings), unlike(cluster), findings)

    def _elected(self, cluster: Cluster) -> Cluster:
        """The same cluster with its master elected again from the facts at hand, remembered."""
        cluster = _with_election(cluster, self._elect(cluster, cluster.active()))
        self.store.save_cluster(cluster)
        return cluster

    def _elect(self, cluster: Cluster, nodes: Sequence[Node]) -> Election:
        if cluster.master_pin:
            pin = cluster.master_pin
            nodes = [node.model_copy(update={"master": node.name == pin}) for node in nodes]
        return elect(nodes, {node.name: _usable_facts(cluster, node) for node in nodes})

    def ready(self, cluster: Cluster, only: Sequence[str] = ()) -> Ready:
        """only: the nodes to take; none means all that are not released. Raises HostsError for unusable ones."""
        nodes = cluster.chosen(only)
        for node in nodes:
            if node.name in cluster.released:
                raise UsageError(f"{node.name} is released", f"`orch node restore {node.name}` first")
        facts = {node.name: _usable_facts(cluster, node) for node in nodes}
        if errors(facts):
            raise HostsError(errors(facts))
        nodes = with_secrets(cluster, nodes)
        return Ready(nodes, values(facts), self._elect(cluster, nodes))

    def away(self, cluster: Cluster, only: Sequence[str] = ()) -> dict[str, HostError]:
        """Which of these nodes cannot take part in a job now, and why: released, not usable at the last `up`, or not to
        be logged in to. only: as of `ready`.
        """
        nodes = cluster.chosen(only)
        known = {node.name: error for node in nodes if (error := _why_not(cluster, node))}
        opened = self.connections.open([node for node in nodes if node.name not in known])
        return {**known, **errors_by_node(opened)}

    # ---- cleaning up ------------------------------------------------------------------------------------------

    def look(self, cluster: Cluster) -> dict[str, Survey | HostError]:
        """What lies in each node's work folder, and whose it is."""
        return self._on_each(cluster, belongings.survey_host)

    def reap(self, cluster: Cluster, *, end: bool) -> dict[str, Reaped | HostError]:
        """What jobs without a supervisor, and silent links, left on each node; `end` ends ours."""
        return self._on_each(cluster, partial(belongings.reap, end=end))

    def mend(self, cluster: Cluster, nodes: Sequence[Node], *, end: bool) -> dict[str, Mended | HostError]:
        """What starts and ends that were cut short left of ours on these nodes; `end` puts it in order."""
        return self._on_each(cluster, partial(belongings.mend, end=end), nodes)

    def down(self, cluster: Cluster) -> dict[str, Cleared | HostError]:
        """Ends and removes what is this cluster's, and ours, on each node."""
        bare = cluster.with_venvs({})  # no environment is asked to remove itself
        answers = self._on_each(bare, belongings.down)
        self.store.save_cluster(cluster.with_venvs(_without(cluster.venvs, set(values(answers)))))
        return answers

    def _on_each(
        self, cluster: Cluster, action: Callable[[ConnectedHost, Who], Answer], nodes: Sequence[Node] | None = None
    ) -> dict[str, Answer | HostError]:
        """nodes: of the cluster; None means all."""
        who = Who(read_owner(self.store.home), cluster.name)
        asked = cluster.nodes if nodes is None else nodes
        return self.connections.each(asked, lambda host: action(host, who), deadline_s=belongings.CLEAR_S + 5)


def _unusable(node: Node, facts: NodeFacts, findings: Sequence[Finding]) -> HostError | None:
    """The first reason, as far as it is known by the host's facts or by its health."""
    blocking = (found for found in findings if found.level == "block" and node.name in found.where)
    return checks.unusable(node, facts) or next((ProbeError(node.name, one.seen, one.remedy) for one in blocking), None)


def _not_added(error: HostError) -> HostError:
    return _with_more(error, "; ", f"{error.node} was not added")


def or_without(error: HostError) -> HostError:
    """With a word on how a job goes without this host."""
    return _with_more(error, ", or ", f"leave it out: `--nodes`, `orch node release {error.node}`, `--hosts MIN:MAX`")


def _with_more(error: HostError, joined_by: str, words: str) -> HostError:
    """Its remedy goes on with these words, or is made of them."""
    error.remedy = joined_by.join(part for part in (error.remedy, words) if part)
    return error


def _why_not(cluster: Cluster, node: Node) -> HostError | None:
    """Why a node is left out of a job that can do without it, as far as that is remembered."""
    if node.name in cluster.released:
        return HostError(node.name, "is released", f"`orch node restore {node.name}`")
    if node.name in cluster.problems:
        problem = cluster.problems[node.name]
        error = HostError(node.name, f"{problem.message} (at the last `orch up`)", f"`orch up {cluster.file}` again")
        error.at = problem.at
        return error
    found = _usable_facts(cluster, node)
    return found if isinstance(found, HostError) else None


def _usable_facts(cluster: Cluster, node: Node) -> NodeFacts | HostError:
    if node.name in cluster.problems:
        error = cluster.problems[node.name].as_error(node.name)
        return or_without(_with_more(error, "; then ", f"`orch up {cluster.file}` again"))
    if node.name not in cluster.facts:
        return HostError(node.name, "has not been probed", f"`orch up {cluster.file}`")
    return cluster.facts[node.name]


def unlike(cluster: Cluster) -> UnlikeError | None:
    """Why its usable hosts cannot train together on GPUs, if so."""
    usable = [node for node in cluster.active() if node.name in cluster.facts and node.name not in cluster.problems]
    facts = [(node, cluster.facts[node.name]) for node in usable]
    return unlike_versions([GpuHost(node, found) for node, found in facts if checks.wants_cuda(node, found)])


def _problem(name: str, error: HostError) -> Problem:
    return Problem(message=error.message.removeprefix(f"{name}: "), remedy=error.remedy, at=error.at)


def _with_election(cluster: Cluster, election: Election | None) -> Cluster:
    update = {"master": election.master if election else None, "master_reason": election.reason if election else ""}
    return cluster.model_copy(update=update)


def _place(node: Node) -> tuple[Any, ...]:
    """Which folder of which machine a node is, as far as an inventory says."""
    return node.transport, node.host, node.port, node.user, node.proxy_jump, node.workdir


def _peers(node: Node, nodes: Sequence[Node]) -> tuple[str, ...]:
    """Where the others are, as an address or a name that this host can be asked its route to."""
    return tuple(other.address or other.host for other in nodes if other.name != node.name)


def _without(values: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def now_utc() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
