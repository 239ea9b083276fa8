"""A dead switch takes no healthy host along: 64 silent ones stand before the healthy in the inventory."""

from __future__ import annotations

import json

import pytest

from tests.support.crowd import crowd
from tests.support.terminal import Person

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]
HEALTHY = 3
"""Each probes for real at the same moment as the others: this machine carries them all, and each has its deadline."""


def test_healthy_hosts_behind_64_silent_ones_are_heard_and_each_silent_one_is_named(tmp_path):
    with crowd() as hosts:
        person = Person(hosts.lab, tmp_path / "home", tmp_path)
        done = person.types("up", str(hosts.inventory(tmp_path, silent=64, healthy=HEALTHY)), "--json", exit_code=3)
        heard = len(hosts.heard_at())
    status = {node["name"]: node["status"] for node in json.loads(done.stdout)["nodes"]}
    assert heard == HEALTHY
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert errors == ["error: 64 hosts (s[1-64]): no SSH login within 10 s"]
    assert [name for name, status in status.items() if status in ("connected", "master")] == [
        f"h{n}" for n in range(1, HEALTHY + 1)
    ]
