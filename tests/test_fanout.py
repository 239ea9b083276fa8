"""Every host gets an answer, in order and in time."""

import os
import signal
import threading
import time

import pytest

from orchestrator.errors import ConnectError, ProbeError
from orchestrator.transport.fanout import errors, for_each, values


def test_every_host_answers_in_the_order_asked() -> None:
    later = threading.Event()

    def action(number: int) -> int:
        if number == 1:
            assert later.wait(5)
        else:
            later.set()
        return number * 10

    assert list(for_each({"b": 1, "a": 2}, action, deadline_s=10).items()) == [("b", 10), ("a", 20)]


def test_one_hosts_error_is_its_value_and_hides_no_other() -> None:
    def action(node: str) -> str:
        if node == "bad":
            raise ProbeError(node, "no python")
        return node.upper()

    outcomes = for_each({"bad": "bad", "good": "good"}, action, deadline_s=10)
    assert values(outcomes) == {"good": "GOOD"}
    assert [str(error) for error in errors(outcomes)] == ["bad: no python"]


def test_a_late_host_costs_the_deadline_and_no_more() -> None:
    release = threading.Event()
    began = time.monotonic()
    outcomes = for_each({"slow": release.wait, "fast": lambda: True}, lambda work: work(), deadline_s=0.2)
    assert time.monotonic() - began < 2
    assert outcomes["fast"] is True
    late = outcomes["slow"]
    assert isinstance(late, ConnectError) and "slow: no answer within 0.2 s" in str(late)
    release.set()


def test_no_work_begins_after_the_deadline() -> None:
    release, begun = threading.Event(), []

    def action(node: str) -> None:
        begun.append(node)
        release.wait()

    for_each({"one": "one", "two": "two"}, action, deadline_s=0.1, workers=1)
    threads = [thread for thread in threading.enumerate() if thread.name == "orch-fanout"]
    release.set()
    for thread in threads:
        thread.join(5)
    assert begun == ["one"]


def test_hosts_are_asked_at_the_same_time() -> None:
    all_there = threading.Barrier(32)
    assert len(values(for_each({str(n): n for n in range(32)}, lambda _: all_there.wait(10), deadline_s=20))) == 32


def test_more_hosts_than_workers_all_get_their_turn() -> None:
    assert values(for_each({str(n): n for n in range(100)}, lambda n: n + 1, deadline_s=20, workers=3)) == {
        str(n): n + 1 for n in range(100)
    }


def test_a_bug_in_the_action_is_not_mistaken_for_a_dead_host() -> None:
    with pytest.raises(ZeroDivisionError):
        for_each({"a": 0}, lambda n: 1 // n, deadline_s=10)


def test_no_hosts_at_all_is_no_answers() -> None:
    assert for_each({}, lambda _: None, deadline_s=10) == {}


def test_ctrl_c_is_heard_while_hosts_are_slow() -> None:
    release = threading.Event()
    waiting = threading.Event()

    def action(_: str) -> None:
        waiting.set()
        release.wait()

    def interrupt() -> None:
        waiting.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        for_each({"a": "a"}, action, deadline_s=30)
    assert time.monotonic() - began < 5
    release.set()
