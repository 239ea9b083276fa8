"""Repeats quick checks before each start of a job, for changes since `orch up`.

checks = StartChecks(store, print)
checks.look_at_gpus(plan, hosts, printed)       # before anything of the job is on the hosts. Raises RefusedError
checks.check_prepared(plan, hosts, answers, printed)      # from the answers to `prepare`, without a question of its own
checks.findings                                 # of this start
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from orchestrator.doctor.observations import Host, Level, Observations, RawFinding
from orchestrator.doctor.table import Finding, checks_at, finding_of, judge
from orchestrator.errors import HostError, ProbeError, RefusedError
from orchestrator.forecast.gpu_catalogue import RESERVED_BYTES, activation_bytes
from orchestrator.forecast.layers import gradient_bytes, is_known, layers_in, network_of
from orchestrator.hosts import occupied
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.inventory import Node
from orchestrator.hosts.probe import as_of_now, look
from orchestrator.jobs.launch import Prepared
from orchestrator.planning.launch_plan import LaunchPlan, NodePlan
from orchestrator.store import Store
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import for_each
from trainer.shared.settings import Settings

GPUS_S = 60.0
"""Twice the time limit of nvidia-smi."""


class StartChecks:
    """say: called with each line for the user."""

    def __init__(self, store: Store, say: Callable[[str], None]) -> None:
        self._store, self._say = store, say
        self.findings: list[Finding] = []

    def look_at_gpus(self, plan: LaunchPlan, hosts: Mapping[str, ConnectedHost], printed: set[str]) -> bool:
        """Reports users and health of the job's GPUs. Returns whether other programs leave enough memory. Raises
        RefusedError if they do not and the job does not wait, or if a GPU is unusable.

        printed: lines that are not repeated; new lines are added.
        """
        if not printed:
            self.findings = []
        cluster = self._store.known_cluster(plan.cluster)
        on_gpus = {node.name: node for node in plan.nodes if node.gpu_uuids}

        def see(planned: NodePlan) -> Host:
            facts, health = look(hosts[planned.name], (), torch=False, timeout_s=GPUS_S)
            return Host(_node(cluster, planned), facts, health)

        looked = for_each(on_gpus, see, deadline_s=GPUS_S)
        judged = [self._judge(plan, on_gpus[name], found, printed) for name, found in looked.items()]
        refused = [each for each in judged if each]
        waits = plan.asked.waits and all(isinstance(each, occupied.OccupiedError) for each in refused)
        if refused and not waits:
            raise RefusedError(refused)
        return not refused

    def _judge(
        self, plan: LaunchPlan, planned: NodePlan, found: Host | HostError, printed: set[str]
    ) -> HostError | None:
        """Why the job cannot have this host's GPUs; None if it can."""
        name, needed = planned.name, needed_bytes(plan, planned)
        facts = found if isinstance(found, HostError) else found.facts
        room = occupied.judge(name, facts, planned.gpu_uuids, needed, share=plan.share_gpus)
        if isinstance(found, HostError) or (found.facts.gpu_error and "no answer" in found.facts.gpu_error):
            for line in room.lines:
                self._line(line, printed)
            return room.refusal
        seen = _of_gpus(planned, found)
        blocking = [ProbeError(name, one.seen, one.remedy) for one in seen if one.level == "block"]
        if isinstance(room.refusal, occupied.OccupiedError):
            seen.append(_occupied(name, room.refusal.message, room.refusal.remedy, "block"))
        elif not found.facts.gpu_error:
            seen += [_occupied(name, line, occupied.ELSEWHERE, "warn") for line in room.lines]
        self._report(seen, printed)
        return blocking[0] if blocking else room.refusal

    def check_prepared(
        self,
        plan: LaunchPlan,
        hosts: Mapping[str, ConnectedHost],
        answers: Mapping[str, Prepared],
        printed: set[str],
    ) -> None:
        """Reports other changes on the job's hosts. Raises ProbeError for a malformed answer."""
        cluster = self._store.known_cluster(plan.cluster)
        known = cluster.facts if cluster else {}
        seen = []
        for planned in plan.nodes:
            prepared, link = answers[planned.name], hosts[planned.name].transport
            if cluster and planned.name in known and "now" in prepared.answer:
                found = as_of_now(planned.name, known[planned.name], prepared.answer["now"], *prepared[1:])
                node = _node(cluster, planned)
                seen.append(Host(node, *found, login_s=link.login_s, logins_tried=link.logins_tried))
        self._report(judge(Observations(tuple(seen)), checks_at("start")).findings, printed)

    def _report(self, findings: Iterable[Finding], printed: set[str]) -> None:
        for finding in findings:
            if finding not in self.findings:
                self.findings.append(finding)
            if finding.level == "warn":
                self._line(finding.line, printed)

    def _line(self, line: str, printed: set[str]) -> None:
        if line not in printed:
            self._say(line)
        printed.add(line)


def _of_gpus(planned: NodePlan, host: Host) -> list[Finding]:
    """Problems of the GPUs for the job."""
    own = tuple(gpu for gpu in host.facts.gpus if gpu.uuid in planned.gpu_uuids)
    with_own = replace(host, facts=host.facts.model_copy(update={"gpus": own}))
    lost = judge(Observations((host,)), checks_at("gpus_gone")).findings if len(own) < len(planned.gpu_uuids) else ()
    return [*lost, *judge(Observations((with_own,)), checks_at("gpus_well")).findings]


def _occupied(name: str, words: str, remedy: str, level: Level) -> Finding:
    return finding_of("P09", RawFinding((name,), words.removeprefix(f"{name}: "), remedy, level))


def _node(cluster: Cluster | None, planned: NodePlan) -> Node:
    """From the inventory, or from the plan if the cluster is forgotten."""
    known = {node.name: node for node in cluster.nodes} if cluster else {}
    node = known.get(planned.name) or Node(name=planned.name, host=planned.address)
    return node.model_copy(update={"device": planned.device})


# Estimate of a job's memory on each of its GPUs: for the trainer's networks weights, gradients, momentum, activations
# and CUDA's own use; for scripts only the last, since the rest is unknown. Pure.

HALF = ("bf16", "fp16")


def needed_bytes(plan: LaunchPlan, node: NodePlan) -> int:
    settings = plan.training
    if settings is None or not is_known(settings):
        return RESERVED_BYTES
    layers = layers_in(network_of(settings))
    kept = activation_bytes(layers) * (0.5 if settings.amp in HALF else 1.0)
    weights = gradient_bytes(layers)
    if settings.strategy == "tensor" and plan.shares:
        from orchestrator.forecast.tensor_step import weight_bytes  # slow to load

        last = node.first_rank + node.ranks
        weights = max(weight_bytes(layers, plan.shares)[node.first_rank : last])
    return round(RESERVED_BYTES + 3 * weights + _samples_at_once(settings, plan.shares, node) * kept)


def _samples_at_once(settings: Settings, shares: Sequence[int], node: NodePlan) -> int:
    """Per GPU; 0 for a profile, which finds out what fits. shares: of all ranks."""
    if settings.profile_s:
        return 0
    from orchestrator.forecast.inputs import computed_shares  # slow to load

    own = computed_shares(settings.strategy, node.shares, sum(shares))
    share = max(own, default=0) * node.ranks / max(1, len(node.gpu_uuids))
    return round(min(share / max(1, settings.accumulate), settings.local_batch or share))
