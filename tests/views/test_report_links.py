"""What a report says of its hosts' links: as declared, and beside that as a run of collectives measured them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator.controller import Controller
from orchestrator.hosts import Connections
from orchestrator.paths import Home
from orchestrator.store import Store
from tests.support.pages import Page
from tests.support.run_folders import two_hosts


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    home = Home(tmp_path / "home")
    return Controller(Store(home), Connections(home))


def measure(
    runs: Path, job: str, cluster: str = "a2000-v100", gbps: float = 2.31, *, first_alone: bool = False
) -> None:
    """A collected run that measured both directions of the link, or the first one alone: its time was over."""
    from orchestrator.files import write_atomic
    from orchestrator.results import Collectives, CollectiveTime, LinkSpeed, NodeSummary, Summary

    times = [
        CollectiveTime(operation="all_reduce", bytes=size, iterations=5, time_ms=1 + size / 1e5)
        for size in (1 << 10, 1 << 24)
    ]
    links = [LinkSpeed(source="v100", target="a2000", gbps=gbps), LinkSpeed(source="a2000", target="v100", gbps=1.87)]
    links = links[:1] if first_alone else links
    found = Summary(
        schema=1, job=job, experiment="collectives", state="succeeded", world_size=2, cluster=cluster,
        nodes=tuple(NodeSummary(name=name, gpu="x", ranks=1) for name in ("a2000", "v100")),
        collectives=Collectives(declared_gbps=2.5, times=tuple(times), links=tuple(links)),
    )  # fmt: skip
    write_atomic(runs / job / "summary.json", found.model_dump_json(by_alias=True))


def test_what_was_measured_of_its_own_hosts_stands_beside_what_is_declared(
    controller: Controller, tmp_path: Path
) -> None:
    run = two_hosts(tmp_path / "runs" / "run")
    controller.report(run)
    page = run.report.read_text()
    assert "orch run --exp collectives" in page and "declared; measured" not in page
    measure(tmp_path / "runs", "collectives-20261120-0912-old", gbps=9.9)
    measure(tmp_path / "runs", "collectives-20261121-0912-abc")
    measure(tmp_path / "runs", "collectives-20261122-0912-oth", cluster="another", gbps=8.8)
    measure(tmp_path / "runs", "collectives-20261123-0912-cut", gbps=7.7, first_alone=True)
    controller.report(run)
    page = run.report.read_text()
    assert "measured by collectives-20261121-0912-abc" in page
    assert "2.5Gbps<small>2.31Gbps out, 1.87Gbps in</small>" in page
    assert "<small>1.87Gbps out, 2.31Gbps in</small>" in page
    assert not re.search(r"9\.9|8\.8|7\.7", Page(page).text)
