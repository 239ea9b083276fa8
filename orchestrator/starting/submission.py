"""A job for Slurm: here it is made and submitted, in the batch step it is read again.

    submission = submissions.prepared(asked)        # submission.script: the text for sbatch
    job = submissions.started(record, shown)        # waits in Slurm's queue, until the job runs

The batch step has no home of ours: it gets the specification of the job, the code that is shipped, and the nodes as
they are written in the inventory, with their secrets, in a folder that only its user can read.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer

import orchestrator
from orchestrator.clusters import PROBE_S, now_utc
from orchestrator.errors import ConnectError, HostError, OrchError, RefusedError, UsageError
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.connections import Connections
from orchestrator.hosts.facts import VISIBLE
from orchestrator.hosts.inventory import Inventory, Node, nearest
from orchestrator.hosts.inventory_file import load_inventory
from orchestrator.hosts.probe import look
from orchestrator.jobs.job_list import JobList
from orchestrator.jobs.job_store import FINAL_STATES, JobRecord, SlurmLoan
from orchestrator.jobs.retry_policy import keepers_of, kept_by, newest
from orchestrator.jobs.running import RunningJob
from orchestrator.jobs.slurm_queue import LOOK_S, QUEUED, Queued, SlurmQueue
from orchestrator.owner import read_owner
from orchestrator.planning import naming
from orchestrator.planning.bundle import trainer_folder
from orchestrator.planning.job_forms import with_paths
from orchestrator.planning.job_spec import JobSpec, spelled
from orchestrator.planning.launch_plan import CodeFolder, LaunchPlan
from orchestrator.planning.launchers import read_program
from orchestrator.planning.request import AUTO, RunRequest
from orchestrator.provision.venvs import SetupProgress, set_up_for_job
from orchestrator.record import SCHEMA, Owner, Record
from orchestrator.slurm.batch_script import BatchJob, Component, script_of
from orchestrator.starting.retries import Asked
from orchestrator.store import Store
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import errors, values
from orchestrator.transport.shell import LocalTransport

FILE, CODE, TORCH = "submitted.json", "code.tar", "torch"
NODES = "nodes"
"""In the work folder: each host's own, by its name."""
_COUNTED = re.compile(r"(\d{1,4})x(.+)")


Measures = Literal["missing", "all"]


class Submitted(Record):
    """The content of `submitted.json`. types: nodes of the inventory, as written, a component each. measures: the
    profiles to measure, instead of a run.
    """

    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    job: str
    cluster: str
    owner: Owner
    spec: Annotated[JobSpec, PlainSerializer(lambda spec: spec.model_dump(exclude_unset=True, by_alias=True))]
    env: dict[str, str] = Field(repr=False)
    notify: str | None = Field(None, repr=False)
    code: CodeFolder
    workdir: str
    scratch: str | None = None
    defaults: dict[str, Any] = Field(repr=False)
    types: tuple[dict[str, Any], ...] = Field(repr=False)
    measures: Measures | None = None

    def inventory(
        self, components: Sequence[Mapping[str, Mapping[str, str]]], allocations: Sequence[str]
    ) -> dict[str, Any]:
        """The inventory of the hosts that Slurm has lent. components: by host its variables, see `Keepers`."""
        nodes = [
            _host(keys, name, env, f"{self.workdir}/{NODES}/{name}", allocation)
            for keys, hosts, allocation in zip(self.types, components, allocations, strict=True)
            for name, env in hosts.items()
        ]
        defaults = {key: value for key, value in self.defaults.items() if key not in _LOGIN}
        return {"cluster": self.cluster, **({"defaults": defaults} if defaults else {}), "nodes": nodes}


_LOGIN = ("user", "port", "key_file", "host_key", "proxy_jump", "connect_timeout")
"""Keys for the way to the login host."""


def _host(keys: Mapping[str, Any], name: str, env: Mapping[str, str], workdir: str, allocation: str) -> dict[str, Any]:
    """Slurm's choice of GPUs is a fence: others on that host belong to other jobs."""
    kept = {key: value for key, value in keys.items() if key not in (*_LOGIN, "slurm", "most")}
    fence = {"env": {**kept.get("env", {}), **{key: value for key, value in env.items() if value}}}
    device = {} if env.get(VISIBLE) else {"device": "cpu"}
    place = {"name": name, "host": name, "transport": "slurm", "workdir": workdir, "allocation": allocation}
    return {**kept, **fence, **device, **place}


