"""What the controller remembers between two commands, under $ORCH_HOME: clusters and jobs. The hosts are the truth.

Every write is a temporary file, fsync and rename under a lock; every file carries a schema number. A cluster is the
inventory as it was read, plus an overlay (what `orch node` and `orch master` changed), plus the facts of the last `up`:
the user's own file is never touched. A damaged file is a StateError of its own job or cluster and of nothing else.

A start is remembered before it begins, and a lock that dies with the controller tells a start that is at work from one
that was left half done:

    with store.launching(record, plan) as launch:      # job.json, plan.json, then `launching`, locked
        ...                                             # prepare, go
        launch.over()                                   # without it the start counts as half done
"""

from __future__ import annotations

import difflib
import errno
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from orchestrator.errors import OrchError, StateError, UsageError
from orchestrator.files import flock, locked, make_folder, own_folder, write_atomic, write_json
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.grammar import NAME
from orchestrator.jobs.record import JobRecord
from orchestrator.paths import Home
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.planning.profiles import Kind, Profile, Rank
from orchestrator.record import SCHEMA, AnyRecord, Record, RecordError, read_record, write_record


class Removal(Record):
    """That `orch down` removed a job's files."""

    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    at: str
    """When, ISO 8601."""
    nodes: tuple[str, ...]
    """From which hosts."""


LATEST = "latest"
"""In place of a job's id."""
CLUSTER_VARIABLE = "ORCH_CLUSTER"
"""Chooses the current cluster of one terminal."""
MAX_RUN_FOLDERS = 20
"""Of one job: so many are remembered."""


@dataclass(frozen=True)
class Current:
    """The cluster that a command is about if its line names none. by: the variable or the file that says so."""

    name: str
    by: str


