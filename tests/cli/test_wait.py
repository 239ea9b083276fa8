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


@pytest.fixture
def rack(tmp_path: Path) -> Iterator[GpuRack]:
    with gpu_rack(tmp_path) as made:
        yield made


class Run:
    """One `orch run`, until it ends; `go` lets its script end."""

    def __init__(self, person: Person, name: str, nodes: str, *words: str) -> None:
        self.name, self.go = name, person.folder / f"go-{name}"
        options = ["--name", name, *(["--nodes", nodes] if nodes else []), *words]
        self.process: Forked = person.starts("run", *options, "train.py", str(self.go))
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

    def starts(self) -> Run:
        self.until(r"^job ")
        return self

    def waits(self) -> Run:
        self.until("waits")
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


def test_jobs_start_in_the_order_in_which_they_came_and_a_dead_controller_loses_its_place_alone(rack):
    alice, bob = rack.person("alice"), rack.person("bob")
    first = Run(alice, "first", "a").starts()
    large = Run(bob, "large", "", "--wait").waits()
    assert f"place 1 in the queue, behind root's job {first.job} (has GPUs of a" in large.said
    late = Run(alice, "late", "b", "--wait").waits()  # b is free, and kept for the larger job
    assert f"place 1 in the queue, behind root's job {first.job}" not in late.said
    assert f"place 2 in the queue, behind root's job {large.job} (waits" in late.said
    with ended(first, large, late):
        assert queue(bob) == queue(alice) == [(large.job, 1), (late.job, 2)]
        refused = alice.types("run", "--nodes", "b", "train.py", "x", exit_code=3).stderr
        assert f"is kept for root's job {large.job}, which waits for it" in refused and "--wait" in refused
        short = alice.types("run", "--nodes", "b", "--time-limit", "1s", "train.py", "x", exit_code=3).stderr
        assert f"is kept for root's job {large.job}" in short  # a time limit passes nobody
        late.process.kill()  # its ticket goes when its lease is over, and nobody else's with it
        last = Run(alice, "last", "", "--wait").waits()
        assert f"job {late.job} (waits" in last.said
        first.ends()
        large.starts()
        assert "for" in last.until(rf"behind root's job {large.job} \(has GPUs of a, b")
        large.ends()
        with ended(last):
            last.starts().ends()
    assert (
        f"{late.job} has lost its place in the queue: the `orch run` that waited has ended"
        in alice.types("jobs").stderr
    )
    assert queue(alice) == [] and not list((alice.folder / "home" / "waiting").iterdir())
    assert gpu_claim.holder_of(rack.uuids["a"]) is None


def test_of_two_controllers_that_wait_one_starts_and_the_other_keeps_its_place(rack):
    alice, bob = rack.person("alice"), rack.person("bob")
    first = Run(alice, "first", "").starts()
    both = [Run(person, name, "", "--wait").waits() for person, name in ((alice, "one"), (bob, "two"))]
    third = Run(alice, "third", "b", "--wait").waits()
    with ended(first, *both, third):
        first.ends()
        both[0].starts()
        assert both[1].until(f"behind root's job {both[0].job} .has GPUs of a, b").count("place 1")
        both[0].ends()
        both[1].starts()
        third.until(f"place 1 in the queue, behind root's job {both[1].job} .has GPUs of b")
        both[1].ends()
        third.starts().ends()


def test_ctrl_c_and_cancel_leave_the_queue_and_a_lost_ticket_is_taken_anew(rack):
    alice = rack.person("alice")
    first = Run(alice, "first", "a").starts()
    left = Run(alice, "left", "a", "--wait").waits()
    gone = Run(alice, "gone", "a", "--wait").waits()
    robbed = Run(alice, "robbed", "a", "--wait").waits()
    with ended(first, left, gone, robbed):
        left.process.send_signal(signal.SIGINT)
        said = left.ends(130)
        assert f"{left.job} has left the queue" in said and "was not started" in said
        assert queue(alice) == [(gone.job, 1), (robbed.job, 2)]
        alice.types("run", "--nodes", "b", "train.py", str(left.go))  # nobody waits for b
        assert "is out of the queue" in alice.types("cancel", "--job", gone.job).stderr
        assert "was cancelled while it waited" in gone.ends(1)
        assert queue(alice) == [(robbed.job, 1)]
        owner = alice_id(alice)
        assert gpu_queue.send(robbed.job, "a", {"do": "leave", "owner": owner})
        robbed.until("a lost its ticket for this job; it is at the end of the queue again")
        table = alice.types("jobs").stdout
        assert re.search(rf"{robbed.job} +waiting +1", table) and re.search(rf"{first.job} +running", table)
        assert alice.types("cancel", "--job", left.job, exit_code=2)
        first.ends()
        robbed.starts().ends()
    assert not list((alice.folder / "home" / "waiting").iterdir())


