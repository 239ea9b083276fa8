"""The jobs under $ORCH_HOME: their records, plans and run folders.

A start is recorded before it begins. The lock ends with the controller, so that a start in progress differs from a
half-done start:

    with jobs.launching(record, plan) as start:         # writes job.json, plan.json and `launching`, locked
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
from orchestrator.hosts.inventory import Allocation
from orchestrator.paths import Home
from orchestrator.planning.launch_plan import Attempt, HostChoice, LaunchPlan
from orchestrator.record import SCHEMA, Record, Words, write_record
from orchestrator.units import message, one_line

LATEST = "latest"
MAX_RUN_FOLDERS = 20


class Removal(Record):
    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    at: str
    """ISO 8601."""
    nodes: tuple[str, ...]


class PlanHead(Record):
    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    job: str


AnyPlan = TypeVar("AnyPlan", PlanHead, LaunchPlan)


def _newest_first(jobs: Iterable[JobRecord]) -> list[JobRecord]:
    """By number: a clock may have been set back."""
    return sorted(jobs, key=lambda job: (job.number, job.started or "", job.id), reverse=True)


class JobStore(RememberedClusters):
    def __init__(self, home: Home) -> None:
        super().__init__(home)
        self._held: dict[str, JobRecord] = {}  # for this command, if they could not be written

    def save_job(self, record: JobRecord, plan: LaunchPlan | None = None) -> None:
        """plan: of a new job."""
        folder = self.home.job_folder(record.id)
        with self._locked():
            with suppress(OrchError):
                record = record.model_copy(update={"number": record.number or self.job_record(record.id).number})
            if plan:
                write_record(folder / "plan.json", plan.masked())
                self.home.uncollected(record.id).touch()
            write_record(folder / "job.json", record)

    def forget_job(self, job: str) -> None:
        with self._if_writable(), self._locked():
            shutil.rmtree(self.home.job_folder(job), ignore_errors=True)

    def change_job(self, job: str, change: Callable[[JobRecord], JobRecord]) -> JobRecord:
        """Changes a job's record under the lock, so that two commands do not overwrite each other. If the disk cannot
        be written, only this command sees the change.
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
            raise damaged(path, f"it is about {record.id[:80]!r}")
        return record

    def plan(self, job: str) -> LaunchPlan:
        return self._plan(job, LaunchPlan)

    def _plan(self, job: str, form: type[AnyPlan]) -> AnyPlan:
        path = self.home.job_folder(job) / "plan.json"
        plan = self._read(path, form)
        if plan.job != job:
            raise damaged(path, f"it is about {plan.job[:80]!r}")
        return plan

    def jobs(self) -> list[JobRecord]:
        """Newest first, without damaged records."""
        found = []
        for job in self.job_ids():
            with suppress(OrchError):
                found.append(self.job_record(job))
        return _newest_first(found)

    def damaged(self) -> dict[str, OrchError]:
        """By job."""
        found: dict[str, OrchError] = {}
        for job in self.job_ids():
            try:
                if not self.job_record(job).was_queued:
                    self.plan(job)
            except OrchError as error:
                found[job] = error
        return found

    def listed(self) -> tuple[list[JobRecord], dict[str, OrchError]]:
        """`jobs` and `damaged` in one pass. Hosts of an ended job are not asked, so only its plan's id is checked."""
        records, wrong = list[JobRecord](), dict[str, OrchError]()
        for job in self.job_ids():
            try:
                record = self.job_record(job)
                records.append(record)
                if record.state in ENDED and not record.was_queued:
                    self._plan(job, PlanHead)
                elif not record.was_queued:
                    self.plan(job)
            except OrchError as error:
                wrong[job] = error
        return _newest_first(records), wrong

    def job_ids(self) -> list[str]:
        """With damaged jobs."""
        return sorted(path.parent.name for path in self.home.jobs.glob("*/job.json"))

    def uncollected(self, cluster: str) -> list[str]:
        """Jobs whose only copy `orch down` would remove, newest first."""
        return [job.id for job in self.jobs() if job.cluster == cluster and self.home.uncollected(job.id).exists()]

    def nothing_to_collect(self, job: str) -> None:
        with self._if_writable():
            self.home.uncollected(job).unlink(missing_ok=True)

    def files_removed(self, job: str, at: str, nodes: Sequence[str]) -> None:
        with self._locked():
            before = self.removal(job)
            every = sorted({*nodes, *(before.nodes if before else ())})
            write_record(self.home.removed(job), Removal(schema=1, at=at, nodes=tuple(every)))

    def removal(self, job: str) -> Removal | None:
        """None if `orch down` removed nothing. Raises StateError if the note is damaged."""
        path = self.home.removed(job)
        return self._read(path, Removal) if path.exists() else None

    def remember_run(self, job: str, folder: Path) -> None:
        here = folder.absolute()
        folders = [here, *(known for known in self.run_folders(job) if known != here)][:MAX_RUN_FOLDERS]
        with self._if_writable(), self._locked():
            if self.home.job_folder(job).is_dir():  # else the job has been forgotten meanwhile
                write_json(self.home.collected(job), {"schema": SCHEMA, "folders": [str(one) for one in folders]})

    def run_folders(self, job: str) -> list[Path]:
        """Newest first; [] if the note is damaged."""
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            folders = json.loads(self.home.collected(job).read_text())["folders"]
            return [Path(folder) for folder in folders if Path(folder).is_dir()]
        return []

    def runs_of(self, begins: str) -> list[Path]:
        return [folder for job in self.job_ids() if job.startswith(begins) for folder in self.run_folders(job)]

    def find_job(self, wanted: str, cluster: str | None = None) -> str:
        """wanted: an id, a unique prefix, or `latest`. Raises UsageError if no job or several match."""
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
        """jobs: newest first, at least one."""
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

    # ---- starts -----------------------------------------------------------------------------------------------

    @contextmanager
    def launching(self, record: JobRecord, plan: LaunchPlan) -> Iterator[Start]:
        """Records the intent to start this job."""
        path = self.home.launching(record.id)
        make_folder(path.parent)
        with locked(path):
            self.save_job(record.model_copy(update={"number": self.next_number()}), plan)
            yield Start(path)

    def next_number(self) -> int:
        with self._locked():
            try:
                last = int(self.home.last_number.read_text())
            except (OSError, ValueError):  # no number yet, or a damaged file
                last = max((job.number for job in self.jobs()), default=0)
            write_atomic(self.home.last_number, f"{last + 1}\n")
        return last + 1

    def half_started(self) -> list[str]:
        return sorted(path.parent.name for path in self.home.jobs.glob("*/launching") if _is_free(path))

    def is_half_started(self, job: str) -> bool:
        return _is_free(self.home.launching(job))

    def start_is_over(self, job: str) -> None:
        """Only if no host holds anything of the job. A start in progress keeps its mark."""
        marker = self.home.launching(job)
        with self._if_writable(), self._locked(), suppress(FileNotFoundError), open(marker, "rb") as file:
            if _is_left(file, marker):  # no other command locks it before it is removed
                Start(marker).over()