@dataclass(frozen=True)
class Submission:
    job: str
    script: str
    files: bytes
    record: JobRecord


class Submissions:
    """say: prints a line. shows_setup: called while the login host installs a job's packages."""

    def __init__(
        self,
        store: Store,
        connections: Connections,
        jobs: JobList,
        say: Callable[[str], None],
        shows_setup: Callable[[SetupProgress], None],
    ) -> None:
        self._store, self._connections, self._jobs = store, connections, jobs
        self._say, self._shows_setup = say, shows_setup
        self._queue = SlurmQueue(store, connections)

    def prepared(
        self, asked: Asked, measures: Measures | None = None, pythons: Mapping[str, str] | None = None
    ) -> Submission:
        """Asks no host. pythons: by type, if it has packages of this job. Raises OrchError."""
        cluster, request = asked.cluster, asked.job.request
        inventory = load_inventory(Path(cluster.file))
        if inventory.engine is None:
            raise UsageError(f"{cluster.file} has no `engine: slurm` any more", f"`orch up {cluster.file}`")
        _refuse_unfit(request)
        counts = wanted_types(inventory, request.spec.nodes)
        job = naming.job_id(request.spec.name or request.name, datetime.now(timezone.utc))
        chosen = [node for node in inventory.nodes if node.name in counts]
        digest, _ = _controller()
        engine, more = inventory.engine, [*inventory.engine.options, *(["--no-kill"] if request.spec.retries else [])]
        common = [(key, getattr(engine, key)) for key in ("partition", "account", "qos", "time")]
        script = script_of(
            BatchJob(
                job,
                [Component(node.name, counts[node.name], _options(node)) for node in chosen],
                tuple((key, value) for key, value in common if value),
                more,
                chosen[0].python,
                chosen[0].activate,
                f"../../controller-{digest}",
            )
        )
        submitted = Submitted(
            schema=1,
            job=job,
            cluster=cluster.name,
            owner=(owner := read_owner(self._store.home)),
            notify=request.notify,
            spec=travelling(request),
            env=dict(request.env),
            code=asked.job.code,
            workdir=engine.workdir,
            scratch=engine.scratch,
            defaults=inventory.defaults,
            measures=measures,
            types=tuple(
                {**keys, **({"python": pythons[node.name]} if pythons else {})}
                for node in chosen
                for keys in inventory.entries
                if keys["name"] == node.name
            ),
        )
        files = {
            "job.sh": script.encode(),
            FILE: submitted.model_dump_json(by_alias=True).encode(),
            CODE: asked.job.blob,
        }
        profiles = self._store.home.profiles
        files |= {f"home/profiles/{path.name}": path.read_bytes() for path in profiles.glob("*.json")}
        names = tuple(name if count == 1 else f"{count}x{name}" for name, count in counts.items())
        record = JobRecord(
            schema=1,
            id=job,
            state="queued",
            exp=request.name,
            cluster=cluster.name,
            nodes=names,
            started=now_utc(),
            name=request.spec.name,
            note=request.spec.note,
        )
        files[QUEUED] = Queued(owner=owner, record=record).model_dump_json(by_alias=True).encode()
        return Submission(job, script, _tar(files), record)

    def prepare(self, cluster: Cluster) -> list[str]:
        """Sends orch's code, and imports torch there once: hosts with the same installation need not. Returns warnings.
        Raises HostError.
        """
        code, login, warnings = self._send(cluster), self._connections.kept(cluster.login), list[str]()
        for python, activate in dict.fromkeys((node.python, node.activate) for node in cluster.nodes):
            host = ConnectedHost(login.transport, python, activate, login.workdir)
            memory = f"{login.workdir}/{code}/{TORCH}"
            facts, _ = look(host, (), torch=True, timeout_s=PROBE_S, memory=memory)
            if facts.torch is None:
                warnings.append(f"{python}: no torch on the login host ({facts.torch_error}); hosts may have their own")
        return warnings

    def _send(self, cluster: Cluster) -> str:
        login, (digest, code) = self._queue.login(cluster), _controller()
        name = f"controller-{digest}"
        if not login.has(name):
            login.unpack(name, code)
        return name

    def submit(self, asked: Asked, measures: Measures | None = None) -> JobRecord:
        """Hands it to Slurm. Raises UsageError with sbatch's own words."""
        made, code = self.prepared(asked, measures, self._pythons(asked)), self._send(asked.cluster)
        try:
            number = self._queue.login(asked.cluster).submit(made.job, made.files, at=f"../../{code}")
        except (ConnectError, KeyboardInterrupt):
            self._say(f"{made.job}: Slurm may have it without an answer; `orch jobs --rescan` finds it")
            raise
        loan = SlurmLoan(job=number, folder=made.job)
        record = made.record.model_copy(update={"slurm": loan, "number": self._store.next_number()})
        self._store.save_job(record)
        self._say(f"{made.job}: Slurm's job {number}, on {', '.join(record.nodes)}")
        return record

    def _pythons(self, asked: Asked) -> dict[str, str]:
        """By type, with the packages of `--requirements`: the login host installs them once, on the shared disk. Raises
        RefusedError.
        """
        wanted, cluster = asked.request.requirements, asked.cluster
        if wanted is None:
            return {}
        login, owner, found = self._connections.kept(cluster.login), read_owner(self._store.home), dict[str, str]()
        _refuse_unfit(asked.request)
        inventory = load_inventory(Path(cluster.file))
        for node in map(inventory.node, wanted_types(inventory, asked.request.spec.nodes)):
            host = ConnectedHost(login.transport, node.python, node.activate, login.workdir)
            made = set_up_for_job(
                {node.name: host}, wanted, {host.node: node.env}, self._shows_setup, owner=owner, cluster=cluster.name
            )
            if failed := errors(made):
                raise RefusedError(failed)
            found |= {name: each.python for name, each in values(made).items()}
        return found

    def started(self, record: JobRecord, shown: Callable[[str], None]) -> RunningJob:
        """Waits until Slurm has started it. shown: called with Slurm's reason and expected start. Raises OrchError if
        Slurm ends it before.
        """
        said = ""
        while True:
            record = self._queue.refreshed(record)
            if not record.was_queued:
                return self._jobs.find(record.id)
            assert record.slurm  # noqa: S101 - `was_queued`
            if record.slurm.is_over:
                why = record.first_failure.reason if record.first_failure else "nothing of it has run"
                raise OrchError(
                    f"{record.id} has ended ({record.state}): {why}", f"its log: submitted/{record.slurm.folder}"
                )
            if (words := record.slurm.words or "its batch step is starting") != said:
                said = words
                shown(said)
            time.sleep(LOOK_S)

    def end_all(self, cluster: Cluster) -> None:
        """Takes this cluster's jobs out of Slurm. Raises HostError."""
        for record in self._own(cluster):
            if record.slurm and not record.slurm.is_over:
                self._queue.cancel(record)

    def remove_all(self, cluster: Cluster) -> None:
        """Submissions of this home, from the shared work folder. Raises HostError."""
        self._queue.login(cluster).remove([job.slurm.folder for job in self._own(cluster) if job.slurm])

    def _own(self, cluster: Cluster) -> list[JobRecord]:
        """Without jobs of other homes, which `--rescan` found."""
        jobs = [job for job in self._store.jobs() if job.cluster == cluster.name and job.slurm]
        owner = read_owner(self._store.home)
        return [job for job in jobs if job.was_queued or self._store.plan(job.id).owner == owner]

    def after(self, job: RunningJob) -> RunningJob | None:
        """The next job of the same Slurm job: a retry, or a resume after Slurm has queued it again."""
        said = ""
        while job.record.state in FINAL_STATES and job.record.state not in ("succeeded", "cancelled"):
            record = self._queue.refreshed(job.record)
            if (newest := self._queue.newest(record)).id != job.id:
                return self._jobs.find(newest.id)
            assert record.slurm  # noqa: S101 - all jobs of such a cluster have one
            if record.slurm.is_over:
                return None
            if record.slurm.words and record.slurm.words != said:
                said = record.slurm.words
                self._say(f"{job.id} has ended; Slurm's job {record.slurm.job}: {said}")
            time.sleep(LOOK_S)
        return None


