"""Tracebacks at a job's end: the cause's whole and last, a line for each other kind. A job that goes on shows all."""

from __future__ import annotations

import inspect

import pytest

from orchestrator.jobs.follow import GONE_S, HostLiveness
from orchestrator.jobs.frames import Agent, Beat, End
from orchestrator.jobs.job_store import FirstFailure, JobRecord
from orchestrator.jobs.lines import LogLine
from orchestrator.jobs.tracebacks import HOLD_S, Tracebacks, what_failed
from orchestrator.views import following

JOB = "train-20261129-0100-abc"
SRC = f"/home/u/.orch/jobs/{JOB}/src"


def traceback(node: str, rank: int, error: str, line: int = 40, *, prefix: str = "") -> list[LogLine]:
    texts = [
        "Traceback (most recent call last):",
        f'  File "{SRC}/train.py", line {line}, in <module>',
        "    loss.backward()",
        '  File "/opt/torch/_tensor.py", line 512, in backward',
        "    torch.autograd.backward(",
        error,
    ]
    return [LogLine(node, rank, "stderr", prefix + text) for text in texts]


def ended(state: str, failure: FirstFailure | None = None) -> JobRecord:
    known = {"schema": 1, "id": JOB, "state": state, "exp": "train.py", "cluster": "lab", "nodes": ("a", "b", "c")}
    return JobRecord(**known, first_failure=failure)


CAUSE = FirstFailure(node="b", rank=1, reason="rank 1 exited 1")


def test_the_cause_comes_whole_and_those_that_followed_from_it_in_a_line_each_kind():
    tracebacks = Tracebacks(JOB)
    said = [LogLine("a", 0, "stdout", "step 1")]
    assert tracebacks.take(said, 0) == tuple(said)
    victims = {0: "a", 2: "c", 3: "c"}
    for rank, node in victims.items():
        error = f"RuntimeError: Connection closed by peer [10.0.0.{rank}]:{2000 + rank}"
        assert tracebacks.take(traceback(node, rank, error, prefix=f"[rank{rank}]: "), 0.1) == ()
    cause = traceback("b", 1, "ValueError: no such sample", 12)
    assert tracebacks.take(cause, 0.2) == ()
    assert tracebacks.due(HOLD_S + 1, is_failing=True) == ()
    end = tracebacks.end(ended("failed", CAUSE))
    assert end.lines == tuple(cause)
    assert end.folded == ("3 ranks: RuntimeError: Connection closed by peer [10.0.0.0]:2000, train.py:40",)
    assert tracebacks.take(victim := traceback("a", 0, "E: late"), 1) == tuple(victim)  # nothing is held any more


def test_a_host_that_was_lost_leaves_only_what_followed():
    tracebacks = Tracebacks(JOB)
    tracebacks.take(traceback("a", 0, "RuntimeError: no route"), 0)
    end = tracebacks.end(ended("failed", FirstFailure(kind="lost", node="b", reason="no word for 20 s")))
    assert (end.lines, end.folded) == ((), ("rank 0 on a: RuntimeError: no route, train.py:40",))


def test_a_traceback_that_was_only_logged_is_shown_soon():
    tracebacks = Tracebacks(JOB)
    logged = [*traceback("a", 0, "OSError: tried again"), LogLine("a", 0, "stderr", "going on")]
    assert tracebacks.take(logged, 0) == tracebacks.due(HOLD_S, is_failing=False) == ()
    assert tracebacks.due(HOLD_S + 0.1, is_failing=False) == tuple(logged)
    assert tracebacks.end(ended("succeeded")).lines == ()


def test_a_job_that_succeeds_shows_all():
    tracebacks = Tracebacks(JOB)
    tracebacks.take(logged := traceback("a", 0, "OSError: caught"), 0)
    end = tracebacks.end(ended("succeeded"))
    assert (end.lines, end.folded) == (tuple(logged), ())


