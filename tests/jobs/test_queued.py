"""What hosts say of their queues, joined and put into words; nothing of it is taken on trust."""

import pytest

from orchestrator.jobs import HostAnswer, Rival, place_in, place_of, queue_of, read_answer


def said(**rows):
    return {"tickets": [], "ahead": [], "held": [], **rows}


def row(job, number=0, since_s=5.0, user="alice"):
    return {"job": job, "user": user, "since_s": since_s, "number": number, "gpus": ["GPU-a"]}


def test_a_job_on_two_hosts_is_one_rival_and_the_nearest_is_named_first():
    a = read_answer("a", said(held=[row("has-1", since_s=723)], ahead=[row("x-1", 1), row("y-1", 2, None, "")]))
    b = read_answer("b", said(held=[row("has-1", since_s=720)], ahead=[row("y-1", 2, None, "")]))
    standing = place_of({"a": a, "b": b})
    words = "place 3 in the queue, behind alice's job has-1 (has GPUs of a, b for 12m03s), job y-1 (waits)"
    assert standing.words() == f"{words}, alice's job x-1 (waits for 5.0s)"
    assert not standing.is_turn


def test_other_programs_and_silent_sockets_are_named_after_the_place():
    records = {
        "a": {"queue": said(held=[row("has-1")], occupied="", silent=["bob", ""])},
        "b": {"queue": said(occupied="other programs leave 1 MiB", silent=[])},
    }
    place = "place 1 in the queue, behind alice's job has-1 (has GPUs of a for 5.0s)"
    silent = [f"a: a socket of {login} gives no answer: passed over" for login in ("bob", "another login")]
    assert place_in(records) == "; ".join([place, *silent, "b: other programs leave 1 MiB"])
    assert place_in({"b": records["b"]}) == "b: other programs leave 1 MiB"
    huge = {"queue": said(held=[row("has-1", since_s=10**400)], occupied="", silent=[])}
    for nonsense in ({}, {"queue": "nonsense"}, huge, {"queue": said(held=[row("has-1", float("inf"))])}):
        assert place_in({**records, "c": nonsense}) == ""


def test_it_is_a_jobs_turn_when_no_host_names_another():
    assert place_of({"a": read_answer("a", said(tickets=[row("later", 9)])), "b": HostAnswer()}).is_turn


def test_a_job_that_has_started_waits_no_more():
    standing = place_of({"a": read_answer("a", said(held=[row("x-1")], ahead=[row("x-1", 1)]))})
    assert (standing.place, [rival.job for rival in standing.holders]) == (1, ["x-1"])


def test_the_queue_is_in_the_order_of_the_numbers_and_then_of_the_ids():
    answers = {node: read_answer(node, said(tickets=[row("b", 2), row("c", 1), row("a", 2)])) for node in "ba"}
    assert queue_of(answers) == tuple(
        Rival(job, "alice", 5.0, ("a", "b"), number) for job, number in (("c", 1), ("a", 2), ("b", 2))
    )


def test_what_a_host_says_cannot_steer_the_terminal_or_grow_without_end():
    (rival,) = read_answer("a", said(held=[row("\x1b[2Jx" * 999, user="al\nice", since_s=float("inf"))])).held
    assert rival.job.isprintable() and len(rival.job) <= 120 and rival.user == "al ice" and rival.since_s is None
    assert len(read_answer("a", said(ahead=[row("x", 1)] * 9999)).ahead) == 4096


@pytest.mark.parametrize("number", [-1, 1 << 60, "one", None])
def test_nonsense_is_refused(number):
    with pytest.raises((ValueError, TypeError)):
        read_answer("a", said(tickets=[row("x", number)]))
    with pytest.raises((KeyError, TypeError, ValueError)):
        read_answer("a", said(held=[{"job": "x"}]))


@pytest.mark.parametrize("row", ["number", "since_s"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 10**400, "x"])
def test_a_hosts_odd_numbers_hide_the_place_only(row, value):
    rival = {"job": "j", "user": "u", "number": 1, row: value}
    shown = place_in({"a": {"queue": {"ahead": [rival], "occupied": ""}}})
    assert shown == "" or "place 2 in the queue" in shown
