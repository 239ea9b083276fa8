"""The tickets of jobs that wait for GPUs of this machine, whoever's they are and wherever their work folders lie.

    take(Ticket("mnist-1", 3, ("GPU-1",)), node="a", owner="5f0c...")    # and renewed before LEASE_S are over:
    tell("mnist-1", "a", {"do": "renew", "owner": "5f0c..."})            # None: there is none
    there()                                                              # all of them, by number

As with the claim on a GPU, a ticket is a socket of Linux's abstract namespace, and no file: every login of the machine
sees it, the kernel says whose it is, and it is gone with the process that holds it. That process does nothing else, and
ends when nobody renewed the ticket for LEASE_S: a controller that died loses its place and no more. Only the same login
and $ORCH_HOME can renew a ticket, or take it back.

Every login can bind such names too, and connect to them. So all are asked at once and get ANSWER_S together; whoever
gives no answer by then is passed over; no login has more than its part of what is looked at or served; and only an
answer from our own login is believed about our own ticket.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import random
import selectors
import signal
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .answer import Refused
from .occupants import peer_of, user_name
from .turns import Ticket, in_the_way

LEASE_S = 60.0
MOST_LEASE_S = 600.0
MOST, AT_ONCE = 256, 64
"""Further tickets of a login are not looked at; as many of them are asked at a time."""
WORD_BYTES, TICKET_BYTES = 1 << 12, 1 << 14
ANSWER_S = 2.0
"""For the answers of all holders together, and for a word to its holder."""
SERVED, BACKLOG = 16, 4096
"""Connections that a holder keeps open for a login, and those that may wait to be accepted."""
NAMES = 4
"""Under which a ticket may be: another login may have bound the first ones."""
REMEDY = (
    "`--wait` queues behind it; or take other hosts (`--nodes`), end before it (`--time-limit`), or `--share` the GPU"
)
_TICK_S, _AGAIN_S = 1.0, 0.02
_PREFIX = "orch-wait-"


def take(ticket: Ticket, node: str, owner: str) -> None:
    """From now on this ticket is there. owner: not shown to others. Raises Refused where this job has one already."""
    listener = _bound(ticket.job, node, owner)
    if os.fork():
        listener.close()
        return
    try:
        _leave_the_connection()
        _Holder(listener, ticket, owner).hold()
    finally:
        os._exit(0)


def _bound(job: str, node: str, owner: str) -> socket.socket:
    """A listener of the first name that no other login has. Raises Refused."""
    taken = list[str]()
    for name in _own_names(job, node, owner):
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
    holders = {answer.uid for answer in _asked(taken, {}, only=os.getuid()).values()}
    if os.getuid() in holders:
        listener.close()
        raise Refused(f"{job} waits already", "run again: a new id is made each time")
    if len(taken) == NAMES:
        others = sorted("another login" if uid is None else user_name(uid) for uid in holders) or ["another login"]
        raise Refused(f"{', '.join(others)} took the names of {job}'s tickets", "run again: a new id is made each time")
    return listener


def tell(job: str, node: str, word: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the holder of this ticket answers; None where there is none, or where it is not ours. Raises Refused if a
    holder of ours, or one whose login is not known, gives no answer.
    """
    answers = _asked(_own_names(job, node, str(word.get("owner"))), word, only=os.getuid()).values()
    ours = [answer for answer in answers if answer.uid in (None, os.getuid())]
    if heard := [answer.said for answer in ours if answer.said and answer.said.get("heard") is True]:
        return heard[0]
    if any(answer.said is None for answer in ours):
        raise Refused(f"the ticket of {job} gives no answer within {ANSWER_S:.0f} s", "check what loads this host")
    return None


def there() -> list[Ticket]:
    """All that somebody waits with."""
    return seen()[0]


def seen() -> tuple[list[Ticket], list[str]]:
    """The same, and the logins some of whose sockets, named like tickets, gave no answer: these are passed over."""
    found, silent = [], set[str]()
    for answer in _asked(_names(), {}).values():
        if answer.said is None:
            silent.add("" if answer.uid is None else user_name(answer.uid))
        elif not answer.said.get("cancelled") and answer.uid is not None:
            with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
                found.append(_ticket(answer.said, user_name(answer.uid)))
    return sorted(found, key=lambda ticket: (ticket.number, ticket.job)), sorted(silent)


