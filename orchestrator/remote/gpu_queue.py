"""The queue for this machine's GPUs: one ticket per waiting job, across logins and work folders.

    take(Ticket("mnist-1", 3, ("GPU-1",)), node="a", owner="5f0c...")    # lives LEASE_S unless it is renewed
    send("mnist-1", "a", {"do": "renew", "owner": "5f0c..."})            # its holder's answer; None without a ticket
    tickets, silent = all_tickets()
    ahead("mnist-1", ("GPU-1",), tickets)                                # earlier jobs that wait for one of these GPUs

First come, first served within a priority: a job's tickets have one number, larger than any ticket's of its priority
for its GPUs (`number_after`); lower numbers go first, equal numbers by job id. This order is the same on all hosts, so
no two jobs wait for each other. A ticket reserves its GPUs, free ones too; jobs that need other GPUs pass.

A ticket is an abstract Unix socket like a claim (`gpu_claim`). Its holder is the supervisor of a job that waits without
a controller (`turn`), else a process that ends if the ticket is not renewed for LEASE_S. Only the same login and
$ORCH_HOME can renew or cancel it. Since any login can bind and connect to such names, holders are asked in parallel
within ANSWER_S, each login is limited in number, and answers about our own tickets count only from our own login.

As a program it serves a waiting controller. Request: {"action", "workdir", "node", "job", "owner", "gpus"}; actions:

    look       report the queue for these GPUs and their holders
    take       leave a ticket with "number", then as look
    renew      renew the ticket, for "lease_s" if given, then as look
    leave      take the ticket back
    cancel     mark the ticket: its controller gives up at its next renewal

Answer: {"tickets", "ahead", "held", "silent", "cancelled"}: the queue, its part before this job, other jobs that have
the GPUs, logins whose sockets gave no answer ("" if unknown); {"lost": true} without a ticket.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import selectors
import signal
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .agent import lives
from .answer import Refused, reply
from .gpu_claim import Holder, holder_of
from .layout import WorkFolder
from .occupants import peer_of, user_name
from .processes import age_s, identify

LEASE_S = 60.0
MOST_LEASE_S = 600.0
MOST_NUMBER = (1 << 53) - 1  # as in jobs/job_queue.py
FIRST = {"high": 1, "normal": 1 << 51, "low": 1 << 52}  # first number of each priority
MOST, AT_ONCE = 256, 64  # most tickets of one login that are read, and asked at a time
REQUEST_BYTES, ANSWER_BYTES = 1 << 12, 1 << 14
ANSWER_S = 2.0  # for all holders' answers together, and for a request to arrive at its holder
SERVED, BACKLOG = 16, 4096  # open connections per login at a holder, and connections that wait to be accepted
NAMES = 4  # names per ticket: another login may have bound the first ones
REMEDY = "`--wait` queues behind it; or take other hosts (`--nodes`), or `--share` the GPU"
_TICK_S, _AGAIN_S = 1.0, 0.02
_PREFIX = "orch-wait-"


class Ticket(NamedTuple):
    """gpus: of this host. user: the login that holds it. since_s: its age."""

    job: str
    number: int
    gpus: Sequence[str]
    user: str = ""
    since_s: float = 0.0


def ahead(job: str, gpus: Collection[str], tickets: Iterable[Ticket]) -> list[Ticket]:
    """Other jobs' tickets for these GPUs before this job's own; all of them if it has no ticket."""
    ordered = sorted(tickets, key=_order)
    own = min((_order(ticket) for ticket in ordered if ticket.job == job), default=None)
    rivals = [ticket for ticket in ordered if ticket.job != job and not set(gpus).isdisjoint(ticket.gpus)]
    return [ticket for ticket in rivals if own is None or _order(ticket) < own]


def _order(ticket: Ticket) -> tuple[int, str]:
    return ticket.number, ticket.job


def number_after(numbers: Iterable[int], priority: str) -> int:
    """Any login may take the largest number of a priority: later tickets share it, in the order of their jobs."""
    first = FIRST[priority]
    last = min((start for start in FIRST.values() if start > first), default=MOST_NUMBER + 1) - 1
    return min(last, max(first, 1 + max((number for number in numbers if number <= last), default=0)))


def refuse_before_turn(job: str, gpus: Sequence[str]) -> None:
    if not gpus:
        return
    tickets, silent = all_tickets()
    for login in silent:
        sys.stderr.write(f"passed over: sockets of {login or 'another login'} look like tickets and give no answer\n")
    if earlier := ahead(job, gpus, tickets):
        whose = f"{earlier[0].user}'s " if earlier[0].user else ""
        wanted = next(gpu for gpu in gpus if gpu in earlier[0].gpus)
        raise Refused(f"GPU {wanted} is kept for {whose}job {earlier[0].job}, which waits for it", REMEDY)


# ---- a ticket and the process that holds it -------------------------------------------------------------------------


def take(ticket: Ticket, node: str, owner: str) -> None:
    """Forks a process that holds this ticket. owner: the controller's secret. Raises Refused if the ticket exists."""
    listener = _listener(ticket.job, node, owner)
    if os.fork():
        listener.close()
        return
    try:
        _detach()
        TicketHolder(listener, ticket, owner).serve()
    finally:
        os._exit(0)


