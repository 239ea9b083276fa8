"""A dead switch takes no healthy host along: 64 silent ones stand before the healthy in the inventory."""

from __future__ import annotations

import json

import pytest
from crowd import crowd
from person import Person

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]


def test_healthy_hosts_behind_64_silent_ones_are_heard_and_each_silent_one_is_named(tmp_path):
    with crowd() as hosts:
        person = Person(hosts.lab, tmp_path / "home", tmp_path)
        done = person.types("up", str(hosts.inventory(tmp_path, silent=64, healthy=8)), "--json", exit_code=3)
        heard = len(hosts.heard_at())
    status = {node["name"]: node["status"] for node in json.loads(done.stdout)["nodes"]}
    errors = [line.split()[1].rstrip(":") for line in done.stderr.splitlines() if line.startswith("error:")]
    assert heard == 8
    assert errors == [f"s{n}" for n in range(1, 65)]
    assert done.stderr.count("no SSH login within 10 s") == 64
    assert [name for name, status in status.items() if status in ("connected", "master")] == [
        f"h{n}" for n in range(1, 9)
    ]
