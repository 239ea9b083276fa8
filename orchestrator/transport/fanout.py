"""One action on many hosts at once, with an answer for every host.

    outcomes = for_each({"a2000": host_a, "v100": host_b}, probe, deadline_s=20)
    facts, dead = values(outcomes), errors(outcomes)

Takes items by node name and a function; gives, in the same order, each node's value or that node's HostError. Every
host has a deadline of its own, which runs from when work on it begins and stands still while it waits for its turn at
something of ours (`Deadline.paused`). So a late host gets a ConnectError for its value and costs the others nothing,
however many stand before them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from orchestrator.errors import ConnectError, HostError
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.deadline import Deadline, at_work

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 512
"""Threads: hosts that keep us waiting cost little else. Where there are more hosts, they follow in turn."""
STACK_BYTES = 1 << 20  # what a thread may take at most; the usual 8 MiB are too much address space for so many
_TICK_S = 0.25


@dataclass(frozen=True)
class _Answer(Generic[R]):
    node: str
    outcome: R | HostError


@dataclass(frozen=True)
class _Bug:
    """An action raised what no host can cause."""

    error: BaseException


def for_each(
    items: Mapping[str, T], action: Callable[[T], R], *, deadline_s: float, at_once: int = AT_ONCE
) -> dict[str, R | HostError]:
    """`action` of every item, in up to `at_once` threads; answers in the order of `items`.

    deadline_s: of each item, from when its action begins. An action that is late goes on in its daemon thread, unheard,
    and another thread takes its place. Raises whatever an action raises that is not a HostError, as soon as it does.
    """
    crew = _Crew(items, action, deadline_s)
    try:
        outcomes = crew.outcomes(at_once)
    finally:
        crew.over.set()
    return {node: outcomes[node] for node in items}


def values(outcomes: Mapping[str, R | HostError]) -> dict[str, R]:
    """The nodes that answered, and their answers."""
    return {node: outcome for node, outcome in outcomes.items() if not isinstance(outcome, HostError)}


def errors(outcomes: Mapping[str, R | HostError]) -> list[HostError]:
    """The errors of the nodes that did not."""
    return [outcome for outcome in outcomes.values() if isinstance(outcome, HostError)]


def errors_by_node(outcomes: Mapping[str, R | HostError]) -> dict[str, HostError]:
    return {node: outcome for node, outcome in outcomes.items() if isinstance(outcome, HostError)}


class _Crew(Generic[T, R]):
    """The threads that work on one fan-out. over: nobody waits for them."""

    def __init__(self, items: Mapping[str, T], action: Callable[[T], R], deadline_s: float) -> None:
        self.over = threading.Event()
        self._action, self._deadline_s = action, deadline_s
        self._todo: queue.SimpleQueue[tuple[str, T]] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[_Answer[R] | _Bug] = queue.SimpleQueue()
        self._begun: dict[str, Deadline] = {}
        self._open = set(items)
        for pair in items.items():
            self._todo.put(pair)

    def outcomes(self, at_once: int) -> dict[str, R | HostError]:
        """Every node's, as soon as the last has answered or is late."""
        found: dict[str, R | HostError] = {}
        threading.stack_size(STACK_BYTES)
        hired = sum(self._hire() for _ in range(min(at_once, len(self._open))))
        look_at = time.monotonic()
        while self._open and hired:
            answer = self._next_answer()
            if answer and answer.node in self._open:
                self._open.remove(answer.node)
                found[answer.node] = answer.outcome
            if time.monotonic() >= look_at:
                late = self._late_ones()
                self._open -= late.keys()
                found |= late
                hired += sum(self._hire() for _ in late) - len(late)
                look_at = time.monotonic() + _TICK_S
        return found | {node: _no_thread(node) for node in self._open}

    def _next_answer(self) -> _Answer[R] | None:
        """None when nothing came for a moment. Raises what an action raised that is not a HostError."""
        try:
            # Short waits: a Ctrl-C that comes just before the thread goes to sleep does not wake it.
            answer = self._answers.get(timeout=_TICK_S)
        except queue.Empty:
            return None
        if isinstance(answer, _Bug):
            raise answer.error
        return answer

    def _late_ones(self) -> dict[str, ConnectError]:
        begun = [(node, deadline) for node, deadline in list(self._begun.items()) if node in self._open]
        return {node: _late(node, self._deadline_s) for node, deadline in begun if not deadline.left()}

    def _hire(self) -> bool:
        """Whether another thread could be had."""
        try:
            threading.Thread(target=self._work, name="orch-fanout", daemon=True).start()
        except RuntimeError:  # this machine gives no more of them
            return False
        return True

    def _work(self) -> None:
        while not self.over.is_set():
            try:
                node, item = self._todo.get_nowait()
            except queue.Empty:
                return
            deadline = self._begun[node] = Deadline(self._deadline_s)
            with at_work(deadline):
                answer = _attempt(node, self._action, item)
            replaced = node not in self._open
            self._answers.put(answer)
            if replaced:
                return


def _attempt(node: str, action: Callable[[T], R], item: T) -> _Answer[R] | _Bug:
    try:
        return _Answer(node, action(item))
    except HostError as error:
        return _Answer(node, error)
    except BaseException as error:
        return _Bug(error)


def _late(node: str, deadline_s: float) -> ConnectError:
    return ConnectError(node, f"no answer within {deadline_s:g} s", "check that the host is up and not overloaded")


def _no_thread(node: str) -> ConnectError:
    return ConnectError(
        node, "was not asked: this machine gives no more threads", "raise `ulimit -u`, or ask fewer hosts"
    )


# Transfers that may take more than one link to a host: resumed on a new one as long as they get on.
#
# outcomes = on_each_link(sessions, reopen)           {"a2000": what `run` gave, "v100": its HostError}

FOREVER_S = 30 * 24 * 3600.0
"""A transfer has no limit of time: its bytes, or the host's beats, say that it goes on."""

ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)


class Session(Protocol[ResultT_co]):
    """A transfer that may need several links."""

    host: ConnectedHost
    """Where the next link leads."""
    moved_bytes: int
    """Never fewer than before; more means progress."""

    def run(self) -> ResultT_co:
        """To its end over one link. Raises ConnectError where that breaks, HostError for what no new link mends."""


def on_each_link(
    sessions: Mapping[str, Session[ResultT]], reopen: Callable[[str], ConnectedHost]
) -> dict[str, ResultT | HostError]:
    """All hosts at once. reopen: a new connection to a host whose link broke."""
    over = threading.Event()

    def one(session: Session[ResultT]) -> ResultT:
        while True:
            before = session.moved_bytes
            try:
                return session.run()
            except ConnectError:  # while it gets on from one link to the next, it is worth another
                if over.is_set() or session.moved_bytes == before:
                    raise
            session.host = reopen(session.host.node)

    try:
        return for_each(sessions, one, deadline_s=FOREVER_S, at_once=max(1, len(sessions)))
    finally:
        over.set()
