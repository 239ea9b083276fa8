"""Who holds a job up, from what hosts saw: the verdict of each kind of stall, and of none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import ConnectError, HostError
from orchestrator.jobs import HostSnapshot, Verdict, diagnose
from orchestrator.jobs.diagnosis import LONG_S, QUIET_S, VERY_LONG_S
from orchestrator.planning import LaunchPlan
from tests.support.run_folders import Host, write_run

SRC = "/w/jobs/j/src"
TORCH = "/venv/lib/python3.11/site-packages/torch"
REDUCES = [[f"{TORCH}/distributed/distributed_c10d.py", 4181, "all_reduce", ""], [f"{SRC}/train.py", 7, "step", "x"]]
BACKWARD = [[f"{TORCH}/autograd/graph.py", 8, "_engine_run_backward", ""], [f"{SRC}/train.py", 8, "step", ""]]
ELSEWHERE = [[f"{SRC}/train.py", 31, "save", "copy(weights)"]]
LOADS = [[f"{TORCH}/utils/data/dataloader.py", 725, "__next__", ""], [f"{SRC}/train.py", 5, "<module>", "for b in l:"]]


def process(frames: list[list[Any]] | None, **changes: Any) -> dict[str, Any]:
    threads = None if frames is None else [{"main": True, "frames": frames}]
    plain = {"pid": 77, "name": "python", "state": "S", "wchan": "futex_do_wait", "same": True, "idle": True}
    return {**plain, "threads": threads, **changes}


def rank(number: int, frames: list[list[Any]] | None, **changes: Any) -> dict[str, Any]:
    plain = {"rank": number, "ended": False, "does": "waits", "quiet_s": 300.0, "wrapper": "S"}
    return {**plain, "processes": [process(frames)], **changes}


def host(*ranks: dict[str, Any], **changes: Any) -> HostSnapshot:
    return HostSnapshot.model_validate({"state": "running", "alive": True, "src": SRC, "ranks": ranks, **changes})


def verdict(tmp_path: Path, **hosts: HostSnapshot | HostError) -> Verdict:
    run = write_run(tmp_path / "run", [Host(name) for name in hosts], {}, kind="script", exp="train.py", settings={})
    return diagnose(LaunchPlan.model_validate_json(run.plan.read_text()), hosts)


def test_the_one_that_is_elsewhere_while_others_wait_is_named(tmp_path: Path) -> None:
    found = verdict(tmp_path, a=host(rank(0, REDUCES)), b=host(rank(1, ELSEWHERE)), c=host(rank(2, BACKWARD)))
    assert (found.kind, found.node, found.rank, found.place, found.line) == (
        *("missed-collective", "b", 1),
        *("train.py:31 in save", "copy(weights)"),
    )
    assert "each of 2 ranks waits in a collective at train.py:7 in step" in found.reason


def test_it_may_have_ended_or_not_have_begun(tmp_path: Path) -> None:
    ended = {"rank": 1, "ended": True, "exit_code": 0}
    found = verdict(tmp_path, a=host(rank(0, REDUCES)), b=host(ended))
    assert (found.kind, found.rank) == ("missed-collective", 1) and "has ended with exit code 0" in found.reason
    found = verdict(tmp_path / "2", a=host(rank(0, REDUCES)), b=host({"rank": 1, "ended": False}))
    assert (found.kind, found.rank) == ("missed-collective", 1) and "has not begun" in found.reason


def test_who_shows_no_line_is_not_said_to_miss_a_collective(tmp_path: Path) -> None:
    """It does not answer, or has its own handler for the signal: it may well wait with the others."""
    found = verdict(tmp_path, a=host(rank(0, REDUCES)), b=host(rank(1, None)))
    assert (found.kind, found.node, found.rank, found.place) == ("stands-still", "b", 1, "")
    assert "rank 1 on b shows no line (python, state S, futex_do_wait), and rank 0 on a waits in" in found.reason
    found = verdict(tmp_path / "2", a=host(rank(0, REDUCES)), b=host(rank(1, ELSEWHERE), rank(2, None)))
    assert (found.kind, found.rank) == ("missed-collective", 1)


def test_different_collectives_are_told_apart(tmp_path: Path) -> None:
    found = verdict(tmp_path, a=host(rank(0, REDUCES)), b=host(rank(1, BACKWARD)), c=host(rank(2, REDUCES)))
    assert (found.kind, found.rank) == ("missed-collective", 1)
    same = verdict(tmp_path / "2", a=host(rank(0, REDUCES)), b=host(rank(1, REDUCES)))
    assert (same.kind, same.rank) == ("stands-still", None)
    assert "all ranks wait for each other at train.py:7" in same.reason


@pytest.mark.parametrize(
    "changes",
    [
        {"quiet_s": QUIET_S - 1},
        {"quiet_s": 50.0, "step_s": 20.0},  # such a step may take longer than it is quiet
        {"grew": True},
        {"does": "busy"},  # it evaluates, compiles, unpacks
        {"does": "busy", "quiet_s": VERY_LONG_S, "step_s": 600.0},
        {"net_bytes": 1 << 20},  # it downloads
        {"processes": [process(ELSEWHERE, same=False)]},
        {"processes": [process(ELSEWHERE), process(None, pid=78, moved_bytes=1 << 20)]},  # `tar`, say
        {"processes": [process(ELSEWHERE, state="D", moved_bytes=1 << 20)], "does": "disk"},
    ],
)
def test_a_slow_rank_is_no_alarm_while_it_gets_on(tmp_path: Path, changes: dict[str, Any]) -> None:
    found = verdict(tmp_path, a=host(rank(0, REDUCES)), b=host(rank(1, ELSEWHERE, **changes)))
    assert not found.is_alarm, found
    if found.kind == "still-busy":
        assert (found.node, found.rank, found.place) == ("b", 1, "train.py:31 in save")
        assert "waits for it at train.py:7 in step" in found.reason


def test_who_waits_in_a_way_of_its_own_for_one_that_works_is_no_alarm(tmp_path: Path) -> None:
    """As a script does that looks for a file again and again until rank 0 has written it."""
    works = rank(0, ELSEWHERE, does="busy")
    found = verdict(tmp_path, a=host(works), b=host(rank(1, [[f"{SRC}/train.py", 9, "until", "time.sleep(1)"]])))
    assert (found.kind, found.rank) == ("still-busy", 0)


def test_data_that_goes_through_a_slow_link_is_no_alarm(tmp_path: Path) -> None:
    way = {"to": "10.0.0.2", "port": 5000, "unsent": 81920, "unread": 0, "retransmits": 3}
    slow = rank(0, REDUCES, net_bytes=1 << 20, connections=[way])
    assert verdict(tmp_path, a=host(slow), b=host(rank(1, REDUCES))).kind == "still-busy"


def test_with_nccl_who_waits_uses_the_cpu_and_only_time_tells(tmp_path: Path) -> None:
    def ranks(quiet_s: float, other: list[list[Any]], does: str = "busy") -> dict[str, HostSnapshot]:
        spins = rank(0, REDUCES, does="busy", quiet_s=quiet_s)
        return {"a": host(spins), "b": host(rank(1, other, does=does, quiet_s=quiet_s))}

    assert verdict(tmp_path, **ranks(LONG_S - 1, ELSEWHERE)).kind == "still-busy"
    assert verdict(tmp_path / "2", **ranks(LONG_S, ELSEWHERE)).kind == "still-busy"
    idle = verdict(tmp_path / "3", **ranks(LONG_S, ELSEWHERE, "waits"))
    assert (idle.kind, idle.node) == ("missed-collective", "b")
    both = verdict(tmp_path / "4", **ranks(LONG_S, BACKWARD))
    assert both.kind == "still-busy" and "others at train.py:7 in step: they compute, or wait" in both.reason
    at_last = verdict(tmp_path / "5", **ranks(VERY_LONG_S, BACKWARD))
    assert (at_last.kind, at_last.node) == ("missed-collective", "b")
    same = verdict(tmp_path / "6", **ranks(VERY_LONG_S, REDUCES))
    assert same.kind == "stands-still" and "all ranks wait for each other" in same.reason


def test_a_loader_is_the_cause_and_its_worker_the_place(tmp_path: Path) -> None:
    fetch = [[f"{SRC}/data.py", 12, "__getitem__", "read()"], [f"{TORCH}/utils/data/_utils/fetch.py", 54, "fetch", ""]]
    idle = process([[f"{TORCH}/utils/data/_utils/worker.py", 335, "_worker_loop", ""]], pid=78)
    loads = {"processes": [process(LOADS), idle, process(fetch, pid=79)]}
    found = verdict(tmp_path, a=host(rank(0, REDUCES)), b=host(rank(1, LOADS, **loads)))
    assert (found.kind, found.node, found.place) == ("loader", "b", "data.py:12 in __getitem__")
    assert "pid 79" in found.reason
    loads["processes"][2] = process(None, pid=79, name="pt_data_worker", state="T")
    found = verdict(tmp_path / "2", a=host(rank(0, REDUCES)), b=host(rank(1, LOADS, **loads)))
    assert (found.kind, found.remedy) == ("loader", "`orch ssh b -- kill -CONT 79` continues it")


@pytest.mark.parametrize("changes", [{"quiet_s": LONG_S - 1}, {"step_s": 31.0}])
def test_a_checkpoint_on_a_slow_disk_has_time(tmp_path: Path, changes: dict[str, Any]) -> None:
    disk = {"does": "disk", "processes": [process(ELSEWHERE, state="D")], **changes}
    assert verdict(tmp_path, a=host(rank(0, REDUCES)), b=host(rank(1, ELSEWHERE, **disk))).kind == "still-busy"


def test_a_disk_that_still_gives_something_is_not_dead(tmp_path: Path) -> None:
    disk = {"does": "disk", "processes": [process(ELSEWHERE, state="D", idle=False)]}
    found = verdict(tmp_path, a=host(rank(0, REDUCES)), b=host(rank(1, ELSEWHERE, **disk)))
    assert found.kind == "still-busy" and "rank 1 on b waits for a disk, and rank 0 on a waits for it" in found.reason


def test_a_disk_that_gives_no_answer_goes_before_who_waits_for_it(tmp_path: Path) -> None:
    disk = {"does": "disk", "processes": [process(ELSEWHERE, state="D", wchan="rpc_wait_bit_killable")]}
    found = verdict(tmp_path, a=host(rank(0, REDUCES)), b=host(rank(1, ELSEWHERE, **disk)))
    assert (found.kind, found.rank, found.place) == ("dead-mount", 1, "train.py:31 in save")
    assert "(rpc_wait_bit_killable)" in found.reason
    worker = {"processes": [process(LOADS), process(None, pid=79, state="D", wchan="io_schedule")]}
    found = verdict(tmp_path / "2", a=host(rank(0, REDUCES)), b=host(rank(1, LOADS, **worker)))
    assert (found.kind, found.rank) == ("dead-mount", 1)


def test_what_is_stopped_or_full_or_silent_needs_no_time(tmp_path: Path) -> None:
    fresh = {"quiet_s": 0.0}
    found = verdict(tmp_path, a=host(rank(0, REDUCES)), b=host(rank(1, None, does="stopped", **fresh)))
    assert (found.kind, found.rank, found.remedy) == ("stopped", 1, "`orch ssh b -- kill -CONT 77` continues it")
    found = verdict(tmp_path / "2", a=host(rank(0, REDUCES), frozen=["supervisor"]), b=host(rank(1, REDUCES, **fresh)))
    assert (found.kind, found.node) == ("stopped", "a")
    full = {"full_pipes": ["stdout"], "wrapper": "T", "wrapper_pid": 76, **fresh}
    found = verdict(tmp_path / "3", a=host(rank(0, REDUCES)), b=host(rank(1, ELSEWHERE, **full)))
    assert (found.kind, found.rank) == ("full-pipe", 1) and "kill -CONT 76" in found.remedy
    silent = ConnectError("b", "no answer within 40 s", "check that the host is up")
    found = verdict(tmp_path / "4", a=host(rank(0, REDUCES, **fresh)), b=silent)
    assert (found.kind, found.node, found.rank) == ("half-dead-link", "b", None)
    moves = verdict(tmp_path / "5", a=host(rank(0, REDUCES, does="busy", **fresh)), b=silent)
    assert moves.kind == "no-stall"


def test_bytes_that_nobody_confirms_name_the_way(tmp_path: Path) -> None:
    def sends(retransmits: int) -> HostSnapshot:
        way = {"to": "10.0.0.2", "port": 5000, "unsent": 81920, "unread": 0, "retransmits": retransmits}
        return host(rank(0, REDUCES, connections=[way]))

    found = verdict(tmp_path, a=sends(6), b=host(rank(1, REDUCES)))
    assert (found.kind, found.node, found.rank) == ("half-dead-link", "a", 0)
    assert "81,920 bytes were sent again 6 times" in found.reason
    assert verdict(tmp_path / "2", a=sends(0), b=host(rank(1, REDUCES))).kind == "stands-still"


@pytest.mark.parametrize(
    ("mhz", "use", "kind"), [(600, 97, "clock-throttle"), (1900, 97, "no-stall"), (300, 3, "no-stall")]
)
def test_a_gpu_far_below_its_clock_is_told_where_nothing_stands_still(
    tmp_path: Path, mhz: int, use: int, kind: str
) -> None:
    line = f'{{"event": "gpu", "rank": 0, "index": 2, "utilisation": {use}, "sm_mhz": %s, "slowed_by": 64%s}}'
    lines = [line % (1980, ', "max_sm_mhz": 1980'), line % (mhz, "")]
    found = verdict(tmp_path, a=host(rank(0, REDUCES, does="busy", grew=True), gpu_lines=lines))
    assert found.kind == kind
    assert kind == "no-stall" or "runs at 600 of at most 1,980 MHz under load (heat)" in found.reason


def test_a_job_that_has_ended_or_not_begun_does_not_stand_still(tmp_path: Path) -> None:
    ended = {"rank": 0, "ended": True, "exit_code": 0}
    assert verdict(tmp_path, a=host(ended)) == Verdict("no-stall", "its ranks have ended")
    assert verdict(tmp_path / "2", a=host()) == Verdict("no-stall", "its ranks have not begun")


@pytest.mark.parametrize(
    "lie",
    [
        {"ranks": 3},
        {"src": None, "ranks": []},
        {"src": SRC, "ranks": [rank(0, [["f", -1, "g", ""]])]},
        {"src": SRC, "ranks": [rank(0, [["f", 1, "g"]])]},
        {"src": SRC, "ranks": [rank(0, REDUCES, quiet_s=float("inf"))]},
        {"src": SRC, "ranks": [rank(0, REDUCES, does="lies")]},
        {"src": SRC, "ranks": [rank(0, REDUCES * 50)]},
    ],
)
def test_no_host_is_believed_what_makes_no_sense(lie: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="HostSnapshot"):
        HostSnapshot.model_validate(lie)


def test_what_a_host_says_is_printable(tmp_path: Path) -> None:
    evil = [[f"{SRC}/\x1b[2Jx.py", 1, "f\x07", "\x1b]0;t\x07y"]]
    found = verdict(tmp_path, a=host(rank(0, evil)))
    assert (found.place, found.line) == ("x.py:1 in f", "y")
