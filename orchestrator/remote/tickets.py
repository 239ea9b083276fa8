"""The tickets of jobs that wait for GPUs of this machine, whoever's they are and wherever their work folders lie.

    take(Ticket("mnist-1", 3, ("GPU-1",)), node="a", owner="5f0c...")    # and renewed before LEASE_S are over:
    tell("mnist-1", "a", {"do": "renew", "owner": "5f0c..."})            # None: there is none
    there()                                                              # all of them, by number

As with the claim on a GPU, a ticket is a socket of Linux's abstract namespace, and no file: every login of the machine
sees it, the kernel says whose it is, and it is gone with the process that holds it. That process does nothing else, and
ends when nobody renewed the ticket for LEASE_S: a controller that died loses its place and no more. Only the same login
and $ORCH_HOME can renew a ticket, or take it back.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .answer import Refused
from .occupants import peer_of, user_name
from .turns import Ticket, in_the_way

LEASE_S = 60.0
MOST_LEASE_S = 600.0
MOST = 256
"""Further tickets are not looked at."""
WORD_BYTES, TICKET_BYTES = 1 << 12, 1 << 14
ANSWER_S, LOOK_S = 2.0, 10.0
"""For one holder's answer, and for those of all."""
REMEDY = (
    "`--wait` queues behind it; or take other hosts (`--nodes`), end before it (`--time-limit`), or `--share` the GPU"
)
_TICK_S = 1.0
_PREFIX = "orch-wait-"


def take(ticket: Ticket, node: str, owner: str) -> None:
    """From now on this ticket is there. owner: not shown to others. Raises Refused where this job has one already."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(_name(ticket.job, node))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise Refused(f"{ticket.job} waits already", "run again: a new id is made each time") from None
        raise
    listener.listen(MOST)
    if os.fork():
        listener.close()
        return
    try:
        _leave_the_connection()
        _Holder(listener, ticket, owner).hold()
    finally:
        os._exit(0)


def tell(job: str, node: str, word: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the holder of this ticket answers; None where there is none, or where it is not ours."""
    answer = _asked(_name(job, node), word)
    return answer if answer and answer.get("heard") is True else None


def there() -> list[Ticket]:
    """All that somebody waits with."""
    found, until = [], time.monotonic() + LOOK_S
    for name in _names()[:MOST]:
        if time.monotonic() < until and (answer := _asked(name, {})) and not answer.get("cancelled"):
            with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
                found.append(_ticket(answer))
    return sorted(found, key=lambda ticket: (ticket.number, ticket.job))


def refuse_before_turn(job: str, gpus: Sequence[str], longest_s: float | None) -> None:
    """Raises Refused where another job waits for one of these GPUs, and this one would be in its way. longest_s: so
    long this one has them at most.
    """
    if gpus and (first := in_the_way(job, gpus, longest_s, there())):
        whose = f"{first[0].user}'s " if first[0].user else ""
        wanted = next(gpu for gpu in gpus if gpu in first[0].gpus)
        raise Refused(f"GPU {wanted} is kept for {whose}job {first[0].job}, which waits for it", REMEDY)


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
        self._listener.settimeout(_TICK_S)
        while time.monotonic() < self._until and not self._left:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody came, or somebody who says nothing
                talk, _ = self._listener.accept()
                with talk:
                    self._answer(talk)

    def _answer(self, talk: socket.socket) -> None:
        talk.settimeout(_TICK_S)
        word = json.loads(talk.recv(WORD_BYTES))
        heard = peer_of(talk)[1] == os.getuid() and word.get("owner") == self._owner
        if heard:
            self._obey(word)
        now = time.monotonic()
        starts_s = max(0.0, self._starts - now) if math.isfinite(self._starts) else None
        shown = self._ticket._replace(since_s=now - self._taken, starts_s=starts_s)._asdict()
        talk.sendall(json.dumps({**shown, "cancelled": self._cancelled, "heard": heard}).encode())

    def _obey(self, word: Mapping[str, Any]) -> None:
        if word["do"] == "renew":
            self._until = time.monotonic() + min(float(word.get("lease_s", LEASE_S)), MOST_LEASE_S)
            if "starts_s" in word:
                self._starts = time.monotonic() + float(word["starts_s"])
        elif word["do"] == "cancel":  # it stays until its controller has heard of it
            self._cancelled = True
        elif word["do"] == "leave":
            self._left = True


def _leave_the_connection() -> None:
    """No stream and no signal of it reaches us any more."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


def _name(job: str, node: str) -> str:
    """node: two nodes of a job may be one machine."""
    return f"\0{_PREFIX}{hashlib.sha256(f'{job}/{node}'.encode()).hexdigest()[:40]}"


def _names() -> list[str]:
    """Of all tickets on this machine."""
    try:
        lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    except OSError:
        return []
    paths = {line.split()[-1] for line in lines if f" @{_PREFIX}" in line}
    return [f"\0{path[1:]}" for path in sorted(paths)]


def _asked(name: str, word: Mapping[str, Any]) -> dict[str, Any] | None:
    """A holder's answer, with `user`: whose it is."""
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(ANSWER_S)
        asking.connect(name)
        asking.sendall(json.dumps(word).encode())
        said = b""
        while len(said) <= TICKET_BYTES and (more := asking.recv(TICKET_BYTES)):
            said += more
        answer = json.loads(said)
        return {**answer, "user": user_name(peer_of(asking)[1])} if isinstance(answer, dict) else None
    return None


def _ticket(answer: Mapping[str, Any]) -> Ticket:
    """Raises ValueError, TypeError, KeyError for what is none: any login may answer."""
    job, number, gpus = answer["job"], answer["number"], answer["gpus"]
    if not (isinstance(job, str) and 0 < len(job) <= 200 and isinstance(gpus, list) and len(gpus) <= 64):
        raise ValueError("no ticket")
    if type(number) is not int or not 0 < number < 1 << 53 or not all(isinstance(gpu, str) for gpu in gpus):
        raise ValueError("no ticket")
    longest_s, starts_s = (_seconds(answer.get(name)) for name in ("longest_s", "starts_s"))
    return Ticket(job, number, gpus, answer["user"], float(answer["since_s"]), longest_s, starts_s)


def _seconds(said: Any) -> float | None:
    if said is not None and not 0 <= float(said) < math.inf:
        raise ValueError("no ticket")
    return None if said is None else float(said)
