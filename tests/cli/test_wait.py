"""`orch run --wait` as people type it, on hosts behind real SSH servers with a stand-in for nvidia-smi."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.remote import gpu_claim, gpu_queue
from tests.support.forks import Forked
from tests.support.gpu_rack import UNTIL_TOLD, GpuRack, Person, gpu_rack
from tests.support.sshd import needs_sshd, wait_for

DIES_ONCE = """import os, signal, sys, time
if not os.path.exists(sys.argv[1] + ".died"):
    while not os.path.exists(sys.argv[1] + ".dies"):
        time.sleep(0.02)
    open(sys.argv[1] + ".died", "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
"""
pytestmark = [needs_sshd, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GpuRack, Person, Person]]:
    with gpu_rack(tmp_path_factory.mktemp("rack")) as made:
        yield made, made.person("alice"), made.person("bob")


@pytest.fixture
def rack(shared: tuple[GpuRack, Person, Person]) -> Iterator[GpuRack]:
    """After each test nobody waits for a GPU or has one."""
    yield shared[0]
    gpus = {*shared[0].uuids.values()}
    wait_for(lambda: not any(gpus & {*ticket.gpus} for ticket in gpu_queue.all_tickets()[0]), "an empty queue", 60)
    wait_for(lambda: not any(gpu_claim.holder_of(gpu) for gpu in gpus), "free GPUs", 60)


@pytest.fixture
def alice(shared: tuple[GpuRack, Person, Person], rack: GpuRack) -> Person:
    return shared[1]


@pytest.fixture
def bob(shared: tuple[GpuRack, Person, Person], rack: GpuRack) -> Person:
    return shared[2]


class Run:
    """One `orch run`, until it ends; `go` lets its script end."""

    def __init__(self, person: Person, name: str, nodes: str, *words: str, script: str = "train.py") -> None:
        self.name, self.go = name, person.folder / f"go-{name}"
        self.go.unlink(missing_ok=True)
        options = ["--name", name, *(["--nodes", nodes] if nodes else []), *words]
        self.process: Forked = person.starts("run", *options, script, str(self.go))
        self.said = ""
        self.job = ""

    def until(self, sign: str) -> str:
        """Reads on until it says this; gives the line."""
        for line in self.process.stderr:
            self.said += line
            if found := re.search(rf"{self.name}-\d+-\d+-\w+", line):
                self.job = found[0]
            if re.search(sign, line):
                return line
        raise AssertionError(f"{sign!r} was not said:\n{self.said}")

    def is_there(self) -> Run:
        self.until(r"^job ")
        return self

    def waits(self) -> Run:
        self.until(rf"^note: {self.name}\S+ waits: place ")
        return self

    def starts(self) -> Run:
        """After it has waited."""
        self.until(rf"^note: {self.name}\S+ starts$")
        return self

    def ends(self, code: int = 0) -> str:
        self.go.touch()
        out, err = self.process.communicate(240)
        self.said += err
        assert self.process.returncode == code, self.said + out
        return self.said


@contextlib.contextmanager
def ended(*runs: Run) -> Iterator[None]:
    """Whatever a failed test leaves is ended."""
    try:
        yield
    finally:
        for run in runs:
            run.go.touch()
            run.process.kill()
            with run.process:
                pass


def queue(person: Person) -> list[tuple[str, int]]:
    return [(row["id"], row["place"]) for row in person.jobs()["waiting"]]


def state(person: Person, job: str) -> str:
    (row,) = [row for row in person.jobs()["jobs"] if row["id"] == job]
    return str(row["state"])


def test_jobs_start_in_the_order_in_which_they_came_and_a_dead_controller_loses_nothing(rack, alice, bob):
    first = Run(alice, "first", "a").is_there()
    large = Run(bob, "large", "", "--wait").waits()
    assert f"place 1 in the queue, behind root's job {first.job} (has GPUs of a" in large.said
    late = Run(alice, "late", "b", "--wait").waits()  # b is free, and kept for the larger job
    assert f"place 2 in the queue, behind root's job {large.job} (waits" in late.said
    with ended(first, large, late):
        assert queue(bob) == queue(alice) == [(large.job, 1), (late.job, 2)]
        refused = alice.types("run", "--nodes", "b", "--time-limit", "1s", "train.py", "x", exit_code=3).stderr
        assert f"is kept for root's job {large.job}, which waits for it" in refused and "--wait" in refused
        late.process.kill()
        last = Run(alice, "last", "", "--wait").waits()
        with ended(last):
            assert f"job {late.job} (waits" in last.said and last.said.count("waits: ") == 1
            first.ends()
            large.starts()
            last.until(rf"behind root's job {large.job} \(has GPUs of a, b")
            assert state(alice, late.job) == "queued"
            late.go.touch()
            large.ends()
            last.starts().ends()
        assert state(alice, late.job) == "succeeded"


def test_ctrl_c_leaves_it_to_its_hosts_and_a_second_cancels(rack, alice):
    first = Run(alice, "first", "a").is_there()
    left, gone, ends = (Run(alice, name, "a", "--wait").waits() for name in ("left", "gone", "ends"))
    with ended(first, left, gone, ends):
        for run in (left, gone):
            run.process.send_signal(signal.SIGINT)
            run.until("^Detached; it waits on its hosts")
        gone.process.send_signal(signal.SIGINT)
        assert f"cancelled {gone.job}" in gone.ends(130)
        assert f"Reattach: orch logs -f --job {left.job}" in left.ends(130)
        assert queue(alice) == [(left.job, 1), (ends.job, 2)]
        free = alice.types("run", "--nodes", "b", "--wait", "--detach", "train.py", str(left.go))  # nobody waits for b
        assert "its GPUs were free: it runs" in free.stderr
        table = alice.types("jobs").stdout
        assert re.search(rf"{left.job} +waiting +1", table) and re.search(rf"{first.job} +running", table)
        alice.types("cancel", "--job", ends.job)
        assert f"cancelled {ends.job}" in ends.ends(1)
        first.ends()
        alice.types("logs", "-f", "--job", left.job)
        assert [state(alice, run.job) for run in (left, gone, ends)] == ["succeeded", "cancelled", "cancelled"]


def test_a_limit_ends_the_wait_and_a_submitted_job_is_seen_and_followed(rack, alice):
    first = Run(alice, "first", "a").is_there()
    with ended(first):
        said = alice.types("run", "--nodes", "a", "--wait-limit", "1s", "train.py", "x", exit_code=3).stderr
        assert "first cause: a: it was still queued after 1 s (--wait-limit)" in said
        assert alice.jobs()["waiting"] == []
        assert "--share" in alice.types("run", "--wait", "--share", "train.py", "x", exit_code=2).stderr
        assert "--hosts" in alice.types("run", "--wait", "--hosts", "1:2", "train.py", "x", exit_code=2).stderr
        go = alice.folder / "go-second"
        done = alice.types("run", "--nodes", "a", "--wait", "--detach", "train.py", str(go))
        job = done.stdout.strip()
        assert "its hosts start it when its GPUs are free; `orch jobs` shows its place in the queue" in done.stderr
        wait_for(lambda: queue(alice) == [(job, 1)], "its place in the queue", 60)
        (row,) = [row for row in alice.jobs()["jobs"] if row["id"] == job]
        assert row["state"] == "queued"
        assert re.fullmatch(rf"place 1 in the queue, behind root's job {first.job} .has GPUs of a.*", row["waits_for"])
        assert alice.types("jobs").stdout.count(job) == 1
        assert f"{job} waits: place 1 in the queue, behind root's job {first.job}" in alice.types("why", job).stderr
        first.ends()
        go.touch()
        alice.types("logs", "-f", "--job", job)
        assert state(alice, job) == "succeeded"


def test_cancel_and_down_end_jobs_that_wait(rack, alice):
    first = Run(alice, "first", "a").is_there()
    with ended(first):
        jobs = [
            alice.types("run", "--wait", "--detach", "--priority", priority, "train.py", "x").stdout.strip()
            for priority in ("normal", "high")
        ]
        wait_for(lambda: queue(alice) == [(jobs[1], 1), (jobs[0], 2)], "both in the queue", 60)
        alice.types("cancel", "--job", jobs[0])
        assert state(alice, jobs[0]) == "cancelled" and queue(alice) == [(jobs[1], 1)]
        alice.types("down", "--yes", "--discard")
        assert gpu_queue.all_tickets()[0] == [] or jobs[1] not in {ticket.job for ticket in gpu_queue.all_tickets()[0]}
        assert [gpu_claim.holder_of(gpu) for gpu in rack.uuids.values()] == [None, None]


def test_an_attempt_after_a_failed_one_queues_behind_those_who_wait(rack, alice, bob):
    (alice.folder / "dies.py").write_text(DIES_ONCE + UNTIL_TOLD)
    more = ("--wait", "--retries", "1", "--retry-wait", "0.1s")
    first = Run(alice, "first", "a", *more, script="dies.py").is_there()
    failed = first.job
    second = Run(bob, "second", "a", "--wait").waits()
    with ended(first, second):
        Path(f"{first.go}.dies").touch()
        first.until("attempt 2 of 2 follows")
        first.until(f"{first.name}-.* waits: place 1 in the queue, behind root's job {second.job}")
        second.starts().ends()
        first.starts().ends()
        assert first.job != failed
        assert [job["attempt"]["number"] for job in alice.jobs()["jobs"] if job["attempt"]] == [2, 1]


def test_a_host_that_goes_away_is_said_and_dialled_again(rack, alice):
    first = Run(alice, "first", "a").is_there()
    second = Run(alice, "second", "", "--wait").waits()
    with ended(first, second):
        rack.servers["b"].stop()
        second.until("^note: b: .*the job does not depend on this link, trying again")
        rack.servers["b"].start()
        second.until("^note: b: connected again")
        first.ends()
        second.starts().ends()
