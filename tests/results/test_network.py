"""From a collectives run's folder to its figures, the terminal's table and the page; no training is spoken of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.forecast import network_from
from orchestrator.paths import RunFolder
from orchestrator.results import Summary
from orchestrator.results.analyse import analyse
from orchestrator.views import host_tables, write_report
from orchestrator.views.report import headline
from tests.support.pages import PNG, Page, assert_self_contained
from tests.support.run_folders import Host, end, start, write_run

SETTINGS = {"exp": "collectives", "operations": "all", "max_bytes": 2**28}
SIZES = [2**power for power in range(10, 29, 2)]
HOSTS = [Host("a2000", paced=True), Host("v100", gpu="Tesla V100-16GB", paced=True)]


def time_of(operation: str, size: int, alpha_ms: float, gbps: float, **fields: Any) -> dict[str, Any]:
    event = {"event": "collective", "step": 0, "operation": operation, "bytes": size, "iterations": 7}
    event |= {"time_ms": alpha_ms + 8e-6 * size / gbps, "algbw_gbps": 1e9, "busbw_gbps": 1e9, "error": None}
    return event | fields


def run_of_two(root: Path, *more: Any, sizes: list[int] = SIZES) -> RunFolder:
    """all_reduce at 0.2 ms and 2.25 Gbps, gather (of two: half the bytes travel) at 0.1 ms and 4 Gbps."""
    begun = start(model=None, parameters=None, gradient_bytes=None, batch_per_rank=None, settings=SETTINGS)
    times = [time_of("all_reduce", size, 0.2, 2.25) for size in sizes]
    times += [time_of("gather", size, 0.1, 4.0) for size in sizes]
    metrics = {0: [begun, *times, *more, end(valid=None)], 1: [begun, end(valid=None)]}
    return write_run(root, HOSTS, metrics, exp="collectives", settings=SETTINGS)


def test_the_line_and_the_bandwidths_of_each_operation_are_found(tmp_path: Path) -> None:
    run = run_of_two(tmp_path / "run")
    found = analyse(run).collectives
    assert found is not None
    assert found.declared_gbps == 2.5
    reduce, gather = found.operations
    assert (reduce.operation, reduce.smallest_bytes, reduce.largest_bytes) == ("all_reduce", 1024, 2**28)
    assert reduce.latency_us == pytest.approx(200, rel=0.03)
    assert reduce.alpha_us == pytest.approx(200)
    assert reduce.beta_gbps == pytest.approx(2.25)
    assert reduce.busbw_gbps == pytest.approx(2.25, rel=1e-3)
    assert reduce.of_declared == pytest.approx(0.9, rel=1e-3)
    assert (gather.beta_gbps, gather.busbw_gbps) == (pytest.approx(4), pytest.approx(2, rel=1e-3))
    assert json.loads(run.summary.read_text())["collectives"]["operations"][0]["alpha_us"] == pytest.approx(200)
    assert Summary.load(run) == analyse(run)


def test_nothing_is_missing_in_a_run_that_trains_nothing_and_its_hosts_are_no_stand_ins(tmp_path: Path) -> None:
    summary = analyse(run_of_two(tmp_path / "run"))
    assert summary.missing == summary.warnings == ()
    assert [(node.paced, node.valid) for node in summary.nodes] == [(False, True)] * 2
    assert summary.metrics
    assert summary.samples_per_s is None


def test_what_was_refused_or_left_out_is_said_once_an_operation(tmp_path: Path) -> None:
    refused = [time_of("reduce_scatter", size, 0, 1, time_ms=None, iterations=0, error="not here") for size in SIZES]
    left_out = time_of("gather", 2**30, 0, 1, time_ms=None, error="left out: it would take some 9 s")
    summary = analyse(run_of_two(tmp_path / "run", left_out, *refused))
    assert summary.missing == (
        "gather, 1.0GiB and more: left out: it would take some 9 s.",
        "reduce_scatter, 1.0KiB and more: not here.",
    )
    assert [each.operation for each in (summary.collectives or pytest.fail("none")).operations] == [
        "all_reduce",
        "gather",
    ]


def test_lines_that_nobody_can_have_measured_are_left_out(tmp_path: Path) -> None:
    bad: list[dict[str, Any]] = [
        {"operation": "teleport"},
        {"operation": None},
        {"bytes": 0},
        {"bytes": -4},
        {"bytes": "x"},
    ]
    odd = [time_of("all_reduce", 4096, 1, 1) | fields for fields in bad]
    odd += [time_of("broadcast", 4096, 1, 1, time_ms=value) for value in (-1, 0, 1e300, "1", True)]
    found = analyse(run_of_two(tmp_path / "run", *odd)).collectives
    assert found is not None
    assert [each.operation for each in found.operations] == ["all_reduce", "gather"]
    assert len(found.operations) == 2
    assert found.operations == analyse(run_of_two(tmp_path / "plain")).collectives.operations  # type: ignore[union-attr]


def test_a_run_without_a_measurement_says_so(tmp_path: Path) -> None:
    run = run_of_two(tmp_path / "run", sizes=[])
    summary = analyse(run)
    assert summary.missing == ("No measurement was recorded.",)
    assert headline(summary) == "The job succeeded; no collective could be measured."
    assert "img" not in Page(write_report(run, summary).read_text()).tags
    assert not run.chart.exists()


def test_one_size_is_measured_without_a_line(tmp_path: Path) -> None:
    run = run_of_two(tmp_path / "run", sizes=[4096])
    summary = analyse(run)
    assert [(each.alpha_us, each.beta_gbps) for each in (summary.collectives or pytest.fail("none")).operations] == [
        (None, None)
    ] * 2
    write_report(run, summary)


def test_the_page_shows_the_network_and_no_training(tmp_path: Path) -> None:
    run = run_of_two(tmp_path / "run")
    page = Page(write_report(run, analyse(run)).read_text())
    assert_self_contained(page)
    assert page.open == []
    assert run.chart.read_bytes().startswith(PNG)
    for sentence in (
        "all_reduce of 256.0MiB ran at 2.25 Gbps of bus bandwidth, 90 % of the declared 2.50 Gbps.",
        "all_reduce 1.0KiB 204 256.0MiB 2.25 90 % 200 2.25 0 %",
        "256.0MiB 955 2.25 537 2.00",
        "2.0.1",
        "max_bytes 268435456",
    ):
        assert sentence in page.text, sentence
    for word in (
        "samples/s",
        "Host by host",
        "straggler",
        "By GPU type",
        "paced",
        "What it learned",
        "fidelity",
        "Read with care",
    ):
        assert word not in page.text, word


def test_the_terminal_shows_a_line_an_operation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host_tables.print_summary(analyse(run_of_two(tmp_path / "run")))
    printed = capsys.readouterr()
    assert printed.err == ""
    title, head, *lines, repeat = printed.out.splitlines()
    assert repeat.startswith("repeat: orch run ")
    assert title.strip() == "collectives, declared 2.50 Gbps"
    assert head.split()[0] == "operation"
    assert lines[0].split() == [
        "all_reduce",
        "1.0KiB",
        "204",
        "256.0MiB",
        "2.25",
        "90",
        "%",
        "200",
        "2.25",
        "0",
        "%",
    ]
    assert len(lines) == 2


def link_of(source: int, target: int, gbps: float) -> dict[str, Any]:
    return {"event": "link", "source": source, "target": target, "bytes": 2**23, "time_ms": 8e-6 * 2**23 / gbps}


LINKS = (link_of(0, 1, 2.0), link_of(1, 0, 0.5))


def test_paths_between_hosts_are_shown_by_name_each_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strange = ({**LINKS[0], "source": 7}, {**LINKS[0], "time_ms": 0}, {**LINKS[0], "bytes": -1}, {"event": "link"})
    run = run_of_two(tmp_path / "run", *LINKS, *strange)
    summary = analyse(run)
    found = [(link.source, link.target, round(link.gbps, 3)) for link in summary.collectives.links]  # type: ignore[union-attr]
    assert found == [("a2000", "v100", 2.0), ("v100", "a2000", 0.5)]
    host_tables.print_summary(summary)
    *_, head, first, second, _repeat = capsys.readouterr().out.splitlines()
    assert head.split() == ["from", "/", "to", "a2000", "v100"]
    assert (first.split(), second.split()) == (["a2000", "-", "2.00"], ["v100", "0.5", "-"])
    assert "Host to host" in write_report(run, summary).read_text()
    plain = run_of_two(tmp_path / "plain")
    assert "Host to host" not in write_report(plain, analyse(plain)).read_text()


def test_a_plan_takes_each_path_as_measured_and_as_slow_as_all_reduce_found_the_slowest(tmp_path: Path) -> None:
    network = network_from(analyse(run_of_two(tmp_path / "run", *LINKS)))
    assert network is not None
    assert network.bps == pytest.approx(2.25e9)
    assert network.pairs == {("a2000", "v100"): pytest.approx(9e9), ("v100", "a2000"): pytest.approx(2.25e9)}
    lacks_one = network_from(analyse(run_of_two(tmp_path / "less", LINKS[0])))
    assert lacks_one is not None and lacks_one.pairs == {}


def test_a_summary_of_an_older_orch_still_loads(tmp_path: Path) -> None:
    run = run_of_two(tmp_path / "run")
    analyse(run)
    document = json.loads(run.summary.read_text())
    del document["collectives"]
    run.summary.write_text(json.dumps(document))
    assert Summary.load(run).collectives is None
