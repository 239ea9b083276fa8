"""The hub's decision, case by case."""

import itertools

import pytest

from orchestrator.remote.verdict import decide, first_cause, severed


def status(phase, *failures, cancelled=False):
    return {"phase": phase, "failures": list(failures), "cancelled": cancelled, "leftovers": []}


def failure(node, rank=0, kind="rank", secondary=False, order=0):
    return {"node": node, "rank": rank, "kind": kind, "secondary": secondary, "order": order, "reason": "because"}


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        (("joined", None), "wait"),
        (("joined", "joining"), "wait"),
        (("joined", "joined"), "start"),
        (("running", "joined"), "start"),
        (("running", "done"), "start"),
        (("done", "done"), "finish"),
    ],
)
def test_all_start_when_all_have_joined_and_finish_when_all_are_done(phases, expected):
    statuses = {name: status(phase) if phase else {} for name, phase in zip("ab", phases, strict=True)}
    assert decide(statuses, {}, settled=False)["do"] == expected


def test_one_failure_stops_all_and_they_finish_when_all_have_ended():
    one = failure("b", 1)
    assert decide({"a": status("running"), "b": status("running", one)}, {}, False)["do"] == "stop"
    order = decide({"a": status("ended"), "b": status("ended", one)}, {}, False)
    assert (order["do"], order["state"], order["first_failure"]) == ("finish", "failed", one)


def test_a_lost_host_stops_the_rest_and_is_not_waited_for():
    lost = {"b": "no word for 20 s"}
    assert decide({"a": status("running"), "b": status("running")}, lost, False)["do"] == "stop"
    order = decide({"a": status("ended"), "b": status("running")}, lost, False)
    assert (order["do"], order["first_failure"]["node"]) == ("finish", "b")


def test_a_host_that_never_ends_does_not_keep_the_others():
    statuses = {"a": status("ended", failure("a")), "b": status("stopping")}
    assert decide(statuses, {}, settled=False)["do"] == "stop"
    assert decide(statuses, {}, settled=True)["do"] == "finish"


def test_a_cancelled_job_is_cancelled_even_if_ranks_complain_of_broken_connections():
    noise = failure("b", secondary=True)
    order = decide({"a": status("ended", cancelled=True), "b": status("ended", noise)}, {}, False)
    assert (order["state"], order["first_failure"]) == ("cancelled", None)


def test_a_failure_before_the_cancelling_stays_a_failure():
    order = decide({"a": status("ended", failure("a"), cancelled=True)}, {}, False)
    assert order["state"] == "failed"


def test_the_first_cause_does_not_depend_on_the_order_of_the_reports():
    cause = failure("c", 2, order=2)
    effects = [failure("a", 0, secondary=True, order=0), failure("b", 1, secondary=True, order=1)]
    for reports in itertools.permutations([cause, *effects]):
        assert first_cause(list(reports)) is cause


def test_of_two_true_causes_the_first_to_be_heard_counts():
    late, early = failure("a", order=1), failure("b", order=0)
    assert first_cause([late, early]) is early


def test_a_lost_host_explains_broken_connections_but_not_a_ranks_own_failure():
    lost, broken = failure("b", None, kind="lost"), failure("a", secondary=True)
    assert first_cause([broken, lost]) is lost
    own = failure("a", order=1)
    assert first_cause([lost, own]) is own


# ---- ways between two hosts ----------------------------------------------------------------------------------------

HOW = "no connection"


def cut(**ways):
    """cut(b="c"): b reports that it does not reach c."""
    return {name: status("running") | {"cut": dict.fromkeys(ways.get(name, ""), HOW)} for name in "abcd"}


def test_no_way_is_cut_where_nobody_says_so():
    assert severed(cut(), {}) == {}
    assert severed({"a": status("running"), "b": {}}, {}) == {}


@pytest.mark.parametrize("cuts", [{"b": "c"}, {"c": "b"}, {"b": "c", "c": "b"}])
def test_of_two_that_do_not_reach_each_other_one_has_to_go_and_both_are_named(cuts):
    ((node, why),) = severed(cut(**cuts), {}).items()
    assert node == "c"
    assert "b and c cannot reach each other" in why or "c and b cannot reach each other" in why
    assert HOW in why


def test_the_master_stays_where_another_can_go_and_who_is_cut_off_most_goes_first():
    assert [*severed(cut(a="b"), {})] == ["b"]
    assert [*severed(cut(b="a"), {})] == ["b"]
    assert [*severed(cut(a="b", b="c", d="b"), {})] == ["b"]
    assert [*severed(cut(a="bcd"), {})] == ["a"]


def test_every_cut_pair_loses_one_and_whoever_is_lost_already_explains_its_own():
    assert sorted(severed(cut(a="b", c="d"), {})) == ["b", "d"]
    assert severed(cut(b="c"), {"c": "no word for 20 s"}) == {}
    assert severed(cut(b="xyz"), {}) == {}
