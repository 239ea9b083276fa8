"""Runs one action on many hosts in parallel, with a result for every host.

    outcomes = for_each({"a2000": host_a, "v100": host_b}, probe, deadline_s=20)
    facts, dead = values(outcomes), errors(outcomes)

Returns each node's value or HostError, in the order of the items. Each host's deadline begins with its action and
pauses in our own queues (`Deadline.paused`), so that a late host gets a ConnectError and delays no other.
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

AT_ONCE = 512  # Threads; further hosts wait for a thread. Waiting threads cost little.
STACK_BYTES = 1 << 20  # the usual 8 MiB per thread are too much address space
_TICK_S = 0.25


@dataclass(frozen=True)
class _Answer(Generic[R]):
    node: str
    outcome: R | HostError


@dataclass(frozen=True)
class _Bug:
    """An action raised an error that no host can cause."""

    error: BaseException


def for_each(
    items: Mapping[str, T], action: Callable[[T], R], *, deadline_s: float, at_once: int = AT_ONCE
) -> dict[str, R | HostError]:
    """Runs `action` on every item in up to `at_once` threads; results in the order of `items`.

    deadline_s: of each item, from the start of its action. A late action goes on in its daemon thread, its result is
    ignored, and another thread replaces it. Raises any error of an action that is not a HostError at once.
    """
    crew = _Crew(items, action, deadline_s)
    try:
        outcomes = crew.outcomes(at_once)
    finally:
        crew.over.set()
    return {node: outcomes[node] for node in items}


def values(outcomes: Mapping[str, R | HostError]) -> dict[str, R]:
    return {node: outcome for node, outcome in outcomes.items() if not isinstance(outcome, HostError)}


def errors(outcomes: Mapping[str, R | HostError]) -> list[HostError]:
    return [outcome for outcome in outcomes.values() if isinstance(outcome, HostError)]


def errors_by_node(outcomes: Mapping[str, R | HostError]) -> dict[str, HostError]:
    return {node: outcome for node, outcome in outcomes.items() if isinstance(outcome, HostError)}


class _Crew(Generic[T, R]):
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
        found: dict[str, R | HostError] = {}
        threading.stack_size(STACK_BYTES)
        threads = sum(self._add_thread() for _ in range(min(at_once, len(self._open))))
        look_at = time.monotonic()
        while self._open and threads:
            answer = self._next_answer()
            if answer and answer.node in self._open:
                self._open.remove(answer.node)
                found[answer.node] = answer.outcome
            if time.monotonic() >= look_at:
                late = self._late_nodes()
                self._open -= late.keys()
                found |= late
                threads += sum(self._add_thread() for _ in late) - len(late)
                look_at = time.monotonic() + _TICK_S
        return found | {node: _no_thread(node) for node in self._open}

    def _next_answer(self) -> _Answer[R] | None:
        try:
            # Short waits: a Ctrl-C just before the thread sleeps does not wake it.
            answer = self._answers.get(timeout=_TICK_S)
        except queue.Empty:
            return None
        if isinstance(answer, _Bug):
            raise answer.error
        return answer

    def _late_nodes(self) -> dict[str, ConnectError]:
        begun = [(node, deadline) for node, deadline in list(self._begun.items()) if node in self._open]
        return {node: _late(node, self._deadline_s) for node, deadline in begun if not deadline.left()}

    def _add_thread(self) -> bool:
        try:
            threading.Thread(target=self._work, name="orch-fanout", daemon=True).start()
        except RuntimeError:  # no more threads on this machine
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
        node, "was not asked: this machine can start no more threads", "raise `ulimit -u`, or ask fewer hosts"
    )


# Resumes a transfer on new connections as long as it makes progress.
#
#     outcomes = on_each_link(sessions, reopen)           {"a2000": the result of `run`, "v100": its HostError}

FOREVER_S = 30 * 24 * 3600.0  # no time limit: bytes or beats show progress

ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)


class Session(Protocol[ResultT_co]):
    host: ConnectedHost  # for the next connection
    moved_bytes: int  # never falls; an increase is progress

    def run(self) -> ResultT_co:
        """Runs over one connection. Raises ConnectError if it breaks, HostError if a new one would not help."""


def on_each_link(
    sessions: Mapping[str, Session[ResultT]], reopen: Callable[[str], ConnectedHost]
) -> dict[str, ResultT | HostError]:
    """All hosts in parallel. reopen: connects again to a host whose connection broke."""
    over = threading.Event()

    def one(session: Session[ResultT]) -> ResultT:
        while True:
            before = session.moved_bytes
            try:
                return session.run()
            except ConnectError:  # worth another connection while there is progress
                if over.is_set() or session.moved_bytes == before:
                    raise
            session.host = reopen(session.host.node)

    try:
        return for_each(sessions, one, deadline_s=FOREVER_S, at_once=max(1, len(sessions)))
    finally:
        over.set()
