"""The process that stays on a host while a job runs: starts torchrun, watches the ranks, and leaves nothing behind.

Its parent, the keeper, cleans up if it is killed, and starts the next one if the job is tried again (`attempts`). A job
that queues waits here for its GPUs first (`turn`). It runs this host's ranks (`programs`) and communicates with the
other supervisors (`membership`). The master's supervisor is also the hub, which decides when all start, stop and finish
(`coordinator`). No controller is needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn, cast

from . import answer as trouble
from . import attempts, verdict
from .coordinator import JOIN_S, REPORT_S, Coordinator, ladder_s
from .host_state import HostState
from .layout import JobFolder, write_final_record, write_record
from .link import asyncio
from .membership import Membership, Peers, Pulse, Unreached
from .mesh import Place
from .messages import (
    BEFORE_JOINING,
    STILL_QUEUED,
    STOOD_STILL,
    AgentRecord,
    Earlier,
    Failure,
    FinalState,
    Order,
    Process,
    failure,
    finish,
)
from .processes import identify
from .programs import Programs
from .stillness import LOOK_S as STILL_LOOK_S
from .turn import Claims, QueuePlace

GO_S = 300.0
"""Longest time from `prepare` to `go`, longer than the slowest upload; then the controller is gone and the job is
undone.
"""
LOOK_S = 2.0
SETTLE_S = 0.3
"""After a peer's failure, time for our own ranks to report the same cause. REPORT_S if only a broken connection is
known.
"""


class Doors(NamedTuple):
    """The keeper's listeners for all its supervisors; None: the supervisor opens its own."""

    hub: socket.socket | None = None
    peers: socket.socket | None = None


