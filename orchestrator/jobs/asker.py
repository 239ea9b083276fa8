"""Asks why a job prints nothing, beside whoever follows it: once for each stall, and never in the follower's way.

asker = Asker(job.ask_why)
asker.tell(record)              # with each record that comes: asks, where that is due
if record := asker.answer():    # the job's record with what came of it, once
    ...
asker.is_at_work                # an answer is on its way
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from orchestrator.jobs.record import JobRecord
from orchestrator.jobs.stall import asks_for_it


class Asker:
    """ask: takes seconds, gives the job's record; called in a thread that nobody waits for."""

    def __init__(self, ask: Callable[[], JobRecord]) -> None:
        self._ask = ask
        self._answers = queue.SimpleQueue[JobRecord | BaseException]()
        self.is_at_work = False

    def tell(self, record: JobRecord) -> None:
        if not self.is_at_work and asks_for_it(record):
            self.is_at_work = True
            threading.Thread(target=self._work, daemon=True, name=f"why-{record.id}").start()

    def answer(self) -> JobRecord | None:
        """None where none has come since the last one. Raises what went wrong."""
        try:
            found = self._answers.get_nowait()
        except queue.Empty:
            return None
        self.is_at_work = False
        if isinstance(found, BaseException):
            raise found
        return found

    def _work(self) -> None:
        try:
            self._answers.put(self._ask())
        except BaseException as error:  # a bug of ours: whoever follows has to raise it
            self._answers.put(error)