class Start:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def over(self) -> None:
        """Call it once all hosts were asked to start, or if no host holds anything of the job."""
        self._marker.unlink(missing_ok=True)


def _is_free(marker: Path) -> bool:
    """The mark exists, and its controller is dead or gave up."""
    try:
        with open(marker, "rb") as file:
            return _is_left(file, marker)
    except FileNotFoundError:
        return False


def _is_left(file: IO[Any], marker: Path) -> bool:
    """Keeps an unlocked mark locked until `file` is closed."""
    try:
        flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return is_at(file, marker)


# A job's record, as `job.json` holds it. Pure.

JobState = Literal["queued", "starting", "running", "succeeded", "failed", "cancelled", "lost"]
_LARGEST = 1 << 53
"""Larger integers have no exact float."""

ENDED: frozenset[str] = frozenset({"succeeded", "failed", "cancelled"})
"""Lost jobs may be found again."""

FINAL_STATES: frozenset[str] = ENDED | {"lost"}


class FirstFailure(Record):
    kind: Words = ""
    """"rank", "torchrun", "prepare", "supervisor", ...; "lost" if only other hosts report the host as missing."""
    node: Words
    rank: int | None = None
    exit_code: int | None = None
    signal: Words | None = None
    reason: Annotated[str, AfterValidator(lambda text: message(text, 500))]
    secondary: bool = False
    """Its log only blames others: ranks that died, or a broken connection."""
    log_line: Words | None = None
    """From the rank's error log."""
    whose: Literal["hosts", "script", "person"] | None = None
    """The cause, as its host judges (`remote/attempts.py`); None: unknown."""
    loses_host: bool = False
    """Another attempt would leave this host out."""

    @property
    def words(self) -> str:
        return ": ".join(part for part in (self.node, self.reason, self.log_line) if part)


