"""Commands about a cluster that another command changes meanwhile: each applies what it learnt, and undoes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator import clusters
from orchestrator.clusters import Clusters
from orchestrator.errors import StateError, UsageError
from orchestrator.hosts import Cluster, Connections, Inventory, Venv, load_inventory, node_from_keys, work_folders
from orchestrator.hosts.inventory_file import removed_node
from orchestrator.paths import Home
from orchestrator.store import Store
from tests.support.quick_python import quick_python

FILE = """
cluster: rack
defaults: {transport: local, device: cpu, python: PYTHON}
nodes:
  - {name: a, host: localhost, workdir: FOLDER/a}
  - {name: b, host: localhost, workdir: FOLDER/b}
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    return quick_python(tmp_path_factory.mktemp("python") / "quick")


class Rack:
    """Two people's commands on the same $ORCH_HOME."""

    def __init__(self, folder: Path, python: str, patch: pytest.MonkeyPatch) -> None:
        self.file, self.python, self._patch = folder / "rack.yaml", python, patch
        self.file.write_text(FILE.replace("PYTHON", python).replace("FOLDER", str(folder)))
        self.store = Store(Home(folder / "home"))
        self.ours, self.theirs = (Clusters(Store(self.store.home), Connections(self.store.home)) for _ in range(2))

    @property
    def inventory(self) -> Inventory:
        return load_inventory(self.file)

    @property
    def now(self) -> Cluster:
        return self.store.cluster("rack")

    def keys(self, name: str) -> dict[str, str]:
        place = {"transport": "local", "host": "localhost", "workdir": str(self.file.parent / name)}
        return {"name": name, "device": "cpu", "python": self.python, **place}

    def add(self, by: Clusters, name: str) -> None:
        keys = self.keys(name)
        by.add_node(self.now, keys, node_from_keys(keys, "node add"))

    def meanwhile(self, act: Callable[[], object], owner: object = clusters, name: str = "look") -> list[str]:
        """Has another command act while the next one is at work on its first host."""
        real, acted = getattr(owner, name), list[str]()

        def wrapper(host, *words, **options):  # type: ignore[no-untyped-def]
            if not acted:
                acted.append(host.node)
                act()
            return real(host, *words, **options)

        self._patch.setattr(owner, name, wrapper)
        return acted


