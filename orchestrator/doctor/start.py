"""The checks before each start: what may have changed since `orch up`, as `orch doctor` says it.

    checks = StartChecks(store, print)
    checks.look_at_gpus(plan, hosts, said)      # before anything of the job is there. Raises RefusedError
    checks.hear(plan, hosts, answers, said)     # the answers to `prepare`; it costs no question of its own
    checks.findings                             # what was found for this start

What changes seldom or takes long is left to `orch up` and `orch doctor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from orchestrator.doctor.seen import Host, Level, Seen, Sight
from orchestrator.doctor.table import Finding, checks_at, finding_of, judge
from orchestrator.errors import HostError, ProbeError, RefusedError
from orchestrator.forecast.gpu_catalogue import RESERVED_BYTES, activation_bytes
from orchestrator.forecast.inputs import computed_shares
from orchestrator.forecast.layers import gradient_bytes, is_known, layers_in, network_of
from orchestrator.forecast.tensor_step import weight_bytes
from orchestrator.hosts import occupied
from orchestrator.hosts.answers import as_of_now
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.inventory import Node
from orchestrator.hosts.probe import look
from orchestrator.jobs.launch import Prepared
from orchestrator.planning.launch_plan import LaunchPlan, NodePlan
from orchestrator.store import Store
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import for_each
from trainer.shared.settings import Settings

GPUS_S = 60.0
"""For a look at who is on them: twice what nvidia-smi may take."""


class StartChecks:
    """say: called with each line to read before a job starts."""

    def __init__(self, store: Store, say: Callable[[str], None]) -> None:
        self._store, self._say = store, say
        self.findings: list[Finding] = []

    def look_at_gpus(self, plan: LaunchPlan, hosts: Mapping[str, ConnectedHost], said: set[str]) -> None:
        """Says who is on the job's GPUs at this moment, and how these are. Raises RefusedError where that leaves no
        room for it, or one is of no use. said: lines that are not said again; those of now join it.
        """
        if not said:
            self.findings = []
        cluster = self._store.known_cluster(plan.cluster)
        on_gpus = {node.name: node for node in plan.nodes if node.gpu_uuids}

        def see(planned: NodePlan) -> Host:
            facts, health = look(hosts[planned.name], (), torch=False, timeout_s=GPUS_S)
            return Host(_node(cluster, planned), facts, health)

        refused = []
        for name, found in for_each(on_gpus, see, deadline_s=GPUS_S).items():
            refusal = self._judge(plan, on_gpus[name], found, said)
            refused += [refusal] if refusal else []
        if refused:
            raise RefusedError(refused)

    def _judge(self, plan: LaunchPlan, planned: NodePlan, found: Host | HostError, said: set[str]) -> HostError | None:
        """Why the job cannot have this host's GPUs; None where it can."""
        name, needed = planned.name, needed_bytes(plan, planned)
        facts = found if isinstance(found, HostError) else found.facts
        room = occupied.judge(name, facts, planned.gpu_uuids, needed, share=plan.share_gpus)
        if isinstance(found, HostError) or (found.facts.gpu_error and "no answer" in found.facts.gpu_error):
            for line in room.lines:  # nobody knows
                self._line(line, said)
            return room.refusal
        seen = _of_gpus(planned, found)
        blocking = [ProbeError(name, one.seen, one.remedy) for one in seen if one.level == "block"]
        if isinstance(room.refusal, occupied.OccupiedError):
            seen.append(_occupied(name, room.refusal.message, room.refusal.remedy, "block"))
        elif not found.facts.gpu_error:
            seen += [_occupied(name, line, occupied.ELSEWHERE, "warn") for line in room.lines]
        self._tell(seen, said)
        return blocking[0] if blocking else room.refusal

    def hear(
        self,
        plan: LaunchPlan,
        hosts: Mapping[str, ConnectedHost],
        answers: Mapping[str, Prepared],
        said: set[str],
    ) -> None:
        """Says what else has changed on the job's hosts. Raises ProbeError for an answer that makes no sense."""
        cluster = self._store.known_cluster(plan.cluster)
        known = cluster.facts if cluster else {}
        seen = []
        for planned in plan.nodes:
            prepared, link = answers[planned.name], hosts[planned.name].transport
            if cluster and planned.name in known and "now" in prepared.answer:
                found = as_of_now(planned.name, known[planned.name], prepared.answer["now"], *prepared[1:])
                node = _node(cluster, planned)
                seen.append(Host(node, *found, login_s=link.login_s, logins_tried=link.logins_tried))
        self._tell(judge(Seen(tuple(seen)), checks_at("start")).findings, said)

    def _tell(self, findings: Iterable[Finding], said: set[str]) -> None:
        for finding in findings:
            if finding not in self.findings:
                self.findings.append(finding)
            if finding.level == "warn":
                self._line(finding.line, said)

    def _line(self, line: str, said: set[str]) -> None:
        if line not in said:
            self._say(line)
        said.add(line)


def _of_gpus(planned: NodePlan, host: Host) -> list[Finding]:
    """What is wrong with those that the job is to have."""
    own = tuple(gpu for gpu in host.facts.gpus if gpu.uuid in planned.gpu_uuids)
    with_own = replace(host, facts=host.facts.model_copy(update={"gpus": own}))
    lost = judge(Seen((host,)), checks_at("gpus_gone")).findings if len(own) < len(planned.gpu_uuids) else ()
    return [*lost, *judge(Seen((with_own,)), checks_at("gpus_well")).findings]


def _occupied(name: str, words: str, remedy: str, level: Level) -> Finding:
    return finding_of("P09", Sight((name,), words.removeprefix(f"{name}: "), remedy, level))


def _node(cluster: Cluster | None, planned: NodePlan) -> Node:
    """As the inventory has it; where that is forgotten, as far as the plan does."""
    known = {node.name: node for node in cluster.nodes} if cluster else {}
    node = known.get(planned.name) or Node(name=planned.name, host=planned.address)
    return node.model_copy(update={"device": planned.device})


# How much of a GPU's memory a job takes, about. Pure.
#
#     needed_bytes(plan, plan.nodes[0])       # on each of its GPUs
#
# Of the trainer's networks by the catalogue's rule: weights, gradients and momentum, what forward keeps of each sample,
# and what CUDA takes for itself. Of a script nothing but the last is known.

HALF = ("bf16", "fp16")


def needed_bytes(plan: LaunchPlan, node: NodePlan) -> int:
    settings = plan.training
    if settings is None or not is_known(settings.model):
        return RESERVED_BYTES
    layers = layers_in(network_of(settings))
    kept = activation_bytes(layers) * (0.5 if settings.amp in HALF else 1.0)
    weights = gradient_bytes(layers)
    if settings.strategy == "tensor" and plan.shares:
        last = node.first_rank + node.ranks
        weights = max(weight_bytes(layers, plan.shares)[node.first_rank : last])
    return round(RESERVED_BYTES + 3 * weights + _samples_at_once(settings, plan.shares, node) * kept)


def _samples_at_once(settings: Settings, shares: Sequence[int], node: NodePlan) -> int:
    """On each GPU; none for a profile, which tries how many fit. shares: of all ranks."""
    if settings.profile_s:
        return 0
    own = computed_shares(settings.strategy, node.shares, sum(shares))
    share = max(own, default=0) * node.ranks / max(1, len(node.gpu_uuids))
    return round(min(share / max(1, settings.accumulate), settings.local_batch or share))