def test_a_cancelled_job_folds_only_its_interrupts():
    tracebacks = Tracebacks(JOB)
    tracebacks.take(own := traceback("b", 1, "OSError: its own"), 0)
    for rank in (0, 2):
        tracebacks.take(traceback("a", rank, "KeyboardInterrupt"), 0)
    end = tracebacks.end(ended("cancelled"))
    assert (end.lines, end.folded) == (tuple(own), ("2 ranks: KeyboardInterrupt, train.py:40",))


def test_torchs_warning_about_reverse_dns_is_not_shown():
    noise = "[W1129 socket.cpp:767] [c10d] The hostname of the client socket cannot be retrieved. err=-3"
    assert Tracebacks(JOB).take([LogLine("a", 0, "stderr", noise)], 0) == ()


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["no traceback"], ""),
        (["Traceback (most recent call last):", '  File "x.py", line 3, in f', "    f()"], ""),
        (["Traceback (most recent call last):", '  File "x.py", line 3, in f', "E"], "E, x.py:3"),
        (
            [" 30%|###   | 3/9[rank1]: Traceback (most recent call last):", '  File "x.py", line 3, in f', "E"],
            "E, x.py:3",
        ),
        (
            [
                *("Traceback (most recent call last):", '  File "x.py", line 3, in f', "KeyError: 1", "", "During it"),
                *("Traceback (most recent call last):", '  File "y.py", line 4, in g', "ValueError: 2", "a note"),
            ],
            "ValueError: 2, y.py:4",
        ),
    ],
)
def test_the_error_and_its_place(texts, words):
    assert what_failed(texts, "/jobs/x/src/") == words


def test_the_prompt_waits_for_hosts_that_send_but_not_for_one_that_is_cut_off():
    liveness = HostLiveness(["a", "b"])
    final = Agent({"state": "failed", "alive": False})
    liveness.take("b", Agent({"alive": True}), 0)
    liveness.take("b", Beat(), 1)  # the local clock's: nothing came
    liveness.take("a", final, 25)
    assert not liveness.only_gone_are_left(25)
    liveness.take("a", End({}), 25.3)
    assert liveness.only_gone_are_left(25.3)
    heard = HostLiveness(["a", "b"])
    heard.take("b", Beat(), 24.5)
    heard.take("a", End({}), 25.3)
    assert not heard.only_gone_are_left(25.3) and heard.only_gone_are_left(24.6 + GONE_S)


def test_ranks_that_fail_alike_behind_a_progress_bar_are_folded():
    tracebacks = Tracebacks(JOB)
    for rank, node in enumerate("abc"):
        first, *others = traceback(node, rank, "ModuleNotFoundError: No module named 'x'")
        assert tracebacks.take([first._replace(text=f" 30%|###   | 3/9{first.text}"), *others], 0) == ()
    end = tracebacks.end(ended("failed", CAUSE))
    assert end.folded == ("2 ranks: ModuleNotFoundError: No module named 'x', train.py:40",)
    assert {line.rank for line in end.lines} == {1}


def test_interrupted_events_are_closed_so_that_nothing_connects_to_hosts_while_a_cancel_does():
    def events():
        while True:
            yield (LogLine("a", 0, "stdout", "step"),)

    def press_ctrl_c(line):
        raise KeyboardInterrupt

    told = events()
    with pytest.raises(KeyboardInterrupt):
        following.print_events(told, press_ctrl_c)
    assert inspect.getgeneratorstate(told) == inspect.GEN_CLOSED


def test_the_end_is_printed_once_its_lines_are(capsys):
    tracebacks = Tracebacks(JOB)
    tracebacks.take(traceback("a", 0, "RuntimeError: closed"), 0)
    tracebacks.take(traceback("b", 1, "ValueError: no such sample", 12), 0)
    events = [tracebacks.end(ended("failed", CAUSE))]
    following.print_events(events, ended=lambda record: print("THE END"))
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-2:] == ["[b 1] ValueError: no such sample", "THE END"]
    assert "rank 0 on a: RuntimeError: closed, train.py:40" in shown.err
