"""`--hosts` where GPUs are held: of two who start at once one gets each host, and each goes on without the rest."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.controller import Controller
from orchestrator.errors import ConnectError, OrchError, RefusedError, TooFewError
from orchestrator.hosts import Cluster, Connections, Node
from orchestrator.jobs import RunningJob, job_queue
from orchestrator.paths import Home
from orchestrator.planning import HostRange, JobSpec, parse_job
from orchestrator.starting import Asked
from orchestrator.store import Store
from orchestrator.transport import ask
from orchestrator.ui import pages
from tests.support.probed_hosts import facts, gpu
from tests.support.quick_python import quick_python

UUIDS = {name: f"GPU-{uuid.uuid4()}" for name in "abc"}  # claims reach as far as the machine
SLEEPS = "import time\ntime.sleep(600)\n"


@pytest.fixture(autouse=True)
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All hosts are this machine, which has all GPUs, and nobody on them."""
    write_smi(tmp_path, dict.fromkeys(UUIDS, 0))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def write_smi(tmp_path: Path, used_mib: Mapping[str, int], mode: str = "Default") -> None:
    """used_mib: of each host's GPU, by programs that it does not name. mode: of those that are in use."""
    rows = "\n".join(
        f"{index}, Tesla V100-PCIE-16GB, {uuid}, 16384, {used_mib[name]}, 525.105.17, 00000000:3{index}:00.0, "
        f"{mode if used_mib[name] > 8000 else 'Default'}, 7.0"
        for index, (name, uuid) in enumerate(UUIDS.items())
    )
    text = f"#!/bin/sh\ncase $1 in --query-gpu=*) echo '{rows}';; --query-compute-apps=*) ;; *) exit 2;; esac\n"
    (tmp_path / "nvidia-smi").write_text(text)
    (tmp_path / "nvidia-smi").chmod(0o755)


class Somebody:
    """A person with a home and work folders of their own, on the same hosts."""

    def __init__(self, folder: Path, python: str) -> None:
        nodes = tuple(
            Node(
                name=name,
                host="127.0.0.1",
                address="127.0.0.1",
                interface="lo",
                transport="local",
                python=python,
                workdir=str(folder / name),
            )
            for name in UUIDS
        )
        found = {name: facts(node=name, boot_id=name, gpus=(gpu(index=0, uuid=uuid),)) for name, uuid in UUIDS.items()}
        store = Store(Home(folder / "home"))
        self.cluster = Cluster(name="rack", file="rack.yaml", nodes=nodes, facts=found)
        store.save_cluster(self.cluster, current=True)
        self.connections = Connections(store.home)
        self.controller = Controller(store, self.connections)
        self.folder, self.job = folder, None

    def asked(self, hosts: HostRange | None, only: Sequence[str] = ()) -> Asked:
        script = self.folder / "code" / "train.py"
        script.parent.mkdir(exist_ok=True)
        script.write_text(SLEEPS)
        job = parse_job(JobSpec(script=str(script)))
        return Asked(self.cluster, replace(job, request=replace(job.request, hosts=hosts)), only)

    def starts_on_all(self) -> RunningJob:
        self.job = self.controller.start(self.asked(None))
        return self.job

    def starts_on_the_page(self) -> RunningJob:
        self.asked(None)
        pages.run(self.controller, self.cluster, {"script": str(self.folder / "code" / "train.py")})
        self.job = self.controller.jobs.find("latest")
        return self.job

    def starts(self, least: int, most: int, only: Sequence[str] = ()) -> RunningJob:
        self.job = self.controller.start(self.asked(HostRange(least, most), only))
        return self.job

    def has(self) -> set[str]:
        """Where anything of a job of theirs lies."""
        return {name for name in UUIDS if any((self.folder / name / "jobs").glob("*"))}


@pytest.fixture
def people(tmp_path: Path):
    python = quick_python(tmp_path / "quick")
    made = [Somebody(tmp_path / name, python) for name in ("one", "two")]
    yield made
    for person in made:
        if person.job:
            person.job.cancel()


def both(people: Sequence[Somebody], start: Callable[[Somebody], RunningJob]) -> list[RunningJob | OrchError]:
    """What came of it when all of them start at once."""
    ended: list[RunningJob | OrchError] = []

    def one(person: Somebody) -> None:
        try:
            ended.append(start(person))
        except OrchError as error:
            ended.append(error)

    threads = [threading.Thread(target=one, args=(person,)) for person in people]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ended


def names(job: RunningJob) -> set[str]:
    return {node.name for node in job.plan.nodes}


