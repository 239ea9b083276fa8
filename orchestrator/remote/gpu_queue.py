"""The queue for this machine's GPUs: a ticket for each job that waits, whatever login or work folder it comes from.

    take(Ticket("mnist-1", 3, ("GPU-1",)), node="a", owner="5f0c...")    # lives LEASE_S unless it is renewed
    send("mnist-1", "a", {"do": "renew", "owner": "5f0c..."})            # its holder's answer; None without a ticket
    tickets, silent = all_tickets()
    ahead("mnist-1", ("GPU-1",), tickets)                                # earlier jobs that wait for one of these GPUs

First come, first served: all tickets of a job have one number, one more than the largest number of any ticket for one
of its GPUs when it came. The smaller number goes first; equal numbers go by job id. This is one order for all hosts and
controllers and needs no clock, so no two jobs ever wait for each other. A ticket reserves its GPUs, free ones too: only
a job that needs none of them passes it.

Like the claim on a GPU, a ticket is a socket in Linux's abstract namespace: every login of the machine sees it, the
kernel reports its owner, and it disappears with the process that holds it. That process does nothing else and ends if
nobody renews the ticket for LEASE_S: a controller that dies loses its place, nothing more. Only the same login and
$ORCH_HOME can renew a ticket or take it back.

Any login can bind such names and connect to them. So all holders are asked at once and have ANSWER_S together; a holder
that has not answered by then is passed over; no login gets more than its part of the sockets that are asked or served;
and an answer about our own ticket is believed only from our own login.
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
MOST, AT_ONCE = 256, 64
"""Tickets of one login that are read, and how many of them are asked at a time."""
REQUEST_BYTES, ANSWER_BYTES = 1 << 12, 1 << 14
ANSWER_S = 2.0
"""For all holders' answers together, and for a request to arrive at its holder."""
SERVED, BACKLOG = 16, 4096
"""Connections of one login that a holder keeps open, and connections that wait to be accepted."""
NAMES = 4
"""Names that a ticket may have: another login may have bound the first ones."""
REMEDY = "`--wait` queues behind it; or take other hosts (`--nodes`), or `--share` the GPU"
_TICK_S, _AGAIN_S = 1.0, 0.02
_PREFIX = "orch-wait-"


class Ticket(NamedTuple):
    """gpus: the GPUs of this host that the job waits for. user: the login that holds it. since_s: its age."""

    job: str
    number: int
    gpus: Sequence[str]
    user: str = ""
    since_s: float = 0.0


def ahead(job: str, gpus: Collection[str], tickets: Iterable[Ticket]) -> list[Ticket]:
    """Other jobs' tickets for one of these GPUs before this job's own; all of them if it has no ticket."""
    ordered = sorted(tickets, key=_order)
    own = min((_order(ticket) for ticket in ordered if ticket.job == job), default=None)
    rivals = [ticket for ticket in ordered if ticket.job != job and not set(gpus).isdisjoint(ticket.gpus)]
    return [ticket for ticket in rivals if own is None or _order(ticket) < own]


def _order(ticket: Ticket) -> tuple[int, str]:
    return ticket.number, ticket.job


def refuse_before_turn(job: str, gpus: Sequence[str]) -> None:
    """Raises Refused if an earlier job waits for one of these GPUs."""
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
    """Leaves a process that holds this ticket. owner: a secret of the controller's. Raises Refused if the job has a
    ticket already.
    """
    listener = _listener(ticket.job, node, owner)
    if os.fork():
        listener.close()
        return
    try:
        _leave_the_connection()
        _Holder(listener, ticket, owner).serve()
    finally:
        os._exit(0)


def _listener(job: str, node: str, owner: str) -> socket.socket:
    """A socket with the first name that no other login has bound. Raises Refused."""
    taken = list[str]()
    for name in _names_of(job, node, owner):
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


def _names_of(job: str, node: str, owner: str) -> list[str]:
    """node: two nodes of a job may be one machine. owner: keeps other logins from predicting the names."""
    return [f"\0{_PREFIX}{hashlib.sha256(f'{job}/{node}/{owner}/{i}'.encode()).hexdigest()[:40]}" for i in range(NAMES)]


def _leave_the_connection() -> None:
    """None of its streams and signals reaches this process any more."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


class _Client(NamedTuple):
    """A connection to a holder. until: its request has to be there by then."""

    uid: int
    until: float


class _Holder:
    """The process behind one ticket."""

    def __init__(self, listener: socket.socket, ticket: Ticket, owner: str) -> None:
        self._listener, self._ticket, self._owner = listener, ticket, owner
        self._taken = time.monotonic()
        self._until = self._taken + LEASE_S
        self._cancelled = self._left = False

    def serve(self) -> None:
        """Until the ticket is given back or its lease is over. No login delays another login's requests."""
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as ready:
            ready.register(self._listener, selectors.EVENT_READ)
            while time.monotonic() < self._until and not self._left:
                for key, _ in ready.select(_TICK_S):
                    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
                        self._accept(ready) if key.fileobj is self._listener else self._answer(ready, key)
                for key in [*ready.get_map().values()]:
                    if key.data and key.data.until < time.monotonic():
                        _hang_up(ready, key)

    def _accept(self, ready: selectors.BaseSelector) -> None:
        """The oldest connection of a login makes room for the one after SERVED."""
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
            shown = self._ticket._replace(since_s=time.monotonic() - self._taken)._asdict()
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
    """The answer of our own holder of this ticket; None without one. Raises Refused if our holder, or one whose login
    cannot be seen, gives no answer.
    """
    answers = _ask(_names_of(job, node, str(request.get("owner"))), request, only=os.getuid()).values()
    ours = [answer for answer in answers if answer.uid in (None, os.getuid())]
    if accepted := [answer.content for answer in ours if answer.content and answer.content.get("accepted") is True]:
        return accepted[0]
    if any(answer.content is None for answer in ours):
        raise Refused(f"the ticket of {job} gives no answer within {ANSWER_S:.0f} s", "check what loads this host")
    return None