def _refuse_unfit(request: RunRequest) -> None:
    if request.resumes:
        raise UsageError(
            f"the script of {request.resumes} saved its own checkpoints, which orch does not carry over on Slurm",
            "give the script their path: all hosts see the same disk",
        )
    for name, why in (
        ("hosts", "--nodes 2xTYPE asks for hosts of a type"),
        ("wait_limit_s", "`orch cancel` takes a job out of Slurm's queue"),
        ("priority", "`options: [--nice=100]` in the inventory, or `qos:`"),
        ("share", "Slurm decides who shares a GPU"),
        ("keep", "name the folder by its path: all hosts see the same disk"),
    ):
        if request.spec.given(name):
            raise UsageError(f"{spelled(name)} does not work on Slurm", why)


def wanted_types(inventory: Inventory, listed: Sequence[str]) -> dict[str, int]:
    """listed: `v100`, `2xa16`; () means of each type as many as `most`. Raises UsageError."""
    types = {node.name: node for node in inventory.nodes}
    found: dict[str, int] = {}
    for word in listed or [f"{node.most or 1}x{name}" for name, node in types.items()]:
        match = None if word in types else _COUNTED.fullmatch(word)
        name, count = (match[2], int(match[1])) if match else (word, 1)
        if name not in types or count < 1:
            raise UsageError(f"--nodes {word}: {inventory.file} has no such type of host", nearest(name, list(types)))
        found[name] = found.get(name, 0) + count
    return {name: found[name] for name in types if name in found}


