"""When the hosts of an elastic job restart, with whom, and when they have done so too often."""

import itertools

import pytest

from orchestrator.remote.generations import Generations


def status(phase="joined", generation=0, *faults):
    return {"phase": phase, "generation": generation, "faults": list(faults)}


def fault(node, generation=0, *, secondary=False):
    return {"node": node, "rank": 0, "reason": "rank 0 exited 1", "secondary": secondary, "generation": generation}


def of(nodes, *statuses, **others):
    return {node: others.get(node, status(*statuses)) for node in nodes}


def started(max_restarts=3, nodes="abc"):
    made = Generations(max_restarts)
    assert made.order(of(nodes))["do"] == "start"
    return made


def fall(made, nodes, falls, left=None):
    """These hosts' ranks die; then all that are left are ready again. What follows."""
    number = made.number
    statuses = {node: status("running", number, *faults) for node, faults in falls.items()}
    order = made.order(of(left or nodes, "running", number, **statuses))
    assert (order["do"], order["generation"]) == ("regroup", number + 1)
    statuses = {node: status("joined", number + 1, *faults) for node, faults in falls.items()}
    return made.order(of(left or nodes, "joined", number + 1, **statuses))


def test_nothing_starts_again_while_nobody_falls():
    made = started()
    for phase in ("joined", "running", "done"):
        assert made.order(of("abc", phase)) == {"do": "start", "generation": 0, "members": ["a", "b", "c"]}


def test_when_a_rank_dies_all_hosts_gather_and_then_start_together():
    made = started()
    fell = {"b": status("running", 0, fault("b"))}
    assert made.order(of("abc", "running", **fell)) == {"do": "regroup", "generation": 1, "hearsay": False}
    half = {"a": status("joined", 1), "b": status("regrouping", 0, fault("b"))}
    assert made.order(of("abc", "running", **half))["do"] == "regroup"
    ready = {"b": status("joined", 1, fault("b"))}
    assert made.order(of("abc", "joined", 1, **ready)) == {"do": "start", "generation": 1, "members": ["a", "b", "c"]}
    assert made.order(of("abc", "running", 1, **ready))["do"] == "start"


def test_a_lost_host_is_not_among_those_that_start_again_and_the_master_stays_the_first():
    made = started()
    assert made.order(of("ac", "running"))["do"] == "regroup"
    assert made.order(of("ac", "joined", 1)) == {"do": "start", "generation": 1, "members": ["a", "c"]}


def test_a_host_that_is_lost_while_they_gather_starts_no_further_generation():
    made = started()
    fell = {"b": status("running", 0, fault("b"))}
    assert made.order(of("abc", "running", **fell))["generation"] == 1
    assert made.order(of("ab", "joined", 1)) == {"do": "start", "generation": 1, "members": ["a", "b"]}


def test_a_host_that_was_through_starts_again_with_the_others():
    made = started()
    statuses = {"a": status("done"), "b": status("running", 0, fault("b"))}
    assert made.order(of("abc", "running", **statuses))["do"] == "regroup"
    statuses = {"a": status("done"), "b": status("joined", 1)}
    assert made.order(of("abc", "joined", 1, **statuses))["do"] == "regroup"


def test_as_long_as_only_echoes_are_heard_the_truth_is_given_time():
    made = started()
    echo = {"a": status("running", 0, fault("a", secondary=True))}
    assert made.order(of("abc", "running", **echo))["hearsay"] is True


@pytest.mark.parametrize("max_restarts", [0, 1, 3])
def test_a_host_may_fall_so_often_and_once_more_ends_the_job(max_restarts):
    made = started(max_restarts)
    for _ in range(max_restarts):
        assert fall(made, "abc", {"b": [fault("b", made.number)]})["do"] == "start"
    order = fall(made, "abc", {"b": [fault("b", made.number)]})
    assert order["do"] == "give up"
    times = "1 restart" if max_restarts == 1 else f"{max_restarts} restarts"
    assert order["cause"]["reason"] == f"rank 0 exited 1, and that after {times}"


def test_hosts_are_counted_each_for_itself():
    made = started(1)
    for node in "abc":
        assert fall(made, "abc", {node: [fault(node, made.number)]})["do"] == "start"


def test_who_only_felt_anothers_death_is_not_counted():
    made = started(1)
    for _ in range(1):
        falls = {"a": [fault("a", made.number, secondary=True)], "b": [fault("b", made.number)]}
        assert fall(made, "abc", falls)["do"] == "start"
    assert fall(made, "abc", {"a": [fault("a", made.number, secondary=True)], "b": []}, left="ab")["do"] == "start"
    assert fall(made, "ab", {"a": [fault("a", made.number)]})["do"] == "start"
    assert fall(made, "ab", {"a": [fault("a", made.number)]})["cause"]["node"] == "a"


def test_where_nobody_says_more_than_an_echo_it_does_not_go_on_for_ever():
    made = started(2)
    orders = [fall(made, "abc", {"c": [fault("c", made.number, secondary=True)]})["do"] for _ in range(3)]
    assert orders == ["start", "start", "give up"]


def test_faults_of_earlier_generations_start_nothing_again():
    made = started()
    old = [fault("b", made.number)]
    assert fall(made, "abc", {"b": old})["do"] == "start"
    for phase, generation in itertools.product(("joined", "running"), (1,)):
        assert made.order(of("abc", phase, generation, b=status(phase, generation, *old)))["do"] == "start"
