"""The controller is killed (SIGKILL) at its write points and at random moments; the next one has to know the truth.

What holds after every kill: the job is known, or no host has begun anything; at most one gang of it lives; a start that
was left half done is undone by the next look, not by a time-out; and no byte of a log is lost or doubled.

CI takes a handful of each. All of them: ORCH_CRASHES=all; other moments: ORCH_CRASH_SEED=7 ORCH_CRASHES=200.
"""

import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.controller import Controller
from orchestrator.hosts import Connections
from orchestrator.paths import Home
from orchestrator.remote import processes
from orchestrator.store import Store
from tests.support import forks
from tests.support.local_job import gang

DRIVER = Path(__file__).parents[1] / "support" / "crash_driver.py"
WANTED = os.environ.get("ORCH_CRASHES", "")
SEED = int(os.environ.get("ORCH_CRASH_SEED", "1"))
RANDOM_KILLS = {"": 2, "all": 50}.get(WANTED) or int(WANTED)
RUN_S = 2.5
"""About what a driver takes from its start until its job's ranks run."""
COUNTS = """
import os, pathlib, sys, time
number = 0
while not pathlib.Path(os.environ["END"]).exists():
    print(number, flush=True)
    number += 1
    time.sleep(0.01)
print("end", flush=True)
"""


