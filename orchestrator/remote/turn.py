"""A job that waits for its GPUs (`--wait`): its hosts take their turn together, and no controller is needed.

On every host, `QueuePlace` holds the ticket (`gpu_queue`) and looks who is ahead; on the master's, `Turn` decides:

    {"do": "queue", "number": 0}              hosts report the number that a new ticket would get
    {"do": "queue", "number": 7}              hosts take tickets with the largest of these numbers
    {"do": "queue", "number": 7, "claim": 2}  every host has reported that its turn has come: claim the GPUs
    {"do": "wait", "turn": 2}                 all have claimed them: tickets are given back, the job begins

If a host cannot claim its GPUs, the next order has no `claim`: all others release theirs, and wait on. So a job never
keeps GPUs on one host while it waits for others with another job that does the same.

If every host could claim its GPUs at `prepare`, the job does not queue: `go` is "at_once" (`supervisor`).
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from . import gpu_queue
from .answer import Refused
from .commands import run
from .gpu_queue import Ticket, TicketHolder
from .layout import WorkFolder
from .link import asyncio
from .messages import Order, Status, TurnReport
from .occupants import QUERY, occupants

LOOK_S, FAR_LOOK_S = 1.0, 4.0
"""Longer behind other waiting jobs, since each look costs the host something."""
CLAIM_S = 10.0
OCCUPIED_S = 15.0
"""Between two looks at the memory that other programs leave."""
SMI_S = 30.0
ROOM = ("--query-gpu=uuid,memory.total,memory.used,compute_mode", "--format=csv,noheader,nounits")
UNREPORTED_MIB = 1 << 10  # as in hosts/occupied.py
SHOWN = 8
MOST_HANDLES = 253  # SCM_MAX_FD
PLACE_KEYS = ("job", "user", "number", "since_s")


class Claims:
    """The supervisor's side of the keeper's claims on the job's GPUs (`keeper`). Blocks while the keeper works.

    handles: of the claims that the keeper has.
    """

    def __init__(self, line: socket.socket, handles: Sequence[int] = ()) -> None:
        self._line, self._handles = line, [*handles]

    @property
    def has_any(self) -> bool:
        return bool(self._handles)

    def take(self) -> None:
        """Raises Refused, then nothing is claimed."""
        answer, handles = self._ask("take")
        self._handles = handles  # ours, too: if the keeper is killed, the GPUs stay claimed until the ranks have ended
        if "error" in answer:
            raise Refused(answer["error"], answer["remedy"])

    def release(self) -> None:
        for handle in self._handles:
            socket.close(handle)
        self._handles = []
        self._ask("release")

    def _ask(self, what: str) -> tuple[dict[str, Any], list[int]]:
        try:
            self._line.sendall(what.encode())
            content, handles, _, _ = socket.recv_fds(self._line, 1 << 12, MOST_HANDLES)
            return dict(json.loads(content)), handles
        except (OSError, ValueError) as error:
            raise Refused("its keeper is gone", "run again") from error


class QueuePlace:
    """This host's place in the queue. changed: called after every change of `report`."""

    def __init__(self, job: str, node: dict[str, Any], claims: Claims, changed: Callable[[], None]) -> None:
        self.report: TurnReport = {"next": 0, "number": 0, "has_come": False, "claimed": 0, "refused": 0}
        self.shown: dict[str, Any] = {}
        """For agent.json: {"place", "ahead", "held", "occupied", "silent", "at"}."""
        self._job, self._node, self._claims, self._changed = job, node, claims, changed
        self._asked: dict[str, Any] = node["queue"]
        self._holder: TicketHolder | None = None
        self._order: Order = {"do": "queue"}
        self._woken, self._is_over = asyncio.Event(), False
        self._room_at, self._room = -OCCUPIED_S, ""
        self._told: object = None

    def obey(self, order: Order) -> None:
        if order.get("turn") and order.get("turn") == self.report["claimed"]:
            self._is_over = True
        elif order["do"] != "queue":
            return
        self._order = order
        self._woken.set()

    def leave(self) -> None:
        """Ends `come`."""
        self._is_over = True
        self._woken.set()

    async def come(self) -> None:
        """Returns after the job's turn has come, or `leave`. Raises Refused if no ticket can be taken."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as looks:  # holders must answer while we ask them; no thread stays for the ranks
            try:
                await loop.run_in_executor(looks, self._claims.release)  # of `prepare`
                while not self._is_over:
                    self._woken.clear()
                    await loop.run_in_executor(looks, self._follow_order)
                    self._serve_ticket()
                    seen = await loop.run_in_executor(looks, self._look)
                    self._show(seen)
                    far = seen["ahead"] and not self._order.get("claim")
                    if not self._is_over:
                        await self._wait(FAR_LOOK_S if far else LOOK_S)
            finally:
                self._drop_ticket()

    async def _wait(self, wait_s: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._woken.wait(), wait_s)
        if self._holder:
            self._holder.turn()

    # ---- orders -------------------------------------------------------------------------------------------------

    def _follow_order(self) -> None:
        claim, report = self._order.get("claim", 0), self.report
        if report["claimed"] and report["claimed"] != claim and not self._is_over:
            self._claims.release()
            self.report = {**self.report, "claimed": 0}
        elif claim and claim not in (report["claimed"], report["refused"]):
            try:
                self._claims.take()
                self.report = {**self.report, "claimed": claim}
            except Refused:
                self.report = {**self.report, "refused": claim, "has_come": False}

    def _serve_ticket(self) -> None:
        number = self._order.get("number", 0)
        if self._holder and self._holder.ticket.number != number:
            self._drop_ticket()
        if number and not self._holder:
            ticket = Ticket(self._job, number, tuple(self._node["gpu_uuids"]))
            self._holder = gpu_queue.hold(ticket)
            asyncio.get_running_loop().add_reader(self._holder.fileno(), self._holder.turn)
        self.report = {**self.report, "number": number}

    def _drop_ticket(self) -> None:
        if self._holder:
            asyncio.get_running_loop().remove_reader(self._holder.fileno())
            self._holder.close()
            self._holder = None

    # ---- looks --------------------------------------------------------------------------------------------------

    def _look(self) -> dict[str, Any]:
        gpus = self._node["gpu_uuids"]
        if not gpus:
            return {"tickets": [], "ahead": [], "held": [], "silent": [], "occupied": ""}
        seen = gpu_queue.look(WorkFolder(self._node["workdir"]), self._job, gpus)
        is_first = bool(self._holder) and not seen["ahead"] and not seen["held"]
        return {**seen, "occupied": self._occupied() if is_first and not self.report["claimed"] else ""}

    def _occupied(self) -> str:
        if time.monotonic() > self._room_at + OCCUPIED_S:
            self._room_at = time.monotonic()
            self._room = occupied(self._node["gpu_uuids"], self._asked["needed_bytes"])
        return self._room

    def _show(self, seen: Mapping[str, Any]) -> None:
        rivals = [row["number"] for row in seen["tickets"] if row["job"] != self._job]
        has_come = bool(self.report["number"]) and not (seen["ahead"] or seen["held"] or seen["occupied"])
        self.report = {
            **self.report,
            "next": gpu_queue.number_after(rivals, self._asked["priority"]),
            "has_come": has_come or bool(self.report["claimed"]),
        }
        self.shown = {
            "place": 1 + len(seen["ahead"]),
            "ahead": [{key: row[key] for key in PLACE_KEYS} for row in seen["ahead"][-SHOWN:]],
            "held": seen["held"][:SHOWN],
            "occupied": seen["occupied"],
            "silent": seen["silent"][:SHOWN],
            "at": time.time(),
        }
        if (now := (self.report, _without_ages(self.shown))) != self._told:
            self._told = now
            self._changed()


def _without_ages(shown: Mapping[str, Any]) -> dict[str, Any]:
    rows = {name: [{**row, "since_s": 0} for row in shown.get(name, ())] for name in ("ahead", "held")}
    return {**shown, **rows, "at": 0}


def occupied(gpus: Sequence[str], needed_bytes: int) -> str:
    """Why other programs keep a job off these GPUs: their memory, or the compute mode; "" if nvidia-smi fails."""
    done = run(["nvidia-smi", *ROOM], SMI_S)
    for line in done["out"].splitlines() if done["rc"] == 0 else ():
        uuid, *figures = (field.strip() for field in line.split(","))
        if uuid not in gpus or len(figures) != 3 or not all(figure.isdecimal() for figure in figures[:2]):
            continue
        total, used = map(int, figures[:2])
        if figures[2].startswith("Exclusive") and (used >= UNREPORTED_MIB or _has_program(uuid)):
            return f"another program uses GPU {uuid}, which is in exclusive compute mode"
        needed = min(needed_bytes >> 20, total - UNREPORTED_MIB)
        if used >= UNREPORTED_MIB and total - used < needed:
            return f"other programs leave {total - used} MiB of {total} on GPU {uuid}, and it needs about {needed}"
    return ""


def _has_program(gpu: str) -> bool:
    return gpu in occupants(run(["nvidia-smi", *QUERY], SMI_S)["out"])


class Turn:
    """On the master's host: when all hosts claim their GPUs. Pure, but for the clock that it is given.

    order = turn.order(statuses, now_s)     # None once all have claimed them
    """

    def __init__(self) -> None:
        self.claim = 0
        self._number = self._round = 0
        self._until_s = 0.0

    def order(self, statuses: Mapping[str, Status | None], now_s: float) -> Order | None:
        """statuses: None if a host has given no sign for a while."""
        reports = [status.get("turn") if status else None for status in statuses.values()]
        there = [report for report in reports if report]
        if len(there) < len(reports):
            self.claim = 0
        elif not self._number and all(report["next"] for report in there):
            self._number = max(report["next"] for report in there)
        elif self.claim and all(report["claimed"] == self.claim for report in there):
            return None
        elif self.claim and (now_s > self._until_s or any(report["refused"] == self.claim for report in there)):
            self.claim = 0
        elif not self.claim and all(self._is_ready(report) for report in there):
            self._round += 1
            self.claim, self._until_s = self._round, now_s + CLAIM_S
        order: Order = {"do": "queue", "number": self._number}
        return {**order, "claim": self.claim} if self.claim else order

    def _is_ready(self, report: TurnReport) -> bool:
        return bool(self._number) and report["number"] == self._number and report["has_come"] and not report["claimed"]
