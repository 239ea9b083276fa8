"""What is remembered of jobs under $ORCH_HOME, so that any later command finds them.

A start is remembered before it begins, and a lock that dies with the controller distinguishes a start that is at work
from one that was left half done:

    with jobs.launching(record, plan) as start:         # job.json, plan.json, then `launching`, locked
        ...                                             # prepare, go
        start.over()                                    # without it the start counts as half done
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field

from orchestrator.errors import NoJobError, OrchError, UsageError
from orchestrator.files import flock, is_at, locked, make_folder, write_atomic, write_json
from orchestrator.hosts.cluster import RememberedClusters, damaged
from orchestrator.paths import Home
from orchestrator.planning.launch_plan import Attempt, HostChoice, LaunchPlan
from orchestrator.record import SCHEMA, Record, Words, write_record
from orchestrator.text import message, one_line

LATEST = "latest"
"""In place of a job's id."""
MAX_RUN_FOLDERS = 20
"""The most run folders that are remembered of one job."""


class Removal(Record):
    """When `orch down` removed a job's files."""

    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    at: str
    """When, ISO 8601."""
    nodes: tuple[str, ...]
    """From which hosts."""


class WaitingRun(Record):
    """A run that waits for its GPUs. nodes: where its tickets are."""

    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    job: str
    cluster: str
    nodes: tuple[str, ...]


class PlanHead(Record):
    """As much of a plan as a list of jobs needs."""

    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    job: str


AnyPlan = TypeVar("AnyPlan", PlanHead, LaunchPlan)


def _newest_first(jobs: Iterable[JobRecord]) -> list[JobRecord]:
    """By their numbers: a clock may have been set back."""
    return sorted(jobs, key=lambda job: (job.number, job.started or "", job.id), reverse=True)


