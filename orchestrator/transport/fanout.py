"""One action on many hosts at once, with an answer for every host.

    outcomes = for_each({"a2000": host_a, "v100": host_b}, probe, deadline_s=20)
    facts, dead = values(outcomes), errors(outcomes)

Takes items by node name and a function; gives, in the same order, each node's value or that node's HostError. A host
that is late gets a ConnectError for its value, so that one dead host costs the deadline and never the others' answers.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from orchestrator.errors import ConnectError, HostError

T = TypeVar("T")
R = TypeVar("R")

_TICK_S = 0.5


@dataclass(frozen=True)
class _Answer(Generic[R]):
    node: str
    outcome: R | HostError


@dataclass(frozen=True)
class _Bug:
    """An action raised what no host can cause."""

    error: BaseException


def for_each(
    items: Mapping[str, T], action: Callable[[T], R], *, deadline_s: float, workers: int = 32
) -> dict[str, R | HostError]:
    """`action` of every item, in up to `workers` threads at once; answers in the order of `items`.

    Returns after `deadline_s` at the latest. An action still under way then goes on in its daemon thread, unheard; no
    other is begun. Raises whatever an action raises that is not a HostError, as soon as it does.
    """
    todo: queue.SimpleQueue[tuple[str, T]] = queue.SimpleQueue()
    answers: queue.SimpleQueue[_Answer[R] | _Bug] = queue.SimpleQueue()
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            try:
                node, item = todo.get_nowait()
            except queue.Empty:
                return
            answers.put(_attempt(node, action, item))

    for pair in items.items():
        todo.put(pair)
    for _ in range(min(workers, len(items))):
        threading.Thread(target=work, name="orch-fanout", daemon=True).start()
    try:
        outcomes = _gather(answers, len(items), deadline_s)
    finally:
        over.set()
    return {node: outcomes[node] if node in outcomes else _late(node, deadline_s) for node in items}


def values(outcomes: Mapping[str, R | HostError]) -> dict[str, R]:
    """The nodes that answered, and their answers."""
    return {node: outcome for node, outcome in outcomes.items() if not isinstance(outcome, HostError)}


def errors(outcomes: Mapping[str, R | HostError]) -> list[HostError]:
    """The errors of the nodes that did not."""
    return [outcome for outcome in outcomes.values() if isinstance(outcome, HostError)]


def errors_by_node(outcomes: Mapping[str, R | HostError]) -> dict[str, HostError]:
    return {node: outcome for node, outcome in outcomes.items() if isinstance(outcome, HostError)}


def _attempt(node: str, action: Callable[[T], R], item: T) -> _Answer[R] | _Bug:
    try:
        return _Answer(node, action(item))
    except HostError as error:
        return _Answer(node, error)
    except BaseException as error:
        return _Bug(error)


def _gather(answers: queue.SimpleQueue[_Answer[R] | _Bug], count: int, deadline_s: float) -> dict[str, R | HostError]:
    """Up to `count` answers, fewer when the time is up."""
    end = time.monotonic() + deadline_s
    outcomes: dict[str, R | HostError] = {}
    while len(outcomes) < count:
        left_s = end - time.monotonic()
        try:
            # Short waits: a Ctrl-C that comes just before the thread goes to sleep does not wake it.
            answer = answers.get(timeout=min(max(0.0, left_s), _TICK_S))
        except queue.Empty:
            if left_s <= 0:
                break
            continue
        if isinstance(answer, _Bug):
            raise answer.error
        outcomes[answer.node] = answer.outcome
    return outcomes


def _late(node: str, deadline_s: float) -> ConnectError:
    return ConnectError(node, f"no answer within {deadline_s:g} s", "check that the host is up and not overloaded")
