"""Parent of the supervisor: holds the job's GPU claims, and cleans up if the supervisor dies without a final record.

    python -m orch_remote.keeper <job folder> <descriptor for the answer>

As a subreaper it inherits the processes of a killed supervisor, ends them and records why. The answer is one JSON
object: {"pid", "hub_port", "peer_port", "has_gpus"}, or {"error", "remedy"}.

A job that may wait for its GPUs (`turn`) can claim them later: its supervisor asks for that, a word per message
(`Claims`).
After a failed attempt of a job that its supervisors retry (`attempts`), it starts the next supervisor. At the end it
sends the notification (`notify`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import stat
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn, cast

from . import attempts
from .answer import Refused, refusal
from .answer import describe as describe_error
from .cgroups import out_of_memory_kills
from .gpu_claim import REMEDY, claim, hang_up
from .gpu_queue import refuse_before_turn
from .layout import JobFolder, WorkFolder, write_final_record, write_record
from .link import asyncio, listen_at
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
from .supervisor import Doors, Supervisor
from .turn import Claims

WORD_BYTES = 64


def main() -> None:
    job, answer = JobFolder(Path(sys.argv[1])), int(sys.argv[2])
    try:
        node = json.loads(job.node.read_text())
        adopt_orphans()
        keeper = Keeper(job, node)
        keeper.start(answer)
    except (OSError, Refused) as error:
        os.write(answer, json.dumps(refusal(error)).encode())
        return
    os.close(answer)
    keeper.keep()


class Keeper:
    def __init__(self, job: JobFolder, node: dict[str, Any]) -> None:
        """Raises OSError; Refused if another job has a GPU, or waits for it."""
        self._job, self._node = job, node
        self._claims: list[int] = []
        self._supervisor, self._line = 0, socket.socket()
        self._is_asked_to_end = False
        self._doors = Doors()
        try:
            if not node["share_gpus"]:
                refuse_before_turn(job.id, node["gpu_uuids"])
            self._claims = self._claimed()
        except Refused:
            if not node.get("queue"):
                raise
        if node.get("retries"):  # all supervisors listen at the same ports, and read the same requests
            several = len(node["members"]) > 1
            hub = listen_at(node["address"]) if several and node["is_master"] else None
            self._doors = Doors(hub, listen_at(node["address"]) if several else None)
            os.open(job.control, os.O_RDWR | os.O_NONBLOCK)

    def start(self, answer: int | None) -> None:
        """Starts a supervisor. answer: for the first."""
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        keeper = os.getpid()
        self._supervisor = os.fork()
        if self._supervisor == 0:
            self._line.close()
            self._supervise(theirs, answer, keeper)
        theirs.close()
        if self._is_asked_to_end:
            os.kill(self._supervisor, signal.SIGTERM)

    def _supervise(self, line: socket.socket, answer: int | None, keeper: int) -> NoReturn:
        # In the new process.
        code = 1
        with contextlib.suppress(OSError):  # the log is on a full disk
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                die_with_parent(signal.SIGTERM)
                if os.getppid() != keeper:
                    os._exit(1)
                adopt_orphans()
                supervisor = Supervisor(self._job, self._node, Claims(line, self._claims), self._doors)
                code = attempts.AGAIN if asyncio.run(supervisor.run(answer)) else 0
            except Exception:
                traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)  # taking the interpreter down takes a tenth of our time

    # ---- claims -----------------------------------------------------------------------------------------------

    def _claimed(self) -> list[int]:
        work = WorkFolder(self._node["workdir"])
        return claim_gpus(work, self._job.id, self._node["gpu_uuids"], self._node["share_gpus"])

    def _release(self) -> None:
        give_back(self._claims)
        self._claims = []

    def _serve(self) -> None:
        """Until the supervisor ends."""
        while word := self._received():
            answer: dict[str, str] = {}
            if word == "release":
                self._release()
            elif not self._claims:
                try:
                    self._claims = self._claimed()
                except (OSError, Refused) as error:
                    answer = refusal(error)
            with contextlib.suppress(OSError):
                socket.send_fds(self._line, [json.dumps(answer).encode()], self._claims if word == "take" else [])

    def _received(self) -> str:
        """The supervisor's next word. Hangs up on all who meanwhile ask for the holder of a claim."""
        claims = [handle for handle in self._claims if stat.S_ISSOCK(os.fstat(handle).st_mode)]
        try:
            line = self._line.fileno()
            while line not in (ready := select.select([line, *claims], [], [])[0]):
                for handle in ready:
                    hang_up(handle)
            return self._line.recv(WORD_BYTES).decode(errors="replace")
        except OSError:
            return ""

    # ---- its life ---------------------------------------------------------------------------------------------

    def keep(self) -> None:
        for signum in (signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        # From a Slurm job that has to end, or an administrator: the supervisor ends the ranks and writes the final
        # record.
        signal.signal(signal.SIGTERM, self._end)
        memory_kills = out_of_memory_kills()
        while self._is_tried_again(self._ended(), memory_kills):
            if self._node.get("queue"):
                self._release()
            self.start(None)
        for door in filter(None, self._doors):  # else the other hosts wait there for the master
            door.close()
        if self._node.get("notify"):
            self._notify()

    def _end(self, signum: int, frame: object) -> None:
        self._is_asked_to_end = True
        if self._supervisor:
            os.kill(self._supervisor, signal.SIGTERM)

    def _ended(self) -> int:
        """The supervisor's status, of wait(2)."""
        self._serve()
        pid, status = os.wait()
        while pid != self._supervisor:
            pid, status = os.wait()
        self._supervisor = 0
        self._line.close()
        return status

    def _is_tried_again(self, status: int, memory_kills: int) -> bool:
        """Ends all that is left. Writes the final record if the supervisor has not, or prepares the next attempt."""
        if not self._node.get("retries"):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        job, leftovers = self._job, kill_all(self._job, time.monotonic() + KILL_S)
        with contextlib.suppress(OSError):  # a failing disk: the ranks are ended all the same
            if not job.root.is_dir() or job.is_final():
                return False
            record: dict[str, Any] = {**job.read_agent(), "leftovers": leftovers}
            if os.waitstatus_to_exitcode(status) == attempts.AGAIN and (earlier := record.get("earlier")):
                node, _, why = earlier[-1]["why"].partition(": ")
                record["earlier"], cause = earlier[:-1], failure("supervisor", node, why)
                goes_on = True
            else:
                cause = cause_of(job, self._node, record, status, memory_kills)
                goes_on = "go" in record and attempts.goes_on(self._node, record.get("earlier", []), cause)
            if goes_on and not (blocked := self._prepare_next(record, cause)):
                return True
            if goes_on:
                cause["reason"] += f"; no further attempt: {blocked}"
            final = {"state": "failed", "ended": time.time(), "first_failure": attempts.judged(cause)}
            write_final_record(job, {**record, **final})
        return False

    def _prepare_next(self, record: dict[str, Any], cause: Failure) -> str:
        """Prepares the next attempt; returns what prevents it, if anything."""
        earlier, name = record.get("earlier", []), self._node["name"]
        if record["leftovers"]:
            return f"{name}: {record['leftovers'][0]} does not end"
        if self._is_asked_to_end:
            return f"{name}: its keeper was asked to end (SIGTERM)"
        again = {"state": "starting", "phase": "resting", "earlier": attempts.with_failed(earlier, cause)}
        try:
            write_record(self._job, {**record, **again})
        except OSError as error:
            return f"{name}: {describe_error(error)}"
        attempts.put_aside(self._job, len(earlier) + 1)
        return ""

    def _notify(self) -> None:
        from .notify import notify  # brings a web client

        self._release()  # the next job need not wait for it
        with contextlib.suppress(OSError):
            record = self._job.read_agent()
            is_ours = self._node["is_master"] or self._stands_in(record)
            if is_ours and self._job.root.is_dir() and "go" in record and self._job.is_final():
                how = notify(self._job, self._node, record)
                sys.stderr.write(f"--notify: {how}\n")
                if self._job.root.is_dir():
                    write_record(self._job, {**self._job.read_agent(), "notified": how})

    def _stands_in(self, record: dict[str, Any]) -> bool:
        """For a master whose host gives no sign: the first of the other hosts."""
        others = [member for member in self._node["members"] if member != self._node["master"]]
        return bool(record.get("master_is_silent")) and others[0] == self._node["name"]


def claim_gpus(work: WorkFolder, job: str, uuids: list[str], share: bool) -> list[int]:
    """Claims every GPU until the returned descriptors are closed, here and in all forks: by a lock in the work folder,
    which can be shared, and on the machine, against other work folders. Raises Refused if another job has one.
    """
    work.locks.mkdir(parents=True, exist_ok=True)
    handles = list[int]()
    try:
        for uuid in uuids:
            handles += _locked(work.locks / f"gpu-{uuid}.lock", uuid, job, share)
            handle = claim(uuid, job, share=share)
            handles += [] if handle is None else [handle]
    except BaseException:
        give_back(handles)
        raise
    return handles


def give_back(handles: list[int]) -> None:
    """Also removes our job's name: it may wait on, and then a job ahead of it would take it for the holder."""
    for handle in handles:
        with contextlib.suppress(OSError):  # a socket has no content to remove
            os.ftruncate(handle, 0)
        os.close(handle)


def _locked(path: Path, uuid: str, job: str, share: bool) -> list[int]:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if share else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.write(lock, job.encode())
    except BlockingIOError:
        holder = os.read(lock, 200).decode(errors="replace").strip() or "another job"
        os.close(lock)
        if share:
            return []  # shares it with a job that does not
        raise Refused(f"GPU {uuid} is in use by job {holder}", REMEDY) from None
    except OSError as error:
        os.close(lock)
        raise OSError(error.errno, error.strerror, str(path)) from error  # the system's error has no file name
    return [lock]


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
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(0)  # taking the interpreter down takes a tenth of our time
