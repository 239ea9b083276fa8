"""The hub's decision, case by case."""

import itertools

import pytest

from orchestrator.remote.verdict import decide, first_cause, severed, spare


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


# ---- elastic jobs ---------------------------------------------------------------------------------------------------

LOST = "no word for 20 s"


def three(**phases):
    return {name: status(phases.get(name, "running")) for name in "abc"}


def test_an_elastic_job_goes_on_without_a_lost_host():
    assert decide(three(), {"c": LOST}, False, 2) == {"do": "start"}
    assert decide(three(a="joined", b="regrouping", c="joining"), {"c": LOST}, False, 1) == {"do": "start"}
    assert decide(three(), {"c": LOST}, False) | {"first_failure": None} == {
        "do": "stop",
        "state": "failed",
        "first_failure": None,
    }


def test_an_elastic_job_succeeds_when_those_that_are_left_are_done():
    assert decide(three(a="done", b="done"), {"c": LOST}, False, 2)["state"] == "succeeded"
    assert decide(three(a="done"), {"c": LOST}, False, 2)["do"] == "start"


def test_below_the_minimum_the_host_that_was_one_too_many_is_the_cause():
    order = decide(three(), {"c": LOST, "b": "gone"}, False, 2)
    assert (order["do"], order["state"], order["first_failure"]["node"]) == ("stop", "failed", "b")
    assert decide(three(a="ended"), {"c": LOST, "b": "gone"}, False, 2)["do"] == "finish"


def test_without_its_master_no_elastic_job_goes_on():
    assert decide(three(), {"a": LOST}, False, 1)["first_failure"]["node"] == "a"
    cut_off = dict.fromkeys("abc", LOST)
    assert decide(three(), cut_off, False, 1)["first_failure"]["node"] == "a"


def test_what_a_lost_host_complained_of_is_no_failure_of_an_elastic_job():
    statuses = three() | {"c": status("running", failure("c", kind="supervisor"))}
    assert decide(statuses, {"c": LOST}, False, 2)["do"] == "start"
    assert decide(statuses, {}, False, 2)["do"] == "stop"


def test_a_failure_ends_an_elastic_job_as_any_other():
    statuses = three() | {"b": status("running", failure("b", 1))}
    assert decide(statuses, {"c": LOST}, False, 2)["first_failure"]["rank"] == 1


@pytest.mark.parametrize("minimum", [1, 2, 3, 4])
def test_so_many_are_spared_as_the_minimum_allows(minimum):
    for lost in itertools.permutations("bcd"):
        assert spare(list("abcd"), list(lost), minimum) == list(lost)[: 4 - minimum]
    assert spare(list("abcd"), ["b"], None) == []
