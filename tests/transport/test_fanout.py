"""Every host gets an answer, in order and in time."""

import os
import signal
import threading
import time

import pytest

from orchestrator.errors import ConnectError, ProbeError
from orchestrator.transport import Deadline, errors, for_each, values


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
    assert [str(error) for error in errors(outcomes)] == ["bad: no python: try again"]


def test_a_late_host_costs_the_deadline_and_no_more() -> None:
    release = threading.Event()
    began = time.monotonic()
    outcomes = for_each({"slow": release.wait, "fast": lambda: True}, lambda work: work(), deadline_s=1.0)
    assert time.monotonic() - began < 30
    assert outcomes["fast"] is True
    late = outcomes["slow"]
    assert isinstance(late, ConnectError) and "slow: no answer within 1 s" in str(late)
    release.set()


def test_those_who_wait_behind_late_hosts_have_their_own_time() -> None:
    release = threading.Event()
    silent = {f"silent {n}": release.wait for n in range(3)}
    outcomes = for_each({**silent, "last": lambda: "heard"}, lambda work: work(), deadline_s=0.3, at_once=1)
    assert [type(outcomes[node]) for node in silent] == [ConnectError] * 3
    assert outcomes["last"] == "heard"
    release.set()


def test_silent_hosts_that_stand_first_keep_no_other_waiting() -> None:
    release, all_heard = threading.Event(), threading.Event()
    heard = []

    def action(node: int) -> None:
        if node < 300:
            release.wait()
            return
        heard.append(node)
        if len(heard) == 16:
            all_heard.set()

    asking = threading.Thread(
        target=for_each, args=({str(n): n for n in range(316)}, action), kwargs={"deadline_s": 60}
    )
    asking.start()
    assert all_heard.wait(30)  # while not one of the silent hosts has been given up
    assert asking.is_alive()
    release.set()
    asking.join(30)


def test_waiting_for_ones_turn_costs_no_time() -> None:
    def action(held_s: float) -> str:
        with Deadline(10).paused():
            time.sleep(held_s)
        return "heard"

    assert for_each({"queues": 1.0}, action, deadline_s=0.3) == {"queues": "heard"}


def test_no_work_begins_once_nobody_waits_for_it() -> None:
    release, begun = threading.Event(), []

    def action(node: str) -> None:
        begun.append(node)
        if node == "two":
            raise ZeroDivisionError
        release.wait()

    with pytest.raises(ZeroDivisionError):
        for_each({node: node for node in ("one", "two", "three", "four")}, action, deadline_s=10, at_once=2)
    threads = [thread for thread in threading.enumerate() if thread.name == "orch-fanout"]
    release.set()
    for thread in threads:
        thread.join(5)
    assert begun[:2] == ["one", "two"] and "four" not in begun


def test_where_threads_are_scarce_those_there_are_do_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [True, True]
    really_start = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if not few:
            raise RuntimeError("can't start new thread")
        few.pop()
        really_start(thread)

    release = threading.Event()
    work = {"silent": release.wait, **{str(n): lambda: "heard" for n in range(20)}}
    monkeypatch.setattr(threading.Thread, "start", start)
    outcomes = for_each(work, lambda work: work(), deadline_s=0.3)
    assert [name for name, outcome in outcomes.items() if outcome != "heard"] == ["silent"]
    outcomes = for_each(work, lambda work: work(), deadline_s=0.3)
    assert "no more threads" in str(outcomes["19"])
    release.set()


def test_hosts_are_asked_at_the_same_time() -> None:
    all_there = threading.Barrier(32)
    assert len(values(for_each({str(n): n for n in range(32)}, lambda _: all_there.wait(10), deadline_s=20))) == 32


def test_more_hosts_than_workers_all_get_their_turn() -> None:
    assert values(for_each({str(n): n for n in range(100)}, lambda n: n + 1, deadline_s=20, at_once=3)) == {
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
        for_each({"a": "a"}, action, deadline_s=200)
    assert time.monotonic() - began < 100
    release.set()
