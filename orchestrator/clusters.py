"""Clusters: connect, probe, check, elect a master; hosts ready for a job; cleanup of work folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import Any, TypeVar

from orchestrator.doctor.observations import Host, Observations
from orchestrator.doctor.table import Finding, checks_at, judge
from orchestrator.errors import HostError, HostsError, OrchError, ProbeError, StateError, UnlikeError, UsageError
from orchestrator.hosts import checks, work_folders
from orchestrator.hosts.cluster import (
    Cluster,
    Problem,
    Venv,
    all_but,
    login_host,
    only,
    released,
    with_known,
    with_made,
    with_node,
    without_node,
)
from orchestrator.hosts.connections import Connections
from orchestrator.hosts.election import Election, elect
from orchestrator.hosts.facts import NodeFacts
from orchestrator.hosts.forms.slurm import hosts_of
from orchestrator.hosts.inventory import Inventory, Node
from orchestrator.hosts.inventory_file import extra_again, with_secrets
from orchestrator.hosts.probe import SLOW_TORCH_S, look, probe, shared_folders
from orchestrator.hosts.work_folders import Cleared, Mended, Reaped, Survey, Who
from orchestrator.jobs.job_store import ENDED
from orchestrator.owner import read_owner
from orchestrator.planning.nccl import GpuHost, unlike_versions
from orchestrator.slurm.login import LoginFacts, SlurmLogin
from orchestrator.store import Store
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import errors, errors_by_node, values

PROBE_S = 90.0
# Shorter: a user waits at the screen.
GPUS_S = 15.0

NO_ACCOUNTS = "Slurm keeps no accounts: how a job has ended is known from its hosts' last records only"

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Up:
    cluster: Cluster
    election: Election | None
    """None without a usable host."""
    problems: Mapping[str, HostError]
    warnings: tuple[str, ...]
    unlike: UnlikeError | None = None
    findings: tuple[Finding, ...] = ()
    """Problems and warnings that `orch doctor` also checks."""


@dataclass(frozen=True)
class Look:
    nodes: Mapping[str, Node]
    facts: Mapping[str, NodeFacts]
    problems: Mapping[str, HostError]
    findings: tuple[Finding, ...]
    at: str
    """ISO 8601."""


@dataclass(frozen=True)
class Ready:
    nodes: Sequence[Node]
    facts: Mapping[str, NodeFacts]
    election: Election


class Clusters:
    def __init__(self, store: Store, connections: Connections) -> None:
        self.store, self.connections = store, connections

    def up(self, inventory: Inventory, *, torch_memory: str = "") -> Up:
        """Connects to every host, probes and elects; remembers failing hosts, too. If all hosts fail, a known cluster
        with usable hosts stays, so that its jobs stay reachable. torch_memory: a folder on every host for facts about
        its torch, which takes seconds to import.
        """
        if inventory.engine:
            return self._up_slurm(inventory)
        cluster, forgotten = self._of_file(inventory)
        look = self._look_at(cluster, cluster.nodes, torch_memory)
        if not _usable(look.facts, look.problems) and (kept := self._usable_before(inventory.cluster)):
            up = self._up(self._with_look(cluster, look), look)
            stays = f"no host can be used, so cluster {kept.name} stays as `orch up {kept.file}` left it"
            return replace(up, warnings=(*inventory.warnings, *up.warnings, stays))

        def now() -> Cluster:
            nonlocal forgotten
            cluster, forgotten = self._of_file(inventory)  # another command may have changed it meanwhile
            return self._with_look(cluster, look)

        before = self.store.current()
        stays = before.name if before and not _usable(look.facts, look.problems) else inventory.cluster
        up = self._up(self.store.save_cluster(now, current=stays == inventory.cluster), look)
        if stays != inventory.cluster:
            forgotten = (*forgotten, f"no host can be used, so {stays} stays the current cluster")
        return replace(up, warnings=(*forgotten, *inventory.warnings, *up.warnings))

    def _up_slurm(self, inventory: Inventory) -> Up:
        """Asks the login host only: hosts are known as Slurm declares them, until a job runs there."""
        assert inventory.engine  # noqa: S101 - the caller's
        at = login_host(inventory.nodes[0], inventory.engine)
        login, facts = self.ask_login(at)
        found = self.connections.kept(at)
        problem, remedy = checks.workdir(at, probe(found, (), torch=False, timeout_s=PROBE_S))
        if problem:
            raise ProbeError(at.name, problem, remedy)
        declared, broken = login.hosts()
        nodes, warnings = hosts_of(inventory, declared, login.expanded, f"{inventory.engine.workdir}/nodes")
        warnings += [f"skipped a line of `scontrol show nodes`: {line}" for line in broken[:3]]
        if not facts.accounts:
            warnings.append(NO_ACCOUNTS)
        cluster = Cluster(
            schema=1,
            name=inventory.cluster,
            file=os.path.abspath(inventory.file),
            nodes=nodes,
            defaults=inventory.defaults,
            engine=inventory.engine,
        )

        def with_facts() -> Cluster:
            known = self._usable_before(cluster.name)
            facts = only(known.facts if known else {}, {node.name for node in nodes})
            return cluster.model_copy(update={"facts": facts})

        saved = self.store.save_cluster(with_facts, current=True)
        return Up(saved, None, {}, (*inventory.warnings, *warnings))

    def ask_login(self, at: Node) -> tuple[SlurmLogin, LoginFacts]:
        """at: a login host. Raises HostError, also if commands or Python modules are missing there."""
        host = self.connections.kept(at)
        login = SlurmLogin(host.transport, host.workdir)
        facts = login.facts(at.python, at.activate)
        if facts.missing:
            names = " ".join(facts.missing)
            raise ProbeError(
                at.name, f"{names}: missing there", f"`{at.python} -m pip install ...`, or `module load slurm`"
            )
        return login, facts

    def _usable_before(self, name: str) -> Cluster | None:
        with suppress(StateError):
            known = self.store.known_cluster(name)
            return known if known and _usable(known.facts, known.problems) else None
        return None

    def nodes_of(self, inventory: Inventory) -> tuple[Node, ...]:
        """With nodes added to its cluster, which take the file's defaults."""
        with suppress(StateError):  # `up` reports a damaged record
            if known := self.store.known_cluster(inventory.cluster):
                return *inventory.nodes, *extra_again(known, inventory)
        return inventory.nodes

    def _of_file(self, inventory: Inventory) -> tuple[Cluster, tuple[str, ...]]:
        """Also returns messages on lost changes. Raises UsageError, see `_takes_over`."""
        known, forgotten = None, tuple[str, ...]()
        try:
            known = self.store.known_cluster(inventory.cluster)
        except StateError as error:
            forgotten = (f"{error.message}: changes by `orch node` and `orch master` are lost",)
        file = os.path.abspath(inventory.file)
        if known and known.file != file:
            forgotten += self._takes_over(known, inventory)
        of_file = Cluster(
            schema=1, name=inventory.cluster, file=file, nodes=inventory.nodes, defaults=inventory.defaults
        )
        if known:
            gone = [node.name for node in inventory.nodes if node.name in known.removed]
            forgotten += tuple(f"{name} was removed earlier: `orch node add {name}` brings it back" for name in gone)
            of_file = with_known(of_file, known.model_copy(update={"extra": extra_again(known, inventory)}))
        return of_file, forgotten

    def _takes_over(self, known: Cluster, inventory: Inventory) -> tuple[str, ...]:
        """Messages if another file replaces the known cluster. Raises UsageError if running jobs would become
        unreachable.
        """
        here = {_place(node) for node in inventory.nodes}
        elsewhere = [node.name for node in known.nodes if _place(node) not in here]
        if not elsewhere:
            return ()
        whose = f"cluster {known.name} was defined by {known.file} with different hosts ({', '.join(elsewhere)})"
        running = [job.id for job in self.store.jobs() if job.cluster == known.name and job.state not in ENDED]
        if running:
            raise UsageError(
                f"{whose} and jobs that have not ended: {', '.join(running[:3])}",
                f"give {inventory.file} another `cluster:` name, or first `orch down --cluster {known.name}`",
            )
        return (f"{whose}; this file replaces it",)

    def add_node(self, cluster: Cluster, keys: Mapping[str, Any], node: Node) -> Up:
        """keys: as in `with_node`. Raises UsageError if it exists already, HostError if unreachable; then it is not
        added.
        """
        # A host that was the only one has been asked for no route, from which its training address follows.
        first = [node for node in cluster.nodes if node.name in cluster.facts and not cluster.facts[node.name].routes]
        look = self._look_at(with_node(cluster, keys, node), (node, *first))
        if node.name not in look.facts:
            raise _not_added(look.problems[node.name])
        return self._remember(cluster.name, look, lambda known: with_node(known, keys, node))

    def set_venvs(self, name: str, venvs: Mapping[str, Venv | None]) -> Up:
        """Uses each environment's Python (None: the node's own), and probes."""
        cluster = with_made(self.store.cluster(name), venvs)  # read again: making environments took time
        look = self._look_at(cluster, [node for node in cluster.nodes if node.name in venvs])
        return self._remember(name, look, lambda known: with_made(known, venvs))

    def remove_node(self, cluster: Cluster, name: str) -> Cluster:
        return self.store.change_cluster(cluster.name, lambda known: self._elected(without_node(known, name)))

    def release_node(self, cluster: Cluster, name: str, *, restore: bool) -> Cluster:
        return self.store.change_cluster(
            cluster.name, lambda known: self._elected(released(known, name, restore=restore))
        )

    def pin_master(self, cluster: Cluster, name: str | None) -> Cluster:
        """name: None lets the election choose."""

        def pinned(known: Cluster) -> Cluster:
            if name:
                known.node(name)
            return self._elected(known.model_copy(update={"master_pin": name}))

        return self.store.change_cluster(cluster.name, pinned)

    def silent(self, cluster: Cluster) -> dict[str, HostError]:
        """Hosts without a login now, and why."""
        if not cluster.engine:
            return self.connections.silent(cluster.nodes)
        away = [*self.connections.silent([cluster.login]).values()]
        return {node.name: error for node in cluster.nodes for error in away}

    def on_gpus(self, cluster: Cluster, without: Collection[str] = ()) -> dict[str, NodeFacts]:
        """Current facts of the GPU nodes that answer in time; not remembered. without: nodes known not to answer."""
        known = {node.name: node for node in cluster.nodes if node.name in cluster.facts and node.name not in without}
        asked = [node for name, node in known.items() if checks.wants_cuda(node, cluster.facts[name])]

        def look(host: ConnectedHost) -> NodeFacts:
            return probe(host, (), torch=False, timeout_s=GPUS_S)

        if not asked or cluster.engine:  # Slurm's hosts are there only within a job
            return {}
        return values(self.connections.each(asked, look, deadline_s=GPUS_S))

    def _look_at(self, cluster: Cluster, nodes: Sequence[Node], torch_memory: str = "") -> Look:
        peers = {node.name: _peers(node, cluster.nodes) for node in nodes}
        by_name = {node.name: node for node in nodes}

        def see(host: ConnectedHost) -> Host:
            facts, health = look(host, peers[host.node], torch=True, timeout_s=PROBE_S, memory=torch_memory)
            link = host.transport
            return Host(by_name[host.node], facts, health, login_s=link.login_s, logins_tried=link.logins_tried)

        probed = self.connections.each(nodes, see, deadline_s=PROBE_S + SLOW_TORCH_S + 10)
        facts, problems = {name: host.facts for name, host in values(probed).items()}, errors_by_node(probed)
        shared = shared_folders(self.connections, facts)
        seen = Observations(tuple(values(probed).values()), errors_by_node(probed), shared_folders=shared)
        findings = judge(seen, checks_at("up")).findings
        for node in nodes:
            if node.name in facts and (blocked := _unusable(node, facts[node.name], findings)):
                problems[node.name] = blocked
        return Look(by_name, facts, problems, findings, now_utc())

    def _remember(self, name: str, look: Look, change: Callable[[Cluster], Cluster]) -> Up:
        saved = self.store.change_cluster(name, lambda known: self._with_look(change(known), look), current=True)
        return self._up(saved, look)

    def _with_look(self, cluster: Cluster, look: Look) -> Cluster:
        """Skips nodes that have changed since; elects the master again."""
        same = {node.name for node in cluster.nodes if _is_seen(node, look)}
        problems = {name: _problem(name, error) for name, error in look.problems.items() if name in same}
        cluster = cluster.model_copy(
            update={
                "facts": {**all_but(cluster.facts, same), **only(look.facts, same)},
                "problems": {**all_but(cluster.problems, same), **problems},
                "added": {node.name: cluster.added.get(node.name, look.at) for node in cluster.nodes},
                "probed": {**cluster.probed, **dict.fromkeys(same, look.at)},
            }
        )
        with suppress(OrchError):  # `_up` reports it
            return self._elected(cluster)
        return _with_election(cluster, None)

    def _up(self, cluster: Cluster, look: Look) -> Up:
        problems = only(look.problems, {node.name for node in cluster.nodes})
        warnings = [finding.line for finding in look.findings if finding.level == "warn"]
        election = None
        try:
            election = self._elect(cluster, cluster.active())
        except OrchError as error:
            if not problems:  # else the hosts' problems explain it
                warnings.append(str(error))
        return Up(cluster, election, problems, tuple(warnings), unlike(cluster), look.findings)

    def _elected(self, cluster: Cluster) -> Cluster:
        return _with_election(cluster, self._elect(cluster, cluster.active()))

    def _elect(self, cluster: Cluster, nodes: Sequence[Node]) -> Election:
        if cluster.master_pin:
            pin = cluster.master_pin
            nodes = [node.model_copy(update={"master": node.name == pin}) for node in nodes]
        return elect(nodes, {node.name: _usable_facts(cluster, node) for node in nodes})

    def ready(self, cluster: Cluster, only: Sequence[str] = ()) -> Ready:
        """only: () means all that are not released. Raises UsageError for a released node, HostsError for unusable
        ones.
        """
        cluster.refuse_engine()
        nodes = cluster.chosen(only)
        for node in nodes:
            if node.name in cluster.released:
                raise UsageError(f"{node.name} is released", f"`orch node restore {node.name}` first")
        facts = {node.name: _usable_facts(cluster, node) for node in nodes}
        if errors(facts):
            raise HostsError(errors(facts))
        nodes = with_secrets(self.store.home, cluster, nodes)
        return Ready(nodes, values(facts), self._elect(cluster, nodes))

    def away(self, cluster: Cluster, only: Sequence[str] = ()) -> dict[str, HostError]:
        """Nodes that cannot take part now, and why: released, unusable at the last `up`, or no login. only: see
        `ready`.
        """
        nodes = cluster.chosen(only)
        known = {node.name: error for node in nodes if (error := _why_not(cluster, node))}
        opened = self.connections.open([node for node in nodes if node.name not in known])
        return {**known, **errors_by_node(opened)}

    # ---- cleaning up ------------------------------------------------------------------------------------------

    def look(self, cluster: Cluster) -> dict[str, Survey | HostError]:
        return self._on_each(cluster, work_folders.survey_host)

    def reap(self, cluster: Cluster, *, end: bool) -> dict[str, Reaped | HostError]:
        """Leftovers of jobs without a supervisor, and silent links; `end` ends ours."""
        return self._on_each(cluster, partial(work_folders.reap, end=end))

    def mend(self, cluster: Cluster, nodes: Sequence[Node], *, end: bool) -> dict[str, Mended | HostError]:
        """Our leftovers of interrupted starts and ends; `end` cleans up."""
        return self._on_each(cluster, partial(work_folders.mend, end=end), nodes)

    def down(self, cluster: Cluster, spared: Mapping[str, HostError] | None = None) -> dict[str, Cleared | HostError]:
        """Ends and removes all that belongs to this cluster and home. spared: nodes to skip, with errors for the
        answer.
        """
        bare = cluster.with_venvs({})  # an environment cannot remove itself
        spared = spared or {}
        nodes = [node for node in bare.nodes if node.name not in spared]
        answers = {**self._on_each(bare, work_folders.down, nodes), **spared}
        cleared = set(values(answers))
        with suppress(StateError):  # removed or damaged meanwhile
            self.store.change_cluster(cluster.name, lambda known: known.with_venvs(all_but(known.venvs, cleared)))
        return answers

    def _on_each(
        self, cluster: Cluster, action: Callable[[ConnectedHost, Who], Answer], nodes: Sequence[Node] | None = None
    ) -> dict[str, Answer | HostError]:
        who = Who(read_owner(self.store.home), cluster.name)
        asked = cluster.nodes if nodes is None else nodes
        return self.connections.each(asked, lambda host: action(host, who), deadline_s=work_folders.CLEAR_S + 5)