def _options(node: Node) -> tuple[tuple[str, str], ...]:
    given = node.slurm.model_dump(exclude_none=True) if node.slurm else {}
    if "gres" not in given and node.gpus:
        given["gres"] = f"gpu:{node.gpus}"
    return tuple(given.items())


def travelling(request: RunRequest) -> JobSpec:
    """The specification for another machine: paths below the shipped folder, settings as decided here, no variables."""
    spec = request.spec
    settings = {**request.chosen, **({"strategy": AUTO} if request.best_way else {})}
    changed: dict[str, Any] = {name: [] for name in ("nodes", "env_files") if spec.given(name)}
    changed |= {"env": {}} if spec.given("env") else {}
    changed |= {"wait": False} if spec.wait else {}  # each job waits in Slurm's queue
    changed |= {name: None for name in ("resume", "cluster", "requirements") if spec.given(name)}
    if settings:
        changed["settings"] = settings
    if request.kind == "experiment" and not spec.exp:
        changed["exp"] = request.name
    if spec.script:
        root = (Path(spec.folder) if spec.folder else Path(read_program(spec.command).name).parent).resolve()
        spec = with_paths(spec, None, lambda name: os.path.relpath(os.path.realpath(name), root))
    return spec.updated(**changed, **({"folder": None} if spec.folder else {}))


@cache
def _controller() -> tuple[str, bytes]:
    """The code of orch itself, which the batch step runs: its digest, and a tar."""
    packages = [Path(orchestrator.__file__).parent, trainer_folder()]
    files = {
        f"{package.name}/{path.relative_to(package).as_posix()}": path.read_bytes()
        for package in packages
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    tar = _tar(files)
    return hashlib.sha256(tar).hexdigest()[:16], tar


def _tar(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o600
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


# ---- in the batch step -------------------------------------------------------------------------------------------


def with_submitted(asked: Asked, submitted: Submitted, blob: bytes) -> Asked:
    """The job with the code and variables that it was submitted with. asked: of the same specification."""
    request = replace(asked.job.request, env=submitted.env)
    return replace(asked, job=replace(asked.job, request=request, code=submitted.code, blob=blob))


def resumed(plan: LaunchPlan) -> str | None:
    """The newest checkpoint of this job, on the disk that all hosts share; None without any."""
    if plan.training is None:
        return None
    found = []
    for name in keepers_of(plan):
        node = plan.node(name)
        with suppress(HostError):
            found.append(kept_by(plan, ConnectedHost(LocalTransport(name), node.python, None, node.workdir)))
    best = newest([kept for kept in found if kept])
    return best.path if best else plan.recorded.resume
