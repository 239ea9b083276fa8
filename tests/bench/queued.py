"""A trace of short jobs, really run through the queue: three logins, four hosts behind real SSH servers, a GPU each.

    python -m tests.bench.queued [--jobs 30] [--seed 1] [--killed 6]

Each job is an `orch run --wait` of any priority. So many controllers are killed (SIGKILL) at random, while they start a
job, while it waits and while it runs. Then it is checked, from the records on the hosts, that no GPU had two jobs at
once, that every job has run once, unless its controller was killed before its hosts had it, and that nothing is left.
As root the logins are users that are made for this and removed again; else three people with homes of their own share
one.

The GPUs are made up: only their claims are real. The hosts' Python is the system's, which every user may run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import pwd
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.remote import gpu_claim, gpu_queue
from tests.support.forks import Forked
from tests.support.gpu_rack import GpuRack, Person, gpu_rack

HOSTS = "abcd"
PEOPLE = ("orch-ada", "orch-bob", "orch-cem")
LONGEST_S = 4.0
"""Of a job."""
EVERY_S = 3.0
"""Between two jobs that come."""
GONE_S = 420.0
"""After so long nothing of a killed controller is left: a host undoes its half start."""
WAITING_S = 8.0
"""A controller is killed within this time after its start."""
SYSTEM_PYTHON = Path(f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}")
SLEEPS = "import sys, time\ntime.sleep(float(sys.argv[1]))\n"


@dataclass(frozen=True)
class Job:
    name: str
    person: str
    after_s: float
    takes_s: float
    hosts: tuple[str, ...]
    killed_after_s: float | None


@dataclass
class Run:
    job: Job
    code: int | None = None
    said: str = ""

    @property
    def is_submitted(self) -> bool:
        return f"job {self.job.name}-" in self.said


@dataclass(frozen=True)
class Held:
    """A host's record of a job that had its GPU: from its first rank's start to its last one's end, by its clock."""

    job: str
    host: str
    state: str
    began: float
    ended: float


def trace(count: int, killed: int, draw: random.Random) -> list[Job]:
    doomed, jobs = set(draw.sample(range(count), killed)), []
    for number in range(count):
        hosts = tuple(sorted(draw.sample(HOSTS, draw.choices((1, 2, 4), (6, 3, 1))[0])))
        after_s = number * EVERY_S + draw.uniform(0, EVERY_S)
        killed_after_s = draw.uniform(0.5, WAITING_S) if number in doomed else None
        job = Job(f"t{number:02d}", draw.choice(PEOPLE), after_s, draw.uniform(0.2, LONGEST_S), hosts,
                  killed_after_s)  # fmt: skip
        jobs.append(job)
    return jobs


@contextlib.contextmanager
def logins() -> Iterator[dict[str, str]]:
    """By person: whom they log in as."""
    if os.geteuid() != 0:
        yield dict.fromkeys(PEOPLE, "")
        return
    made = []
    try:
        for name in PEOPLE:
            subprocess.run(["useradd", "--create-home", "--password", "*", "--shell", "/bin/bash", name], check=True)
            made.append(name)
        yield {name: name for name in PEOPLE}
    finally:
        for name in made:
            _end_all_of(pwd.getpwnam(name).pw_uid)
            subprocess.run(["userdel", "--remove", name], check=True, stderr=subprocess.DEVNULL)


