"""What state a job is in, from what its hosts say: `combine` is pure, and trusts no record."""

import signal
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import ConnectError
from orchestrator.jobs import FirstFailure, JobRecord, node_request, state
from orchestrator.planning import Attempt
from tests.support.job_states import GONE, HOSTILE, PLAN, STATES, alive, known, over


def failure(node="b", **more):
    return {"first_failure": {"node": node, "reason": "it broke", **more}}


NOTHING_KNOWN = {"alive": False}
UNREACHABLE = ConnectError("a", "no route")

STATE_OF = {
    "nobody was asked": ({}, "starting"),
    "nobody answers": ({"a": UNREACHABLE, "b": UNREACHABLE, "c": UNREACHABLE}, "starting"),
    "all wait": ({"a": alive("starting"), "b": alive("starting"), "c": alive("starting")}, "starting"),
    "one runs": ({"a": alive("starting"), "b": alive(), "c": alive("starting")}, "running"),
    "all run": ({"a": alive(), "b": alive(), "c": alive()}, "running"),
    "a host that runs vouches for the silent": ({"a": UNREACHABLE, "b": alive()}, "running"),
    "one supervisor is gone, the others have not noticed": ({"a": alive(), "b": GONE, "c": alive()}, "running"),
    "the master has the last word": ({"a": over("succeeded"), "b": alive(), "c": GONE}, "succeeded"),
    "the master failed, a member cancelled": ({"a": over("failed"), "b": over("cancelled")}, "failed"),
    "no master: a failure beats a success": ({"b": over("succeeded"), "c": over("failed")}, "failed"),
    "no master: a cancel beats a success": ({"b": over("succeeded"), "c": over("cancelled")}, "cancelled"),
    "no master, one still runs": ({"a": UNREACHABLE, "b": over("succeeded"), "c": alive()}, "running"),
    "the master's supervisor died": ({"a": GONE, "b": over("failed"), "c": over("failed")}, "failed"),
    "every supervisor is gone without a word": ({"a": GONE, "b": GONE, "c": GONE}, "lost"),
    "no host knows the job": ({"a": NOTHING_KNOWN, "b": NOTHING_KNOWN, "c": NOTHING_KNOWN}, "lost"),
    "gone, but one has not answered": ({"a": GONE, "b": GONE, "c": UNREACHABLE}, "starting"),
    "undone": ({name: over("undone") for name in "abc"}, "cancelled"),
    "undone, and one never heard of it": ({"a": NOTHING_KNOWN, "b": over("undone"), "c": over("undone")}, "cancelled"),
    "undone, but one cannot be asked": ({"a": over("undone"), "b": over("undone"), "c": UNREACHABLE}, "starting"),
}


def combine(found, record, after_s=3600):
    """As if asked so many seconds after the job was begun."""
    return state.combine(PLAN, found, record, datetime.fromisoformat(PLAN.created) + timedelta(seconds=after_s))


@pytest.mark.parametrize(("found", "state"), STATE_OF.values(), ids=list(STATE_OF))
def test_the_state_of_a_job_follows_from_its_hosts(found, state):
    assert combine(found, known()).state == state


@pytest.mark.parametrize("found", [{}, {"a": UNREACHABLE}, {"a": GONE}], ids=["none", "unreachable", "one gone"])
@pytest.mark.parametrize("state", STATES)
def test_what_says_nothing_changes_nothing(state, found):
    assert combine(found, known(state)) == known(state)


@pytest.mark.parametrize("forgetful", [NOTHING_KNOWN, over("lost")], ids=["status", "reader"])
@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled"])
def test_a_job_that_ended_stays_ended_when_its_hosts_have_been_cleaned(state, forgetful):
    ended = known(state, exit_code=7, ended="2026-11-21T10:00:00+00:00")
    assert combine(dict.fromkeys("abc", forgetful), ended) == ended