def hold(ticket: Ticket, node: str, owner: str) -> TicketHolder:
    """Raises Refused if the ticket exists."""
    return TicketHolder(_listener(ticket.job, node, owner), ticket, owner)


def _listener(job: str, node: str, owner: str) -> socket.socket:
    taken = list[str]()
    for name in names_of(job, node, owner):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(name)
            listener.listen(BACKLOG)
            break
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
            taken.append(name)
    holders = {answer.uid for answer in _ask(taken, {}, only=os.getuid()).values()}
    if os.getuid() in holders:
        listener.close()
        raise Refused(f"{job} waits already", "run again: a new id is made each time")
    if len(taken) == NAMES:
        others = sorted("another login" if uid is None else user_name(uid) for uid in holders) or ["another login"]
        raise Refused(f"{', '.join(others)} took the names of {job}'s tickets", "run again: a new id is made each time")
    return listener


def names_of(job: str, node: str, owner: str) -> list[str]:
    # node: two nodes of a job may be on one machine. owner: keeps other logins from predicting the names.
    return [f"\0{_PREFIX}{hashlib.sha256(f'{job}/{node}/{owner}/{i}'.encode()).hexdigest()[:40]}" for i in range(NAMES)]


def _detach() -> None:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


class _Client(NamedTuple):
    uid: int
    until: float