def _usable(facts: Mapping[str, NodeFacts], problems: Mapping[str, object]) -> set[str]:
    return set(facts) - set(problems)


def _unusable(node: Node, facts: NodeFacts, findings: Sequence[Finding]) -> HostError | None:
    """From the host's facts or health."""
    blocking = (each for each in findings if each.level == "block" and node.name in each.where)
    health = (ProbeError(node.name, finding.seen, finding.remedy) for finding in blocking)
    return checks.unusable(node, facts) or next(health, None)


def _not_added(error: HostError) -> HostError:
    return _with_more(error, "; ", f"{error.node} was not added")


def or_without(error: HostError) -> HostError:
    return _with_more(error, ", or ", f"leave it out: `--nodes`, `orch node release {error.node}`, `--hosts MIN:MAX`")


def _with_more(error: HostError, joined_by: str, words: str) -> HostError:
    error.remedy = joined_by.join(part for part in (error.remedy, words) if part)
    return error


def _why_not(cluster: Cluster, node: Node) -> HostError | None:
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
    """None if its usable hosts can train together on GPUs."""
    usable = [node for node in cluster.active() if node.name in cluster.facts and node.name not in cluster.problems]
    facts = [(node, cluster.facts[node.name]) for node in usable]
    return unlike_versions([GpuHost(node, found) for node, found in facts if checks.wants_cuda(node, found)])


def _problem(name: str, error: HostError) -> Problem:
    return Problem(message=error.message.removeprefix(f"{name}: "), remedy=error.remedy, at=error.at)


def _with_election(cluster: Cluster, election: Election | None) -> Cluster:
    update = {"master": election.master if election else None, "master_reason": election.reason if election else ""}
    return cluster.model_copy(update=update)


def _place(node: Node) -> tuple[Any, ...]:
    return node.transport, node.host, node.port, node.user, node.proxy_jump, node.workdir


def _is_seen(node: Node, look: Look) -> bool:
    """Whether the node was probed as it is: another command may have changed its host or Python."""
    seen = look.nodes.get(node.name)
    return seen is not None and (*_place(seen), seen.python) == (*_place(node), node.python)


def _peers(node: Node, nodes: Sequence[Node]) -> tuple[str, ...]:
    return tuple(other.address or other.host for other in nodes if other.name != node.name)


def now_utc() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
