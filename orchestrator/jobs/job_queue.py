"""The queue for GPUs, as its hosts report it (`remote/gpu_queue.py`): they decide, no controller takes part.

queue = Queue(memory, connections)
queue.waiting(jobs)                     # by cluster, all queued runs on these jobs' hosts, other people's too
queue.is_crossed(plan, error)           # whether a simultaneous start may have caused these refusals
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from orchestrator.errors import HostError, HostsError, OrchError
from orchestrator.hosts.connections import Connections
from orchestrator.jobs.job_store import FINAL_STATES, JobRecord, JobStore
from orchestrator.jobs.queue_place import HostAnswer, Rival, place_of, queue_of, read_answer
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.transport import ask
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import errors, values

ASK_S = 30.0
CROSSED_S = 10.0
"""Two starts within this time count as simultaneous."""


class Queue:
    def __init__(self, memory: JobStore, connections: Connections) -> None:
        self._memory, self._connections = memory, connections

    def waiting(self, jobs: Sequence[JobRecord]) -> dict[str, tuple[Rival, ...]]:
        """In order, on the hosts of these jobs, if not ended."""
        nodes: dict[str, set[str]] = {}
        for job in jobs:
            if job.state not in FINAL_STATES:
                with suppress(OrchError):  # a damaged plan is reported elsewhere
                    if on_gpus := {node.name for node in self._memory.plan(job.id).nodes if node.gpu_uuids}:
                        nodes.setdefault(job.cluster, set()).update(on_gpus)
        queues = {}
        for cluster, names in sorted(nodes.items()):
            with suppress(OrchError):  # a damaged or forgotten cluster: `orch jobs` reports it with its jobs
                facts = self._memory.cluster(cluster).facts
                gpus = {name: [gpu.uuid for gpu in facts[name].gpus] for name in names if name in facts}
                queues[cluster] = queue_of(values(self._look(cluster, gpus)))
        return queues

    def is_crossed(self, plan: LaunchPlan, error: HostsError) -> bool:
        """Each of the two has a GPU that the other needs. error: of this start."""
        gpus = {node.name: node.gpu_uuids for node in plan.nodes if node.gpu_uuids}
        names_gpu = [any(gpu in each.message for gpu in gpus.get(each.node, ())) for each in error.errors]
        if not all(names_gpu) or len(names_gpu) == len(gpus):  # else this start had a GPU itself
            return False
        answers = self._look(plan.cluster, gpus)
        queue = place_of(values(answers))
        just_now = all(each.since_s is not None and each.since_s < CROSSED_S for each in queue.holders)
        return just_now and not queue.before and not errors(answers)

    def _look(self, cluster: str, gpus: Mapping[str, Sequence[str]]) -> dict[str, HostAnswer | HostError]:
        def look(host: ConnectedHost) -> HostAnswer:
            request = {"workdir": host.workdir, "gpus": list(gpus[host.node])}
            answer = ask.ask(host, "gpu_queue", request, timeout_s=ASK_S)
            return ask.understood(host.node, lambda: read_answer(host.node, answer))

        nodes = [node for node in self._memory.cluster(cluster).nodes if node.name in gpus]
        return self._connections.each(nodes, look, deadline_s=ASK_S)