class TicketHolder:
    """`serve` until the ticket's lease is over; or `turn` whenever `fileno` can be read, and every second."""

    def __init__(self, listener: socket.socket, ticket: Ticket, owner: str) -> None:
        self.ticket = ticket
        self._listener, self._owner = listener, owner
        self._taken = time.monotonic()
        self._until = self._taken + LEASE_S
        self._cancelled = self._left = False
        self._ready = selectors.EpollSelector()
        self._listener.setblocking(False)
        self._ready.register(self._listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        return self._ready.fileno()

    def serve(self) -> None:
        while time.monotonic() < self._until and not self._left:
            self.turn(_TICK_S)

    def turn(self, wait_s: float = 0.0) -> None:
        for key, _ in self._ready.select(wait_s):
            with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
                self._accept(self._ready) if key.fileobj is self._listener else self._answer(self._ready, key)
        for key in [*self._ready.get_map().values()]:
            if key.data and key.data.until < time.monotonic():
                _hang_up(self._ready, key)

    def close(self) -> None:
        for key in [*self._ready.get_map().values()]:
            _hang_up(self._ready, key)
        self._ready.close()

    def _accept(self, ready: selectors.BaseSelector) -> None:
        client, _ = self._listener.accept()
        client.setblocking(False)
        uid = peer_of(client)[1]
        theirs = [key for key in ready.get_map().values() if key.data and key.data.uid == uid]
        if len(theirs) >= SERVED:
            _hang_up(ready, min(theirs, key=lambda key: key.data.until))
        ready.register(client, selectors.EVENT_READ, _Client(uid, time.monotonic() + ANSWER_S))

    def _answer(self, ready: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        client = key.fileobj
        assert isinstance(client, socket.socket)
        try:
            request = json.loads(client.recv(REQUEST_BYTES))
            accepted = key.data.uid == os.getuid() and request.get("owner") == self._owner
            if accepted:
                self._obey(request)
            shown = self.ticket._replace(since_s=time.monotonic() - self._taken)._asdict()
            client.sendall(json.dumps({**shown, "cancelled": self._cancelled, "accepted": accepted}).encode())
        finally:
            _hang_up(ready, key)

    def _obey(self, request: Mapping[str, Any]) -> None:
        if request["do"] == "renew":
            self._until = time.monotonic() + min(float(request.get("lease_s", LEASE_S)), MOST_LEASE_S)
        elif request["do"] == "cancel":  # the ticket stays until its controller has seen the mark
            self._cancelled = True
        elif request["do"] == "leave":
            self._left = True


# ---- asking holders -------------------------------------------------------------------------------------------------


def send(job: str, node: str, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Our own holder's answer; None without a ticket. Raises Refused if our holder or an unknown login's is silent."""
    answers = _ask(names_of(job, node, str(request.get("owner"))), request, only=os.getuid()).values()
    ours = [answer for answer in answers if answer.uid in (None, os.getuid())]
    if accepted := [answer.content for answer in ours if answer.content and answer.content.get("accepted") is True]:
        return accepted[0]
    if any(answer.content is None for answer in ours):
        raise Refused(f"the ticket of {job} gives no answer within {ANSWER_S:.0f} s", "check what loads this host")
    return None


def all_tickets() -> tuple[list[Ticket], list[str]]:
    """In the queue's order, and the logins of sockets that are named like tickets but gave no answer."""
    found, silent = [], set[str]()
    for answer in _ask(all_names(), {}).values():
        if answer.content is None:
            silent.add("" if answer.uid is None else user_name(answer.uid))
        elif not answer.content.get("cancelled") and answer.uid is not None:
            with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
                found.append(_ticket(answer.content, user_name(answer.uid)))
    return sorted(found, key=_order), sorted(silent)


def all_names() -> list[str]:
    # Shuffled, so that no login's names always come first.
    try:
        lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    except OSError:
        return []
    paths = {line.split()[-1] for line in lines if f" @{_PREFIX}" in line}
    names = [f"\0{path[1:]}" for path in paths]
    random.shuffle(names)
    return names


def _ticket(answer: Mapping[str, Any], user: str) -> Ticket:
    job, number, gpus = answer["job"], answer["number"], answer["gpus"]
    if not (isinstance(job, str) and 0 < len(job) <= 200 and isinstance(gpus, list) and len(gpus) <= 64):
        raise ValueError("no ticket")
    if type(number) is not int or not 0 < number <= MOST_NUMBER or not all(isinstance(gpu, str) for gpu in gpus):
        raise ValueError("no ticket")
    return Ticket(job, number, gpus, user, float(answer["since_s"]))


class _Answer(NamedTuple):
    """uid: the holder's; None if it accepts no connection. content: None without an answer in time, {} if malformed."""

    uid: int | None = None
    content: dict[str, Any] | None = None


def _ask(names: Sequence[str], request: Mapping[str, Any], only: int | None = None) -> dict[str, _Answer]:
    """Answers within ANSWER_S, without names that have no listener. only: ask this login, up to its first answer."""
    asking = _Asking(names, request, only)
    asking.run()
    return asking.answers


class _Asking:
    def __init__(self, names: Sequence[str], request: Mapping[str, Any], only: int | None) -> None:
        self.answers: dict[str, _Answer] = {}
        self._names, self._request, self._only = deque(names), json.dumps(request).encode(), only
        self._until = time.monotonic() + ANSWER_S
        self._of_login, self._open, self._counted = Counter[int](), Counter[int](), set[str]()
        self._ready = selectors.DefaultSelector()

    def run(self) -> None:
        try:
            while (left_s := self._until - time.monotonic()) > 0 and (self._names or self._ready.get_map()):
                for _ in range(len(self._names)):
                    if time.monotonic() < self._until:
                        self._connect(self._names.popleft())
                wait_s = _AGAIN_S if self._names else left_s if self._ready.get_map() else 0
                for key, _ in self._ready.select(wait_s):
                    self._read(key)
                if self._only is not None and any(answer.content for answer in self.answers.values()):
                    return
        finally:
            for key in [*self._ready.get_map().values()]:
                _hang_up(self._ready, key)
            self._ready.close()

    def _connect(self, name: str) -> None:
        holder = None
        try:
            holder = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            holder.setblocking(False)
            holder.connect(name)
            uid = peer_of(holder)[1]
            if self._is_wanted(name, uid):
                if self._open[uid] < AT_ONCE:
                    holder.send(self._request)
                    self._open[uid] += 1
                    self._ready.register(holder, selectors.EVENT_READ, (name, uid, bytearray()))
                    holder = None
                else:
                    self._names.append(name)
        except ConnectionError:  # no process listens, or no longer
            self.answers.pop(name, None)
        except OSError:
            self.answers.setdefault(name, _Answer())
            self._names.append(name)
        finally:
            if holder:
                holder.close()

    def _is_wanted(self, name: str, uid: int) -> bool:
        if name not in self._counted:
            self._counted.add(name)
            self._of_login[uid] += 1
        wanted = self._only in (None, uid) and self._of_login[uid] <= MOST
        if wanted or self._only is not None:
            self.answers[name] = _Answer(uid)
        return wanted

    def _read(self, key: selectors.SelectorKey) -> None:
        name, uid, received = key.data
        assert isinstance(key.fileobj, socket.socket)
        try:
            more = key.fileobj.recv(ANSWER_BYTES)
        except OSError:
            more = b""
        received.extend(more)
        if not more or len(received) > ANSWER_BYTES:
            self.answers[name] = _Answer(uid, _content(bytes(received)))
            self._open[uid] -= 1
            _hang_up(self._ready, key)


def _content(received: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        answer = json.loads(received)
        return answer if isinstance(answer, dict) else {}
    return {}


def _hang_up(ready: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    ready.unregister(key.fileobj)
    assert isinstance(key.fileobj, socket.socket)
    key.fileobj.close()


def main(request: dict[str, Any]) -> None:
    reply(request, act)


def act(request: dict[str, Any]) -> dict[str, Any]:
    action, job, cancelled = request["action"], request.get("job", ""), False
    if action == "take":
        take_turn(request)
    elif action != "look":
        lease_s = request.get("lease_s", LEASE_S)
        answer = send(job, request["node"], {"do": action, "owner": request["owner"], "lease_s": lease_s})
        if answer is None:
            return {"lost": True}
        cancelled = answer["cancelled"]
    if action in ("leave", "cancel"):
        return {"cancelled": cancelled}
    return {**look(WorkFolder(request["workdir"]), job, request["gpus"]), "cancelled": cancelled}


def look(work: WorkFolder, job: str, gpus: Sequence[str]) -> dict[str, Any]:
    """The queue for these GPUs, as in the answer."""
    everyone, silent = all_tickets()
    queue = [ticket for ticket in everyone if not set(gpus).isdisjoint(ticket.gpus)]
    return {
        "tickets": [ticket._asdict() for ticket in queue],
        "ahead": [ticket._asdict() for ticket in ahead(job, gpus, queue)],
        "held": held(work, job, gpus),
        "silent": silent,
    }


def take_turn(request: dict[str, Any]) -> None:
    # Once, even if the first answer was lost on its way and the controller asks again.
    job, node, owner, number = (request[key] for key in ("job", "node", "owner", "number"))
    existing = send(job, node, {"do": "renew", "owner": owner})
    if existing is None or existing["number"] != number:
        take(Ticket(job, number, request["gpus"]), node, owner)


def held(work: WorkFolder, job: str, gpus: Sequence[str]) -> list[dict[str, Any]]:
    found = []
    for gpu in gpus:
        holder = holder_of(gpu) or _of_this_folder(work, gpu)
        if holder and holder.job != job:
            since_s = None
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                since_s = age_s(identify(holder.pid)) if holder.pid else None
            found.append({"job": holder.job, "user": holder.user, "since_s": since_s})
    return found


def _of_this_folder(work: WorkFolder, gpu: str) -> Holder | None:
    # The living job named in the GPU's lock file. Does not try the lock, since a starting job may need it now.
    try:
        job = work.job((work.locks / f"gpu-{gpu}.lock").read_text(errors="replace")[:200].strip() or "none")
    except (OSError, ValueError):
        return None
    agent = job.read_agent()
    return Holder(user_name(os.getuid()), job.id, int(agent["pid"])) if lives(agent) else None
