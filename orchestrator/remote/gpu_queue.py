"""The queue for this machine's GPUs: one ticket per waiting job, across logins and work folders.

    holder = hold(Ticket("mnist-1", 3, ("GPU-1",)))      # by the supervisor of the job (`turn`), until it is closed
    tickets, silent = all_tickets()
    ahead("mnist-1", ("GPU-1",), tickets)                # earlier jobs that wait for one of these GPUs

First come, first served within a priority: a job's tickets have one number, larger than any ticket's of its priority
for its GPUs (`number_after`); lower numbers go first, equal numbers by job id. This order is the same on all hosts, so
no two jobs wait for each other. A ticket reserves its GPUs, free ones too; jobs that need other GPUs pass.

A ticket is an abstract Unix socket like a claim (`gpu_claim`), with a random name. Since any login can bind and connect
to such names, holders are asked in parallel within ANSWER_S, and each login is limited in number.

As a program it reports the queue for some GPUs. Request: {"workdir", "gpus"}. Answer: {"tickets", "held", "silent"}:
the queue, jobs that have the GPUs, logins whose sockets gave no answer ("" if unknown); "ahead" is of `look`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
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

MOST_NUMBER = (1 << 53) - 1  # as in jobs/queue_place.py
MOST_SINCE_S = 1e9
FIRST = {"high": 1, "normal": 1 << 51, "low": 1 << 52}  # first number of each priority
MOST, AT_ONCE = 256, 64  # most tickets of one login that are read, and asked at a time
REQUEST_BYTES, ANSWER_BYTES = 1 << 12, 1 << 14
ANSWER_S = 2.0  # for all holders' answers together, and for a request to arrive at its holder
SERVED, BACKLOG = 16, 4096  # open connections per login at a holder, and connections that wait to be accepted
REMEDY = "`--wait` queues behind it; or take other hosts (`--nodes`), or `--share` the GPU"
_AGAIN_S = 0.02
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


# ---- a ticket and its holder ----------------------------------------------------------------------------------------


def hold(ticket: Ticket) -> TicketHolder:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{_PREFIX}{os.urandom(20).hex()}")
    listener.listen(BACKLOG)
    return TicketHolder(listener, ticket)


class _Client(NamedTuple):
    uid: int
    until: float


class TicketHolder:
    """Answers others in `turn`, to be called whenever `fileno` can be read, and every second."""

    def __init__(self, listener: socket.socket, ticket: Ticket) -> None:
        self.ticket = ticket
        self._listener, self._taken = listener, time.monotonic()
        self._ready = selectors.EpollSelector()
        self._listener.setblocking(False)
        self._ready.register(self._listener, selectors.EVENT_READ)

    def fileno(self) -> int:
        return self._ready.fileno()

    def turn(self) -> None:
        for key, _ in self._ready.select(0):
            with contextlib.suppress(OSError, ValueError):  # a full table, or hung up by `_accept`
                self._accept() if key.fileobj is self._listener else self._answer(key)
        for key in [*self._ready.get_map().values()]:
            if key.data and key.data.until < time.monotonic():
                _hang_up(self._ready, key)

    def close(self) -> None:
        for key in [*self._ready.get_map().values()]:
            _hang_up(self._ready, key)
        self._ready.close()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        client.setblocking(False)
        uid = peer_of(client)[1]
        theirs = [key for key in self._ready.get_map().values() if key.data and key.data.uid == uid]
        if len(theirs) >= SERVED:
            _hang_up(self._ready, min(theirs, key=lambda key: key.data.until))
        self._ready.register(client, selectors.EVENT_READ, _Client(uid, time.monotonic() + ANSWER_S))

    def _answer(self, key: selectors.SelectorKey) -> None:
        client = key.fileobj
        assert isinstance(client, socket.socket)
        try:
            client.recv(REQUEST_BYTES)
            shown = self.ticket._replace(since_s=time.monotonic() - self._taken)
            client.sendall(json.dumps(shown._asdict()).encode())
        finally:
            _hang_up(self._ready, key)


# ---- asking holders -------------------------------------------------------------------------------------------------


def all_tickets() -> tuple[list[Ticket], list[str]]:
    """In the queue's order, and the logins of sockets that are named like tickets but gave no answer."""
    found, silent = [], set[str]()
    for answer in _ask(all_names()).values():
        if answer.content is None:
            silent.add("" if answer.uid is None else user_name(answer.uid))
        elif answer.uid is not None:
            with contextlib.suppress(KeyError, TypeError, ValueError):
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
    since_s = answer["since_s"]
    if type(since_s) not in (int, float) or not 0 <= since_s < MOST_SINCE_S:  # false for NaN
        raise ValueError("no ticket")
    return Ticket(job, number, gpus, user, float(since_s))


class _Answer(NamedTuple):
    """uid: the holder's; None if it accepts no connection. content: None without an answer in time, {} if malformed."""

    uid: int | None = None
    content: dict[str, Any] | None = None


def _ask(names: Sequence[str]) -> dict[str, _Answer]:
    """Answers within ANSWER_S, without names that have no listener."""
    asking = _Asking(names)
    asking.run()
    return asking.answers


class _Asking:
    def __init__(self, names: Sequence[str]) -> None:
        self.answers: dict[str, _Answer] = {}
        self._names = deque(names)
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
                    holder.send(b"{}")  # the holder answers a request
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
        if self._of_login[uid] > MOST:
            return False
        self.answers[name] = _Answer(uid)
        return True

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
    return look(WorkFolder(request["workdir"]), "", request["gpus"])


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