class Supervisor:
    """One host's part of one attempt at a job: every change of `state` goes through `_changed`."""

    def __init__(self, job: JobFolder, node: dict[str, Any], claims: Claims, doors: Doors) -> None:
        before = job.read_agent()  # of the last attempt's supervisor
        self._earlier: list[Earlier] = before.get("earlier", [])
        self._token = token = attempts.token_of(bytes.fromhex(node["token"]), len(self._earlier) + 1)
        self._job, self._node, self._doors = job, node, doors
        self._peers = Peers(node["name"], token, self._changed, node["silence_s"])
        self.state = HostState(job, node, self._peers.cut, self._changed)
        self._record = RecordWriter(job, node["name"], before)
        self._fifo = ControlFifo(job, self._received)
        self._tasks, self._pulse = Tasks(self._crash), Pulse()
        self._looks = ThreadPoolExecutor(1)
        self._coordinator = (
            Coordinator(node, token, self.state, self._peers, self._takes_part, self._obey, self._earlier)
            if node["is_master"]
            else None
        )
        self._has_gpus = claims.has_any or not node["gpu_uuids"]
        self._queue = QueuePlace(job.id, node, claims, self._queue_changed) if node.get("queue") else None
        self._membership: Membership | None = None
        rendezvous = self._coordinator.rendezvous if self._coordinator else None
        self._programs = Programs(job, node, self.state, self._fifo.drain, rendezvous, len(self._earlier) + 1)
        self._go: dict[str, Any] | None = None
        self._decided, self._finished = asyncio.Event(), asyncio.Event()
        """Starting or not is decided; the final record is written."""
        self._rendezvous_port: int | None = None
        self._may_meet = asyncio.Event()
        self._stopping: asyncio.Task[None] | None = None
        self._is_finishing = self._is_retried = False
        if self._earlier:
            self._go = {"hub_port": before["joins"]}
            self.state.phase = "resting"

    # ---- life -------------------------------------------------------------------------------------------------

    async def run(self, answer: int | None) -> bool:
        """Runs until the attempt is over here; returns whether another follows. answer: descriptor for our pid and
        ports; None after the first attempt.
        """
        loop = asyncio.get_running_loop()
        self._tasks.watch_callbacks()
        loop.add_signal_handler(signal.SIGCHLD, self._programs.children.reap)
        loop.add_signal_handler(signal.SIGTERM, self._keeper_died)
        self._fifo.open()
        record = self._record.record
        if self._coordinator:
            record["hub_port"] = await self._coordinator.listen(self._doors.hub)
        if len(self._node["members"]) > 1:
            record["peer_port"] = await self._peers.listen(self._node["address"], self._doors.peers)
        self._write()
        if answer is not None:
            kept = {key: record.get(key) for key in ("pid", "hub_port", "peer_port")}
            os.write(answer, json.dumps({**kept, "has_gpus": self._has_gpus}).encode())
            os.close(answer)
            if not self._queue:
                self._programs.begin()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._decided.wait(), GO_S)
        if self._go is None:
            self._write({"state": "undone", "ended": time.time()})
            return False
        await self._take_part(self._go)
        return self._is_retried

    async def _take_part(self, go: dict[str, Any]) -> None:
        self._record.record.setdefault("go", time.time())
        self._record.record["joins"] = int(go["hub_port"])
        self._peers.places = {name: Place(*place) for name, place in self._job.read_peers().items()}
        join_s = JOIN_S + (
            self._node["silence_s"] + ladder_s(self._node) if self._earlier else 0.0
        )  # a host may notice late
        if self._coordinator:
            self._coordinator.open(join_s)
        else:
            hub = (self._node["master_address"], go["hub_port"])
            self._membership = Membership(
                hub,
                self._node["name"],
                self._token,
                self.state.status,
                self._obey,
                self._hub_gone,
                self._node["silence_s"],
            )
            self._tasks.spawn(self._membership.stay(join_s))
        for work in (self._watch_folder(), self._watch_ranks(), self._pulse.beat(), self._begin()):
            self._tasks.spawn(work)
        if self._coordinator and self._queue:
            self._tasks.spawn(self._coordinator.watch_turn())
        self._changed()
        await self._finished.wait()
        self._peers.close()
        if self._membership:
            self._membership.close()
        if self._coordinator:
            await self._coordinator.close()

    async def _begin(self) -> None:
        """Rests after a failed attempt, waits for the job's turn, then joins the others."""
        if self._earlier:
            rest_s = attempts.pause_s(self._node, self._earlier)
            self._write({"next_at": time.time() + rest_s})
            await asyncio.sleep(rest_s)
        if self._queue and self._stopping is None and not (self._go or {}).get("at_once"):
            self.state.enter("queued")
            try:
                await self._queue.come()
            except (trouble.Refused, OSError) as error:
                words = trouble.refusal(error)["error"]
                self.state.fail(failure("port", self._node["name"], f"no place in the queue: {words}"))
            self._pulse.begin_anew()
        if self._stopping is not None:
            return
        self.state.phase = "joining"
        self._programs.begin()
        if limit_s := self._node.get("time_limit_s"):
            asyncio.get_running_loop().call_later(limit_s, self._time_is_up, limit_s)
        if self._coordinator:
            self._coordinator.meet()
        await self._join()

    async def _join(self) -> None:
        if self.state.phase == "joining" and all(await asyncio.gather(self._programs.prepare(), self._reached())):
            if self._stopping is None:
                self.state.phase = "joined"
                self._peers.watch()
            self._changed()

    async def _reached(self) -> bool:
        try:
            await self._peers.reach()
            if not self._coordinator:
                await self._may_meet.wait()
                assert self._rendezvous_port is not None
                await self._peers.reach_rendezvous(self._node["master"], self._rendezvous_port)
        except Unreached as error:
            cause = failure("network", error.node, str(error))
            if self._stopping is None:
                self.state.fail(cause)
                if self._membership and not self._membership.has_connected:
                    self._give_up(cause)  # no hub to report to
            return False
        return True

    async def _watch_ranks(self) -> None:
        while True:
            await asyncio.sleep(STILL_LOOK_S)
            if self.state.phase == "running":
                await self._in_thread(self.state.ranks.has_files)  # then their system answers, and has their sizes
                if self.state.phase == "running" and self.state.ranks.look(time.monotonic()):
                    self._write()

    async def _watch_folder(self) -> None:
        # Without the job's folder no request can reach us, so the job ends.
        while await self._in_thread(self.state.has_folder):
            await asyncio.sleep(LOOK_S)
        self.state.fail(self.state.without_folder())

    async def _in_thread(self, look: Callable[[], bool]) -> bool:
        """A look at files of a server that gives no answer must not stop our pulse."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._looks, look)
        except RuntimeError:  # no further thread may start
            return look()

    # ---- reports to others ------------------------------------------------------------------------------------

    def _queue_changed(self) -> None:
        assert self._queue
        self.state.turn = self._queue.report
        self._record.record["queue"] = self._queue.shown
        self._changed()

    def _changed(self) -> None:
        if self._go is None and self.state.failures:
            self._decided.set()
        if self._membership:
            self._membership.announce()
        self._write()
        if self._coordinator:
            self._coordinator.decide()

    def _write(self, more: AgentRecord | None = None) -> None:
        news = self.state.record()
        if self._coordinator and (dropped := self._coordinator.dropped()):
            news["dropped"] = dropped
        self.state.cannot_write = not self._record.write({**news, **(more or {})})

    # ---- orders -----------------------------------------------------------------------------------------------

    def _obey(self, order: Order) -> None:
        if self._is_left_behind():
            return
        if self._queue:
            self._queue.obey(order)
        if self._rendezvous_port is None and "rendezvous_port" in order:
            self._rendezvous_port = int(order["rendezvous_port"])
            self._may_meet.set()
        if order["do"] == "start" and self.state.phase == "joined":
            self._start_ranks(order)
        elif order["do"] == "stop":
            self._stop(self._settle_s(order))
        elif order["do"] == "finish":
            is_retried = bool(order.get("is_retried"))
            self._tasks.spawn(self._finish(order["state"], order.get("first_failure"), is_retried=is_retried))

    def _settle_s(self, order: Order) -> float:
        if self.state.cancelled or order["state"] == "cancelled":
            return 0.0
        first = order.get("first_failure")
        return REPORT_S if first and first.get("secondary") else SETTLE_S

    def _start_ranks(self, order: Order) -> None:
        self.state.phase = "running"
        self._write({"state": "running", "rendezvous_port": order["rendezvous_port"]})
        self._tasks.spawn(self._programs.run_torchrun(self._programs.torchrun_argv(order)))

    def _stop(self, settle_s: float = 0.0) -> None:
        if self._stopping is None:
            self._fifo.drain()  # earlier events are causes, later ones are our doing
            self.state.is_stopping = True
            if self._queue:
                self._queue.leave()
            self._stopping = self._tasks.spawn(self._end_ranks(settle_s))

    async def _end_ranks(self, settle_s: float) -> None:
        await asyncio.sleep(settle_s)
        self.state.ranks.look(time.monotonic())  # their activity at the moment they are ended
        self.state.enter("stopping")
        self.state.leftovers = await self._programs.children.end_all_of_it(self.state.ranks.wrappers)
        self._fifo.drain()
        self.state.enter("ended")

    async def _finish(self, state: FinalState, first_failure: Failure | None, *, is_retried: bool) -> None:
        if self._is_finishing:
            return  # the first verdict counts: the hub may leave while our ranks end
        self._is_finishing = True
        if self.state.phase != "ended":
            self._stop()
            assert self._stopping
            await self._stopping
        if is_retried and first_failure and not (self.state.is_last or self.state.leftovers or self.state.cancelled):
            self._write({"state": "starting", "earlier": attempts.with_failed(self._earlier, first_failure)})
            if not self.state.cannot_write:
                self._is_retried = True
                self._finished.set()
                return
            self._record.record["earlier"] = self._earlier
        self._write({"state": state, "first_failure": attempts.judged(first_failure), "ended": time.time()})
        self._finished.set()

    # ---- without the hub --------------------------------------------------------------------------------------

    def _takes_part(self) -> bool:
        return self._go is not None and not self._is_left_behind()

    def _is_left_behind(self) -> bool:
        # We were frozen until our lease was over: the others ended without us, and so do we.
        if (
            self._pulse.longest_s < self._node["silence_s"]
            or len(self._node["members"]) == 1
            or self.state.phase == "queued"
        ):
            return False
        why = f"stood still for {self._pulse.longest_s:.0f} s (stopped, starved or asleep), and its lease is over"
        self._give_up(failure("lost", self._node["name"], why))
        return True

    def _give_up(self, cause: Failure) -> None:
        is_retried = attempts.goes_on(self._node, self._earlier, cause) and not self.state.cancelled
        if self._coordinator:
            self._coordinator.order = finish("failed", cause, is_retried=is_retried)
        self._tasks.spawn(self._finish("failed", cause, is_retried=is_retried))

    def _hub_gone(self, why: str) -> None:
        if not self._is_left_behind():
            why += STILL_QUEUED if self.state.phase == "queued" else ""
            if self._membership and not self._membership.host_is_up:
                self._record.record["master_is_silent"] = True
            lost = failure("lost", self._node["master"], why)
            self._give_up(verdict.first_cause([*self.state.failures, lost]) or lost)

    def _keeper_died(self) -> None:
        self.state.is_last = True
        self._fail("supervisor", "the supervisor was asked to end (SIGTERM, or its keeper died)")

    def _time_is_up(self, limit_s: float) -> None:
        if self.state.phase not in ("done", "stopping", "ended"):
            self._fail("time", f"the time limit of {limit_s:g} s is over")

    def _fail(self, kind: str, reason: str) -> None:
        self.state.fail(failure(kind, self._node["name"], reason))

    def _crash(self, error: BaseException) -> NoReturn:
        with contextlib.suppress(Exception):
            how = trouble.describe(error) if isinstance(error, OSError) else repr(error)
            reason = f"the supervisor failed: {how[:400]}"
            self.state.failures.append(failure("supervisor", self._node["name"], reason))
            self._changed()
        raise SystemExit(f"supervisor: {error!r}") from error

    # ---- events -----------------------------------------------------------------------------------------------

    def _received(self, event: dict[str, Any]) -> None:
        if "rank" in event:
            if self.state.phase not in BEFORE_JOINING:  # else it is of a rank of the last attempt
                self._rank_reported(event)
        elif "go" in event:
            self._go, self._pulse = event["go"], Pulse()
            self._decided.set()
        elif event.get("request") == "cancel" and self.state.phase != "ended":
            self.state.cancelled = True
            if self._go is None:
                self._decided.set()
            else:
                self._stop()

    def _rank_reported(self, event: dict[str, Any]) -> None:
        state = self.state
        if event["event"] == "started":
            state.ranks.started(event)
        elif event["event"] in ("met", "alone", "not finite"):
            state.ranks.reported(event)
        else:
            state.ranks.ended(event, look=state.phase == "running")
            if state.phase == "running" and event["exit_code"] != 0 and event["cause"] is None:
                log = self._job.rank(event["rank"]) / "stderr.log"
                state.fail(self._programs.failures.of_rank(event, log))
                return
            if state.phase == "running" and event["cause"] == STOOD_STILL and not state.failures:
                self._fail("supervisor", f"{STOOD_STILL} (stopped, starved or asleep), so its ranks ended themselves")
                return
        self._changed()


class Tasks:
    """Reports every error. crashed: called with the exception of a task or of the loop's callbacks."""

    def __init__(self, crashed: Callable[[BaseException], None]) -> None:
        self._crashed = crashed
        self._tasks: set[asyncio.Task[None]] = set()

    def watch_callbacks(self) -> None:
        asyncio.get_running_loop().set_exception_handler(self._callback_failed)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._crashed(error)

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "handle" in context and isinstance(error := context.get("exception"), Exception):
            self._crashed(error)
        loop.default_exception_handler(context)


