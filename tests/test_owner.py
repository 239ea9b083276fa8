"""The identity of an $ORCH_HOME, and that it travels with every job to its hosts."""

import json
import threading

import pytest

from orchestrator.controller import Controller
from orchestrator.errors import StateError
from orchestrator.hosts import Connections
from orchestrator.owner import read_owner
from orchestrator.paths import Home
from orchestrator.record import Owner
from orchestrator.store import Store
from tests.support.local_job import gang


def test_a_home_is_somebody_from_its_first_need_on_and_no_other_home_is_the_same(tmp_path):
    one, other = Home(tmp_path / "one"), Home(tmp_path / "other")
    owner = read_owner(one)
    assert "@" in owner.name
    assert read_owner(one) == owner
    assert read_owner(other).id != owner.id
    assert one.owner.stat().st_mode & 0o777 == 0o600
    assert json.loads(one.owner.read_text())["schema"] == 1


def test_two_commands_at_once_make_one_identity(tmp_path):
    found, start = set(), threading.Barrier(8)

    def ask():
        start.wait()
        found.add(read_owner(Home(tmp_path / "home")).id)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(found) == 1


@pytest.mark.parametrize("content", ["", "[]", '{"schema": 1, "id": "x", "name": "y"}'])
def test_a_damaged_identity_is_never_replaced_silently(tmp_path, content):
    home = Home(tmp_path)
    home.owner.write_text(content)
    with pytest.raises(StateError, match="damaged"):
        read_owner(home)
    assert home.owner.read_text() == content


def test_a_launched_job_carries_its_owner_and_cluster_on_every_host(tmp_path):
    home = Home(tmp_path / "home")
    with gang(tmp_path, "print('hi')") as job, Connections(home) as connections:
        controller = Controller(Store(home), connections)
        controller.store.save_cluster(job.cluster())
        controller.launch(job.plan, job.blob)
        owner = read_owner(home)
        for node in ("a", "b"):
            record = json.loads((job.folder(node) / "node.json").read_text())
            assert (record["owner"], record["cluster"]) == ({"id": owner.id, "name": owner.name}, "test")
        assert controller.store.plan(job.plan.job).owner == owner


def test_only_the_id_distinguishes_owners():
    ada = Owner(id="a" * 32, name="ada@desk")
    assert ada == ada.model_copy(update={"name": "ada@laptop"})
    assert len({ada, ada.model_copy(update={"name": "ada@laptop"})}) == 1
    assert ada != ada.model_copy(update={"id": "b" * 32})