def test_a_job_that_has_not_reached_its_hosts_yet_is_not_lost():
    unheard_of = dict.fromkeys("abc", NOTHING_KNOWN)
    assert combine(unheard_of, known(), after_s=5).state == "starting"
    assert combine(unheard_of, known(), after_s=state.START_S + 1).state == "lost"
    assert combine(unheard_of, known("running"), after_s=5).state == "lost"
    assert combine(dict.fromkeys("abc", GONE), known(), after_s=5).state == "lost"


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled"])
def test_an_older_answer_does_not_undo_a_known_end(state):
    assert combine(dict.fromkeys("abc", alive()), known(state)).state == state


def test_a_job_that_seemed_lost_is_found_again():
    lost = combine(dict.fromkeys("abc", GONE), known())
    assert (lost.exit_code, lost.first_failure.node) == (1, "a")
    found = combine({"a": over("succeeded")}, lost)
    assert (found.state, found.exit_code, found.first_failure) == ("succeeded", 0, None)


EXIT_CODES = {
    "its own code": (failure(rank=1, exit_code=7), 7),
    "a signal": (failure(rank=1, signal="SIGKILL"), 137),
    "a signal beats a code": (failure(signal="SIGSEGV", exit_code=1), 139),
    "neither is known": (failure(), 1),
    "a code of 0 is no failure's": (failure(exit_code=0), 1),
    "no first failure": ({}, 1),
    "a signal that is none": (failure(signal="SIGNONSENSE", exit_code=4), 4),
    "a failure that is none": ({"first_failure": "yes"}, 1),
}


@pytest.mark.parametrize(("record", "code"), EXIT_CODES.values(), ids=list(EXIT_CODES))
def test_a_failed_jobs_exit_code_is_the_first_failing_ranks_own(record, code):
    assert combine({"a": over("failed", **record)}, known()).exit_code == code


@pytest.mark.parametrize("which", list(signal.Signals))
def test_signal_n_gives_128_plus_n(which):
    record = over("failed", **failure(signal=which.name))
    assert combine({"a": record}, known()).exit_code == 128 + which


def test_success_is_0_and_a_cancelled_job_has_no_code():
    assert combine({"a": over("succeeded")}, known()).exit_code == 0
    assert combine({"a": over("cancelled", **failure(exit_code=7))}, known()).exit_code is None


def test_the_end_is_the_hosts_time_and_all_else_stays_as_it_was_known():
    ended = combine({"a": over("failed", ended=1795253567.9, **failure(rank=1, exit_code=7))}, known())
    assert ended == known(
        "failed", exit_code=7, ended="2026-11-21T09:32:47+00:00",
        first_failure=FirstFailure(node="b", rank=1, exit_code=7, reason="it broke"),
    )  # fmt: skip


WAITS = PLAN.model_copy(update={"asked": PLAN.asked.updated(wait=True)})


def test_a_job_that_waited_began_with_its_ranks():
    now, ranks = (
        datetime.fromisoformat(PLAN.created),
        [{"0": {"started": 1795253569.0}}, {"1": {"started": 1795253567.9}}],
    )
    there = {node: alive(ranks=of_host) for node, of_host in zip("ab", ranks, strict=True)}
    begun = state.combine(WAITS, there, known("queued"), now)
    assert (begun.state, begun.started) == ("running", "2026-11-21T09:32:47+00:00")
    later = {node: alive(ranks={"0": {"started": 1795253600.0}}) for node in "ab"}
    assert state.combine(WAITS, later, begun, now).started == begun.started
    waits = {**there, "b": alive("starting", phase="queued", ranks={"1": {}})}
    assert state.combine(WAITS, waits, known("queued"), now).started == known().started
    assert state.combine(PLAN, there, known("starting"), now).started == known().started
    second = {"attempt": Attempt(number=2, most=2)}  # a job of its own, if a controller retries
    begun = state.combine(WAITS.model_copy(update=second), there, known("queued").model_copy(update=second), now)
    assert begun.started == "2026-11-21T09:32:47+00:00"


KEYS = ("state", "alive", "first_failure", "ended", "ranks")