class RecordWriter:
    """Writes agent.json. record: the file's content, updated with each `write`."""

    def __init__(self, job: JobFolder, node: str, before: dict[str, Any]) -> None:
        """before: the record of the last attempt; {} for the first."""
        self._job = job
        me = identify(os.getpid())
        kept = {key: before[key] for key in ("go", "joins", "earlier") if key in before}
        self.record: AgentRecord = {
            "schema": 1,
            "job": job.id,
            "node": node,
            "state": "starting",
            "pid": me.pid,
            "start_time": me.start_time,
            "boot_id": me.boot_id,
            "keeper": cast(Process, identify(os.getppid())._asdict()),
            "started": time.time(),
            **cast(AgentRecord, kept),
        }

    def write(self, news: AgentRecord) -> bool:
        """False for a full disk or a removed folder, which must not keep the job from ending; the hub still gets our
        status.
        """
        self.record.update(news)
        if self.record.get("phase") != "queued":
            self.record.pop("queue", None)
        if self.record.get("phase") != "resting":
            self.record.pop("next_at", None)
        try:
            (write_final_record if "ended" in self.record else write_record)(self._job, self.record)
            return True
        except OSError as error:
            with contextlib.suppress(OSError):  # the log is on the same disk
                sys.stderr.write(f"cannot write {self._job.agent}: {error}\n")
        return False


CHUNK_BYTES = 1 << 16


class ControlFifo:
    """The job folder's FIFOs: `control` receives one JSON object a line from `control` and the rank wrappers (`rank`);
    `alive` shows the ranks that we run.

    received: called with each line; ValueError or KeyError means an invalid message.
    """

    def __init__(self, job: JobFolder, received: Callable[[dict[str, Any]], None]) -> None:
        self._job, self._received = job, received
        self._control: int | None = None
        self._alive: int | None = None
        self._unread = b""

    def open(self) -> None:
        # Opened for reading and writing: no end of file when a writer leaves, and opening never blocks.
        self._control = os.open(self._job.control, os.O_RDWR | os.O_NONBLOCK)
        self._alive = os.open(self._job.alive, os.O_RDWR)
        asyncio.get_running_loop().add_reader(self._control, self.drain)

    def drain(self) -> None:
        assert self._control is not None
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._control, CHUNK_BYTES):
                self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, KeyError):
                if isinstance(event := json.loads(line), dict):
                    self._received(event)