@pytest.fixture
def rack(tmp_path: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> Rack:
    made = Rack(tmp_path, python, monkeypatch)
    made.ours.up(made.inventory)
    return made


def test_an_up_keeps_what_others_released_pinned_and_added_meanwhile(rack: Rack) -> None:
    def others() -> None:
        rack.theirs.release_node(rack.now, "a", restore=False)
        rack.theirs.pin_master(rack.now, "b")
        rack.add(rack.theirs, "c")

    acted = rack.meanwhile(others)
    up = rack.ours.up(rack.inventory)
    assert acted and (up.cluster.master, up.cluster.facts) == ("b", rack.now.facts)
    assert (rack.now.released, rack.now.master_pin, rack.now.master) == (("a",), "b", "b")
    assert [node.name for node in rack.now.nodes] == ["a", "b", "c"]
    assert rack.now.facts.keys() == rack.now.added.keys() == rack.now.probed.keys() == {"a", "b", "c"}


def test_an_up_brings_nothing_back_that_another_removed_meanwhile(rack: Rack) -> None:
    rack.meanwhile(lambda: rack.theirs.remove_node(rack.now, "b"))
    assert [node.name for node in rack.ours.up(rack.inventory).cluster.nodes] == ["a"]
    assert rack.now.removed == ("b",) and rack.now.facts.keys() == {"a"}


def test_a_removed_host_is_named_by_up_and_comes_back_as_its_file_has_it(rack: Rack) -> None:
    rack.ours.remove_node(rack.now, "a")
    up = rack.ours.up(rack.inventory)
    assert up.warnings[0] == "a was removed earlier: `orch node add a` brings it back"
    assert not rack.now.facts["b"].routes
    back = removed_node(rack.now, "a")
    assert back == rack.inventory.nodes[0] and removed_node(rack.now, "c") is None
    rack.ours.add_node(rack.now, {}, back)
    assert (rack.now.removed, rack.now.extra, rack.now.extra_keys) == ((), (), {})
    assert all(facts.routes for facts in rack.now.facts.values())  # else b has no training address
    assert not any("removed earlier" in warning for warning in rack.ours.up(rack.inventory).warnings)


def test_of_a_host_that_another_has_given_an_environment_meanwhile_it_learnt_nothing(rack: Rack, python: str) -> None:
    venv = Venv(python=python + "3", base_python=python, torch="2.0", torchvision="0.15")
    Path(venv.python).unlink(missing_ok=True)
    Path(venv.python).symlink_to(Path(python).name)
    rack.meanwhile(lambda: rack.theirs.set_venvs("rack", {"a": venv}))
    rack.ours.up(rack.inventory)
    assert rack.now.venvs == {"a": venv} and rack.now.node("a").python == venv.python
    assert [rack.now.facts[name].python_executable for name in "ab"] == [venv.python, python]


def test_an_environment_or_a_host_that_comes_late_undoes_no_release(rack: Rack, python: str) -> None:
    venv = Venv(python=python, base_python=python, torch="2.0", torchvision="0.15")
    rack.meanwhile(lambda: rack.theirs.release_node(rack.now, "b", restore=False))
    rack.ours.set_venvs("rack", {"a": venv})
    assert rack.now.released == ("b",) and rack.now.venvs == {"a": venv}
    rack.meanwhile(lambda: rack.theirs.release_node(rack.now, "b", restore=True))
    rack.add(rack.ours, "c")
    assert rack.now.released == () and rack.now.node("c")


def test_of_two_hosts_added_by_one_name_the_second_is_refused(rack: Rack) -> None:
    rack.meanwhile(lambda: rack.add(rack.theirs, "c"))
    with pytest.raises(UsageError, match="c is already in cluster rack"):
        rack.add(rack.ours, "c")


def test_a_release_by_what_was_read_before_undoes_nothing(rack: Rack) -> None:
    read = rack.now
    rack.theirs.pin_master(read, "b")
    rack.ours.release_node(read, "a", restore=False)
    assert (rack.now.master_pin, rack.now.released) == ("b", ("a",))
    with pytest.raises(UsageError, match="b is the only usable host"):
        rack.ours.release_node(read, "b", restore=False)
    rack.theirs.remove_node(read, "a")
    with pytest.raises(UsageError, match="b is the last node"):
        rack.ours.remove_node(read, "b")


def test_a_down_forgets_environments_and_nothing_else(rack: Rack, python: str) -> None:
    venv = Venv(python=python, base_python=python, torch="2.0", torchvision="0.15")
    rack.ours.set_venvs("rack", {"a": venv})
    rack.meanwhile(lambda: rack.theirs.release_node(rack.now, "b", restore=False), work_folders, "down")
    rack.ours.down(rack.now)
    assert rack.now.released == ("b",) and rack.now.venvs == {}


def test_a_cluster_that_was_removed_meanwhile_is_said_and_does_not_come_back(rack: Rack, python: str) -> None:
    read, venv = rack.now, Venv(python=python, base_python=python, torch="2.0", torchvision="0.15")
    rack.meanwhile(rack.store.home.cluster("rack").unlink)
    with pytest.raises(StateError, match=r"^cluster rack was removed while this command ran: `orch up INVENTORY`"):
        rack.ours.set_venvs("rack", {"a": venv})
    with pytest.raises(StateError, match="was removed"):
        rack.ours.release_node(read, "a", restore=False)
    assert rack.ours.down(read).keys() == {"a", "b"}  # its hosts are cleared for all that
    assert rack.store.cluster_names() == []


def test_another_file_that_takes_a_clusters_place_meanwhile_is_told(rack: Rack, python: str, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(FILE.replace("PYTHON", python).replace("FOLDER", str(tmp_path / "elsewhere")))
    rack.meanwhile(lambda: rack.theirs.up(load_inventory(other)))
    up = rack.ours.up(rack.inventory)
    assert any(f"was defined by {other} with different hosts" in warning for warning in up.warnings)
    assert rack.now.file == str(rack.file)


def test_an_up_without_a_usable_host_keeps_the_known_cluster(rack: Rack) -> None:
    before = rack.now
    wrong = rack.file.with_name("wrong.yaml")
    wrong.write_text(rack.file.read_text().replace(rack.python, "/nowhere/python"))
    up = rack.ours.up(load_inventory(wrong))
    assert set(up.problems) == {"a", "b"} and up.election is None
    assert rack.now == before
    assert up.warnings[-1] == f"no host can be used, so cluster rack stays as `orch up {rack.file}` left it"


def test_an_up_without_a_usable_host_does_not_become_current(rack: Rack) -> None:
    wrong = rack.file.with_name("wrong.yaml")
    wrong.write_text(rack.file.read_text().replace(rack.python, "/nowhere/python").replace(": rack", ": other"))
    up = rack.ours.up(load_inventory(wrong))
    assert up.warnings[-1] == "no host can be used, so rack stays the current cluster"
    assert rack.store.cluster_names() == ["other", "rack"] and rack.store.cluster_name() == "rack"


def test_an_up_with_one_usable_host_takes_its_place(rack: Rack) -> None:
    half = rack.file.with_name("half.yaml")
    half.write_text(rack.file.read_text() + "  - {name: c, host: localhost, workdir: /proc/none}\n")
    assert set(rack.ours.up(load_inventory(half)).problems) == {"c"}
    assert set(rack.now.problems) == {"c"} and rack.now.file == str(half)