def _end_all_of(uid: int) -> None:
    """What a login of this bench has left."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if process.stat().st_uid == uid:
                os.kill(int(process.name), signal.SIGKILL)


def run(job: Job, person: Person, began: float, more: Sequence[str]) -> Run:
    time.sleep(max(0.0, began + job.after_s - time.monotonic()))
    words = ["--name", job.name, "--nodes", ",".join(job.hosts), "--wait", *more]
    with person.starts("run", *words, "train.py", str(job.takes_s)) as process:
        if job.killed_after_s is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(job.killed_after_s)
            process.kill()
        return Run(job, *_ended(process))


def _ended(process: Forked) -> tuple[int, str]:
    out, err = process.communicate(1200)
    assert process.returncode is not None
    return process.returncode, out + err


def held(rack: GpuRack) -> list[Held]:
    found = []
    for person, host in itertools.product(PEOPLE, HOSTS):
        for path in rack.work(person, host).glob("jobs/*/agent.json"):
            record = json.loads(path.read_text())
            ranks = [rank for rank in record.get("ranks", {}).values() if "started" in rank]
            began = min((rank["started"] for rank in ranks), default=record["started"])
            ended = max((rank.get("ended", float("inf")) for rank in ranks), default=began)
            found.append(Held(record["job"], host, record["state"], began, ended))
    return found


def faults(runs: Sequence[Run], records: Sequence[Held]) -> Iterator[str]:
    for host in HOSTS:
        ran = (each for each in records if each.host == host and each.ended > each.began)  # the others had no rank
        there = sorted(ran, key=lambda each: each.began)
        for one, other in itertools.pairwise(there):
            if other.began < one.ended:
                yield f"{host}: {one.job} ({one.state}) and {other.job} ({other.state}) at once"
    for each in runs:
        states = {one.host: one.state for one in records if one.job.startswith(f"{each.job.name}-")}
        has_run = set(states) == set(each.job.hosts) and set(states.values()) == {"succeeded"}
        if each.code not in (0, -9) or (each.is_submitted and not has_run):
            yield f"{each.job}: exit code {each.code}, {states}\n{each.said}"
        if each.code == -9 and not has_run and set(states.values()) - {"undone", "cancelled"}:
            yield f"{each.job} was killed and did half: {states}"


def left_of(rack: GpuRack) -> Iterator[str]:
    """Tickets, claims and processes that a job has left behind."""
    mine = {*rack.uuids.values()}
    yield from (f"left: ticket of {each.job}" for each in gpu_queue.all_tickets()[0] if mine & {*each.gpus})
    yield from (f"left: claim on {gpu}" for gpu in mine if gpu_claim.holder_of(gpu))
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = process.read_bytes()
            if b"orch_remote" in words and str(rack.folder).encode() in words:
                yield f"left: process {process.parent.name}"


def play(jobs: Sequence[Job], people: dict[str, Person], more: dict[str, list[str]]) -> list[Run]:
    """more: options of each job, by name."""
    runs, began = list[Run](), time.monotonic()

    def begin(job: Job) -> None:
        runs.append(run(job, people[job.person], began, more[job.name]))

    threads = [threading.Thread(target=begin, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return runs


def afterwards(people: dict[str, Person]) -> None:
    """Until nothing runs or waits any more."""
    until = time.monotonic() + GONE_S
    for person in people.values():
        while True:
            rows = person.jobs()
            alive = [row["id"] for row in rows["jobs"] if row["state"] in ("queued", "starting", "running")]
            if not alive and not rows["waiting"]:
                break
            assert time.monotonic() < until, f"still there: {alive}, {rows['waiting']}"
            time.sleep(5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("--jobs", 30), ("--seed", 1), ("--killed", 6)):
        parser.add_argument(option, type=int, default=default)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that nothing of it stays
    draw = random.Random(asked.seed)
    jobs = trace(asked.jobs, asked.killed, draw)
    more = {job.name: ["--priority", draw.choice(("low", "normal", "normal", "high"))] for job in jobs}
    folder = Path(tempfile.mkdtemp(prefix="orch-queued-"))
    folder.chmod(0o755)
    try:
        with logins() as login, gpu_rack(folder, HOSTS) as rack:
            open_to_all(folder)
            people = {name: rack.person(name, login[name]) for name in PEOPLE}
            for person in people.values():
                (person.folder / "train.py").write_text(SLEEPS)
            began = time.monotonic()
            runs = play(jobs, people, more)
            afterwards(people)
            took_s = time.monotonic() - began
            records = held(rack)
            deadline = time.monotonic() + 10.0  # for keepers whose last record has just been read
            while [*left_of(rack)] and time.monotonic() < deadline:
                time.sleep(0.1)
            found = [*faults(runs, records), *left_of(rack)]
    finally:
        shutil.rmtree(folder)
    killed, at_once = sum(each.code == -9 for each in runs), sum("waits: " not in each.said for each in runs)
    users = len(set(login.values()))
    print(f"{len(jobs)} jobs, {users} logins, {len(HOSTS)} hosts, seed {asked.seed}: all over after {took_s:.0f} s")
    print(f"{killed} controllers killed; {at_once} jobs began at once; {len(records)} records on the hosts")
    print("\n".join(found) or "as it should be")
    raise SystemExit(bool(found))


def open_to_all(folder: Path) -> None:
    """Each login makes its own work folders below, and may run this Python."""
    python = folder / "python"
    (python / "bin/python").unlink()
    (python / "bin/python").symlink_to(SYSTEM_PYTHON)
    (python / "pyvenv.cfg").write_text(f"home = {SYSTEM_PYTHON.parent}\ninclude-system-site-packages = false\n")
    (folder / "work").mkdir()
    (folder / "work").chmod(0o1777)
    for name in PEOPLE:
        (folder / "work" / name).mkdir()
        (folder / "work" / name).chmod(0o1777)


if __name__ == "__main__":
    main()