class RememberedJobs(RememberedClusters):
    """Jobs, beside the clusters that they belong to."""

    def __init__(self, home: Home) -> None:
        super().__init__(home)
        self._held: dict[str, JobRecord] = {}  # for the length of this command, where they could not be written

    def save_job(self, record: JobRecord, plan: LaunchPlan | None = None) -> None:
        """plan: of a job that is new here. The job keeps the number that it has here."""
        folder = self.home.job_folder(record.id)
        with self._locked():
            with suppress(OrchError):
                record = record.model_copy(update={"number": record.number or self.job_record(record.id).number})
            if plan:
                write_record(folder / "plan.json", plan.masked())
                self.home.uncollected(record.id).touch()
            write_record(folder / "job.json", record)

    def forget_job(self, job: str) -> None:
        """Of a start that was undone, and that another has taken the place of."""
        with self._if_writable(), self._locked():
            shutil.rmtree(self.home.job_folder(job), ignore_errors=True)

    def change_job(self, job: str, change: Callable[[JobRecord], JobRecord]) -> JobRecord:
        """Reads, changes and writes a job's record under the lock: two commands at once do not undo each other.

        Where nothing can be written (a full disk, a read-only one) this command alone goes by the new record.
        """
        try:
            with self._locked():
                known = self.job_record(job)
                record = change(known)
                if record != known or job in self._held:
                    write_record(self.home.job_folder(job) / "job.json", record)
                    self._held.pop(job, None)
        except OSError as error:
            self.unwritten = error
            record = self._held[job] = change(self.job_record(job))
        return record

    def job_record(self, job: str) -> JobRecord:
        if job in self._held:
            return self._held[job]
        path = self.home.job_folder(job) / "job.json"
        record = self._read(path, JobRecord)
        if record.id != job:
            raise damaged(path, f"it speaks of {record.id[:80]!r}")
        return record

    def plan(self, job: str) -> LaunchPlan:
        return self._plan(job, LaunchPlan)

    def _plan(self, job: str, form: type[AnyPlan]) -> AnyPlan:
        path = self.home.job_folder(job) / "plan.json"
        plan = self._read(path, form)
        if plan.job != job:
            raise damaged(path, f"it speaks of {plan.job[:80]!r}")
        return plan

    def jobs(self) -> list[JobRecord]:
        """Newest first, without the damaged ones."""
        found = []
        for job in self.job_ids():
            with suppress(OrchError):
                found.append(self.job_record(job))
        return _newest_first(found)

    def damaged(self) -> dict[str, OrchError]:
        """Jobs whose record or plan cannot be read, and why."""
        found: dict[str, OrchError] = {}
        for job in self.job_ids():
            try:
                self.job_record(job)
                self.plan(job)
            except OrchError as error:
                found[job] = error
        return found

    def listed(self) -> tuple[list[JobRecord], dict[str, OrchError]]:
        """`jobs` and `damaged` at once. Of a plan whose job has ended only the id is checked: nobody asks its hosts."""
        records, wrong = list[JobRecord](), dict[str, OrchError]()
        for job in self.job_ids():
            try:
                record = self.job_record(job)
                records.append(record)
                if record.state in ENDED:
                    self._plan(job, PlanHead)
                else:
                    self.plan(job)
            except OrchError as error:
                wrong[job] = error
        return _newest_first(records), wrong

    def job_ids(self) -> list[str]:
        """The ids of all remembered jobs, the damaged ones too. Without job.json nothing of a job has begun."""
        return sorted(path.parent.name for path in self.home.jobs.glob("*/job.json"))

    def uncollected(self, cluster: str) -> list[str]:
        """Jobs of this cluster whose files `orch down` would take before anybody has collected them; newest first."""
        return [job.id for job in self.jobs() if job.cluster == cluster and self.home.uncollected(job.id).exists()]

    def nothing_to_collect(self, job: str) -> None:
        """Its files are here since it ended, or its hosts no longer hold any."""
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
            if self.home.job_folder(job).is_dir():  # else the job has been forgotten meanwhile
                write_json(self.home.collected(job), {"schema": SCHEMA, "folders": [str(one) for one in folders]})

    def run_folders(self, job: str) -> list[Path]:
        """Those that hold files of the job and are still there; newest first. A damaged note counts as none."""
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            folders = json.loads(self.home.collected(job).read_text())["folders"]
            return [Path(folder) for folder in folders if Path(folder).is_dir()]
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
            raise UsageError(f"{wanted!r} matches several jobs: {', '.join(fitting[:5])}", "give more of the id")
        if not known:
            raise NoJobError("no job yet", "start one with `orch run`; `orch jobs --rescan` asks the hosts for others")
        raise NoJobError(f"no job {wanted!r}", f"the latest: {', '.join(known[:5])} (`orch jobs` lists all)")

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

    # ---- runs that wait -----------------------------------------------------------------------------------------

    def remember_waiting(self, run: WaitingRun) -> None:
        with self._if_writable(), self._locked():
            make_folder(self.home.waiting)
            write_record(self.home.waiting / f"{run.job}.json", run)

    def forget_waiting(self, job: str) -> None:
        with self._if_writable():
            (self.home.waiting / f"{job}.json").unlink(missing_ok=True)

    def waiting_runs(self) -> list[WaitingRun]:
        """The damaged ones left out: nothing but where to look hangs on them."""
        found = []
        for path in sorted(self.home.waiting.glob("*.json")):
            with suppress(OrchError):
                found.append(self._read(path, WaitingRun))
        return found

    def waiting_run(self, wanted: str) -> WaitingRun | None:
        """The one meant by an id or a unique prefix of one."""
        runs = self.waiting_runs()
        fitting = [run for run in runs if run.job == wanted] or [run for run in runs if run.job.startswith(wanted)]
        return fitting[0] if len(fitting) == 1 else None

    # ---- starts -----------------------------------------------------------------------------------------------

    @contextmanager
    def launching(self, record: JobRecord, plan: LaunchPlan) -> Iterator[Start]:
        """Remembers the intent to start this job, and that we are at it for as long as we live."""
        path = self.home.launching(record.id)
        make_folder(path.parent)
        with locked(path):
            self.save_job(record.model_copy(update={"number": self._next_number()}), plan)
            yield Start(path)

    def _next_number(self) -> int:
        with self._locked():
            try:
                last = int(self.home.last_number.read_text())
            except (OSError, ValueError):  # none yet, or a damaged one
                last = max((job.number for job in self.jobs()), default=0)
            write_atomic(self.home.last_number, f"{last + 1}\n")
        return last + 1

    def half_started(self) -> list[str]:
        """Jobs whose start was begun and not finished, and whose controller no longer runs."""
        return sorted(path.parent.name for path in self.home.jobs.glob("*/launching") if _is_free(path))

    def is_half_started(self, job: str) -> bool:
        return _is_free(self.home.launching(job))

    def start_is_over(self, job: str) -> None:
        """Nothing is left of it on any host. A start that somebody is at by now stays remembered."""
        marker = self.home.launching(job)
        with self._if_writable(), self._locked(), suppress(FileNotFoundError), open(marker, "rb") as file:
            if _is_left(file, marker):  # and nobody takes it before it is gone
                Start(marker).over()


