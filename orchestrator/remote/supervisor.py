"""The one process of ours that stays on a host while a job runs: starts torchrun, watches, and leaves nothing behind.

Its parent, the keeper, starts it and cleans up should it be killed. It speaks with the other hosts' supervisors
(`hub`), starts and ends this host's ranks. The master's supervisor is the hub: it decides (`verdict`) when all start,
stop and finish. All of it works with no controller in sight.
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
from .logs import is_secondary, log_tail, telling_line
from .processes import MARK, below_or_marked, describe, die_with_parent, end_all, identify, process_group, signal_name

GO_S = 300.0
"""Prepared but not told to go for this long: the controller is gone, undo. Longer than the slowest upload may take."""
JOIN_S = 30.0
LOOK_S = 2.0
SETTLE_S = 0.3
"""When a peer failed: so long may a rank of ours, dying of the true cause this very moment, take to say so."""
KILL_S = 5.0
GPU_WATCH_S = 1.0
"""So long may what a sick driver holds, though it was killed, keep a job from its end."""

# What a host's profile may have left behind and torchrun would obey (it reads PET_* as its own options).
_UNSET = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_UNSET_PREFIXES = ("PET_", "TORCHELASTIC_", "ORCH_")


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
            **identify(os.getpid())._asdict(),
            "keeper": identify(os.getppid())._asdict(),
            "started": time.time(),
        }
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._gpu_watch = self._killed_group = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrivals: dict[tuple[str, str, Any], int] = {}
        self._finishing = False

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
        self._spawn(self._watch_folder())
        if self.phase == "joining" and await self._prepared() and self.phase == "joining":
            self.phase = "joined"
        self.changed()
        await self.finished.wait()
        if self.membership:
            self.membership.close()
        if self.hub:
            self.hub.announce()
            # The others leave when their own ranks have ended: that may take them the whole ladder.
            await self._until(lambda: self.hub is None or self.hub.connected == 0, self._ladder_s)
            self.hub.close()

    async def _prepared(self) -> bool:
        """Runs the inventory's `prepare` command, once a host and job, before any rank starts."""
        if not self.node.get("prepare"):
            return True
        with open(self.job.prepare_log, "wb") as log:
            code = await self._launch(["sh", "-c", self.node["prepare"]], log, self.job.src)
        if code != 0 and self._stopping is None:
            self._fail("prepare", f"the `prepare` command {_how(code)}", log=self.job.prepare_log, code=code)
        return code == 0

    # ---- what others see --------------------------------------------------------------------------------------

    def status(self) -> Message:
        return {
            "phase": self.phase,
            "failures": self.failures[:8],
            "cancelled": self.cancelled,
            "leftovers": self.leftovers[:20],
        }

    def changed(self) -> None:
        if self.membership:
            self.membership.announce()
        self._write()
        if self.hub:
            self._decide()

    def _write(self, **more: Any) -> None:
        """A full disk or a removed folder must not keep the job from ending: the hub knows what the file cannot say."""
        shown = {"phase": self.phase, "ranks": self.ranks, "failures": self.failures, "leftovers": self.leftovers}
        self.record.update(shown, **more)
        try:
            write_json(self.job.agent, self.record)
        except OSError as error:
            sys.stderr.write(f"cannot write {self.job.agent}: {error}\n")

    # ---- orders -----------------------------------------------------------------------------------------------

    def _decide(self, settled: bool = False) -> None:
        """The hub's own step: everybody's status in, one order out, obeyed here like everywhere."""
        assert self.hub
        if self.go is None or self.order["do"] == "finish":
            return
        statuses = {name: self.hub.statuses.get(name, {}) for name in self.node["members"]}
        statuses[self.node["name"]] = self.status()
        for one in (failure for status in statuses.values() for failure in status.get("failures", ())):
            one.setdefault("order", self._arrival(one))
        order = verdict.decide(statuses, self.hub.lost, settled)
        if order["do"] == "start":
            order["rendezvous_port"] = self.order.get("rendezvous_port") or self._free_port()
        if order["do"] == "stop" and self.order["do"] != "stop":
            asyncio.get_running_loop().call_later(self._ladder_s, self._decide, True)
        if order != self.order:
            self.order = order
            self.hub.announce()
            self.obey(order)

    def _arrival(self, one: dict[str, Any]) -> int:
        key = (one["node"], one["kind"], one["rank"])
        return self._arrivals.setdefault(key, len(self._arrivals))

    def obey(self, order: Message) -> None:
        self.order = order
        if order["do"] == "start" and self.phase == "joined":
            self.phase = "running"
            self._spawn(self._run_torchrun(int(order["rendezvous_port"])))
        elif order["do"] == "stop":
            self._stop(settle_s=0.0 if self.cancelled or order["state"] == "cancelled" else SETTLE_S)
        elif order["do"] == "finish":
            self._spawn(self._finish(order["state"], order.get("first_failure")))

    def _stop(self, settle_s: float = 0.0) -> None:
        if self._stopping is None:
            self._drain()  # what already happened here is a cause, what happens from now on is our doing
            self._stopping = self._spawn(self._end_ranks(settle_s))

    async def _finish(self, state: str, first_failure: dict[str, Any] | None) -> None:
        if self._finishing:
            return  # the first verdict counts: while our ranks end, the hub may already have left
        self._finishing = True
        if self.phase != "ended":
            self._stop()
            assert self._stopping
            await self._stopping
        self._write(state=state, first_failure=first_failure, ended=time.time())
        self.finished.set()

    def _hub_gone(self, why: str) -> None:
        self._spawn(self._finish("failed", failure("lost", self.node["master"], why)))

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
            _, ended = self._start(argv, log, self.job.bin, self._environment())
        self._watch_gpus()
        code = await ended
        self._end_gpu_watch()
        self._drain()
        if self.phase != "running":
            return
        if code == 0:
            self.phase = "done"
            self.changed()
        elif not self.failures:
            self._fail("torchrun", f"torchrun {_how(code)}", log=self.job.torchrun_log, code=code)

    async def _launch(self, argv: list[str], log: Any, folder: Path) -> int:
        """Starts a child that dies with us; returns its exit code, negative for a signal."""
        _, ended = self._start(argv, log, folder, self._environment())
        return await ended

    def _start(
        self, argv: list[str], log: Any, folder: Path, environment: dict[str, str]
    ) -> tuple[int, asyncio.Future[int]]:
        """A child in a session of its own: its pid and its exit code to come."""
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(signal.SIGKILL),
        )
        child.returncode = 0  # `_reap` hears of its end; Popen must not wait for it, too
        ended = self._exits[child.pid] = asyncio.get_running_loop().create_future()
        return child.pid, ended

    def _watch_gpus(self) -> None:
        if self.node["gpu_uuids"]:
            argv = [sys.executable, "-m", "orch_remote.gpus", str(self.job.root)]
            # Nothing of the job's own code is to be found before the standard library.
            environment = {**self._environment(), "PYTHONPATH": str(self.job.bin)}
            self._gpu_watch, _ = self._start(argv, sys.stderr, self.job.bin, environment)

    def _end_gpu_watch(self) -> None:
        if self._gpu_watch in self._exits:  # not reaped, so the group is still its own
            self._killed_group = self._gpu_watch
            os.killpg(self._killed_group, signal.SIGKILL)

    def _environment(self) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in _UNSET and not name.startswith(_UNSET_PREFIXES)
        }
        own = {MARK: str(self.job.root), "ORCH_JOB": self.job.id, "ORCH_NODE": self.node["name"]}
        # The job's own code first: for a script both its folder and the packages shipped with it.
        given = {**inherited, **self.node["env"]}
        path = [str(self.job.src), *filter(None, [given.get("PYTHONPATH")]), str(self.job.bin)]
        return {**given, **own, "PYTHONPATH": os.pathsep.join(path)}

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in self._exits:
                    self._exits.pop(pid).set_result(os.waitstatus_to_exitcode(status))

    async def _end_ranks(self, settle_s: float) -> None:
        """The ladder: INT to the ranks, TERM to all, KILL to all, each only if the one before did not do."""
        await asyncio.sleep(settle_s)
        self.phase = "stopping"
        self.changed()
        self._end_gpu_watch()
        grace_s = self.node["grace_s"]
        for signum, wait_s in ((signal.SIGINT, grace_s), (signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_S)):
            if not self._left():
                break
            deadline = asyncio.get_running_loop().time() + wait_s
            self._signal(signum)
            while self._left() and asyncio.get_running_loop().time() < deadline:
                if signum == signal.SIGKILL:
                    self._signal(signum)  # a process that forks while it is killed
                await asyncio.sleep(0.05)
        await self._until(lambda: not below_or_marked(self.job.root), GPU_WATCH_S)
        self.leftovers = [describe(pid) for pid in below_or_marked(self.job.root)]
        self._drain()
        self.phase = "ended"
        self.changed()

    def _left(self) -> list[int]:
        """What the ladder has to end. The GPU watch was killed before it, and a sick driver may hold that for long."""
        return [pid for pid in below_or_marked(self.job.root) if process_group(pid) != self._killed_group]

    def _signal(self, signum: int) -> None:
        # torchrun answers INT by ending its workers itself and at once; the ranks are to have their grace first.
        running = self._left()
        wrappers = [pid for pid in running if pid in {rank.get("wrapper") for rank in self.ranks.values()}]
        end_all(wrappers if signum == signal.SIGINT and wrappers else running, signum)

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
            log = self.job.rank(event["rank"]) / "stderr.log"
            self._fail("rank", f"rank {event['rank']} {how}", log=log, rank=event["rank"],
                       exit_code=event["exit_code"], signal=event["signal"])  # fmt: skip
        else:
            self.changed()

    def _fail(self, kind: str, reason: str, *, log: Path | None = None, code: int | None = None, **more: Any) -> None:
        """log: where the reason may stand. code: a child's exit code, negative for a signal."""
        found = {**failure(kind, self.node["name"], reason), **more}
        if code is not None:
            found |= {"exit_code": code if code > 0 else None, "signal": signal_name(-code) if code < 0 else None}
        lines = log_tail(log) if log else []
        # Nobody who is killed from outside says why; one who aborts (NCCL's watchdog does) has said it before.
        if found["signal"] in (None, "SIGABRT"):
            found |= {"log_line": telling_line(lines), "secondary": is_secondary(lines)}
        self.failures.append(found)
        if self.go is None:
            self.told.set()
        self.changed()

    # ---- small things -----------------------------------------------------------------------------------------

    @property
    def _token(self) -> bytes:
        return bytes.fromhex(self.node["token"])

    def _free_port(self) -> int:
        """The port the plan names if nobody holds it, else another; asked on every address, as torchrun will.

        A lock of our own keeps it from another job of ours until torchrun listens on it.
        """
        for port in (self.node["rendezvous_port"], *[0] * 20):
            with contextlib.suppress(OSError), socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", port))
                free = int(probe.getsockname()[1])
                lock = os.open(Work(self.node["workdir"]).locks / f"port-{free}.lock", os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return free
        raise OSError("no free TCP port")

    @property
    def _ladder_s(self) -> float:
        """The longest that ending a host's ranks can take, and a little for the news to travel."""
        return float(2 * self.node["grace_s"] + 2 * KILL_S)

    async def _watch_folder(self) -> None:
        """Somebody may remove the job's folder under us: then nobody can speak to us any more, so the job ends."""
        while self.job.control.exists():
            await asyncio.sleep(LOOK_S)
        self._fail("folder", f"the job's folder was removed ({self.job.root})")

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


def failure(kind: str, node: str, reason: str) -> dict[str, Any]:
    """What went wrong, as the hub hears it. kind: "rank", "torchrun", "prepare", "lost", ..."""
    nothing = {"rank": None, "exit_code": None, "signal": None, "log_line": None, "secondary": False}
    return {"kind": kind, "node": node, "reason": reason, **nothing}


def _fill(part: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        part = part.replace("{" + name + "}", value)
    return part


def _how(code: int) -> str:
    return f"was killed by {signal_name(-code)}" if code < 0 else f"exited {code}"
