"""`orch doctor` as a person types it: over real SSH servers of this machine, and over this machine with a GPU stood in
for.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.doctor import CHECKS
from orchestrator.owner import read_owner
from orchestrator.paths import Home
from tests.support.local_cluster import Place
from tests.support.ssh_rack import Rack, ssh_rack
from tests.support.sshd import needs_sshd

ALL = {check.id for check in CHECKS}


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    with ssh_rack(tmp_path_factory.mktemp("rack")) as rack:
        yield rack


@needs_sshd
def test_hosts_that_answer_are_shown_beside_one_that_is_off(rack: Rack) -> None:
    shown = rack.types("doctor", exit_code=3).stdout
    assert "connections between hosts" in shown
    assert "block: P01 login, gone: " in shown
    assert "\n  if ignored: " in shown
    assert "\n  try: " in shown
    assert shown.splitlines()[-1].count(" checks passed, ") == 1


@needs_sshd
def test_the_document_accounts_for_every_check(rack: Rack) -> None:
    found = json.loads(rack.types("doctor", "--json", "--nodes", "a2000,v100").stdout)
    assert found["hosts"] == ["a2000", "v100"]
    assert {one["kind"] for one in found["pairs"]} == {"open"}
    assert {*found["passed"], *found["not_applicable"], *(one["id"] for one in found["findings"])} == ALL
    assert [(one["id"], one["where"]) for one in found["findings"] if one["id"] == "P17"] == [
        ("P17", ["a2000", "v100"])  # they are one machine
    ]
    assert not (rack.folder / "one").exists()


@needs_sshd
def test_one_host_alone_has_no_ways_to_be_tried(rack: Rack) -> None:
    found = json.loads(rack.types("doctor", "--json", "--nodes", "v100").stdout)
    assert found["pairs"] == []
    assert found["not_applicable"]["P14"] == "one host alone"


@needs_sshd
def test_a_file_and_a_remembered_cluster_at_once_are_refused(rack: Rack) -> None:
    said = rack.types("doctor", "rack.yaml", "--cluster", "rack", exit_code=2).stderr
    assert "rack.yaml and --cluster at once" in said
    assert "has no node 'h100'" in rack.types("doctor", "rack.yaml", "--nodes", "h100", exit_code=2).stderr


# A card with two memory errors, at a quarter of its lanes; whoever asks for its processes is told of one.
SMI = """#!/bin/sh
case $1 in
*fabric*) echo '0, GPU-1, 00000000:3B:00.0, 2, No, No, No, 0x0, 1200, 1200, 250, 250, 4, 16, [N/A]' ;;
*compute-apps*) echo 'GPU-1, 999999999, 9000, python3' ;;
*) echo '0, Tesla V100-PCIE-16GB, GPU-1, 16384, 9000, 525.105.17, 00000000:3B:00.0, Default, 7.0' ;;
esac
"""


def test_a_gpu_that_is_sick_in_use_and_of_no_use_to_torch_is_all_of_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    person = Place(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text(SMI)
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    file = tmp_path / "gpu.yaml"
    file.write_text((tmp_path / "rack.yaml").read_text().replace("device: cpu", "device: auto"))
    found = json.loads(person.types("doctor", str(file), "--allow-local", "--nodes", "a", "--json", code=1).stdout)
    seen = {one["seen"]: one for one in found["findings"]}
    assert "GPU 0 has had 2 memory errors that could not be corrected" in seen
    assert "GPU 0 has 4 of its 16 PCIe lanes" in seen
    assert {one["id"]: one["level"] for one in found["findings"]}.items() >= {"P07": "block", "P09": "warn"}.items()
    assert "P11" in found["not_applicable"]
    shown = person.types("doctor", str(file), "--allow-local", "--nodes", "a", code=1).stdout
    assert "block: P07 GPUs compute, a: " in shown
    assert "warn: P10 GPU health, a: GPU 0 has 4 of its 16 PCIe lanes" in shown


def test_what_a_dead_job_of_ours_left_is_ended_when_its_person_says_so_and_anothers_is_not(tmp_path: Path) -> None:
    person = Place(tmp_path)
    owner = read_owner(Home(tmp_path / "home")).model_dump()
    strays = {}
    for job, whose in (("mine-1", owner), ("bobs-1", {**owner, "id": "b" * 32, "name": "bob@desk"})):
        folder = tmp_path / "a" / "jobs" / job
        folder.mkdir(parents=True)
        (folder / "node.json").write_text(json.dumps({"job": job, "owner": whose, "cluster": "rack"}))
        strays[job] = subprocess.Popen(["sleep", "300"], env={"PATH": os.environ["PATH"], "ORCH_JOB_DIR": str(folder)})
    (tmp_path / "a" / ".orch-work").write_text('{"schema": 1, "what": "work folder of orch"}\n')
    (tmp_path / "a").chmod(0o700)
    try:
        words = ("doctor", "--fix", "--nodes", "a")
        refused = person.types(*words, code=2).stderr
        assert "a: would end or wake mine-1: pid " in refused and "add --yes to agree" in refused
        assert [stray.poll() for stray in strays.values()] == [None, None]
        assert "cannot ask for your consent" in person.types(*words, "--json", code=2).stderr
        found = json.loads(person.types(*words, "--yes", "--json").stdout)
        assert list(found["fixed"]) == ["a"] and found["fixed"]["a"][0].startswith("mine-1: pid ")
        assert strays["mine-1"].wait(10) == -9 and strays["bobs-1"].poll() is None
        running = {one["seen"] for one in found["findings"] if one["id"] == "P31"}  # others', of this machine, too
        assert "job bobs-1 has processes there" in running and "job mine-1 has processes there" not in running
        assert json.loads(person.types(*words, "--json", "--yes").stdout)["fixed"] == {}
    finally:
        for stray in strays.values():
            stray.kill()
            stray.wait()