def all_tickets() -> tuple[list[Ticket], list[str]]:
    """In the queue's order; and the logins of sockets that are named like tickets but gave no answer."""
    found, silent = [], set[str]()
    for answer in _ask(_all_names(), {}).values():
        if answer.content is None:
            silent.add("" if answer.uid is None else user_name(answer.uid))
        elif not answer.content.get("cancelled") and answer.uid is not None:
            with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
                found.append(_ticket(answer.content, user_name(answer.uid)))
    return sorted(found, key=_order), sorted(silent)


def _all_names() -> list[str]:
    """Of all tickets on this machine, shuffled: no login's names always come first."""
    try:
        lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    except OSError:
        return []
    paths = {line.split()[-1] for line in lines if f" @{_PREFIX}" in line}
    names = [f"\0{path[1:]}" for path in paths]
    random.shuffle(names)
    return names


def _ticket(answer: Mapping[str, Any], user: str) -> Ticket:
    """Raises ValueError, TypeError, KeyError for anything but a ticket: any login may answer."""
    job, number, gpus = answer["job"], answer["number"], answer["gpus"]
    if not (isinstance(job, str) and 0 < len(job) <= 200 and isinstance(gpus, list) and len(gpus) <= 64):
        raise ValueError("no ticket")
    if type(number) is not int or not 0 < number < 1 << 53 or not all(isinstance(gpu, str) for gpu in gpus):
        raise ValueError("no ticket")
    return Ticket(job, number, gpus, user, float(answer["since_s"]))


class _Answer(NamedTuple):
    """uid: the holder's; None if the kernel accepts no further connection to it. content: None without an answer in
    time, {} for a malformed one.
    """

    uid: int | None = None
    content: dict[str, Any] | None = None


def _ask(names: Sequence[str], request: Mapping[str, Any], only: int | None = None) -> dict[str, _Answer]:
    """The answers of these names' holders within ANSWER_S, without names at which no process listens. only: a login
    whose first answer is enough; other logins' holders are not asked.
    """
    asking = _Asking(names, request, only)
    asking.run()
    return asking.answers


class _Asking:
    """Many holders, asked at once."""

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
        """Puts the name off if its holder, its login or this process has too many connections open."""
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


# A job's place in the queue for this host's GPUs. The controller that waits asks again and again.
#
# Request: {"action", "workdir", "node", "job", "owner", "gpus"}; the actions are
# - look       reports the queue for these GPUs and who has them
# - take       leaves a ticket with this "number", then as look
# - renew      renews the ticket, for "lease_s" if given, then as look
# - leave      takes the ticket back
# - cancel     marks the ticket, so that its controller gives up at its next renewal
#
# Answer: {"tickets", "ahead", "held", "silent", "cancelled"}: the queue for these GPUs, the part of it before this job,
# the other jobs that have them now, the logins whose sockets gave no answer ("" for an unknown login);
# {"lost": true} if there is no such ticket.


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
    gpus = request["gpus"]
    everybody, silent = all_tickets()
    queue = [ticket for ticket in everybody if not set(gpus).isdisjoint(ticket.gpus)]
    return {
        "tickets": [ticket._asdict() for ticket in queue],
        "ahead": [ticket._asdict() for ticket in ahead(job, gpus, queue)],
        "held": held(WorkFolder(request["workdir"]), job, gpus),
        "silent": silent,
        "cancelled": cancelled,
    }


def take_turn(request: dict[str, Any]) -> None:
    """Once, even if the first answer was lost on its way and the controller asks again."""
    job, node, owner, number = (request[key] for key in ("job", "node", "owner", "number"))
    existing = send(job, node, {"do": "renew", "owner": owner})
    if existing is None or existing["number"] != number:
        take(Ticket(job, number, request["gpus"]), node, owner)


def held(work: WorkFolder, job: str, gpus: list[str]) -> list[dict[str, Any]]:
    """The other jobs that have these GPUs: of any login on this machine, and of this work folder."""
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
    """The living job that holds the GPU's lock file. The lock itself is not tried: a start may want it now."""
    try:
        job = work.job((work.locks / f"gpu-{gpu}.lock").read_text(errors="replace")[:200].strip() or "none")
    except (OSError, ValueError):
        return None
    agent = job.read_agent()
    return Holder(user_name(os.getuid()), job.id, int(agent["pid"])) if lives(agent) else None
