"""The one process of ours that stays on a host while a job runs: starts torchrun, watches, and leaves nothing behind.

    python -m orch_remote.supervisor <job folder> <descriptor for the answer>

It is two processes. The keeper (parent, subreaper) does nothing but wait: should the supervisor itself be killed, every
process of the job falls back to the keeper, which ends it and writes down why. The supervisor (child) holds the claims,
speaks with the other hosts' supervisors (`hub`), starts and ends the ranks. The master's supervisor is the hub: it
decides (`verdict`) when all start, stop and finish. All of it works with no controller in sight.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import verdict
from .hub import Hub, Membership, Message
from .layout import Job, Work, write_json
from .processes import MARK, adopt_orphans, descendants, describe, die_with_parent, end_all, identify, marked

GO_S = 60.0
"""Prepared but not told to go for this long: the controller is gone, undo."""
JOIN_S = 30.0
KILL_S = 5.0
LOG_TAIL_BYTES = 1 << 16

# What a host's profile may have left behind and torchrun would obey (it reads PET_* as its own options).
_UNSET = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_UNSET_PREFIXES = ("PET_", "TORCHELASTIC_", "ORCH_")


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
    for uuid in () if share else uuids:
        lock = os.open(work.locks / f"gpu-{uuid}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
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
    if job.is_final():
        return
    leftovers = kill_all(job, time.monotonic() + KILL_S)
    name = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else None
    how = f"was killed by {name}" if name else f"exited {os.waitstatus_to_exitcode(status)}"
    failure = {
        **_failure("supervisor", node["name"], f"the supervisor {how}"),
        "signal": name,
        "log_line": last_error_line(job.supervisor_log) if not name else None,
    }
    record = {**job.read_agent(), "state": "failed", "first_failure": failure, "leftovers": leftovers}
    write_json(job.agent, {**record, "ended": time.time()})


def kill_all(job: Job, deadline: float) -> list[str]:
    """SIGKILL to everything of this job below us or marked, until none is left. Returns what stayed."""
    while True:
        pids = ours(job)
        end_all(pids, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not pids or time.monotonic() > deadline:
            return [describe(pid) for pid in pids]
        time.sleep(0.02)


def ours(job: Job) -> list[int]:
    return sorted({*descendants(os.getpid()), *marked(job.root)} - {os.getpid()})


class Supervisor:
    """One host's part of one job. Its state is `status()`; every change goes through `changed()`."""

    def __init__(self, job: Job, node: dict[str, Any]) -> None:
        self.job, self.node = job, node
        self.phase = "joining"
        self.cancelled = False
        self.failures: list[dict[str, Any]] = []
        self.leftovers: list[str] = []
        self.ranks: dict[str, dict[str, Any]] = {str(rank): {} for rank in node["rank_numbers"]}
        self.order: Message = {"do": "wait"}
        self.hub: Hub | None = None
        self.membership: Membership | None = None
        self.record: dict[str, Any] = {
            "schema": 1,
            "job": job.id,
            "node": node["name"],
            "state": "starting",
            **vars(identify(os.getpid())),
            "keeper": vars(identify(os.getppid())),
            "started": time.time(),
        }
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._heard_order = 0

    # ---- life -------------------------------------------------------------------------------------------------

    async def run(self, answer: int) -> None:
        loop = asyncio.get_running_loop()
        self.told, self.finished = asyncio.Event(), asyncio.Event()
        self.go: dict[str, Any] | None = None
        self._stopping: asyncio.Task[None] | None = None
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        loop.add_signal_handler(signal.SIGTERM, self._keeper_died)
        self._open_fifos(loop)
        if self.node["is_master"]:
            members = {name for name in self.node["members"] if name != self.node["name"]}
            self.hub = Hub(members, self._token, lambda: self.order, self._decide)
            self.record["hub_port"] = await self.hub.listen(self.node["address"])
        self._write()
        os.write(answer, json.dumps({"pid": os.getpid(), "hub_port": self.record.get("hub_port")}).encode())
        os.close(answer)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.told.wait(), GO_S)
        if self.go is None:
            self._write(state="undone", ended=time.time())
            return
        await self._take_part()

    async def _take_part(self) -> None:
        assert self.go is not None
        self.record["go"] = time.time()
        if limit_s := self.node.get("time_limit_s"):
            asyncio.get_running_loop().call_later(limit_s, self._time_is_up, limit_s)
        if self.hub:
            self.hub.expect(JOIN_S)
        else:
            hub = (self.node["master_address"], self.go["hub_port"])
            self.membership = Membership(hub, self.node["name"], self._token, self.status, self.obey, self._hub_gone)
            self._spawn(self.membership.stay(JOIN_S))
        if await self._prepared() and self.phase == "joining":
            self.phase = "joined"
        self.changed()
        await self.finished.wait()
        if self.membership:
            self.membership.close()
        if self.hub:
            self.hub.announce()
            await self._until(lambda: self.hub is None or self.hub.connected == 0, KILL_S)
            self.hub.close()

    async def _prepared(self) -> bool:
        """Runs the inventory's `prepare` command, once a host and job, before any rank starts."""
        if not self.node.get("prepare"):
            return True
        with open(self.job.prepare_log, "wb") as log:
            code = await self._launch(["sh", "-c", self.node["prepare"]], log, self.job.src)
        if code == 0:
            return True
        line = last_error_line(self.job.prepare_log)
        self._fail("prepare", f"the `prepare` command exited {code}", exit_code=code, log_line=line)
        return False

    # ---- what others see --------------------------------------------------------------------------------------

    def status(self) -> Message:
        return {
            "phase": self.phase,
            "failures": self.failures[:8],
            "cancelled": self.cancelled,
            "leftovers": self.leftovers[:20],
        }

    def changed(self) -> None:
        self._write()
        if self.membership:
            self.membership.announce()
        if self.hub:
            self._decide()

    def _write(self, **more: Any) -> None:
        shown = {"phase": self.phase, "ranks": self.ranks, "failures": self.failures, "leftovers": self.leftovers}
        self.record.update(shown, **more)
        write_json(self.job.agent, self.record)

    # ---- orders -----------------------------------------------------------------------------------------------

    def _decide(self, settled: bool = False) -> None:
        """The hub's own step: everybody's status in, one order out, obeyed here like everywhere."""
        assert self.hub
        if self.go is None or self.order["do"] == "finish":
            return
        statuses = {name: self.hub.statuses.get(name, {}) for name in self.node["members"]}
        statuses[self.node["name"]] = self.status()
        for failure in (f for status in statuses.values() for f in status.get("failures", ())):
            failure.setdefault("order", self._arrival(failure))
        order = verdict.decide(statuses, self.hub.lost, settled)
        if order["do"] == "start":
            order["rendezvous_port"] = self.order.get("rendezvous_port") or self._free_port()
        if order["do"] == "stop" and self.order["do"] != "stop":
            patience_s = 2 * self.node["grace_s"] + 2 * KILL_S
            asyncio.get_running_loop().call_later(patience_s, self._decide, True)
        if order != self.order:
            self.order = order
            self.hub.announce()
            self.obey(order)

    def _arrival(self, failure: dict[str, Any]) -> int:
        key = (failure["node"], failure["kind"], failure["rank"])
        arrivals = self.__dict__.setdefault("_arrivals", {})
        return int(arrivals.setdefault(key, len(arrivals)))

    def obey(self, order: Message) -> None:
        self.order = order
        if order["do"] == "start" and self.phase == "joined":
            self.phase = "running"
            self._spawn(self._run_torchrun(int(order["rendezvous_port"])))
        elif order["do"] == "stop":
            self._stop()
        elif order["do"] == "finish":
            self._spawn(self._finish(order["state"], order.get("first_failure")))

    def _stop(self) -> None:
        if self._stopping is None:
            self._drain()  # what already happened here is a cause, what happens from now on is our doing
            self._stopping = self._spawn(self._end_ranks())

    async def _finish(self, state: str, first_failure: dict[str, Any] | None) -> None:
        if self.finished.is_set():
            return
        if self.phase != "ended":
            self._stop()
            assert self._stopping
            await self._stopping
        self._write(state=state, first_failure=first_failure, ended=time.time())
        self.finished.set()

    def _hub_gone(self, why: str) -> None:
        if self.finished.is_set():
            return
        self._spawn(self._finish("failed", _failure("lost", self.node["master"], why)))

    def _keeper_died(self) -> None:
        self._fail("supervisor", "the supervisor was asked to end (SIGTERM, or its keeper died)")

    def _time_is_up(self, limit_s: float) -> None:
        if self.phase not in ("done", "stopping", "ended"):
            self._fail("time", f"the time limit of {limit_s:g} s is over")

    # ---- ranks ------------------------------------------------------------------------------------------------

    async def _run_torchrun(self, port: int) -> None:
        self._write(state="running", rendezvous_port=port)
        fill = {"rendezvous_port": str(port), "job_dir": str(self.job.root), "python": sys.executable}
        argv = [sys.executable, *(_fill(part, fill) for part in self.node["torchrun"])]
        with open(self.job.torchrun_log, "wb") as log:
            code = await self._launch(argv, log, self.job.bin)
        self._drain()
        if self.phase != "running":
            return
        if code == 0:
            self.phase = "done"
            self.changed()
        elif not self.failures:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited {code}"
            line = last_error_line(self.job.torchrun_log)
            self._fail("torchrun", f"torchrun {how}", signal=signal.Signals(-code).name if code < 0 else None,
                       exit_code=code if code > 0 else None, log_line=line)  # fmt: skip

    async def _launch(self, argv: list[str], log: Any, folder: Path) -> int:
        """Starts a child that dies with us; returns its exit code, negative for a signal."""
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=self._environment(),
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGKILL),
        )
        self._exits[child.pid] = asyncio.get_running_loop().create_future()
        code = await self._exits[child.pid]
        child.returncode = code  # reaped by `_reap`; Popen must not wait for it again
        return code

    def _environment(self) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in _UNSET and not name.startswith(_UNSET_PREFIXES)
        }
        own = {MARK: str(self.job.root), "ORCH_JOB": self.job.id, "ORCH_NODE": self.node["name"]}
        # The job's own code first: for a script both its folder and the packages shipped with it.
        path = os.pathsep.join(p for p in (str(self.job.src), inherited.get("PYTHONPATH")) if p)
        return {**inherited, **self.node["env"], **own, "PYTHONPATH": os.pathsep.join((path, str(self.job.bin)))}

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self._exits:
                    self._exits[pid].set_result(os.waitstatus_to_exitcode(status))

    async def _end_ranks(self) -> None:
        """The ladder: INT to the ranks, TERM to all, KILL to all, each only if the one before did not do."""
        self.phase = "stopping"
        self.changed()
        grace_s = self.node["grace_s"]
        for signum, wait_s in ((signal.SIGINT, grace_s), (signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_S)):
            if not ours(self.job):
                break
            deadline = asyncio.get_running_loop().time() + wait_s
            self._signal(signum)
            while ours(self.job) and asyncio.get_running_loop().time() < deadline:
                if signum == signal.SIGKILL:
                    self._signal(signum)  # a process that forks while it is killed
                await asyncio.sleep(0.05)
        self.leftovers = [describe(pid) for pid in ours(self.job)]
        self._drain()
        self.phase = "ended"
        self.changed()

    def _signal(self, signum: int) -> None:
        # torchrun answers INT by ending its workers itself and at once; the ranks are to have their grace first.
        wrappers = [int(rank["wrapper"]) for rank in self.ranks.values() if "wrapper" in rank]
        end_all(wrappers if signum == signal.SIGINT and wrappers else ours(self.job), signum)

    # ---- events -----------------------------------------------------------------------------------------------

    def _open_fifos(self, loop: asyncio.AbstractEventLoop) -> None:
        # Opened for both ways: no end of file when a writer leaves, and opening never waits for another side.
        self._control = os.open(self.job.control, os.O_RDWR | os.O_NONBLOCK)
        self._alive = os.open(self.job.alive, os.O_RDWR)
        self._unread = b""
        loop.add_reader(self._control, self._drain)

    def _drain(self) -> None:
        """Reads every line that waits in the control FIFO: requests of `control`, events of the rank wrappers."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._control, 1 << 16):
                self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, KeyError):
                self._event(json.loads(line))

    def _event(self, event: dict[str, Any]) -> None:
        if "rank" in event:
            self._rank_event(event)
        elif "go" in event:
            self.go = event["go"]
            self.told.set()
        elif event.get("request") == "undo":
            self.told.set()
        elif event.get("request") == "cancel" and self.phase not in ("ended",):
            self.cancelled = True
            if self.go is None:
                self.told.set()
            else:
                self._stop()

    def _rank_event(self, event: dict[str, Any]) -> None:
        rank = self.ranks[str(event["rank"])]
        if event["event"] == "started":
            rank.update(pid=event["pid"], wrapper=event.get("wrapper"), started=time.time())
            self.changed()
            return
        rank.update({key: event[key] for key in ("exit_code", "signal", "cause")}, ended=time.time())
        failed = event["exit_code"] != 0 and event["cause"] is None
        if failed and self.phase == "running":
            how = f"was killed by {event['signal']}" if event["signal"] else f"exited {event['exit_code']}"
            line = last_error_line(self.job.rank(event["rank"]) / "stderr.log")
            self._fail("rank", f"rank {event['rank']} {how}", rank=event["rank"], exit_code=event["exit_code"],
                       signal=event["signal"], log_line=None if event["signal"] else line)  # fmt: skip
        else:
            self.changed()

    def _fail(self, kind: str, reason: str, **more: Any) -> None:
        failure = {**_failure(kind, self.node["name"], reason), **more}
        failure["secondary"] = bool(failure["log_line"]) and verdict.is_secondary(failure["log_line"])
        self.failures.append(failure)
        if self.go is None:
            self.told.set()
        self.changed()

    # ---- small things -----------------------------------------------------------------------------------------

    @property
    def _token(self) -> bytes:
        return bytes.fromhex(self.node["token"])

    def _free_port(self) -> int:
        """The port the plan names if nobody holds it, else another; asked on every address, as torchrun will."""
        for port in (self.node["rendezvous_port"], 0):
            with contextlib.suppress(OSError), socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", port))
                return int(probe.getsockname()[1])
        raise OSError("no free TCP port")

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception():
            raise SystemExit(f"supervisor: {task.exception()!r}") from task.exception()

    async def _until(self, condition: Any, timeout_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not condition() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)


def _failure(kind: str, node: str, reason: str) -> dict[str, Any]:
    nothing = {"rank": None, "exit_code": None, "signal": None, "log_line": None, "secondary": False}
    return {"kind": kind, "node": node, "reason": reason, **nothing}


def _fill(part: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        part = part.replace("{" + name + "}", value)
    return part


def last_error_line(log: Path) -> str | None:
    """The line of a log that most likely says why: the last that names an error, else the last of all."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.path.getsize(log) - LOG_TAIL_BYTES))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines()]
    except OSError:
        return None
    telling = [line for line in lines if line and not line.startswith(("[W", "warnings.warn"))]
    errors = [line for line in telling if "Error" in line or "error:" in line.lower()]
    found = (errors or telling)[-1:]
    return found[0][:400] if found else None


if __name__ == "__main__":
    main()
