"""The one process of ours that stays on a host while a job runs: starts torchrun, watches, and leaves nothing behind.

Its parent, the keeper, starts it and cleans up should it be killed. It speaks with the other hosts' supervisors
(`hub`), starts and ends this host's ranks. The master's supervisor is the hub: it decides (`verdict`) when all start,
stop and finish. All of it works with no controller in sight.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import trouble, verdict
from .children import KILL_S, Children, until
from .door import MAX_LINE
from .elastic import Elastic
from .fitting import fitted
from .generations import Generations
from .hub import LEASE_S, Hub, Membership, Message, Pulse
from .layout import Job, write_last_word, write_record
from .logs import advice, is_secondary, log_tail, telling_line
from .memory import out_of_memory_kills
from .peers import Peers, Place, Unreached
from .ports import Claim, admit, claim_port, listen, own_source, shut_out
from .processes import identify, signal_name
from .stillness import LOOK_S as STILL_LOOK_S
from .stillness import QUIET_S, Stillness

GO_S = 300.0
"""Prepared but not told to go for this long: the controller is gone, undo. Longer than the slowest upload may take."""
JOIN_S = 30.0
LOOK_S = 2.0
PREPARE = "ORCH_PREPARE"
SETTLE_S = 0.3
"""When a peer failed: so long may a rank of ours, dying of the true cause this very moment, take to say so."""
HEARSAY_S = 2.0
"""The same, where all that is known so far is that a connection broke: the one who broke it may be slow to end."""
OUT_OF_MEMORY = "this host, or the cgroup that it runs in, ran out of memory, and the kernel ended a process"
ALONE_S = 120.0
"""Ranks that have met nobody for so long are said to be alone; they may still meet."""
TOLD = 8
"""So many of a host's failures are told and kept."""


