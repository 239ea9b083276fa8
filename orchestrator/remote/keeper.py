"""The parent of the supervisor: holds the job's claims with it, and cleans up if it dies without a last word.

    python -m orch_remote.keeper <job folder> <descriptor for the answer>

It does nothing but wait. Should the supervisor itself be killed, every process of the job falls back to the keeper (a
subreaper), which ends it and writes down why. The answer is one JSON object: {"pid", "hub_port"} or {"error"}.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from .children import KILL_S
from .layout import Job, Work, write_last_word
from .logs import log_tail, telling_line
from .processes import (
    adopt_orphans,
    below_or_marked,
    describe,
    die_with_parent,
    end_all,
    signal_name,
)
from .supervisor import Supervisor, failure


def main() -> None:
    job, answer = Job(Path(sys.argv[1])), int(sys.argv[2])
    node = json.loads(job.node.read_text())
    adopt_orphans()
    refusal = claim_gpus(Work(node["workdir"]), job.id, node["gpu_uuids"], node["share_gpus"])
    if refusal:
        os.write(answer, json.dumps({"error": refusal}).encode())
        return
    child = os.fork()
    if child:
        os.close(answer)
        keep(job, node, child)
        return
    die_with_parent(signal.SIGTERM)
    adopt_orphans()
    asyncio.run(Supervisor(job, node).run(answer))


def claim_gpus(work: Work, job: str, uuids: list[str], share: bool) -> str | None:
    """Locks every GPU for as long as keeper or supervisor lives. Returns the refusal, None where all is ours."""
    work.locks.mkdir(parents=True, exist_ok=True)
    for uuid in uuids:
        lock = os.open(work.locks / f"gpu-{uuid}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if share else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if share:
                continue  # beside a job that has it for itself: this one was asked to
            holder = os.read(lock, 200).decode(errors="replace").strip() or "another job"
            return f"GPU {uuid} is in use by job {holder}"
        os.ftruncate(lock, 0)
        os.write(lock, job.encode())
    return None


def keep(job: Job, node: dict[str, Any], supervisor: int) -> None:
    """The keeper: waits for the supervisor; ends what is left if it died without a final word."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    pid, status = os.wait()
    while pid != supervisor:
        pid, status = os.wait()
    leftovers = kill_all(job, time.monotonic() + KILL_S)
    if job.is_final() or not job.root.is_dir():
        return
    name = signal_name(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else None
    how = f"was killed by {name}" if name else f"exited {os.waitstatus_to_exitcode(status)}"
    cause = {
        **failure("supervisor", node["name"], f"the supervisor {how}"),
        "signal": name,
        "log_line": telling_line(log_tail(job.supervisor_log)) if not name else None,
    }
    record = {**job.read_agent(), "state": "failed", "first_failure": cause, "leftovers": leftovers}
    with contextlib.suppress(OSError):  # a full disk: the ranks are ended all the same
        write_last_word(job, {**record, "ended": time.time()})


def kill_all(job: Job, deadline: float) -> list[str]:
    """SIGKILL to everything of this job below us or marked, until none is left. Returns what stayed."""
    while True:
        left = below_or_marked(job.root)
        end_all(left, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not left or time.monotonic() > deadline:
            return [describe(process) for process in left]
        time.sleep(0.02)


if __name__ == "__main__":
    main()
