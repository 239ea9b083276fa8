"""Live figures for the page: a running job's hosts are connected from its first view until it is no longer viewed."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from orchestrator.controller import opened
from orchestrator.jobs.gauging import GaugedJob
from orchestrator.jobs.job_store import ENDED
from orchestrator.jobs.live_stats import JobNow
from orchestrator.paths import Home

UNSEEN_S = 15.0
"""Without a view for this long, the connections to a job's hosts are closed."""
FIRST_S = 3.0
"""Longest wait of the first view for the hosts' first figures."""
AGAIN_S = 10.0
"""Least time between two reconnects to a running job."""


@dataclass
class _Viewed:
    """before: shown after a reconnect until the first figures arrive."""

    gauged: GaugedJob
    begun_s: float
    before: GaugedJob | None = None

    @property
    def is_due_again(self) -> bool:
        has_ended = self.gauged.record.state in ENDED
        return self.gauged.is_over and not has_ended and time.monotonic() - self.begun_s > AGAIN_S


class Watched:
    def __init__(self, home: Home) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._jobs: dict[str, _Viewed] = {}
        self._seen_s: dict[str, float] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._let_go, daemon=True, name="watched").start()

    def now(self, job: str) -> JobNow:
        """Raises UsageError for an unknown job."""
        with self._lock:
            self._seen_s[job] = time.monotonic()
            known = self._jobs.get(job)
            if known is None or known.is_due_again:
                known = self._jobs[job] = _Viewed(self._begun(job), time.monotonic(), known.gauged if known else None)
        if known.before and not known.gauged.heard.is_set():
            return known.before.now()
        known.gauged.heard.wait(FIRST_S)
        return known.gauged.now()

    def _begun(self, job: str) -> GaugedJob:
        with opened(self._home) as controller:
            gauged = GaugedJob(controller.jobs.find(job))
        gauged.start()  # over its own connections
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
            found.gauged.leave()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            for job in [*self._jobs]:
                self._end(job)
