"""Parent of the supervisor: holds the job's GPU claims, and cleans up if the supervisor dies without a final record.

    python -m orch_remote.keeper <job folder> <descriptor for the answer>

As a subreaper it inherits the processes of a killed supervisor, ends them and records why. The answer is one JSON
object: {"pid", "hub_port", "peer_port"}, or {"error", "remedy"}.
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
from .cgroups import out_of_memory_kills
from .gpu_claim import REMEDY, claim
from .gpu_queue import refuse_before_turn
from .layout import JobFolder, WorkFolder, write_final_record
from .link import asyncio
from .logs import log_tail, telling_line
from .messages import Failure, failure
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
    """Claims every GPU until keeper and supervisor end: by a lock in the work folder, which can be shared, and on the
    machine, against other work folders. Raises Refused if another job has one.
    """
    work.locks.mkdir(parents=True, exist_ok=True)
    for uuid in uuids:
        path = work.locks / f"gpu-{uuid}.lock"
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if share else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            if share:
                continue  # shares it with a job that does not
            holder = os.read(lock, 200).decode(errors="replace").strip() or "another job"
            raise Refused(f"GPU {uuid} is in use by job {holder}", REMEDY) from None
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error  # the system's error has no file name
        os.ftruncate(lock, 0)
        os.write(lock, job.encode())
        claim(uuid, job, share=share)


def keep(job: JobFolder, node: dict[str, Any], supervisor: int) -> None:
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    # From a Slurm job that has to end, or an administrator: the supervisor ends the ranks and writes the final record.
    signal.signal(signal.SIGTERM, lambda signum, frame: os.kill(supervisor, signal.SIGTERM))
    memory_kills = out_of_memory_kills()
    pid, status = os.wait()
    while pid != supervisor:
        pid, status = os.wait()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    leftovers = kill_all(job, time.monotonic() + KILL_S)
    with contextlib.suppress(OSError):  # a full or failing disk: the ranks are ended all the same
        if job.root.is_dir() and not job.is_final():
            record: dict[str, Any] = {
                **job.read_agent(),
                "state": "failed",
                "leftovers": leftovers,
                "ended": time.time(),
            }
            write_final_record(job, {**record, "first_failure": cause_of(job, node, record, status, memory_kills)})


def cause_of(job: JobFolder, node: dict[str, Any], record: dict[str, Any], status: int, memory_kills: int) -> Failure:
    """The supervisor's recorded failure, otherwise its death. status: of wait(2). memory_kills: the kernel's at the
    start.
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
    """SIGKILL until no process of this job is left. Returns the survivors."""
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
    os._exit(0)  # taking the interpreter down takes a tenth of our time