class Store:
    """unwritten: why something that a reading command learned could not be remembered; such a command goes on."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.unwritten: OSError | None = None
        self._held: dict[str, JobRecord] = {}  # for the length of this command, where they could not be written

    # ---- clusters ---------------------------------------------------------------------------------------------

    def save_cluster(self, cluster: Cluster, *, current: bool = False) -> None:
        with self._locked():
            write_record(self.home.cluster(cluster.name), cluster.masked())
            if current:
                write_atomic(self.home.current_cluster, cluster.name + "\n")

    def cluster(self, name: str | None = None) -> Cluster:
        """The named cluster, else the current one. Raises UsageError where there is none."""
        return self._read(self.home.cluster(self.cluster_name(name)), Cluster)

    def cluster_name(self, name: str | None = None) -> str:
        """The same, without a look into it."""
        chosen, known = Current(name, "") if name else self.current(), self.cluster_names()
        if chosen and chosen.name in known:
            return chosen.name
        if not known and not chosen:
            raise UsageError("no cluster yet", "start with `orch up INVENTORY`")
        near = difflib.get_close_matches(chosen.name, known, n=1) if chosen else []
        meant = f"did you mean {near[0]}? " if near else ""
        remembered = f"known: {', '.join(known) or 'none'}"
        if chosen and chosen.by != str(self.home.current_cluster):
            by = f"{chosen.by}: " if chosen.by else ""
            remedy = f"{meant}`orch up INVENTORY` remembers one; {remembered}"
            raise UsageError(f"{by}no cluster named {chosen.name!r} is remembered", remedy)
        raise UsageError(
            f"{self.home.current_cluster} names no cluster that is remembered",
            f"{meant}`orch use NAME` writes it again, or `--cluster NAME`; {remembered}",
        )

    def current(self) -> Current | None:
        """This terminal's, else the one that the last `orch up` or `orch use` chose."""
        if terminals := self.terminals():
            return terminals
        try:
            name = self.home.current_cluster.read_text().strip()
        except (FileNotFoundError, ValueError):
            return None
        return Current(name, str(self.home.current_cluster)) if re.fullmatch(NAME, name) else None

    @staticmethod
    def terminals() -> Current | None:
        """What ORCH_CLUSTER says; None where it is not set, or empty."""
        name = os.environ.get(CLUSTER_VARIABLE)
        return Current(name, CLUSTER_VARIABLE) if name else None

    def use(self, name: str) -> Cluster:
        """Makes a remembered cluster the current one. Raises UsageError where it is unknown."""
        cluster = self.cluster(name)
        with self._locked():
            write_atomic(self.home.current_cluster, cluster.name + "\n")
        return cluster

    def cluster_names(self) -> list[str]:
        return sorted(path.stem for path in self.home.clusters.glob("*.json") if not path.name.startswith("."))

    def known_cluster(self, name: str) -> Cluster | None:
        """None where it is unknown. Raises StateError where it is damaged."""
        return self._read(self.home.cluster(name), Cluster) if self.home.cluster(name).is_file() else None

    # ---- jobs -------------------------------------------------------------------------------------------------

    def save_job(self, record: JobRecord, plan: LaunchPlan | None = None) -> None:
        """plan: of a job that is new here."""
        folder = self.home.job(record.id)
        with self._locked():
            if plan:
                write_record(folder / "plan.json", plan.masked())
                self.home.uncollected(record.id).touch()
            write_record(folder / "job.json", record)

    def change_job(self, job: str, change: Callable[[JobRecord], JobRecord]) -> JobRecord:
        """Reads, changes and writes a job's record under the lock: two commands at once do not undo each other.

        Where nothing can be written (a full disk, a read-only one) this command alone goes by the new record.
        """
        try:
            with self._locked():
                known = self.job(job)
                record = change(known)
                if record != known or job in self._held:
                    write_record(self.home.job(job) / "job.json", record)
                    self._held.pop(job, None)
        except OSError as error:
            self.unwritten = error
            record = self._held[job] = change(self.job(job))
        return record

    def job(self, job: str) -> JobRecord:
        if job in self._held:
            return self._held[job]
        path = self.home.job(job) / "job.json"
        record = self._read(path, JobRecord)
        if record.id != job:
            raise _damaged(path, f"it speaks of {record.id[:80]!r}")
        return record

    def plan(self, job: str) -> LaunchPlan:
        path = self.home.job(job) / "plan.json"
        plan = self._read(path, LaunchPlan)
        if plan.job != job:
            raise _damaged(path, f"it speaks of {plan.job[:80]!r}")
        return plan

    def jobs(self) -> list[JobRecord]:
        """Newest first; the damaged ones left out."""
        found = []
        for job in self.job_ids():
            with suppress(OrchError):
                found.append(self.job(job))
        return sorted(found, key=lambda job: (job.started or "", job.id), reverse=True)

    def damaged(self) -> dict[str, OrchError]:
        """Jobs whose record or plan cannot be read, and why."""
        found: dict[str, OrchError] = {}
        for job in self.job_ids():
            try:
                self.job(job)
                self.plan(job)
            except OrchError as error:
                found[job] = error
        return found

    def job_ids(self) -> list[str]:
        """Of all that are remembered, the damaged ones too. Without job.json nothing of a job has begun."""
        return sorted(path.parent.name for path in self.home.jobs.glob("*/job.json"))

    def uncollected(self, cluster: str) -> list[str]:
        """Jobs of this cluster whose files `orch down` would take before anybody has collected them; newest first."""
        return [job.id for job in self.jobs() if job.cluster == cluster and self.home.uncollected(job.id).exists()]

    def nothing_to_collect(self, job: str) -> None:
        """Its files are here since it ended, or its hosts hold none any more."""
        with self._if_writable():
            self.home.uncollected(job).unlink(missing_ok=True)

    def files_removed(self, job: str, at: str, nodes: Sequence[str]) -> None:
        """Notes that `orch down` removed the job's files from these hosts."""
        with self._locked():
            before = self.removal(job)
            every = sorted({*nodes, *(before.nodes if before else ())})
            write_record(self.home.removed(job), Removal(schema=1, at=at, nodes=tuple(every)))

    def removal(self, job: str) -> Removal | None:
        """None where `orch down` has removed nothing of this job. Raises StateError where the note is damaged."""
        path = self.home.removed(job)
        return self._read(path, Removal) if path.exists() else None

    def remember_run(self, job: str, folder: Path) -> None:
        """This run folder holds files of the job."""
        here = folder.absolute()
        folders = [here, *(known for known in self.run_folders(job) if known != here)][:MAX_RUN_FOLDERS]
        with self._if_writable(), self._locked():
            if self.home.job(job).is_dir():  # else the job has been forgotten meanwhile
                write_json(self.home.collected(job), {"schema": SCHEMA, "folders": [str(one) for one in folders]})

    def run_folders(self, job: str) -> list[Path]:
        """Those that hold files of the job and are still there; newest first. A damaged note counts as none."""
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            told = json.loads(self.home.collected(job).read_text())["folders"]
            return [Path(folder) for folder in told if Path(folder).is_dir()]
        return []

    def runs_of(self, begins: str) -> list[Path]:
        """The run folders of all jobs whose ids begin so."""
        return [folder for job in self.job_ids() if job.startswith(begins) for folder in self.run_folders(job)]

    def find_job(self, wanted: str, cluster: str | None = None) -> str:
        """The id meant by an id, a unique prefix of one, or `latest`: the newest of the current cluster.

        cluster: only its jobs, for a person named it. Raises UsageError where none or several fit.
        """
        jobs = {job.id: job for job in self.jobs()}
        if wanted == LATEST and jobs:
            return self._latest(list(jobs.values()), cluster)
        known = [*jobs, *(job for job in self.job_ids() if job not in jobs)]
        fitting = [job for job in known if job == wanted] or [job for job in known if job.startswith(wanted)]
        if cluster:
            elsewhere, cluster = fitting, self.cluster_name(cluster)
            fitting = [job for job in fitting if job not in jobs or jobs[job].cluster == cluster]
            if len(elsewhere) == 1 and not fitting:
                where = jobs[elsewhere[0]].cluster
                raise UsageError(f"{elsewhere[0]} ran on cluster {where}, not on {cluster}", "leave --cluster out")
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise UsageError(f"{wanted!r} fits several jobs: {', '.join(fitting[:5])}", "give more of the id")
        if not known:
            raise UsageError("no job yet", "start one with `orch run`; `orch jobs --rescan` asks the hosts for others")
        raise UsageError(f"no job {wanted!r}", f"the latest: {', '.join(known[:5])} (`orch jobs` lists all)")

    def _latest(self, jobs: Sequence[JobRecord], cluster: str | None) -> str:
        """jobs: newest first, at least one. Without a current cluster the newest of all."""
        if cluster or self.terminals():
            cluster = self.cluster_name(cluster)
        elif current := self.current():
            cluster = current.name
        for job in jobs:
            if cluster in (None, job.cluster):
                return job.id
        newest = jobs[0]
        raise UsageError(
            f"no job yet on cluster {cluster}", f"the latest of cluster {newest.cluster}: --job {newest.id}"
        )

    # ---- profiles ---------------------------------------------------------------------------------------------

    def save_profile(self, profile: Profile) -> None:
        """One that is not valid takes the place of none that is."""
        path = self.home.profile(profile.key)
        with self._locked():
            known = self._profile(path)
            if profile.valid or known is None or not known.valid:
                make_folder(self.home.profiles)
                write_record(path, profile)

    def profiles(self, kinds: Mapping[Rank, Kind], cluster: str, *, valid: bool = True) -> dict[Rank, Profile]:
        """Of the ranks that have one: its host's own, else that of its kind. One that is damaged counts as none, and
        so does one that is not valid; with valid=False, one that is.
        """
        found = {}
        for rank, kind in kinds.items():
            for key in (kind.key, kind.of(f"{cluster}/{rank[0]}").key):
                profile = self._profile(self.home.profile(key))
                if profile and profile.valid == valid:
                    found[rank] = profile
        return found

    def _profile(self, path: Path) -> Profile | None:
        with suppress(OrchError):
            return self._read(path, Profile)
        return None

    # ---- starts -----------------------------------------------------------------------------------------------

    @contextmanager
    def launching(self, record: JobRecord, plan: LaunchPlan) -> Iterator[Launch]:
        """Remembers the intent to start this job, and that we are at it for as long as we live."""
        path = self.home.launching(record.id)
        make_folder(path.parent)
        with locked(path):
            self.save_job(record, plan)
            yield Launch(path)

    def half_started(self) -> list[str]:
        """Jobs that a controller began to start and did not end starting, and that nobody is at any more."""
        return sorted(path.parent.name for path in self.home.jobs.glob("*/launching") if _is_free(path))

    def is_half_started(self, job: str) -> bool:
        return _is_free(self.home.launching(job))

    def start_is_over(self, job: str) -> None:
        with self._if_writable():
            Launch(self.home.launching(job)).over()

    # ---- files ------------------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        own_folder(self.home.root)
        os.chmod(self.home.root, 0o700)
        with locked(self.home.root / ".lock"):
            yield

    @contextmanager
    def _if_writable(self) -> Iterator[None]:
        """For what is worth remembering, and not worth failing for."""
        try:
            yield
        except OSError as error:
            self.unwritten = error

    def _read(self, path: Path, form: type[AnyRecord]) -> AnyRecord:
        try:
            return read_record(path, form)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise _damaged(path, "it is missing") from error
            raise _damaged(path, error.strerror or str(error)) from error
        except RecordError as error:
            raise _damaged(path, str(error)) from error


class Launch:
    """A start that is remembered until it is `over`."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def over(self) -> None:
        """Every host has been told to go, or nothing is left on any."""
        self._marker.unlink(missing_ok=True)


def _is_free(marker: Path) -> bool:
    """Whether the marker is there and nobody holds it: its controller is dead, or gave up."""
    try:
        with open(marker, "rb") as file:
            flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return marker.exists()
    except (FileNotFoundError, BlockingIOError):
        return False


def _damaged(path: Path, why: str) -> StateError:
    is_cluster = path.parent.name == "clusters"
    remedy = "`orch up INVENTORY` writes it again" if is_cluster else "`orch jobs --rescan` rebuilds it from the hosts"
    return StateError(f"{path} is damaged ({why})", remedy)
