"""agent.json: what became of a job on this host, written by its supervisor alone.

record = RecordWriter(job, "beta")
record.write({"phase": "running"})              # joins what was written before
record.write({"state": "failed", "ended": now}) # the last word, for which there is room on a full disk
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import cast

from .layout import JobFolder, write_last_word, write_record
from .messages import AgentRecord, Process
from .processes import identify


class RecordWriter:
    """said: what the file says, and what joins it with the next `write`."""

    def __init__(self, job: JobFolder, node: str) -> None:
        self._job = job
        me = identify(os.getpid())
        self.said: AgentRecord = {
            "schema": 1,
            "job": job.id,
            "node": node,
            "state": "starting",
            "pid": me.pid,
            "start_time": me.start_time,
            "boot_id": me.boot_id,
            "keeper": cast(Process, identify(os.getppid())._asdict()),
            "started": time.time(),
        }

    def write(self, news: AgentRecord) -> None:
        """A full disk or a removed folder must not keep the job from ending: the hub knows what the file cannot say."""
        self.said.update(news)
        try:
            (write_last_word if "ended" in self.said else write_record)(self._job, self.said)
        except OSError as error:
            with contextlib.suppress(OSError):  # the log lies on the same disk
                sys.stderr.write(f"cannot write {self._job.agent}: {error}\n")
