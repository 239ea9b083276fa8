"""The parent of the supervisor: holds the job's claims with it, and cleans up if it dies without a last word.

    python -m orch_remote.keeper <job folder> <descriptor for the answer>

Should the supervisor itself be killed, every process of the job falls back to it (a subreaper), and it ends
them and writes down why. The answer is one JSON object: {"pid", "hub_port", "peer_port"}, or {"error", "remedy"}.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, cast

from .answer import Refused, refusal
from .gpu_claim import REMEDY, claim
from .gpu_queue import refuse_before_turn
from .layout import JobFolder, WorkFolder, write_last_word
from .logs import log_tail, telling_line
from .memory import out_of_memory_kills
from .messages import Failure, failure
from .plain_asyncio import asyncio
from .processes import (
    Killing,
    adopt_orphans,
    below_or_marked,
    describe,
    die_with_parent,
    signal_name,
)
from .programs import KILL_S, OUT_OF_MEMORY, how_it_ended
from .supervisor import Supervisor


def main() -> None:
    job, answer = JobFolder(Path(sys.argv[1])), int(sys.argv[2])
    try:
        node = json.loads(job.node.read_text())
        adopt_orphans()
        if not node["share_gpus"]:
            refuse_before_turn(job.id, node["gpu_uuids"])
        claim_gpus(WorkFolder(node["workdir"]), job.id, node["gpu_uuids"], node["share_gpus"])
        child = os.fork()
    except (OSError, Refused) as error:
        os.write(answer, json.dumps(refusal(error)).encode())
        return
    if child:
        os.close(answer)
        keep(job, node, child)
        return
    die_with_parent(signal.SIGTERM)
    adopt_orphans()
    asyncio.run(Supervisor(job, node).run(answer))


def claim_gpus(work: WorkFolder, job: str, uuids: list[str], share: bool) -> None:
    """Every GPU for as long as keeper or supervisor lives: in the work folder, where a lock can be shared, and on the
    machine, for those with another one. Raises Refused where one is another job's.
    """
    work.locks.mkdir(parents=True, exist_ok=True)
    for uuid in uuids:
        path = work.locks / f"gpu-{uuid}.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if share else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if share:
                continue  # beside a job that has it for itself: this one was asked to
            holder = os.read(lock, 200).decode(errors="replace").strip() or "another job"
            raise Refused(f"GPU {uuid} is in use by job {holder}", REMEDY) from None
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error  # the system does not say which file
        os.ftruncate(lock, 0)
        os.write(lock, job.encode())
        claim(uuid, job, share=share)


def keep(job: JobFolder, node: dict[str, Any], supervisor: int) -> None:
    """The keeper: waits for the supervisor; ends what is left if it died without a final word."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    memory_kills = out_of_memory_kills()
    pid, status = os.wait()
    while pid != supervisor:
        pid, status = os.wait()
    leftovers = kill_all(job, time.monotonic() + KILL_S)
    with contextlib.suppress(OSError):  # a full disk, or one that fails: the ranks are ended all the same
        if job.root.is_dir() and not job.is_final():
            record: dict[str, Any] = {
                **job.read_agent(),
                "state": "failed",
                "leftovers": leftovers,
                "ended": time.time(),
            }
            write_last_word(job, {**record, "first_failure": cause_of(job, node, record, status, memory_kills)})


def cause_of(job: JobFolder, node: dict[str, Any], record: dict[str, Any], status: int, memory_kills: int) -> Failure:
    """What the supervisor itself recorded before it died, else its death. status: as of wait(2). memory_kills: those
    of the kernel when the job began.
    """
    for one in record.get("failures", ()):
        if not one["secondary"]:
            return cast(Failure, dict(one))
    code = os.waitstatus_to_exitcode(status)
    name, how = signal_name(-code) if code < 0 else None, how_it_ended(code)
    if name == "SIGKILL" and out_of_memory_kills() > memory_kills:
        how += f": {OUT_OF_MEMORY}"
    return {
        **failure("supervisor", node["name"], f"the supervisor {how}"),
        "signal": name,
        "log_line": telling_line(log_tail(job.supervisor_log)) if not name else None,
    }


def kill_all(job: JobFolder, deadline: float) -> list[str]:
    """SIGKILL to everything of this job below us or marked, until none is left. Returns what stayed."""
    killing = Killing()
    while True:
        left = below_or_marked(job.root)
        killing.of(left)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not left or time.monotonic() > deadline:
            return [describe(process) for process in left]
        time.sleep(0.02)


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # nothing is left to do, and to take an interpreter apart is a tenth of what we cost
