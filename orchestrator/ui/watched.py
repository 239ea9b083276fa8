"""The running jobs that somebody looks at on the page: each is heard from the first look on, until nobody looks.

watched = Watched(home)
watched.now("resnet152-...")        JobNow; the hosts are connected to at the first look, and anew where that failed
"""

from __future__ import annotations

import threading
import time

from orchestrator.controller import opened
from orchestrator.jobs.gauge import JobNow
from orchestrator.jobs.gauging import GaugedJob
from orchestrator.paths import Home

UNSEEN_S = 15.0
"""Nobody has looked for so long: the connections to its hosts end."""
FIRST_S = 3.0
"""So long the first look waits for the hosts' first words."""
AGAIN_S = 10.0
"""Not sooner than so long after it was begun a job is begun anew where hearing it failed."""


class Watched:
    def __init__(self, home: Home) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._jobs: dict[str, tuple[GaugedJob, float]] = {}
        """And when each was begun."""
        self._seen_s: dict[str, float] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._let_go, daemon=True, name="watched").start()

    def now(self, job: str) -> JobNow:
        """Raises UsageError where there is no such job."""
        with self._lock:
            self._seen_s[job] = time.monotonic()
            if job not in self._jobs or _is_due_again(*self._jobs[job]):
                self._jobs[job] = self._begun(job), time.monotonic()
            gauged, _ = self._jobs[job]
        gauged.heard.wait(FIRST_S)
        return gauged.now()

    def _begun(self, job: str) -> GaugedJob:
        with opened(self._home) as controller:
            gauged = GaugedJob(controller.jobs.find(job))
        gauged.start()  # over connections of its own
        return gauged

    def _let_go(self) -> None:
        while not self._closed.wait(UNSEEN_S / 3):
            with self._lock:
                self._drop_unseen()

    def _drop_unseen(self) -> None:
        for job in [job for job, at_s in self._seen_s.items() if time.monotonic() - at_s > UNSEEN_S]:
            del self._seen_s[job]
            self._end(job)

    def _end(self, job: str) -> None:
        if found := self._jobs.pop(job, None):
            found[0].leave()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            for job in [*self._jobs]:
                self._end(job)


def _is_due_again(gauged: GaugedJob, begun_s: float) -> bool:
    failed = gauged.is_over and (gauged.error or gauged.bug)
    return bool(failed) and time.monotonic() - begun_s > AGAIN_S
