"""The record of a sweep: `sweep.json` in a folder of its own in $ORCH_HOME, written before each step.

store = SweepStore(home)
with store.held(sweep_id):                  only one command drives a sweep
    store.save(record)
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from orchestrator.errors import OrchError, UsageError
from orchestrator.files import flock, make_folder
from orchestrator.paths import Home
from orchestrator.planning.job_spec import JobSpec
from orchestrator.planning.launch_plan import RecordedSpec
from orchestrator.record import SCHEMA, Record, RecordError, read_record, write_record
from orchestrator.sweeps.grid import label
from orchestrator.sweeps.sweep_spec import SweepSpec

LATEST = "latest"
TrialState = Literal["waiting", "running", "succeeded", "failed", "stopped", "cancelled"]
OVER: frozenset[str] = frozenset({"succeeded", "failed", "stopped", "cancelled"})


class Trial(Record):
    """One of a sweep's settings, and its job."""

    number: int
    """From 1."""
    values: dict[str, str]
    state: TrialState = "waiting"
    slot: str | None = None
    job: str | None = None
    """Recorded before it starts."""
    lost: tuple[str, ...] = ()
    """Earlier jobs that went with their hosts."""
    why: str = ""
    """It failed or was stopped."""
    began: float | None = None
    """Seconds since 1970, by the local clock."""
    seconds: float | None = None
    """From its start to its end."""
    step: int | None = None
    samples_per_s: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    is_collected: bool = False

    @property
    def key(self) -> str:
        return str(self.number)

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    @property
    def label(self) -> str:
        return label(self.values)

    def next_job(self, sweep: str) -> str:
        again = f"-{len(self.lost) + 1}" if self.lost else ""
        return f"{sweep}-{self.number:03d}{again}"


class SweepRecord(Record):
    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    id: str
    cluster: str
    created: str
    asked: RecordedSpec
    """Without values of variables."""
    sweep: SweepSpec
    digest: str
    """Identifies what was asked, and the code: the same command continues the sweep."""
    out: str
    trials: tuple[Trial, ...]

    @property
    def is_over(self) -> bool:
        return all(trial.is_over for trial in self.trials)

    def with_trial(self, trial: Trial) -> SweepRecord:
        changed = (trial if each.number == trial.number else each for each in self.trials)
        return self.model_copy(update={"trials": tuple(changed)})


def digest_of(job: JobSpec, sweep: SweepSpec, cluster: str, code: str) -> str:
    asked: list[Any] = [job.model_dump(mode="json", exclude_unset=True), sweep.model_dump(mode="json"), cluster, code]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


class SweepStore:
    def __init__(self, home: Home) -> None:
        self._folder = home.sweeps

    def save(self, record: SweepRecord) -> None:
        write_record(self._file(record.id), record)

    def all(self) -> list[SweepRecord]:
        """Newest first, without damaged records."""
        found = list[SweepRecord]()
        for file in self._folder.glob("*/sweep.json"):
            with suppress(OSError, RecordError, OrchError):
                found.append(read_record(file, SweepRecord))
        return sorted(found, key=lambda sweep: (sweep.created, sweep.id), reverse=True)

    def find(self, wanted: str) -> SweepRecord:
        """wanted: an id, a unique prefix, or `latest`. Raises UsageError."""
        known = self.all()
        fitting = known[:1] if wanted == LATEST else [sweep for sweep in known if sweep.id.startswith(wanted)]
        exact = [sweep for sweep in fitting if sweep.id == wanted] or fitting
        if len(exact) == 1:
            return exact[0]
        what = f"{wanted!r} matches several sweeps" if exact else f"no sweep {wanted!r}"
        there = ", ".join(sweep.id for sweep in known[:5]) or "none"
        raise UsageError(what, f"the latest: {there}")

    def unfinished(self, digest: str) -> SweepRecord | None:
        return next((sweep for sweep in self.all() if sweep.digest == digest and not sweep.is_over), None)

    @contextmanager
    def held(self, sweep: str) -> Iterator[None]:
        """Raises UsageError if another command drives it."""
        lock = self._file(sweep).with_name("lock")
        make_folder(lock.parent)
        with open(lock, "a") as file:
            try:
                flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"{sweep} is under way in another terminal", "follow its jobs: `orch top`") from None
            yield

    def _file(self, sweep: str) -> Path:
        return self._folder / sweep / "sweep.json"


def trials_of(drawn: Sequence[dict[str, str]]) -> tuple[Trial, ...]:
    return tuple(Trial(number=number, values=values) for number, values in enumerate(drawn, start=1))
