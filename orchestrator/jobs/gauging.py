"""Feeds `orch top`: a thread per job streams from its hosts into that job's `live_stats.Gauge`."""

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
    """If its stream fails, `now` shows the error for each of its hosts."""

    def __init__(self, job: RunningJob) -> None:
        self.error: OrchError | None = None
        self.bug: Exception | None = None
        """For the command to raise."""
        self.heard, self.over = threading.Event(), threading.Event()
        """Events: all hosts have reported; the stream has ended."""
        self._job, self._leaving = job, False
        self._gauge = Gauge(job.plan, job.record)
        self._thread = threading.Thread(target=self._receive, daemon=True, name=f"gauge-{job.id}")

    @property
    def is_over(self) -> bool:
        return self.over.is_set()

    def start(self) -> None:
        self._thread.start()

    def leave(self) -> None:
        self._leaving = True

    def now(self) -> JobNow:
        return self._gauge.now(since_s(self._gauge.record.started), time.monotonic())

    @property
    def record(self) -> JobRecord:
        return self._gauge.record

    def _receive(self) -> None:
        try:
            with self._job.apart() as job:
                for gauge in job.gauged(self._gauge):
                    if gauge.has_received_all:
                        self.heard.set()
                    if self._leaving:
                        break
        except OrchError as error:
            self.error = error
            self._mark_silent(str(error))
        except Exception as error:
            self.bug = error
            self._mark_silent(f"{error.__class__.__name__}: {error}")
        finally:
            self.heard.set()
            self.over.set()

    def _mark_silent(self, why: str) -> None:
        for node in self._job.plan.nodes:
            self._gauge.take(node.name, HostError(node.name, why), time.monotonic())


@contextlib.contextmanager
def gauging(jobs: Iterable[RunningJob]) -> Iterator[list[GaugedJob]]:
    watched = [GaugedJob(job) for job in jobs]
    try:
        for job in watched:
            job.start()
        yield watched
    finally:
        for job in watched:
            job.leave()