def test_a_host_whose_gpu_another_job_holds_is_left_out(people) -> None:
    first, second = people
    first.starts(1, 1, ["b"])
    job = second.starts(2, 3)
    assert names(job) == {"a", "c"} == second.has()
    (left,) = job.record.hosts.left_out
    assert left.node == "b" and f"GPU {UUIDS['b']} is in use by" in left.reason and first.job.id in left.reason
    assert second.controller.store.job_ids() == [job.id]


def test_a_host_that_falls_silent_in_between_is_left_out_and_what_it_began_is_settled_later(
    people, monkeypatch
) -> None:
    first, _ = people
    asks, cut = ask.ask, {"b"}

    def asked(host, program, request, **options):
        if host.node in cut and program == "prepare":
            assert options["timeout_s"] < 21  # a spare takes its place
        if host.node in cut and request.get("action") == "undo":
            assert options["timeout_s"] < 11
        answer = asks(host, program, request, **options)  # it arrives, and no answer comes back
        if host.node in cut and program in ("prepare", "control"):
            raise ConnectError(host.node, "the link broke")
        return answer

    monkeypatch.setattr(ask, "ask", asked)
    job = first.starts(2, 3)
    assert names(job) == {"a", "c"} and [each.node for each in job.record.hosts.left_out] == ["b"]
    store = first.controller.store
    cut.clear()
    first.controller.jobs.settle_half_starts()
    assert [record.state for record in store.jobs() if record.id != job.id] == ["cancelled"]
    assert store.half_started() == []


def test_with_too_few_gpus_that_are_free_nothing_is_left(people) -> None:
    first, second = people
    first.starts(2, 2, ["a", "b"])
    with pytest.raises(TooFewError, match=r"1 of 3 hosts can take part, and 2 are needed") as found:
        second.starts(2, 3)
    assert "\na: GPU " in found.value.message and "\nb: GPU " in found.value.message
    assert second.has() == set() and second.controller.store.job_ids() == []


def test_a_gpu_without_room_costs_its_host_and_who_is_on_others_is_said_once(people, tmp_path: Path) -> None:
    person, said = people[0], []
    person.controller.say = said.append
    write_smi(tmp_path, {"a": 0, "b": 12000, "c": 2048}, mode="Exclusive_Process")
    job = person.starts(2, 3)
    assert names(job) == {"a", "c"} == person.has()
    (left,) = job.record.hosts.left_out
    assert left.node == "b" and "and it is in exclusive compute mode" in left.reason
    assert len(said) == 1 and said[0].startswith("c: GPU 2 (Tesla V100-PCIE-16GB) is in use by")


def test_of_two_who_start_at_once_each_host_has_one_of_them(people) -> None:
    ended = both(people, lambda person: person.starts(1, 3))  # the other may be a moment sooner everywhere
    jobs = [one for one in ended if isinstance(one, RunningJob)]
    taken = [name for job in jobs for name in names(job)]
    assert jobs and len(taken) == len({*taken})
    assert all(isinstance(one, TooFewError) for one in ended if one not in jobs)
    for person in people:
        assert person.has() == (names(person.job) if person.job else set())


@pytest.mark.parametrize("start", [Somebody.starts_on_all, Somebody.starts_on_the_page])
def test_of_two_who_refuse_each_other_crosswise_one_starts(people, start, monkeypatch: pytest.MonkeyPatch) -> None:
    asks, first, has = ask.ask, {"one": "a", "two": "b"}, {"one": threading.Event(), "two": threading.Event()}

    def asked(host, program, request, **options):
        who, rival = ("one", "two") if "/one/" in host.workdir else ("two", "one")
        if program == "prepare" and host.node != first[who]:
            assert has[rival].wait(60)  # each has a host that the other needs
        answer = asks(host, program, request, **options)
        if program == "prepare" and host.node == first[who]:
            has[who].set()
            assert has[rival].wait(60)
        return answer

    monkeypatch.setattr(ask, "ask", asked)
    ended = both(people, start)
    (job,), (error,) = ([one for one in ended if isinstance(one, kind)] for kind in (RunningJob, RefusedError))
    assert names(job) == {"a", "b", "c"} and "is in use by" in str(error)
    assert sorted(len(person.has()) for person in people) == [0, 3]


def test_who_is_refused_for_a_job_that_runs_for_long_does_not_wait(people, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = people
    one.starts(1, 1, ["b"])
    monkeypatch.setattr(job_queue, "CROSSED_S", 0.0)
    launch, launched = two.controller.launch, []
    monkeypatch.setattr(two.controller, "launch", lambda *given: launched.append(1) or launch(*given))
    with pytest.raises(RefusedError, match="is in use by"):
        two.starts_on_all()
    assert launched == [1]