class NotFinite(Record):
    node: Words
    rank: int = Field(ge=0)
    step: int = Field(ge=0, lt=_LARGEST)
    """From 0."""
    epoch: int = Field(ge=0, lt=_LARGEST)
    loss: Literal["nan", "inf", "-inf"]
    of: Literal["loss", "test loss"] = "loss"

    @property
    def words(self) -> str:
        """`loss nan since update 25 (epoch 3, v100, rank 1)`."""
        place = f"epoch {self.epoch + 1}, {one_line(self.node)}, rank {self.rank}"
        return f"{self.of} {self.loss} since update {self.step + 1:,} ({place})"


class StillRank(Record):
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
    """The result of `orch why`."""

    kind: Kind
    reason: Words
    remedy: Words = ""
    node: Words | None = None
    rank: int | None = None
    place: Words = ""
    """`train.py:31 in step`; "" if unknown."""
    line: Words = ""

    @property
    def is_alarm(self) -> bool:
        return self.kind not in ("no-stall", "still-busy")


class Answer(Record):
    verdict: Verdict
    quiet_s: float
    """Silence of the ranks by then."""


class Stall(Record):
    """No rank prints anything; `answer` shows whether the job is healthy all the same."""

    quiet_s: float
    ranks: tuple[StillRank, ...]
    since: tuple[float, ...] = ()
    """By host, the start of the silence by its own clock; 0 if not reported. Identifies a stall."""
    answer: Answer | None = None
    """None if not diagnosed yet."""

    @property
    def waits(self) -> bool:
        return bool({rank.does for rank in self.ranks} & {"waits", "disk", "stopped"})


class SlurmLoan(Record):
    """The Slurm job that holds a job's hosts, or will hold them.

    folder: of the submission, below `submitted` of the work folder. hosts: their allocations. is_over: Slurm has ended
    it. words: Slurm's state and reason while it waits.
    """

    job: Annotated[str, Field(pattern=r"^[0-9]{1,12}$")]
    folder: str
    hosts: dict[str, Allocation] = Field(default_factory=dict)
    is_over: bool = False
    words: Words = ""


class JobRecord(Record):
    """A row of `orch jobs --json` and the content of `job.json`."""

    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    id: str
    state: JobState
    exp: str
    cluster: str
    nodes: tuple[str, ...]
    number: int = 0
    """In the order of this home's starts; 0 for jobs of an older orch and recovered jobs."""
    started: str | None = None
    ended: str | None = None
    exit_code: int | None = None
    first_failure: FirstFailure | None = None
    stall: Stall | None = None
    """If the job has ended: the last one observed."""
    name: Words | None = None
    note: Words | None = None
    hosts: HostChoice | None = None
    attempt: Attempt | None = None
    """With `--retries`."""
    not_finite: NotFinite | None = None
    """The job may succeed all the same."""
    joined: bool | None = None
    """Whether any two ranks met. None: unknown, or a single rank."""
    slurm: SlurmLoan | None = None
    waits_for: Words | None = None
    """A queued job: its place, and who is ahead. Between two attempts: when the next begins."""

    @property
    def was_queued(self) -> bool:
        """Whether Slurm has not started it: it has no plan yet, or never got one."""
        return self.slurm is not None and not self.slurm.hosts

    @classmethod
    def of(cls, plan: LaunchPlan, state: JobState) -> JobRecord:
        """Before any host has answered."""
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


class QueuedError(UsageError):
    def __init__(self, record: JobRecord) -> None:
        assert record.slurm  # noqa: S101 - the caller's
        self.record = record
        has_ended = record.state in ENDED
        waits = f"waits in Slurm's queue: job {record.slurm.job}, {record.slurm.words or 'its batch step is starting'}"
        why = record.first_failure.reason if record.first_failure else "nothing of it has run"
        super().__init__(
            f"{record.id} {f'has ended ({record.state}): {why}' if has_ended else waits}",
            "`orch jobs` lists all jobs"
            if has_ended
            else f"`orch logs -f {record.id}` once it runs; `orch cancel {record.id}`",
        )