class Crash:
    """A gang, a $ORCH_HOME, and drivers that are killed."""

    def __init__(self, job, folder):
        self.job, self.folder = job, folder
        self.home = Home(folder / "home")
        Store(self.home).save_cluster(job.cluster(), current=True)
        (folder / "plan.json").write_text(job.plan.model_dump_json(by_alias=True))
        (folder / "blob").write_bytes(job.blob)

    def drive(self, action, kill_at=0):
        """A driver that runs until it is killed at this point, or to its end: the points it passed until then."""
        done = forks.run(forks.CRASH, self._words(action, kill_at))
        assert done.returncode in (0, -9 if kill_at else 0), done.stderr
        return [int(line) for line in done.stdout.splitlines()]

    def kill_after(self, action, delay_s):
        driver = subprocess.Popen(
            [sys.executable, str(DRIVER), *self._words(action, 0)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(delay_s)
        driver.kill()
        driver.wait()

    def _words(self, action, kill_at):
        return [action, str(self.home.root), str(self.folder), str(kill_at)]

    def controller(self):
        return Controller(Store(self.home), Connections(self.home))

    def end(self):
        (self.folder / "end").touch()

    def living(self):
        """The job's processes on each node."""
        return {node.name: processes.marked(self.job.folder(node.name)) for node in self.job.plan.nodes}

    def supervisors(self):
        """Living keepers and supervisors of this job on each node: a pair for each start of it."""
        found = {node.name: 0 for node in self.job.plan.nodes}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                for node in self.job.plan.nodes if b"orch_remote.keeper" in words else ():
                    found[node.name] += str(self.job.folder(node.name)).encode() in words
        return found

    def check(self):
        """What has to hold after a kill; gives the job's state, None where it was never remembered."""
        listed = self.controller().jobs.all()
        assert listed.problems == {}
        state = listed.records[0].state if listed.records else None
        assert state in (None, "running", "starting", "succeeded", "cancelled")
        if state in (None, "cancelled"):
            assert (self.living(), self.supervisors()) == ({"a": [], "b": []}, {"a": 0, "b": 0})
        if state in ("running", "starting"):
            self.wait_for_one_gang_or_its_end()
            assert max(map(len, self.living().values())) <= 3  # launcher, wrapper, rank
        if state != "starting" and state is not None:
            assert Store(self.home).half_started() == []
        return state

    def wait_for_one_gang_or_its_end(self):
        """A keeper stays for a moment when its supervisor has ended; two gangs are wrong at any moment."""
        deadline = time.monotonic() + 60
        while (found := self.supervisors()) not in ({"a": 2, "b": 2}, {"a": 0, "b": 0}):
            assert max(found.values()) <= 2 and time.monotonic() < deadline, found
            time.sleep(0.05)

    def check_logs(self):
        """After the end: every rank's lines, all of them, once and in order."""
        controller = self.controller()
        run = controller.collect(controller.jobs.of(self.job.plan), self.folder / "runs").run
        for node in self.job.plan.nodes:
            for rank in node.rank_numbers:
                log = run.rank(node.name, rank) / "stdout.log"
                assert log.read_bytes() == (self.job.folder(node.name) / f"rank-{rank}" / "stdout.log").read_bytes()
                *numbers, last = log.read_text().splitlines()
                assert numbers == [str(number) for number in range(len(numbers))]
                assert last == "end"

    def finish(self, state):
        """Lets a job that goes on come to its end."""
        if state not in ("running", "starting", "succeeded"):
            return
        self.end()
        controller = self.controller()
        for _ in controller.jobs.of(self.job.plan).follow():
            pass
        assert self.check() == "succeeded"
        self.check_logs()


@pytest.fixture
def crashes(tmp_path):
    """crash(number): a fresh job and $ORCH_HOME of that number."""

    def crash(number):
        folder = tmp_path / f"crash-{number}"
        folder.mkdir()
        return gang(folder, COUNTS, ranks=(1, 1), env={"END": str(folder / "end")}, grace_s=0.3), folder

    return crash


def of(points, count):
    """These of so many points: all of them when asked for, else a handful that is spread over them."""
    return (
        range(1, points + 1) if WANTED == "all" else sorted({1 + (points - 1) * i // (count - 1) for i in range(count)})
    )


def test_a_run_that_is_killed_at_its_write_points_leaves_a_whole_gang_or_none(crashes):
    made, folder = crashes("whole")
    with made as job:
        crash = Crash(job, folder)
        crash.end()
        launched, points = crash.drive("run")
    assert launched > 30
    seen = set()
    # Most of them while it launches: how many looks come after that depends on how long the ranks take.
    for kill_at in sorted({*of(launched, 7), *of(points, 2)}):
        made, folder = crashes(kill_at)
        with made as job:
            crash = Crash(job, folder)
            if kill_at > launched:
                crash.end()  # these lie in the following
            crash.drive("run", kill_at)
            state = crash.check()
            seen.add(state)
            crash.finish(state)
    assert {None, "cancelled"} <= seen


def test_a_run_that_is_killed_at_any_moment_leaves_a_whole_gang_or_none(crashes):
    moments = random.Random(SEED)
    for number in range(RANDOM_KILLS):
        made, folder = crashes(number)
        with made as job:
            crash = Crash(job, folder)
            crash.kill_after("run", moments.uniform(0.3, RUN_S))
            crash.finish(crash.check())


def test_a_look_that_is_killed_changes_nothing(crashes):
    made, folder = crashes("jobs")
    with made as job:
        crash = Crash(job, folder)
        crash.controller().launch(job.plan, job.blob)
        job.wait_running()
        known = Store(crash.home).job_record(job.plan.job)
        (points,) = crash.drive("jobs")
        for kill_at in of(points, 2):
            Store(crash.home).save_job(known)
            crash.drive("jobs", kill_at)
            assert crash.check() == "running"


def test_a_cancel_that_is_killed_can_be_made_again(crashes):
    # Requests to two hosts, then the record: two points for each.
    for kill_at in range(1, 15) if WANTED else (2, 9):
        made, folder = crashes(f"cancel-{kill_at}")
        with made as job:
            crash = Crash(job, folder)
            crash.controller().launch(job.plan, job.blob)
            job.wait_running()
            crash.drive("cancel", kill_at)
            assert crash.check() in ("running", "cancelled")
            crash.controller().jobs.of(job.plan).cancel()
            assert crash.check() == "cancelled"


def test_a_collect_that_is_killed_is_completed_by_the_next(crashes):
    made, folder = crashes("collect")
    with made as job:
        crash = Crash(job, folder)
        crash.end()
        crash.controller().launch(job.plan, job.blob)
        job.wait()
        (points,) = crash.drive("collect")
        for kill_at in of(points, 3):
            subprocess.run(["rm", "-rf", str(folder / "runs")], check=True)
            crash.drive("collect", kill_at)
            crash.check_logs()
            assert not list((folder / "runs").rglob("*.part"))


@pytest.mark.skipif(not WANTED, reason="minutes of probing: ORCH_CRASHES=all")
def test_an_up_that_is_killed_leaves_the_cluster_as_it_was_or_as_it_is(crashes):
    made, folder = crashes("up")
    with made as job:
        crash = Crash(job, folder)
        node = "  - {{name: {}, address: 127.0.0.1, workdir: {}, python: {}}}\n"
        nodes = "".join(node.format(n.name, n.workdir, sys.executable) for n in job.plan.nodes)
        head = "cluster: test\ndefaults: {transport: local, device: cpu, ranks: 1}\nnodes:\n"
        (folder / "inventory.yaml").write_text(head + nodes)
        before = Store(crash.home).cluster()
        (points,) = crash.drive("up")
        after = Store(crash.home).cluster()
        for kill_at in of(points, 3):
            Store(crash.home).save_cluster(before, current=True)
            crash.drive("up", kill_at)
            found = Store(crash.home).cluster()
            assert found == before or found.nodes == after.nodes
            assert crash.controller().jobs.all().problems == {}


def test_a_new_run_undoes_a_half_start_that_holds_its_gpu(crashes):
    made, folder = crashes("half")
    other, _ = crashes("other")
    with made as job, other as later:
        on_gpu = [node.model_copy(update={"gpu_uuids": ("GPU-1",)}) for node in job.plan.nodes]
        job.plan = job.plan.model_copy(update={"nodes": tuple(on_gpu)})
        crash = Crash(job, folder)
        crash.drive("run", "go")
        assert all(crash.supervisors().values())  # prepared, and nobody will ever say go
        in_same_folders = [
            node.model_copy(update={"workdir": there.workdir, "gpu_uuids": ("GPU-1",)})
            for node, there in zip(later.plan.nodes, job.plan.nodes, strict=True)
        ]
        later.plan = later.plan.model_copy(update={"nodes": tuple(in_same_folders)})
        began = time.monotonic()
        crash.controller().launch(later.plan, later.blob)
        assert time.monotonic() - began < 20
        assert not any(crash.supervisors().values())
        later.wait_running()  # a launch ends with the word to go: ranks begin after it
        states = {record.id: record.state for record in crash.controller().jobs.all().records}
        assert (states[job.plan.job], states[later.plan.job]) == ("cancelled", "running")
