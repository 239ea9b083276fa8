"""Whose last word counts while a job is followed: pure, with times given."""

import time

from orchestrator.errors import ConnectError, HostError
from orchestrator.jobs import Agent, Beat, HostLiveness, combine
from orchestrator.jobs.follow import BEYOND_S, Follow
from orchestrator.jobs.live import Notice
from orchestrator.planning.job_spec import SILENCE_S
from orchestrator.planning.launch_plan import Attempt
from tests.support.job_states import GONE, PLAN, alive, known, over

BROKE = ConnectError("a", "the SSH connection broke")
NO_WORD = over("failed", first_failure={"node": "a", "kind": "lost", "reason": "no word from the master for 20 s"})
SILENT_S = SILENCE_S + BEYOND_S
LATE_S = 2 * SILENT_S


def heard_after(*items):
    """A HostLiveness after these (seconds, host, frame or error)."""
    liveness = HostLiveness()
    for at_s, name, item in items:
        liveness.take(name, Agent(item) if isinstance(item, dict) else item, at_s)
    return liveness


def state(liveness, now_s, plan=PLAN):
    return combine(plan, liveness.found(now_s), known("running"), None).state


RUNNING = [(0.0, name, alive()) for name in "abc"]


def test_a_dead_masters_last_word_counts_no_more_when_the_others_have_ended():
    liveness = heard_after(*RUNNING, (20.0, "a", BROKE), (21.0, "b", NO_WORD), (22.0, "c", NO_WORD))
    assert state(liveness, 25.0) == "running"
    ended = combine(PLAN, liveness.found(20.1 + SILENT_S), known("running"), None)
    assert (ended.state, ended.exit_code, ended.first_failure.node) == ("failed", 1, "a")


def test_a_job_that_the_other_hosts_know_to_have_succeeded_has_although_its_masters_word_is_missing():
    liveness = heard_after(*RUNNING, (20.0, "a", BROKE), (21.0, "b", over("succeeded")), (22.0, "c", over("succeeded")))
    assert state(liveness, LATE_S) == "succeeded"


def test_a_link_that_broke_ends_no_job_that_another_host_says_to_run():
    liveness = heard_after(*RUNNING, (1.0, "a", BROKE), (1.0, "b", BROKE), (100.0, "c", Beat(from_host=True)))
    assert state(liveness, 100.0) == "running"
    assert state(heard_after(*RUNNING, (1.0, "a", BROKE), (2.0, "b", GONE)), 100.0) == "running"


def test_a_controller_that_hears_no_host_at_all_does_not_know_the_job_to_have_ended():
    liveness = heard_after(*RUNNING, *((1.0, name, BROKE) for name in "abc"))
    assert liveness.missed(100.0) == frozenset("abc")
    assert state(liveness, 100.0) == "running"


def test_a_job_that_bears_longer_silence_misses_a_host_later():
    liveness = HostLiveness("abc", silence_s=60.0)
    for at_s, name, item in [*((at_s, name, Agent(item)) for at_s, name, item in RUNNING), (20.0, "a", BROKE)]:
        liveness.take(name, item, at_s)
    assert (liveness.missed(89.0), liveness.missed(91.0)) == (frozenset(), {"a"})


def test_a_host_that_is_heard_again_counts_again():
    liveness = heard_after(*RUNNING, (20.0, "a", BROKE), (21.0, "b", NO_WORD), (22.0, "c", NO_WORD))
    assert liveness.take("", Beat(), LATE_S)
    assert liveness.missed(LATE_S) == {"a"}
    assert liveness.take("a", Beat(from_host=True), LATE_S)
    assert state(liveness, LATE_S) == "running"


def test_a_host_that_falls_silent_without_a_broken_link_is_missed_too():
    beats = [(float(second), "", Beat()) for second in range(5, 60)]
    liveness = heard_after(*RUNNING, (1.0, "b", NO_WORD), (2.0, "c", NO_WORD), (4.0, "a", Beat(from_host=True)), *beats)
    assert state(liveness, 5.0 + SILENT_S - 1) == "running"
    assert state(liveness, 5.1 + SILENT_S) == "failed"


def test_frames_that_waited_while_nobody_looked_make_no_host_silent():
    """The time runs from when all that came has been taken: a terminal may hold everything up for minutes."""
    liveness = heard_after(*RUNNING, (300.0, "b", NO_WORD))
    assert liveness.missed(300.0) == frozenset()


def test_the_word_changes_with_a_record_and_with_who_is_missed_and_with_nothing_else():
    liveness = HostLiveness()
    assert liveness.take("a", Agent(alive()), 0.0)
    assert not liveness.take("a", Beat(from_host=True), 1.0)
    assert not liveness.take("a", BROKE, 2.0)
    assert liveness.take("", Beat(), 3.0 + SILENT_S)
    assert not liveness.take("", Beat(), 4.0 + SILENT_S)
    assert liveness.take("a", Beat(from_host=True), 5.0 + SILENT_S)


def test_a_host_that_is_no_longer_dialled_speaks_of_its_end_alone():
    refused = HostError("a", "its host key changed")
    liveness = heard_after(*RUNNING, (1.0, "a", refused), (2.0, "b", NO_WORD), (3.0, "c", NO_WORD))
    assert state(liveness, 3.0) == "failed"
    assert state(heard_after((0.0, "a", over("succeeded")), (1.0, "a", refused)), 1.0) == "succeeded"


def test_a_follower_that_no_host_answers_reports_it_once_per_outage():
    """It is no end: only this machine's network may be down."""
    liveness = heard_after(*RUNNING, *((1.0, name, BROKE) for name in "abc"))
    assert liveness.all_silent_s(SILENT_S) == 0
    assert liveness.all_silent_s(1.1 + SILENT_S) == SILENT_S + 0.1
    liveness.take("c", Beat(from_host=True), 50.0)
    assert liveness.all_silent_s(60.0) == 0
    assert HostLiveness("abc").all_silent_s(1e9) == 0


def test_the_words_name_the_hosts_and_what_one_can_do(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    plan = PLAN.model_copy(update={"attempt": Attempt(number=1, most=2)})
    follow = Follow(plan, lambda found: combine(plan, found, known("running"), None), until_end=True)

    def outage():
        for name in "abc":
            yield name, Agent(alive())
        for _ in range(2):
            for name in "abc":
                yield name, BROKE
            for _ in range(3):
                now[0] += SILENT_S
                yield "", Beat()
            yield "a", Agent(alive())

    told = [each.text for each in follow.events(outage()) if isinstance(each, Notice) and "no host" in each.text]
    assert len(told) == 2
    assert "no host of j answers since" in told[0] and "(a, b, c)" in told[0]
    assert "`orch cancel --job j`" in told[0] and "--retries acts once a host reports an end" in told[0]
