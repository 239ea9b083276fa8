"""Running jobs that are looked at together, each heard in a thread of its own, so that none waits for another's hosts,
and over connections of its own, so that none ends another's.

with gauging(controller.jobs.find(name) for name in names) as looked_at:
    while [one for one in looked_at if not one.is_over]:
        show([one.now() for one in looked_at])
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator

from orchestrator.errors import HostError, OrchError
from orchestrator.jobs.follow import since_s
from orchestrator.jobs.job_store import JobRecord
from orchestrator.jobs.live_stats import Gauge, JobNow
from orchestrator.jobs.running import RunningJob


class GaugedJob:
    """Where hearing it fails, `now` says so of each of its hosts."""

    def __init__(self, job: RunningJob) -> None:
        self.error: OrchError | None = None
        """Why nothing more is heard of it, where that is no end of the job."""
        self.bug: Exception | None = None
        """The same, where it is a mistake of ours: a command raises it."""
        self.heard, self.over = threading.Event(), threading.Event()
        """Have all its hosts been heard? Is nothing more to be heard?"""
        self._job, self._leaving = job, False
        self._gauge = Gauge(job.plan, job.record)
        self._thread = threading.Thread(target=self._hear, daemon=True, name=f"gauge-{job.id}")

    @property
    def is_over(self) -> bool:
        return self.over.is_set()

    def start(self) -> None:
        self._thread.start()

    def leave(self) -> None:
        self._leaving = True

    def now(self) -> JobNow:
        return self._gauge.now(since_s(self._job.plan), time.monotonic())

    @property
    def record(self) -> JobRecord:
        """As it was heard last."""
        return self._gauge.record

    def _hear(self) -> None:
        try:
            with self._job.apart() as job:
                for gauge in job.gauged(self._gauge):
                    if gauge.has_heard_all:
                        self.heard.set()
                    if self._leaving:
                        break
        except OrchError as error:
            self.error = error
            self._be_silent(str(error))
        except Exception as error:
            self.bug = error
            self._be_silent(f"{error.__class__.__name__}: {error}")
        finally:
            self.heard.set()
            self.over.set()

    def _be_silent(self, why: str) -> None:
        """So that nobody takes its last figures for those of now."""
        for node in self._job.plan.nodes:
            self._gauge.take(node.name, HostError(node.name, why), time.monotonic())


@contextlib.contextmanager
def gauging(jobs: Iterable[RunningJob]) -> Iterator[list[GaugedJob]]:
    looked_at = [GaugedJob(job) for job in jobs]
    try:
        for one in looked_at:
            one.start()
        yield looked_at
    finally:
        for one in looked_at:
            one.leave()
