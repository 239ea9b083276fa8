"""Who the others wait for, and what limits a step: from step lines whose figures can be checked in the head."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from orchestrator.results import Bound, Summary
from orchestrator.results.analyse import analyse
from tests.support.run_folders import SETTINGS, Host, step, write_run

TWO = [Host("a2000", 1, "RTX A2000"), Host("v100", 1, "Tesla V100-16GB")]
Parts = tuple[float, float, float, float]
"""load, compute, exposed, optim, in ms."""


def analysed(
    folder: Path, ranks: list[tuple[Parts, dict[str, Any]]], hosts: list[Host] = TWO, **settings: Any
) -> Summary:
    """Ten equal steps of 32 samples a rank: its parts, and fields beside them."""
    lines = {rank: [step(n, 32, *parts, **more) for n in range(10)] for rank, (parts, more) in enumerate(ranks)}
    return analyse(write_run(folder / "run", hosts, lines, settings={**SETTINGS, **settings}))


def waits_and_syncs(summary: Summary) -> list[tuple[float | None, float | None]]:
    return [(node.wait_ms, node.sync_ms) for node in summary.nodes]


# ---- waiting, where gradients travel beside backward --------------------------------------------------------------


def test_a_late_ranks_delay_that_the_wire_hides_is_no_wait(tmp_path: Path) -> None:
    """The wire is busy with earlier gradients for 50 ms on both, whenever the last one comes."""
    late, early = ((2, 80, 10, 8), {"comm_ms": 50}), ((2, 60, 30, 8), {"comm_ms": 50})
    summary = analysed(tmp_path, [late, early], strategy="ddp")
    assert waits_and_syncs(summary) == [(0, 10), (0, 30)]
    assert summary.straggler is None


def test_what_the_wire_does_not_hide_of_a_late_ranks_delay_is_waiting(tmp_path: Path) -> None:
    late, early = ((2, 80, 10, 8), {"comm_ms": 50}), ((2, 60, 30, 8), {"comm_ms": 62})
    summary = analysed(tmp_path, [late, early], strategy="ddp")
    assert waits_and_syncs(summary) == [(0, 10), (12, 18)]
    assert summary.straggler is not None
    assert (summary.straggler.node, summary.straggler.wait_ms) == ("a2000", pytest.approx(12))
    assert summary.straggler.reason == "takes 1.3x as long per sample as v100"


def test_a_rank_waits_no_longer_than_its_compute_leaves_exposed(tmp_path: Path) -> None:
    late, early = ((2, 80, 10, 8), {"comm_ms": 20}), ((2, 60, 30, 8), {"comm_ms": 95})
    assert waits_and_syncs(analysed(tmp_path, [late, early], strategy="ddp")) == [(0, 10), (30, 0)]


def test_lines_without_the_time_of_collectives_keep_to_what_is_exposed(tmp_path: Path) -> None:
    late, early = ((2, 80, 10, 8), {}), ((2, 60, 30, 8), {})
    summary = analysed(tmp_path, [late, early])
    assert waits_and_syncs(summary) == [(0, 10), (20, 10)]
    assert summary.straggler is not None
    assert summary.straggler.wait_ms == pytest.approx(20)


@pytest.mark.parametrize("comm", [-5, "50", 1e13])
def test_an_impossible_time_of_collectives_costs_its_line(tmp_path: Path, comm: Any) -> None:
    summary = analysed(tmp_path, [((2, 60, 30, 8), {}), ((2, 60, 30, 8), {"comm_ms": comm})])
    assert summary.missing[0] == "v100: rank 1 reported no step."
    assert "10 lines with an impossible number" in summary.warnings[0]


# ---- noise ----------------------------------------------------------------------------------------------------------


def under_load(folder: Path, spread_ms: float, slower: float = 1.0, steps: int = 200) -> Summary:
    """Two equal hosts that others' programs disturb for a while each; a2000 computes so much longer, beside."""
    chance = random.Random(7)
    drift = [[chance.gauss(0, spread_ms) for _ in range(steps // 20 + 1)] for _ in TWO]
    lines: dict[int, list[Any]] = {0: [], 1: []}
    for n in range(steps):
        own = [40 + abs(drift[rank][n // 20] + chance.gauss(0, spread_ms)) for rank in range(2)]
        own[0] *= slower
        for rank in range(2):
            lines[rank].append(step(n, 32, 2, own[rank], 10 + max(own) - own[rank], 8))
    return analyse(write_run(folder / "run", TWO, lines))


@pytest.mark.parametrize("spread_ms", [2.0, 10.0, 25.0])
def test_of_two_equal_hosts_under_load_none_is_named(tmp_path: Path, spread_ms: float) -> None:
    assert under_load(tmp_path, spread_ms).straggler is None


@pytest.mark.parametrize(("spread_ms", "slower"), [(1.0, 1.15), (5.0, 1.6), (10.0, 2.0)])
def test_a_host_that_is_slower_than_the_noise_is_named(tmp_path: Path, spread_ms: float, slower: float) -> None:
    found = under_load(tmp_path, spread_ms, slower).straggler
    assert found is not None
    assert found.node == "a2000"


def test_a_host_that_was_slow_for_one_stretch_of_the_run_is_no_straggler(tmp_path: Path) -> None:
    """A neighbour's program ran there for a tenth of the time; both hosts are equal."""
    late, even = ((2, 200, 10, 8), (2, 40, 170, 8)), ((2, 40, 10, 8), (2, 40, 10, 8))
    parts = [late if 50 <= n < 60 else even for n in range(103)]
    lines = {rank: [step(n, 32, *part[rank]) for n, part in enumerate(parts)] for rank in range(2)}
    assert analyse(write_run(tmp_path / "run", TWO, lines)).straggler is None


def test_one_measured_step_names_a_host_only_where_most_of_it_is_waiting(tmp_path: Path) -> None:
    def after_one(compute_ms: float) -> Summary:
        ranks = ((2, compute_ms, 10, 8), (2, 40, compute_ms - 30, 8))
        lines = {rank: [step(n, 32, *parts) for n in range(4)] for rank, parts in enumerate(ranks)}
        return analyse(write_run(tmp_path / str(compute_ms), TWO, lines))

    assert after_one(60).straggler is None
    assert after_one(400).straggler is not None


# ---- a bottleneck made on purpose ---------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", ["rank:0,at:start,ms:40", "at:start,ms:40,rank:0"])
def test_a_bottleneck_that_was_asked_for_is_named_as_such(tmp_path: Path, slow: str) -> None:
    summary = analysed(tmp_path, [((2, 80, 10, 8), {}), ((2, 40, 50, 8), {})], slow=slow)
    assert summary.straggler is not None
    assert summary.straggler.reason == f"takes 2.0x as long per sample as v100 (slow={slow} was asked for)"


@pytest.mark.parametrize("slow", ["", "rank:1,at:start,ms:40", "rank:01,at:sync,ms:40", None])
def test_another_ranks_bottleneck_is_no_excuse(tmp_path: Path, slow: str | None) -> None:
    summary = analysed(tmp_path, [((2, 80, 10, 8), {}), ((2, 40, 50, 8), {})], slow=slow)
    assert summary.straggler is not None
    assert summary.straggler.reason == "takes 2.0x as long per sample as v100"


# ---- what limits a step --------------------------------------------------------------------------------------------

LIMITED_BY = {
    "input": ((60, 20, 12, 8), (10, 20, 62, 8), "Input-bound: for 60 % of each step a2000 waits for its own data."),
    "compute": (
        (2, 70, 20, 8),
        (2, 30, 60, 8),
        "Compute-bound: 70 % of each step is a2000's own forward and backward.",
    ),
    "wire": (
        (2, 12, 78, 8),
        (2, 10, 80, 8),
        "Network-bound: 78 % of each step is gradient traffic not hidden by compute.",
    ),
    "optimiser": ((5, 20, 10, 65), (5, 20, 70, 5), "Optimiser-bound: the update takes 65 % of each step of a2000."),
}


@pytest.mark.parametrize("part", LIMITED_BY)
def test_the_largest_part_of_the_slowest_ranks_step_is_the_limit(tmp_path: Path, part: Any) -> None:
    slowest, other, words = LIMITED_BY[part]
    summary = analysed(tmp_path, [(slowest, {}), (other, {})])
    share = max(slowest) / 100
    assert summary.bound == Bound(part=part, node="a2000", share=share)
    assert summary.bound is not None
    assert summary.bound.words == words


def test_waiting_is_nobodys_bound(tmp_path: Path) -> None:
    """v100's largest part is the wait for a2000: the limit is a2000's compute."""
    summary = analysed(tmp_path, [((2, 80, 10, 8), {}), ((2, 9, 81, 8), {})])
    assert summary.bound is not None
    assert (summary.bound.part, summary.bound.node) == ("compute", "a2000")


def test_what_hosts_wait_for_each_other_by_turns_is_not_the_wires(tmp_path: Path) -> None:
    """Each is 60 ms late in every second step: 30 ms of waiting on the average, 10 of the wire, 35 of compute."""
    early, late = step(0, 32, 2, 5, 70, 8), step(0, 32, 2, 65, 10, 8)
    lines = {rank: [{**(late if n % 2 == rank else early), "step": n} for n in range(10)] for rank in range(2)}
    summary = analyse(write_run(tmp_path / "run", TWO, lines, settings={**SETTINGS, "warmup_steps": 0}))
    assert waits_and_syncs(summary) == [(30, 10), (30, 10)]
    assert summary.bound is not None
    assert (summary.bound.part, summary.bound.share) == ("compute", pytest.approx(35 / 85))


def test_a_process_alone_is_bound_by_its_own_parts(tmp_path: Path) -> None:
    summary = analysed(tmp_path, [((2, 80, 0, 18), {"comm_ms": 0})], [Host("v100")], strategy="none")
    assert summary.bound == Bound(part="compute", node="v100", share=0.8)
    assert summary.straggler is None


def test_without_all_parts_or_all_ranks_nothing_is_said_to_bind(tmp_path: Path) -> None:
    whole = [step(n, 32, 2, 80, 10, 8) for n in range(10)]
    parted = [{name: value for name, value in line.items() if name != "load_ms"} for line in whole]
    assert analyse(write_run(tmp_path / "whole", TWO, {0: whole, 1: whole})).bound is not None
    assert analyse(write_run(tmp_path / "parted", TWO, {0: parted, 1: parted})).bound is None
    assert analyse(write_run(tmp_path / "one", TWO, {0: whole})).bound is None
