"""Speed profiles: measures each host by itself, in a job, and stores the result.

    profiling = Profiling(controller, cluster, ProfileRequest.of(JobSpec(exp="resnet152_cifar")), each=False)
    for found in profiling.run(follow):
        found.rank, found.profile.samples_per_s(512), found.fresh

Hosts of one kind are measured once, unless `each`. Hosts on one machine (by boot id) are measured in turn, so that
measurements do not disturb each other.

"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from orchestrator.clusters import now_utc
from orchestrator.controller import Controller
from orchestrator.errors import OrchError, UsageError
from orchestrator.hosts.cluster import Cluster
from orchestrator.jobs import collect
from orchestrator.jobs.job_store import FINAL_STATES
from orchestrator.jobs.running import RunningJob
from orchestrator.paths import RunFolder
from orchestrator.planning.job_spec import JobSpec
from orchestrator.planning.launch_plan import LaunchPlan, NodePlan
from orchestrator.planning.profiles import (
    Kind,
    Measurement,
    Profile,
    Rank,
    RankProfile,
    cuda_graph_of,
    kinds_of,
    profile_line,
    tf32_of,
)
from orchestrator.planning.request import ParsedJob, parse_job, refuse_without_trainer, request_of
from orchestrator.results.events import Events, MetricsFile
from orchestrator.results.tables import read_events

Follow = Callable[[RunningJob], None]

BUDGET_S = 15.0
# Settings that do not affect a rank by itself.
_LEFT_OUT = {"shares": "equal", "speeds": "", "accumulate": "0", "strategy": "ddp", "sync_bn": "false", "slow": ""}
_LEFT_OUT |= {"resume": "", "checkpoint_every": "0"}


def _cuda_graph(exp: str, asked: Mapping[str, str]) -> str:
    """The setting as the later run will resolve it. Raises UsageError for an invalid value."""
    decide = ("strategy", "sync_bn", "accumulate", "cuda_graph")
    settings = request_of(exp, {key: asked[key] for key in decide if key in asked}).training
    return cuda_graph_of(settings) if settings else "auto"


@dataclass(frozen=True)
class ProfileRequest:
    """spec: with a measurement's settings. left_out: given settings that do not affect a rank by itself. line: the
    command for it.
    """

    spec: JobSpec
    job: ParsedJob
    left_out: tuple[str, ...]
    batch: int
    line: str

    @classmethod
    def of(cls, spec: JobSpec) -> ProfileRequest:
        """Raises UsageError for an unknown experiment or setting, or a script that does not import `trainer`."""
        asked = spec.settings
        left_out = tuple(f"{key}={asked[key]}" for key in _LEFT_OUT if asked.get(key, _LEFT_OUT[key]) != _LEFT_OUT[key])
        if spec.exp == "collectives":
            raise UsageError("collectives trains nothing that a host could do alone", "choose another --exp")
        pairs = {"profile_s": str(BUDGET_S), **asked, **_LEFT_OUT}
        if spec.exp:
            pairs["cuda_graph"] = _cuda_graph(spec.exp, asked)
        spec = spec.updated(settings=pairs)
        job = parse_job(spec)
        refuse_without_trainer(job)
        training = job.request.training
        if training is None or not training.profile_s:
            raise UsageError("profile_s=0 measures nothing", "leave it out")
        return cls(spec, job, left_out, training.batch, profile_line(training))

    def on(self, nodes: Sequence[str]) -> ProfileRequest:
        """nodes: types of hosts of a Slurm cluster."""
        request = replace(self.job.request, spec=self.job.request.spec.updated(nodes=[*nodes]))
        return replace(self, job=replace(self.job, request=request))

    def batch_of(self, found: Sequence[RankProfile]) -> int:
        """Per update over all ranks: from the settings, else as the script reported it."""
        own = next((each.profile.batch for each in found if each.profile.batch), None)
        return own if own and self.job.request.batch is None and not self.job.request.trains else self.batch


class Profiling:
    """Raises HostsError for unusable hosts."""

    def __init__(
        self,
        controller: Controller,
        cluster: Cluster,
        wanted: ProfileRequest,
        *,
        only: Sequence[str] = (),
        each: bool = False,
    ) -> None:
        self.controller, self.cluster, self.job, self._batch = controller, cluster, wanted.job, wanted.batch
        facts = controller.clusters.ready(cluster, only).facts
        self.whole = controller.choice.plan(cluster, self.job.request, self.job.code, only)
        if "tf32" not in wanted.spec.settings:  # of all hosts: a host measured by itself does not know the others
            training = self.job.request.training
            assert training  # noqa: S101 - `ProfileRequest.of` has seen to it
            tf32 = tf32_of(training.tf32, self.whole.nodes, facts)
            spec = wanted.spec.updated(settings={**wanted.spec.settings, "tf32": tf32})
            request = request_of(spec.exp, spec.settings) if spec.exp else parse_job(spec).request
            self.job = replace(self.job, request=request)
        self.machines = {name: fact.boot_id for name, fact in facts.items()}
        self.kinds = self._kinds(kinds_of(self.whole, facts), each)

    def _kinds(self, shared: Mapping[Rank, Kind], each: bool) -> dict[Rank, Kind]:
        """By rank. The host's own kind with `each`, or if it has such a profile: splits prefer it, so it is shown and
        measured again.
        """
        if each:
            return {rank: kind.of(f"{self.cluster.name}/{rank[0]}") for rank, kind in shared.items()}
        known = self.controller.store.profiles(shared, self.cluster.name)
        return {rank: kind.of(known[rank].host) if rank in known else kind for rank, kind in shared.items()}

    def run(self, follow: Follow, *, again: bool = False) -> list[RankProfile]:
        """Every rank's profile; measures missing ones. An invalid measurement never replaces a known profile. Raises
        HostsError or OrchError.
        """
        store = self.controller.store
        known = {} if again else store.profiles(self.kinds, self.cluster.name)
        missing = {rank: kind for rank, kind in self.kinds.items() if rank not in known}
        measured: dict[str, Profile] = {}  # by key
        for nodes in self._rounds(missing):
            for profile in self._measure(nodes, follow):
                measured[profile.key] = profile
                store.save_profile(profile)
        return [
            RankProfile(rank, measured[kind.key], True)
            if kind.key in measured
            else RankProfile(rank, known[rank], False)
            for rank, kind in self.kinds.items()
        ]

    def _rounds(self, missing: Mapping[Rank, Kind]) -> list[list[str]]:
        """Nodes to measure at the same time; one per combination of kinds."""
        by_kinds: dict[tuple[str, ...], str] = {}
        for node in self.whole.nodes:
            keys = tuple(self.kinds[node.name, i].key for i in range(node.ranks))
            if any((node.name, i) in missing for i in range(node.ranks)):
                by_kinds.setdefault(keys, node.name)
        machines: dict[str, list[str]] = {}
        for name in by_kinds.values():
            machines.setdefault(self.machines[name], []).append(name)
        most = max(map(len, machines.values()), default=0)
        return [[names[turn] for names in machines.values() if turn < len(names)] for turn in range(most)]

    def _measure(self, names: Sequence[str], follow: Follow) -> list[Profile]:
        """A job per node, all at once."""
        plans = [self._plan_of(name) for name in names]
        launched = list[RunningJob]()
        try:
            for plan in plans:
                launched.append(self.controller.launch(plan, self.job.blob))
            for job in launched:
                follow(job)
            return [profile for job in launched for profile in self._read(job)]
        except BaseException:  # a Ctrl-C, too: a partial profile is useless
            for job in launched:
                with suppress(OrchError):
                    if job.record.state not in FINAL_STATES:
                        job.cancel()
            raise

    def _plan_of(self, name: str) -> LaunchPlan:
        """Only this node, with the threads per rank of the whole plan."""
        plan = self.controller.choice.plan(self.cluster, self.job.request, self.job.code, [name])
        threads = {key: value for key, value in self.whole.node(name).env.items() if key == "OMP_NUM_THREADS"}
        node = plan.nodes[0]
        return plan.model_copy(update={"nodes": (node.model_copy(update={"env": {**node.env, **threads}}),)})

    def _read(self, job: RunningJob) -> list[Profile]:
        plan, record = job.plan, job.record
        node = plan.nodes[0]
        if record.state != "succeeded":
            why = record.first_failure
            words = f": {why.log_line or why.reason}" if why else ""
            raise OrchError(
                f"{node.name} could not be measured ({plan.job} {record.state}{words})",
                f"see `orch logs --job {plan.job}`",
            )
        with tempfile.TemporaryDirectory(prefix="orch-profile-") as folder:
            run = RunFolder(Path(folder) / plan.job)
            run.root.mkdir()
            for error in collect.collect(plan, job.hosts, run).errors.values():
                raise error
            self.controller.store.nothing_to_collect(plan.job)
            files = [MetricsFile(node.name, rank, run.metrics(node.name, rank)) for rank in node.rank_numbers]
            with read_events(files) as events:
                return self._profiles(plan, node, events)

    def _profiles(self, plan: LaunchPlan, node: NodePlan, events: Events) -> list[Profile]:
        """One per kind: of equal ranks the slowest, since others wait for it."""
        measurements, ends = events.latest("profile"), events.latest("end")
        by_key: dict[str, Profile] = {}
        for local_rank in range(node.ranks):
            kind, end = self.kinds[node.name, local_rank], ends.get(local_rank, {})
            try:
                measured = Measurement.model_validate(measurements.get(local_rank))
            except ValidationError as error:
                raise OrchError(
                    f"{node.name}: rank {local_rank} left no measurement", f"see `orch logs --job {plan.job}`"
                ) from error
            profile = Profile(
                **dict(kind),
                **dict(measured),
                schema=1,
                node=node.name,
                created=now_utc(),
                code=None if self.job.request.trains else plan.code.sha256,
                valid=end.get("valid") is not False,
            )
            other = by_key.setdefault(kind.key, profile)
            batch = profile.batch or self._batch
            if profile.samples_per_s(batch) < other.samples_per_s(batch):
                by_key[kind.key] = profile
        return list(by_key.values())
