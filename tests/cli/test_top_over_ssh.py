"""`orch top` over real SSH servers: several jobs of one host, and hosts of two clusters that have one name."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.served_page import TRAINS
from tests.support.ssh_rack import Rack, ssh_rack
from tests.support.sshd import Sshd, needs_sshd, wait_for

pytestmark = [needs_sshd, pytest.mark.timeout(300)]

Looks = dict[str, dict[str, Any]]
UNTIL_S = 30.0


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    folder = tmp_path_factory.mktemp("top")
    (folder / "mine").mkdir()
    (folder / "mine" / "trains.py").write_text(TRAINS)
    with ssh_rack(folder) as made:
        text = (folder / "rack.yaml").read_text().replace("cluster: rack", "cluster: other").replace("/two", "/four")
        kept = [line.replace("v100,", "a2000,") for line in text.splitlines() if "name: v100" in line]
        head, _, _ = text.partition("nodes:")
        (folder / "other.yaml").write_text(f"{head}nodes:\n{kept[0]}\n")
        made.types("up", "other.yaml")
        yield made


@contextlib.contextmanager
def running(rack: Rack, *clusters: str) -> Iterator[list[str]]:
    """A job on a2000 of each of these."""
    words = ("run", "--detach", "--json", "--nodes", "a2000", "--cluster")
    jobs = list[str]()
    try:
        for cluster in clusters:
            jobs.append(json.loads(rack.types(*words, cluster, "--", "mine/trains.py").stdout)["id"])
        yield jobs
    finally:
        for job in jobs:
            rack.types("cancel", job, "--yes")


@contextlib.contextmanager
def top(rack: Rack, jobs: list[str]) -> Iterator[Callable[[Callable[[Looks], bool]], None]]:
    """Reads on until the newest looks, by job, are as wanted."""
    newest: Looks = {}

    with rack.starts("top", "--json", "--every", "0.3s", *jobs) as process:

        def until(is_so: Callable[[Looks], bool]) -> None:
            end = time.monotonic() + UNTIL_S
            for line in process.stdout:
                assert time.monotonic() < end, newest
                look = json.loads(line)
                newest[look["job"]] = look
                if len(newest) == len(jobs) and is_so(newest):
                    return
            raise AssertionError(f"it ended: {process.stderr.read()}")

        try:
            yield until
        finally:
            process.send_signal(signal.SIGINT)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def more_logins(server: Sshd, before: int) -> bool:
    return server.logins() > before


def is_silent(job: str, looks: Looks) -> bool:
    return bool(looks[job]["hosts"][0]["silent"])


def heard(look: dict[str, Any]) -> bool:
    return not look["hosts"][0]["silent"] and bool(look["step"])


def test_two_jobs_of_one_host_have_a_connection_each_and_one_that_breaks_ends_no_other(rack: Rack) -> None:
    server, begun = rack.servers["a2000"], dict[str, int]()
    with running(rack, "rack", "rack") as jobs, top(rack, jobs) as until:
        until(lambda looks: all(map(heard, looks.values())))
        wait_for(lambda: len(children(server.process.pid)) == 2, "the end of the connections that started the jobs")
        for connection in children(server.process.pid):
            before = server.logins()
            os.kill(connection, signal.SIGKILL)
            wait_for(partial(more_logins, server, before), "the broken link to be dialled again")
            until(lambda looks: all(map(heard, looks.values())))
            until(lambda looks: begun.update({job: looks[job]["step"] for job in jobs}) is None)
            until(lambda looks: all(looks[job]["step"] > begun[job] + 60 for job in jobs))  # three seconds
            assert server.logins() - before == 1


def test_hosts_of_two_clusters_with_one_name_are_not_mistaken_for_each_other(rack: Rack) -> None:
    one, two = rack.servers["a2000"], rack.servers["v100"]
    with running(rack, "rack", "other") as jobs, top(rack, jobs) as until:
        until(lambda looks: all(map(heard, looks.values())))
        for job, server, other in zip(jobs, (one, two), (two, one), strict=True):
            before = other.logins()
            server.stop()
            try:
                until(partial(is_silent, job))
            finally:
                server.start()
            until(lambda looks: all(map(heard, looks.values())))
            assert other.logins() == before