@pytest.mark.parametrize("ended", [float("nan"), float("inf"), 1e300, -1e300, "now", None, [], 10**400])
def test_a_time_that_is_none_leaves_the_end_unknown(ended):
    record = combine({"a": over("succeeded", ended=ended)}, known())
    assert (record.state, record.ended) == ("succeeded", None)


@given(st.dictionaries(st.sampled_from("abc"), st.dictionaries(st.sampled_from(KEYS), HOSTILE)))
def test_whatever_hosts_answer_it_is_a_job_record(found):
    for plan, before in ((PLAN, known()), (WAITS, known("queued"))):
        record = state.combine(plan, found, before, datetime.fromisoformat(PLAN.created))
        assert JobRecord.model_validate_json(record.model_dump_json(by_alias=True)) == record


@given(st.dictionaries(st.sampled_from(("node", "rank", "exit_code", "signal", "reason", "log_line")), HOSTILE))
def test_whatever_a_first_failure_holds_the_record_and_its_code_are_sound(found):
    record = combine({"a": over("failed", first_failure=found)}, known())
    assert JobRecord.model_validate_json(record.model_dump_json(by_alias=True)) == record
    assert isinstance(record.exit_code, int)
    assert record.exit_code != 0


WAITING, ASKED = alive("starting"), alive("starting", go=1.0)
HALF_STARTED = {
    "all wait for a word": (dict.fromkeys("abc", WAITING), True),
    "one does not know of it": ({"a": ASKED, "b": NOTHING_KNOWN, "c": ASKED}, True),
    "one was asked, the others wait": ({"a": ASKED, "b": WAITING, "c": WAITING}, True),
    "all were asked": (dict.fromkeys("abc", ASKED), False),
    "all that answer were asked": ({"a": ASKED, "b": UNREACHABLE, "c": ASKED}, False),
    "all is undone": (dict.fromkeys("abc", over("undone")), False),
    "nobody answers": (dict.fromkeys("abc", UNREACHABLE), False),
}


@pytest.mark.parametrize(("found", "half"), HALF_STARTED.values(), ids=list(HALF_STARTED))
def test_a_start_is_half_done_where_a_host_waits_for_a_word_that_never_comes(found, half):
    assert state.is_half_started(found) is half


def test_the_token_travels_in_the_request_of_each_host_with_its_own_ranks():
    requests = [node_request(PLAN, one, "70ce") for one in PLAN.nodes]
    assert [request["rank_numbers"] for request in requests] == [[0], [1], [2]]
    assert [request["is_master"] for request in requests] == [True, False, False]
    assert {request["token"] for request in requests} == {"70ce"}


def test_a_host_that_others_miss_says_itself_why_also_when_it_comes_later():
    missed = over("failed", **failure(kind="lost", reason="no word for 20 s"))
    own = over("failed", **failure(kind="supervisor", reason="was killed", signal="SIGKILL"))
    at_first = combine({"a": missed, "b": UNREACHABLE}, known())
    assert (at_first.first_failure.reason, at_first.exit_code) == ("no word for 20 s", 1)
    for record in (combine({"a": missed, "b": own}, known()), combine({"b": own}, at_first)):
        assert (record.first_failure.reason, record.exit_code) == ("was killed", 137)


@pytest.mark.parametrize(
    "own",
    [
        over("failed", **failure(node="a", kind="lost", reason="no word from the master")),
        over("failed", first_failure={"node": ["b"], "reason": 3}),
        over("failed"),
        over("cancelled", **failure(kind="rank", reason="of another time")),
        alive(**failure(kind="rank", reason="not its last word")),
    ],
)
def test_a_word_that_is_not_about_its_own_end_explains_nothing(own):
    missed = over("failed", **failure(kind="lost", reason="no word for 20 s"))
    assert combine({"a": missed, "b": own}, known()).first_failure.reason == "no word for 20 s"


def test_a_host_that_failed_later_does_not_take_the_place_of_the_first_cause():
    first = over("failed", **failure(node="c", kind="rank", reason="the true one"))
    own = over("failed", **failure(kind="supervisor", reason="was killed"))
    assert combine({"a": first, "b": own}, known()).first_failure.reason == "the true one"