def refuse_before_turn(job: str, gpus: Sequence[str], longest_s: float | None) -> None:
    """Raises Refused where another job waits for one of these GPUs, and this one would be in its way. longest_s: so
    long this one has them at most.
    """
    if not gpus:
        return
    tickets, silent = seen()
    for login in silent:
        sys.stderr.write(f"passed over: sockets of {login or 'another login'} look like tickets and give no answer\n")
    if first := in_the_way(job, gpus, longest_s, tickets):
        whose = f"{first[0].user}'s " if first[0].user else ""
        wanted = next(gpu for gpu in gpus if gpu in first[0].gpus)
        raise Refused(f"GPU {wanted} is kept for {whose}job {first[0].job}, which waits for it", REMEDY)


class _Talk(NamedTuple):
    """Somebody who is connected to a holder. until: so long their word is awaited."""

    uid: int
    until: float


class _Holder:
    """The process behind one ticket."""

    def __init__(self, listener: socket.socket, ticket: Ticket, owner: str) -> None:
        self._listener, self._ticket, self._owner = listener, ticket, owner
        self._taken = time.monotonic()
        self._until = self._taken + LEASE_S
        self._starts = math.inf
        """When it does at the latest."""
        self._cancelled = self._left = False

    def hold(self) -> None:
        """Many may be connected at a time, and no login keeps another one's word waiting."""
        self._listener.setblocking(False)
        with selectors.DefaultSelector() as ready:
            ready.register(self._listener, selectors.EVENT_READ)
            while time.monotonic() < self._until and not self._left:
                for key, _ in ready.select(_TICK_S):
                    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
                        self._accept(ready) if key.fileobj is self._listener else self._hear(ready, key)
                for key in [*ready.get_map().values()]:
                    if key.data and key.data.until < time.monotonic():
                        _hang_up(ready, key)

    def _accept(self, ready: selectors.BaseSelector) -> None:
        """Of a login that has SERVED connections the oldest makes room."""
        talk, _ = self._listener.accept()
        talk.setblocking(False)
        uid = peer_of(talk)[1]
        theirs = [key for key in ready.get_map().values() if key.data and key.data.uid == uid]
        if len(theirs) >= SERVED:
            _hang_up(ready, min(theirs, key=lambda key: key.data.until))
        ready.register(talk, selectors.EVENT_READ, _Talk(uid, time.monotonic() + ANSWER_S))

    def _hear(self, ready: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        talk = key.fileobj
        assert isinstance(talk, socket.socket)
        try:
            word = json.loads(talk.recv(WORD_BYTES))
            heard = key.data.uid == os.getuid() and word.get("owner") == self._owner
            if heard:
                self._obey(word)
            talk.sendall(self._shown(heard))
        finally:
            _hang_up(ready, key)

    def _shown(self, heard: bool) -> bytes:
        now = time.monotonic()
        starts_s = max(0.0, self._starts - now) if math.isfinite(self._starts) else None
        shown = self._ticket._replace(since_s=now - self._taken, starts_s=starts_s)._asdict()
        return json.dumps({**shown, "cancelled": self._cancelled, "heard": heard}).encode()

    def _obey(self, word: Mapping[str, Any]) -> None:
        if word["do"] == "renew":
            self._until = time.monotonic() + min(float(word.get("lease_s", LEASE_S)), MOST_LEASE_S)
            if "starts_s" in word:
                self._starts = time.monotonic() + float(word["starts_s"])
        elif word["do"] == "cancel":  # it stays until its controller has heard of it
            self._cancelled = True
        elif word["do"] == "leave":
            self._left = True


def _hang_up(ready: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    ready.unregister(key.fileobj)
    assert isinstance(key.fileobj, socket.socket)
    key.fileobj.close()


def _leave_the_connection() -> None:
    """No stream and no signal of it reaches us any more."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


def _own_names(job: str, node: str, owner: str) -> list[str]:
    """node: two nodes of a job may be one machine. owner: so that no other login can foresee them."""
    return [f"\0{_PREFIX}{hashlib.sha256(f'{job}/{node}/{owner}/{i}'.encode()).hexdigest()[:40]}" for i in range(NAMES)]


def _names() -> list[str]:
    """Of all tickets on this machine."""
    try:
        lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    except OSError:
        return []
    paths = {line.split()[-1] for line in lines if f" @{_PREFIX}" in line}
    found = [f"\0{path[1:]}" for path in paths]
    random.shuffle(found)  # no login's names are always before another one's
    return found


class _Answer(NamedTuple):
    """uid: of who holds the name; None where so many ask it that the kernel lets no more. said: None for no answer in
    time, {} for what makes no sense.
    """

    uid: int | None = None
    said: dict[str, Any] | None = None


class _Asking:
    """Holders that are asked at once: see `_asked`."""

    def __init__(self, names: Sequence[str], word: Mapping[str, Any], only: int | None) -> None:
        self.found: dict[str, _Answer] = {}
        self._names, self._word, self._only = deque(names), json.dumps(word).encode(), only
        self._until = time.monotonic() + ANSWER_S
        self._of_login, self._open, self._counted = Counter[int](), Counter[int](), set[str]()
        self._ready = selectors.DefaultSelector()

    def ask(self) -> None:
        try:
            while (left_s := self._until - time.monotonic()) > 0 and (self._names or self._ready.get_map()):
                for _ in range(len(self._names)):
                    if time.monotonic() < self._until:
                        self._connect(self._names.popleft())
                wait_s = _AGAIN_S if self._names else left_s if self._ready.get_map() else 0
                for key, _ in self._ready.select(wait_s):
                    self._read(key)
                if self._only is not None and any(answer.said for answer in self.found.values()):
                    return
        finally:
            for key in [*self._ready.get_map().values()]:
                _hang_up(self._ready, key)
            self._ready.close()

    def _connect(self, name: str) -> None:
        """Puts the name off if its holder, its login or this process has too many connections open."""
        asking = None
        try:
            asking = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            asking.setblocking(False)
            asking.connect(name)
            uid = peer_of(asking)[1]
            if self._is_wanted(name, uid):
                if self._open[uid] < AT_ONCE:
                    asking.send(self._word)
                    self._open[uid] += 1
                    self._ready.register(asking, selectors.EVENT_READ, (name, uid, bytearray()))
                    asking = None
                else:
                    self._names.append(name)
        except ConnectionError:  # nobody listens, or no longer
            self.found.pop(name, None)
        except OSError:
            self.found.setdefault(name, _Answer())
            self._names.append(name)
        finally:
            if asking:
                asking.close()

    def _is_wanted(self, name: str, uid: int) -> bool:
        if name not in self._counted:
            self._counted.add(name)
            self._of_login[uid] += 1
        wanted = self._only in (None, uid) and self._of_login[uid] <= MOST
        if wanted or self._only is not None:
            self.found[name] = _Answer(uid)
        return wanted

    def _read(self, key: selectors.SelectorKey) -> None:
        name, uid, said = key.data
        assert isinstance(key.fileobj, socket.socket)
        try:
            more = key.fileobj.recv(TICKET_BYTES)
        except OSError:
            more = b""
        said.extend(more)
        if not more or len(said) > TICKET_BYTES:
            self.found[name] = _Answer(uid, _understood(bytes(said)))
            self._open[uid] -= 1
            _hang_up(self._ready, key)


def _asked(names: Sequence[str], word: Mapping[str, Any], only: int | None = None) -> dict[str, _Answer]:
    """What the holders of these names answer within ANSWER_S; a name at which nobody listens is left out. only: the
    login whose first answer is enough; others' holders are not asked.
    """
    asking = _Asking(names, word, only)
    asking.ask()
    return asking.found


def _understood(said: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        answer = json.loads(said)
        return answer if isinstance(answer, dict) else {}
    return {}


def _ticket(answer: Mapping[str, Any], user: str) -> Ticket:
    """Raises ValueError, TypeError, KeyError for what is none: any login may answer."""
    job, number, gpus = answer["job"], answer["number"], answer["gpus"]
    if not (isinstance(job, str) and 0 < len(job) <= 200 and isinstance(gpus, list) and len(gpus) <= 64):
        raise ValueError("no ticket")
    if type(number) is not int or not 0 < number < 1 << 53 or not all(isinstance(gpu, str) for gpu in gpus):
        raise ValueError("no ticket")
    longest_s, starts_s = (_seconds(answer.get(name)) for name in ("longest_s", "starts_s"))
    return Ticket(job, number, gpus, user, float(answer["since_s"]), longest_s, starts_s)


def _seconds(said: Any) -> float | None:
    if said is not None and not 0 <= float(said) < math.inf:
        raise ValueError("no ticket")
    return None if said is None else float(said)