class Supervisor:
    """One host's part of one job. Its state is `status()`; every change goes through `changed()`."""

    def __init__(self, job: Job, node: dict[str, Any]) -> None:
        self.job, self.node = job, node
        self.phase = "joining"
        self.cancelled = False
        self.failures: list[dict[str, Any]] = []
        self.leftovers: list[str] = []
        self.ranks: dict[str, dict[str, Any]] = {str(rank): {} for rank in node["rank_numbers"]}
        self.elastic = Elastic(node, self.ranks) if node.get("elastic") else None
        self.generations = Generations(node["elastic"]["max_restarts"]) if node.get("elastic") else None
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
        self.children, self.pulse, self.still = Children(job, node), Pulse(), Stillness(job)
        self.peers = Peers(node["name"], self._token, self.changed)
        self._claim: Claim | None = None
        self._memory_kills = out_of_memory_kills()
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrivals: dict[tuple[str, str, Any], int] = {}
        self._finishing = False

    # ---- life -------------------------------------------------------------------------------------------------

    async def run(self, answer: int) -> None:
        loop = asyncio.get_running_loop()
        self.told, self.finished = asyncio.Event(), asyncio.Event()
        self.go: dict[str, Any] | None = None
        self._told_to_meet_at: asyncio.Future[int] = loop.create_future()
        self._stopping: asyncio.Task[None] | None = None
        loop.set_exception_handler(self._callback_failed)
        loop.add_signal_handler(signal.SIGCHLD, self.children.reap)
        loop.add_signal_handler(signal.SIGTERM, self._keeper_died)
        self._open_fifos(loop)
        if self.node["is_master"]:
            members = {name for name in self.node["members"] if name != self.node["name"]}
            self.hub = Hub(members, self._token, lambda: self.order, self._decide)
            self.record["hub_port"] = await self.hub.listen(self.node["address"])
        if len(self.node["members"]) > 1:
            self.record["peer_port"] = await self.peers.listen(self.node["address"])
        self._write()
        os.write(answer, json.dumps({key: self.record.get(key) for key in ("pid", "hub_port", "peer_port")}).encode())
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
        if self.elastic:
            self.elastic.begin()
        if limit_s := self.node.get("time_limit_s"):
            asyncio.get_running_loop().call_later(limit_s, self._time_is_up, limit_s)
        self.peers.places = {name: Place(*place) for name, place in self.job.read_peers().items()}
        if self.hub:
            if self.peers.places:
                self.hub.expect(JOIN_S, self.peers.remedy(self.node["name"]))
            self._open_rendezvous()
        else:
            hub = (self.node["master_address"], self.go["hub_port"])
            self.membership = Membership(hub, self.node["name"], self._token, self.status, self.obey, self._hub_gone)
            self._spawn(self.membership.stay(JOIN_S))
        self._spawn(self._watch_folder())
        self._spawn(self._watch_ranks())
        self._spawn(self.pulse.beat())
        self._spawn(self._join())
        self.changed()
        await self.finished.wait()
        self.peers.close()
        if self.membership:
            self.membership.close()
        if self.hub:
            self.hub.announce()
            # The others leave when their own ranks have ended: that may take them the whole ladder.
            await until(lambda: self.hub is None or self.hub.connected == 0, self._ladder_s)
            self.hub.close()

    async def _join(self) -> None:
        """All that comes before the word to start."""
        if self.phase == "joining" and all(await asyncio.gather(self._prepared(), self._reached())):
            if self._stopping is None:
                self.phase = "joined"
                self.peers.watch()
            self.changed()

    async def _reached(self) -> bool:
        """Checks the way to every other host, and to where the ranks will meet."""
        try:
            await self.peers.reach()
            if not self.hub:
                await self.peers.reach_rendezvous(self.node["master"], await self._told_to_meet_at)
        except Unreached as error:
            cause = failure("network", error.node, str(error))
            if self._stopping is None:
                self._failed(cause)
                if self.membership and not self.membership.has_heard:
                    self._give_up(cause)  # whom could we still tell?
            return False
        return True

    def _open_rendezvous(self) -> None:
        """Claims the port that the ranks will meet at, tells it to the members, and lets them try it."""
        assert self.hub
        if claim := self._claim_port():
            self.order = {"do": "wait", "rendezvous_port": claim.number}
            self.hub.announce()
            if self.peers.places:
                listen(claim.store)
                self.peers.open_rendezvous(claim.store.dup())

    async def _prepared(self) -> bool:
        """Runs the inventory's `prepare` command, once a host and job, before any rank starts."""
        if not self.node.get("prepare"):
            return True
        # Every user of this host can read a command line, and only its owner an environment.
        environment = {**self.children.environment(), PREPARE: self.node["prepare"]}
        line = f'line=${PREPARE}; unset {PREPARE}; eval "$line"'
        ended = self._start("prepare", ["sh", "-c", line], self.job.prepare_log, self.job.src, environment)
        if ended is None:
            return False
        code = await ended
        if code != 0 and self._stopping is None:
            self._fail("prepare", f"{_name('prepare')} {_how(code)}", log=self.job.prepare_log, code=code)
        self._memory_kills = out_of_memory_kills()  # from here on they are the ranks'
        return code == 0

    # ---- what others see --------------------------------------------------------------------------------------

    def status(self) -> Message:
        status = {
            **(self.elastic.status() if self.elastic else {}),
            "phase": self.phase,
            "failures": self._told_failures,
            "cancelled": self.cancelled,
            "leftovers": self.leftovers[:20],
            "cut": dict([*self.peers.cut.items()][:8]),
        }
        if dropped := self._dropped:
            status["dropped"] = dropped
        return fitted(status, MAX_LINE // 2)

    def changed(self) -> None:
        if self.membership:
            self.membership.announce()
        self._write()
        if self.hub:
            self._decide()

    def _write(self, **more: Any) -> None:
        """A full disk or a removed folder must not keep the job from ending: the hub knows what the file cannot say."""
        shown = {"phase": self.phase, "ranks": self.ranks, "failures": self._told_failures, "leftovers": self.leftovers}
        if self.elastic:
            shown["faults"] = self.elastic.faults
        if self.hub and (
            dropped := {node: one["dropped"] for node, one in self.hub.statuses.items() if "dropped" in one}
        ):
            shown["dropped"] = dropped  # a host whose disk fails can tell nobody else
        self.record.update(shown, **more)
        try:
            (write_last_word if "ended" in self.record else write_record)(self.job, self.record)
        except OSError as error:
            with contextlib.suppress(OSError):  # the log lies on the same disk
                sys.stderr.write(f"cannot write {self.job.agent}: {error}\n")

    # ---- orders -----------------------------------------------------------------------------------------------

    def _decide(self, settled: bool = False) -> None:
        """The hub's own step: everybody's status in, one order out, obeyed here like everywhere."""
        assert self.hub
        if self.go is None or self.order["do"] == "finish" or self._left_behind():
            return
        statuses = {name: self.hub.statuses.get(name, {}) for name in self.node["members"]}
        statuses[self.node["name"]] = self.status()
        for one in (failure for status in statuses.values() for failure in status.get("failures", ())):
            one.setdefault("order", self._arrival(one))
        if self.order["do"] in ("wait", "start"):
            for node, why in verdict.severed(statuses, self.hub.lost).items():
                self.hub.lost.setdefault(node, why)
        order = self._verdict(statuses, settled)
        if order["do"] == "give up":
            self._failed(order["cause"])
            return
        if order["do"] == "wait" and "rendezvous_port" in self.order:
            order["rendezvous_port"] = self.order["rendezvous_port"]
        if order["do"] == "start":
            order["rendezvous_port"] = self._port_of(order)
            if order["rendezvous_port"] is None:
                return  # that is a failure, which has been decided on
        if order["do"] == "stop" and self.order["do"] != "stop":
            asyncio.get_running_loop().call_later(self._ladder_s, self._decide, True)
        if order != self.order:
            self.order = order
            self.hub.announce()
            self.obey(order)

    def _verdict(self, statuses: dict[str, Message], settled: bool) -> Message:
        """In an elastic job, who is spared is a fault, and out for good."""
        assert self.hub
        if self.elastic is None:
            return verdict.decide(statuses, self._lost(), settled)
        for node in self.hub.statuses:  # a host that shuts down says so, and is as good as gone
            leaves = [one for one in statuses[node].get("failures", ()) if one["kind"] == "supervisor"]
            if leaves:
                self.hub.lost.setdefault(node, leaves[0]["reason"])
        lost = self._lost()
        for node in verdict.spare(list(statuses), list(lost), self.elastic.minimum):
            if not self.hub.is_dismissed(node):
                loss = failure("lost", node, lost[node])
                self.hub.dismiss(node, {"do": "finish", "state": "failed", "first_failure": loss})
                self.elastic.add(loss)
        order = verdict.decide(statuses, lost, settled, self.elastic.minimum)
        if order["do"] != "start" or not self.generations:
            return order
        return self.generations.order({node: status for node, status in statuses.items() if node not in lost})

    def _lost(self) -> dict[str, str]:
        """Who is gone, and why, as the hub sees it; ourselves first where we are the one that is cut off."""
        assert self.hub
        if not self.hub.lost or not self.hub.is_cut_off:
            return self.hub.lost
        why = f"no word from any other host for {LEASE_S:.0f} s: this one was cut off, or all of them went down"
        return dict.fromkeys((self.node["name"], *self.node["members"]), why)

    def _arrival(self, one: dict[str, Any]) -> int:
        key = (one["node"], one["kind"], one["rank"])
        return self._arrivals.setdefault(key, len(self._arrivals))

    def obey(self, order: Message) -> None:
        if self._left_behind():
            return
        self.order = order
        if "rendezvous_port" in order and not self._told_to_meet_at.done():
            self._told_to_meet_at.set_result(int(order["rendezvous_port"]))
        if order["do"] == "start" and self.phase == "joined" and order.get("generation", 0) == self.generation:
            self._meet_at(order)
        elif order["do"] == "regroup" and self.elastic and order["generation"] > self.elastic.wanted:
            self.elastic.wanted = order["generation"]
            self._spawn(self._regroup(HEARSAY_S if order["hearsay"] else SETTLE_S))
        elif order["do"] == "stop":
            self._stop(self._settle_s(order))
        elif order["do"] == "finish":
            self._spawn(self._finish(order["state"], order.get("first_failure")))

    def _settle_s(self, order: Message) -> float:
        if self.cancelled or order["state"] == "cancelled":
            return 0.0
        first = order.get("first_failure") or {}
        return HEARSAY_S if first.get("secondary") else SETTLE_S

    def _stop(self, settle_s: float = 0.0) -> None:
        if self._stopping is None:
            self._drain()  # what already happened here is a cause, what happens from now on is our doing
            self._stopping = self._spawn(self._end_ranks(settle_s))

    def _left_behind(self) -> bool:
        """Whether we stood still until our lease had run out. Then the others ended without us, and so do we."""
        if self.pulse.longest_s < LEASE_S or len(self.node["members"]) == 1:
            return False
        why = f"stood still for {self.pulse.longest_s:.0f} s (stopped, starved or asleep), and its lease is over"
        self._give_up(failure("lost", self.node["name"], why))
        return True

    def _give_up(self, cause: dict[str, Any]) -> None:
        self.order = {"do": "finish", "state": "failed", "first_failure": cause}
        self._spawn(self._finish("failed", cause))

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
        if not self._left_behind():
            lost = failure("lost", self.node["master"], why)
            self._give_up(verdict.first_cause([*self.failures, lost]) or lost)

    def _keeper_died(self) -> None:
        self._fail("supervisor", "the supervisor was asked to end (SIGTERM, or its keeper died)")

    def _time_is_up(self, limit_s: float) -> None:
        if self.phase not in ("done", "stopping", "ended"):
            self._fail("time", f"the time limit of {limit_s:g} s is over")

    # ---- ranks ------------------------------------------------------------------------------------------------

    def _meet_at(self, order: Message) -> None:
        members = order.get("members", self.node["members"])
        self.peers.forget(set(self.node["members"]) - set(members))
        fill = {
            "rendezvous_port": str(order["rendezvous_port"]),
            "job_dir": str(self.job.root),
            "python": sys.executable,
            "nodes": str(len(members)),
            "node_rank": str(members.index(self.node["name"])),
        }
        self.phase = "running"
        self._write(state="running", rendezvous_port=order["rendezvous_port"])
        self._spawn(self._run_torchrun([sys.executable, *(_fill(part, fill) for part in self.node["torchrun"])]))

    async def _run_torchrun(self, argv: list[str]) -> None:
        generation = self.generation
        if not (ended := self._launch(argv)):
            return
        self.children.watch_gpus()
        code = await ended
        if generation != self.generation:
            return  # we ended it, and the next one may run already
        self.children.end_gpu_watch()
        self._drain()
        if self.phase != "running" or (self.elastic and self.elastic.has_fallen()):
            return
        if code == 0:
            self.phase = "done"
            self.changed()
        elif not self.failures:
            self._torchrun_failed(code)

    def _torchrun_failed(self, code: int) -> None:
        found = self._found("torchrun", f"torchrun {_how(code)}", self.job.torchrun_log, code)
        if self.elastic and found["secondary"]:  # another host's fell while they met
            self._died({**found, "rank": self.node["rank_numbers"][0]})
        else:
            self._failed(found)

    async def _regroup(self, settle_s: float) -> None:
        """Ends what is left of this generation, and is ready for the next one."""
        assert self.elastic
        await asyncio.sleep(settle_s)
        if self._stopping:
            return
        self._drain()
        self.phase = "regrouping"
        self.changed()
        gone = await self.children.kill_all_of_it(self.elastic.leave())
        self._drain()
        if self._stopping:
            return
        if not gone:
            self._fail("supervisor", "what its ranks left does not end, though it was killed")
            return
        self.elastic.enter(self.elastic.wanted)
        self.phase = "joined"
        self.changed()

    def _launch(self, argv: list[str]) -> asyncio.Future[int] | None:
        """torchrun. The master's gets the socket that its store is to listen on, and we keep none of it."""
        if not self._claim:
            return self._start("torchrun", argv, self.job.torchrun_log, self.job.bin)
        with self._claim.store as store:
            environment = {**self.children.environment(), "ORCH_STORE": str(store.fileno())}
            return self._start("torchrun", argv, self.job.torchrun_log, self.job.bin, environment, [store.fileno()])

    def _start(
        self,
        kind: str,
        argv: list[str],
        log: Path,
        folder: Path,
        environment: dict[str, str] | None = None,
        handles: Sequence[int] = (),
    ) -> asyncio.Future[int] | None:
        """A child whose output goes to this log; None where this host cannot start it, which is told as a failure."""
        try:
            with open(log, "wb") as output:
                return self.children.start(argv, output, folder, environment, handles)
        except OSError as error:
            self._fail(kind, f"{_name(kind)} did not start: {trouble.told(error)}")
            return None

    async def _end_ranks(self, settle_s: float) -> None:
        await asyncio.sleep(settle_s)
        self._note(self.still.look(self.ranks, time.monotonic()))  # as they are found when they are ended
        self.phase = "stopping"
        self.changed()
        self.leftovers = await self.children.end_all_of_it(
            lambda: {rank["wrapper"] for rank in self.ranks.values() if rank.get("wrapper")}
        )
        self._drain()
        self.phase = "ended"
        self.changed()

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
                if isinstance(event := json.loads(line), dict):
                    self._event(event)

    def _event(self, event: dict[str, Any]) -> None:
        if "rank" in event:
            self._rank_event(event)
        elif "go" in event:
            self.go, self.pulse = event["go"], Pulse()
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
            again = {"restarts": rank.get("restarts", 0) + 1} if rank else {}
            again |= {key: rank[key] for key in ("dropped_bytes",) if key in rank}
            rank.clear()
            rank.update(pid=event["pid"], wrapper=event.get("wrapper"), started=time.time(), **again)
            if self.elastic:
                self.elastic.started(event)
            self.changed()
            return
        if event["event"] == "met":
            rank["met"] = True
            self.changed()
            return
        rank |= {key: event[key] for key in ("exit_code", "signal", "cause", "met") if key in event}
        if event["cause"] is None:
            rank.pop("does", None)  # else it is how the rank was found when it was ended
        rank["ended"] = time.time()
        if self.phase == "running":  # what the others have printed since the last look counts
            self._note(self.still.look(self.ranks, time.monotonic()))
        if lost := event.get("dropped_bytes"):
            rank["dropped_bytes"] = rank.get("dropped_bytes", 0) + lost
        failed = event["exit_code"] != 0 and event["cause"] is None
        if failed and self.phase == "running" and "trouble" in event:
            self._died(self._found("rank", f"rank {event['rank']} did not start: {event['trouble']}", None, None,
                                   rank=event["rank"], exit_code=event["exit_code"]))  # fmt: skip
        elif failed and self.phase == "running":
            how = f"was killed by {event['signal']}" if event["signal"] else f"exited {event['exit_code']}"
            log = self.job.rank(event["rank"]) / "stderr.log"
            found = self._found("rank", f"rank {event['rank']} {how}", log, None, rank=event["rank"],
                                exit_code=event["exit_code"], signal=event["signal"])  # fmt: skip
            self._died(found)
            return
        if self.elastic and self.phase == "running" and self.elastic.is_through():
            self.phase = "done"  # torchrun would still wait for the others' to be done
        self.changed()

    def _fail(self, kind: str, reason: str, *, log: Path | None = None, code: int | None = None, **more: Any) -> None:
        """log: where the reason may stand. code: a child's exit code, negative for a signal."""
        self._failed(self._found(kind, reason, log, code, **more))

    def _found(self, kind: str, reason: str, log: Path | None, code: int | None, **more: Any) -> dict[str, Any]:
        found = {**failure(kind, self.node["name"], reason), **more}
        if code is not None:
            found |= {"exit_code": code if code > 0 else None, "signal": signal_name(-code) if code < 0 else None}
        if found["signal"] == "SIGKILL" and out_of_memory_kills() > self._memory_kills:
            found["reason"] += f": {OUT_OF_MEMORY}"
        lines = log_tail(log) if log else []
        # Nobody who is killed from outside says why; one who aborts (NCCL's watchdog does) has said it before.
        if found["signal"] in (None, "SIGABRT"):
            found |= {"log_line": telling_line(lines), "secondary": is_secondary(lines)}
            if known := advice(lines):
                found["reason"] += f": {known}"
        return found

    def _died(self, found: dict[str, Any]) -> None:
        """One of our ranks. In an elastic job the hub has all of them start anew, until it has enough."""
        if self.elastic is None:
            self._failed(found)
        else:
            self.elastic.add(found)
            self.changed()

    def _failed(self, found: dict[str, Any]) -> None:
        if not self._folder_is_there:  # whatever else fails then fails of it
            found = self._folder_removed
        self.failures.append(found)
        if self.go is None:
            self.told.set()
        self.changed()

    # ---- small things -----------------------------------------------------------------------------------------

    @property
    def _token(self) -> bytes:
        return bytes.fromhex(self.node["token"])

    @property
    def _told_failures(self) -> list[dict[str, Any]]:
        """As many as a message and the record hold: causes before what only followed from another's death."""
        return sorted(self.failures, key=lambda one: bool(one["secondary"]))[:TOLD]

    @property
    def _dropped(self) -> dict[str, int]:
        """By rank, the bytes that it printed and the disk did not take."""
        return {rank: told["dropped_bytes"] for rank, told in self.ranks.items() if "dropped_bytes" in told}

    @property
    def _folder_removed(self) -> dict[str, Any]:
        return failure("folder", self.node["name"], f"the job's folder was removed ({self.job.root})")

    @property
    def _folder_is_there(self) -> bool:
        try:
            return self.job.control.exists()
        except OSError:  # a disk that fails does not say that it is gone
            return True

    @property
    def generation(self) -> int:
        return self.elastic.generation if self.elastic else 0

    def _port_of(self, start: Message) -> int | None:
        """Each generation has a port of its own, and the first one's has been tried; None where there is none."""
        assert self.hub
        if self.order["do"] == "start" and self.order.get("generation") == start.get("generation"):
            return int(self.order["rendezvous_port"])
        self.peers.close_rendezvous()
        claim = self._claim if self.order["do"] == "wait" else self._claim_port()
        if not claim:
            return None
        admit(claim.store, {own_source(claim.store), *self.hub.addresses.values()})
        shut_out(claim.store)  # who still waits there is no host of ours: those have tried it
        return claim.number

    def _claim_port(self) -> Claim | None:
        """The port that the plan names if nobody has it, else another, ours until the job ends."""
        if self._claim:
            self._claim.close()
            self._claim = None
        try:
            self._claim = claim_port(self.node["address"], self.node["rendezvous_port"])
        except OSError as error:
            self._fail("port", f"no port to meet at: {error}")
        return self._claim

    @property
    def _ladder_s(self) -> float:
        """The longest that ending a host's ranks can take, and a little for the news to travel."""
        return float(HEARSAY_S + 2 * self.node["grace_s"] + 2 * KILL_S)

    async def _watch_ranks(self) -> None:
        """Notes which of them stand still, and which have met nobody: for people, nothing is ended for it."""
        while True:
            await asyncio.sleep(STILL_LOOK_S)
            if self.phase == "running" and self._note(self.still.look(self.ranks, time.monotonic())):
                self._write()

    def _note(self, found: dict[str, str]) -> bool:
        """found: what each rank that runs does, {} where they print. Returns whether that is news."""
        before = json.dumps(self.ranks)
        for number, rank in self.ranks.items():
            if "ended" not in rank:
                rank.pop("does", None)
            if number in found:
                rank["does"] = found[number]
            if "met" not in rank and time.time() - rank.get("started", time.time()) > ALONE_S:
                rank["met"] = False
        if not found:
            self.record["quiet_since"] = None
        elif not self.record.get("quiet_since"):
            self.record["quiet_since"] = time.time() - QUIET_S
        return json.dumps(self.ranks) != before

    async def _watch_folder(self) -> None:
        """Somebody may remove the job's folder under us: then nobody can speak to us any more, so the job ends."""
        while self._folder_is_there:
            await asyncio.sleep(LOOK_S)
        self._failed(self._folder_removed)

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self._crash(error)

    def _crash(self, error: BaseException) -> NoReturn:
        """What nobody foresaw: the hub and the record learn of it, and the keeper ends what is left."""
        with contextlib.suppress(Exception):
            how = trouble.told(error) if isinstance(error, OSError) else repr(error)
            self.failures.append(failure("supervisor", self.node["name"], f"the supervisor failed: {how[:400]}"))
            self.changed()
        raise SystemExit(f"supervisor: {error!r}") from error

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What is no task of ours but a callback: `_decide` in its time, an event from the FIFO."""
        if "handle" in context and isinstance(context.get("exception"), Exception):
            self._crash(context["exception"])
        loop.default_exception_handler(context)


def failure(kind: str, node: str, reason: str) -> dict[str, Any]:
    """What went wrong, as the hub hears it. kind: "rank", "torchrun", "prepare", "lost", ..."""
    nothing = {"rank": None, "exit_code": None, "signal": None, "log_line": None, "secondary": False}
    return {"kind": kind, "node": node, "reason": reason, **nothing}


def _fill(part: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        part = part.replace("{" + name + "}", value)
    return part


def _name(kind: str) -> str:
    return "the `prepare` command" if kind == "prepare" else kind


def _how(code: int) -> str:
    return f"was killed by {signal_name(-code)}" if code < 0 else f"exited {code}"