def test_a_limit_ends_the_wait_and_detach_leaves_it_to_the_hosts(rack):
    alice = rack.person("alice")
    first = Run(alice, "first", "a").starts()
    with ended(first):
        said = alice.types("run", "--nodes", "a", "--wait-limit", "1s", "train.py", "x", exit_code=3).stderr
        assert "was still queued after 1.0s" in said and "`orch jobs` shows the queue" in said
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
        table = alice.types("jobs").stdout
        assert re.search(rf"{job} +waiting +1 ", table) and table.count(job) == 1
        assert f"{job} waits: place 1 in the queue, behind root's job {first.job}" in alice.types("why", job).stderr
        late = Run(alice, "late", "a", "--wait").waits()
        with ended(late):
            assert f"job {job} (waits" in late.said
            first.ends()
            wait_for(lambda: state(alice, job) == "running", "its start", 120)
            go.touch()
            alice.types("logs", "-f", "--job", job)
            late.starts().ends()
        assert state(alice, job) == "succeeded"


def state(person: Person, job: str) -> str:
    (row,) = [row for row in person.jobs()["jobs"] if row["id"] == job]
    return str(row["state"])


def test_cancel_and_down_end_a_job_that_waits_on_its_hosts(rack):
    alice = rack.person("alice")
    first = Run(alice, "first", "a").starts()
    with ended(first):
        jobs = [
            alice.types("run", "--wait", "--detach", "--priority", priority, "train.py", "x").stdout.strip()
            for priority in ("normal", "high")
        ]
        wait_for(lambda: queue(alice) == [(jobs[1], 1), (jobs[0], 2)], "both in the queue", 60)
        alice.types("cancel", "--job", jobs[0])
        assert state(alice, jobs[0]) == "cancelled" and queue(alice) == [(jobs[1], 1)]
        first.ends()
        wait_for(lambda: state(alice, jobs[1]) == "running", "its start", 120)
        second = alice.types("run", "--wait", "--detach", "train.py", "x").stdout.strip()
        wait_for(lambda: queue(alice) == [(second, 1)], "the last in the queue", 60)
        alice.types("down", "--yes", "--discard")
        assert gpu_queue.all_tickets()[0] == [] or second not in {ticket.job for ticket in gpu_queue.all_tickets()[0]}
        assert [gpu_claim.holder_of(gpu) for gpu in rack.uuids.values()] == [None, None]


def test_an_attempt_after_a_failed_one_queues_behind_those_who_wait(rack):
    alice, bob = rack.person("alice"), rack.person("bob")
    (alice.folder / "train.py").write_text(DIES_ONCE + UNTIL_TOLD)
    first = Run(alice, "first", "a", "--wait", "--retries", "1", "--retry-wait", "0.1s").starts()
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


def test_a_host_that_goes_away_is_said_and_asked_again(rack):
    alice = rack.person("alice")
    first = Run(alice, "first", "a").starts()
    second = Run(alice, "second", "", "--wait").waits()
    with ended(first, second):
        rack.servers["b"].stop()
        second.until("^note: b: .*asking again for 5m")
        rack.servers["b"].start()
        first.ends()
        second.starts().ends()


def test_hosts_that_come_back_one_by_one_without_their_tickets_are_waited_for(rack):
    """As after a power cut."""
    alice = rack.person("alice")
    first = Run(alice, "first", "a").starts()
    second = Run(alice, "second", "", "--wait").waits()
    with ended(first, second):
        for server in rack.servers.values():
            server.stop()
        second.until("asking again for 5m")
        for node in rack.servers:
            gpu_queue.send(second.job, node, {"do": "leave", "owner": alice_id(alice)})
        before = requests(rack, "a")
        rack.servers["a"].start()
        wait_for(lambda: requests(rack, "a") > before + 3, "a to be asked several times while b is away", 120)
        rack.servers["b"].start()
        second.until("a, b lost its ticket for this job; it is at the end of the queue again")
        first.ends()
        second.starts().ends()


def requests(rack: GpuRack, node: str) -> int:
    return rack.servers[node].log().count("Starting session")


def alice_id(person: Person) -> str:
    from orchestrator.owner import read_owner
    from orchestrator.paths import Home

    return read_owner(Home(person.folder / "home")).id