class Start:
    """It is remembered until it is `over`."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def over(self) -> None:
        """Every host has been asked to start, or nothing is left on any."""
        self._marker.unlink(missing_ok=True)


def _is_free(marker: Path) -> bool:
    """Whether the marker is there and nobody holds it: its controller is dead, or gave up."""
    try:
        with open(marker, "rb") as file:
            return _is_left(file, marker)
    except FileNotFoundError:
        return False


def _is_left(file: IO[Any], marker: Path) -> bool:
    """The same of the open marker, which nobody can take then until it is closed."""
    try:
        flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return is_at(file, marker)


# A job's record: its state, its first failure and what it went on after, as `job.json` holds it. Pure.

JobState = Literal["starting", "running", "succeeded", "failed", "cancelled", "lost"]
_LARGEST = 1 << 53
"""What a host counts stays below: a larger number has no exact float."""

ENDED: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
"""Known to have ended. A lost job may be found again."""

FINAL_STATES: frozenset[str] = ENDED | {"lost"}


class FirstFailure(Record):
    """The first cause of a failed job."""

    kind: Words = ""
    """ "rank", "torchrun", "prepare", "supervisor", ...; "lost" where others only miss the host."""
    node: Words
    rank: int | None = None
    exit_code: int | None = None
    signal: Words | None = None
    reason: Annotated[str, AfterValidator(lambda text: message(text, 500))]
    """In plain words."""
    secondary: bool = False
    """Whether its own log blames the network alone: others' deaths, or a link that broke."""
    log_line: Words | None = None
    """The line of the rank's error log that says why, if one does."""


class NotFinite(Record):
    """The first loss of a job that is NaN or infinite."""

    node: Words
    rank: int = Field(ge=0)
    step: int = Field(ge=0, lt=_LARGEST)
    """The update, from 0."""
    epoch: int = Field(ge=0, lt=_LARGEST)
    loss: Literal["nan", "inf", "-inf"]
    of: Literal["loss", "test loss"] = "loss"

    @property
    def words(self) -> str:
        """`loss nan since update 25 (epoch 3, v100, rank 1)`."""
        place = f"epoch {self.epoch + 1}, {one_line(self.node)}, rank {self.rank}"
        return f"{self.of} {self.loss} since update {self.step + 1:,} ({place})"


class StillRank(Record):
    """What one rank does while none prints."""

    node: str
    rank: int
    does: Literal["waits", "busy", "disk", "stopped", "ended"]
    """See `remote/stillness.py`."""


Kind = Literal[
    "missed-collective",
    "deadlock",
    "loader",
    "dead-mount",
    "stopped",
    "half-dead-link",
    "full-pipe",
    "stands-still",
    "clock-throttle",
    "still-busy",
    "no-stall",
]


@dataclass(frozen=True)
class Verdict:
    """Who holds a job up, as `orch why` says it."""

    kind: Kind
    reason: Words
    """A sentence."""
    remedy: Words = ""
    node: Words | None = None
    rank: int | None = None
    place: Words = ""
    """`train.py:31 in step`; "" where no line is to be named."""
    line: Words = ""
    """The text of that line."""

    @property
    def is_alarm(self) -> bool:
        return self.kind not in ("no-stall", "still-busy")


class Answer(Record):
    """What came of asking why, without a person, while no rank printed."""

    verdict: Verdict
    quiet_s: float
    """How long they had been quiet by then."""


class Stall(Record):
    """No rank of a job prints anything. It may be healthy for all that: the answer says so."""

    quiet_s: float
    """For how long, in whole minutes, when the hosts were asked."""
    ranks: tuple[StillRank, ...]
    since: tuple[float, ...] = ()
    """Since when, host by host, each by its own clock; 0 where it does not say. It tells one stall from the next."""
    answer: Answer | None = None
    """None where nobody has looked yet."""

    @property
    def waits(self) -> bool:
        """Whether some rank does nothing but wait."""
        return bool({rank.does for rank in self.ranks} & {"waits", "disk", "stopped"})


class JobRecord(Record):
    """A job as `orch jobs --json` lists it and as `job.json` stores it."""

    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    id: str
    state: JobState
    exp: str
    cluster: str
    nodes: tuple[str, ...]
    number: int = 0
    """In the order in which this $ORCH_HOME started its jobs, whatever its clock said; 0 for one of an older orch, and
    one that was found on hosts."""
    started: str | None = None
    ended: str | None = None
    exit_code: int | None = None
    first_failure: FirstFailure | None = None
    stall: Stall | None = None
    """How the ranks of an ended job were found last."""
    name: Words | None = None
    """What its person calls it."""
    note: Words | None = None
    hosts: HostChoice | None = None
    """Which hosts it does without, where it was started by `--hosts`."""
    attempt: Attempt | None = None
    """Which one, of a job that is tried again by `--retries`."""
    not_finite: NotFinite | None = None
    """Its figures are of no use from then on; a job may succeed for all that."""
    joined: bool | None = None
    """Whether any rank has met another; False: each of several runs by itself. None: not known, or a single rank."""

    @classmethod
    def of(cls, plan: LaunchPlan, state: JobState) -> JobRecord:
        """What its plan says of a job, before any host has been heard."""
        return cls(
            schema=1,
            id=plan.job,
            state=state,
            exp=plan.exp,
            cluster=plan.cluster,
            nodes=tuple(node.name for node in plan.nodes),
            started=plan.created,
            name=plan.name,
            note=plan.note,
            hosts=plan.hosts,
            attempt=plan.attempt,
        )
