"""What is seen on the street between two steps, and what of it is lost after a step.

    eyes = Eyes(street)
    before = eyes.look()
    ...                                                  # some of the neighbours type
    for line in eyes.losses(before, eyes.look(), jobs, step): print(line)

It looks from outside, at disks and processes, and asks nothing of the programs under test.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lab_net

from orchestrator.remote.layout import FINAL_STATES

from .people import PEOPLE, Person
from .street import HOSTS, LOGINS, Street

REWRITTEN = {"agent.json", "node.json", "reserve"}
"""By its own supervisor, while a job runs or when it ends: all other files of a job only grow."""
_OF_JOB = re.compile(r"[^/]+/\.orch/jobs/(?P<job>[^/]+)/(?P<name>.+)")
_CODE = re.compile(r"[^/]+/\.orch/code/(?P<sha256>[0-9a-f]{64})/.+")
_SHARED = re.compile(r"[^/]+/\.orch/(code/\.?[0-9a-f]{64}.*|\.orch-work)")
"""What comes with one who needs it and goes with the last one."""
_MARK = re.compile(rb"ORCH_JOB_DIR=[^\0]*/jobs/([^/\0]+)\0")
_NAMED = re.compile(rb"/\.orch/jobs/([^/\0]+)\0")
_RANKS = (b"script.py", b"orch_remote.rank", b"orch_remote.launch", b"1000001")
"""What of a job's processes has to go on by itself: nothing that one of these forks for a moment."""


class Seen(NamedTuple):
    size: int
    sha256: str


Files = Mapping[str, Seen]


class Running(NamedTuple):
    host: str
    pid: int
    start_time: int


@dataclass(frozen=True)
class Job:
    """kind: "run" ends by itself, "stay" goes on, "stray" is a process that its supervisor left."""

    whose: Person
    kind: str


@dataclass(frozen=True)
class Step:
    """Who typed something between two looks, who of them `down`, and who `reap`."""

    typed: Set[str]
    downs: Set[str]
    reaps: Set[str]


@dataclass
class Look:
    """ranks: job -> what has to go on. agents: (host, job) -> its record. disks, homes: name -> path -> file."""

    ranks: Mapping[str, Set[Running]]
    busy: Set[str]
    """Jobs that have any process."""
    agents: Mapping[tuple[str, str], Mapping[str, Any]]
    disks: Mapping[str, Files]
    homes: Mapping[str, Files]

    def of_jobs(self, host: str) -> dict[str, dict[str, tuple[str, Seen]]]:
        """Job -> name in its folder -> path and file."""
        found: dict[str, dict[str, tuple[str, Seen]]] = defaultdict(dict)
        for path, seen in self.disks[host].items():
            if of_job := _OF_JOB.fullmatch(path):
                found[of_job["job"]][of_job["name"]] = (path, seen)
        return found

    def has_ended(self, host: str, job: str) -> bool:
        """Whether nothing of it still writes."""
        return job not in self.busy and self.agents.get((host, job), {}).get("state", "succeeded") in FINAL_STATES

    @property
    def files(self) -> int:
        return sum(len(files) for place in (self.disks, self.homes) for files in place.values())


class Eyes:
    def __init__(self, street: Street) -> None:
        self.street = street
        self.compared = 0
        """Files whose hashes were held against those of the look before."""
        self._known: dict[tuple[int, ...], str] = {}
        self._codes: dict[str, dict[str, Seen]] = {}

    # ---- looking --------------------------------------------------------------------------------------------------

    def look(self) -> Look:
        """Processes first: what has ended by then wrote its files before."""
        ranks, busy = self._processes()
        agents = {(host, job): agent for host in HOSTS for job, agent in self._agents(host)}
        disks = {host: self._files(self.street.disk(host), skip="quick") for host in HOSTS}
        homes = {home: self._files(self.street.folder / home) for home in sorted({p.home for p in PEOPLE.values()})}
        return Look(ranks, busy, agents, disks, homes)

    def _agents(self, host: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for login in LOGINS:
            for path in self.street.work(host, login).glob("jobs/*/agent.json"):
                with contextlib.suppress(FileNotFoundError):
                    yield path.parent.name, json.loads(path.read_text())

    def _processes(self) -> tuple[dict[str, set[Running]], set[str]]:
        ranks: dict[str, set[Running]] = defaultdict(set)
        busy = set()
        for host in HOSTS:
            for pid in lab_net.processes([lab_net.host_namespace(self.street.lab.cluster, host)]):
                with contextlib.suppress(OSError, IndexError):
                    command = Path(f"/proc/{pid}/cmdline").read_bytes()
                    job = _MARK.search(Path(f"/proc/{pid}/environ").read_bytes()) or _NAMED.search(command)
                    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                    if job and stat[0] not in "ZX":
                        busy.add(name := job[1].decode())
                        if any(sign in command for sign in _RANKS):
                            ranks[name].add(Running(host, pid, int(stat[19])))
        return ranks, busy

    def _files(self, root: Path, skip: str = "") -> dict[str, Seen]:
        found = {}
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name != skip]
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    path = os.path.join(folder, name)
                    if os.path.isfile(path):  # not a FIFO of a job
                        found[os.path.relpath(path, root)] = self._seen(path)
        return found

    def _seen(self, path: str) -> Seen:
        """Hashes again only where inode, size or times changed."""
        with open(path, "rb") as file:
            now = os.fstat(file.fileno())
            key = (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
            if key not in self._known:
                self._known[key] = hashlib.sha256(file.read(now.st_size)).hexdigest()
        return Seen(now.st_size, self._known[key])

    # ---- judging --------------------------------------------------------------------------------------------------

    def losses(self, before: Look, after: Look, jobs: Mapping[str, Job], step: Step) -> list[str]:
        """A line for each thing that is lost, changed, or left by its own `down`."""
        found = []
        for host in HOSTS:
            found += self._of_jobs(host, before, after, jobs, step)
            found += self._of_people(before.disks[host], after.disks[host], host)
            found += self._code(host, after)
        for home in before.homes:
            found += self._of_home(home, before.homes[home], after.homes[home], jobs, step)
        return found + list(_of_processes(before, after, jobs, step))

    def _of_jobs(self, host: str, before: Look, after: Look, jobs: Mapping[str, Job], step: Step) -> Iterator[str]:
        was, now = before.of_jobs(host), after.of_jobs(host)
        for job in sorted({*was, *now} - {"2024"}):
            if job not in jobs:
                yield f"{host}: {job} is nobody's"
            elif jobs[job].whose.name in step.downs:
                if job in now:
                    yield f"{host}: {job} outlives the down of its own cluster: {sorted(now[job])[:3]}"
            else:
                for name, (path, seen) in was.get(job, {}).items():
                    there = now.get(job, {}).get(name)
                    if words := self._changed(host, path, seen, there and there[1], before.has_ended(host, job)):
                        yield f"{host}: {job}/{name} {words}"

    def _changed(self, host: str, path: str, was: Seen, now: Seen | None, ended: bool) -> str:
        """What became of a file of a job whose owner did not clear it; "" where nothing did."""
        self.compared += 1
        name = Path(path).name
        if now == was or (not ended and (name in REWRITTEN or name.startswith("."))):
            return ""
        if now is None:
            return "is lost"
        if ended or now.size < was.size:
            return "changed"
        with open(self.street.disk(host) / path, "rb") as file:
            grew = hashlib.sha256(file.read(was.size)).hexdigest() == was.sha256
        return "" if grew else "changed where it had been written"

    def _of_people(self, was: Files, now: Files, host: str) -> Iterator[str]:
        """What lies outside of jobs and shared code is people's own."""

        def own(files: Files) -> dict[str, Seen]:
            jobs = {path for path in files if (found := _OF_JOB.fullmatch(path)) and found["job"] != "2024"}
            return {path: files[path] for path in files if path not in jobs and not _SHARED.fullmatch(path)}

        yield from self._same(own(was), own(now), host)

    def _same(self, was: Files, now: Files, place: str) -> Iterator[str]:
        self.compared += len(was)
        for path in sorted({*was, *now}):
            if was.get(path) != now.get(path):
                how = "is new" if path not in was else "is lost" if path not in now else "changed"
                yield f"{place}: {path} {how}"

    def _code(self, host: str, after: Look) -> Iterator[str]:
        """Each job's code lies there, whole and as it was first seen anywhere."""
        there: dict[tuple[str, str], dict[str, Seen]] = defaultdict(dict)
        for path, seen in after.disks[host].items():
            if found := _CODE.fullmatch(path):
                login, _, rest = path.partition("/")
                there[login, found["sha256"]][rest] = seen
        for sha256, files in ((sha256, files) for (_, sha256), files in there.items()):
            self.compared += len(files)
            if self._codes.setdefault(sha256, files) != files:
                yield f"{host}: code {sha256[:8]} changed: {sorted(files)}"
        for login in LOGINS:
            for path in self.street.work(host, login).glob("jobs/*/node.json"):
                sha256 = json.loads(path.read_text()).get("code")
                if sha256 and (login, sha256) not in there:
                    yield f"{host}: the code of {path.parent.name} is lost"

    def _of_home(self, home: str, was: Files, now: Files, jobs: Mapping[str, Job], step: Step) -> Iterator[str]:
        """A home and what it collected change by the commands of its own people alone; of two clusters, what bears the
        one's name by its own. What was pulled stays whoever types.
        """
        typed = {person.name for person in PEOPLE.values() if person.home == home} & step.typed
        if not typed:
            yield from self._same(was, now, home)
            return
        strange = [job for job, found in jobs.items() if found.whose.home == home and found.whose.name not in typed]
        clusters = {p.cluster for p in PEOPLE.values() if p.home == home and p.name not in typed}
        parts = {*strange, *(f"{cluster}.json" for cluster in clusters)}

        def kept(path: str) -> bool:
            return bool(parts & set(Path(path).parts))

        yield from self._same(*({p: seen for p, seen in files.items() if kept(p)} for files in (was, now)), home)
        pulled = {path: seen for path, seen in was.items() if "files" in Path(path).parts and not kept(path)}
        yield from self._same(pulled, {path: now[path] for path in pulled if path in now}, home)


def _of_processes(before: Look, after: Look, jobs: Mapping[str, Job], step: Step) -> Iterator[str]:
    for job, found in jobs.items():
        whose = found.whose.name
        if whose in step.downs or (found.kind == "stray" and whose in step.reaps):
            if after.ranks.get(job):
                yield f"{job}: outlives its own end: {after.ranks[job]}"
        elif found.kind != "run" and (gone := before.ranks.get(job, set()) - after.ranks.get(job, set())):
            yield f"{job}: ended without a word of its owner: {gone}"
        for host in HOSTS:
            agent = after.agents.get((host, job), {})
            wanted = {"stay": "running", "run": "succeeded"}.get(found.kind)
            if agent and (agent["state"] != wanted or agent.get("failures")):
                yield f"{host}: {job} is {agent['state']}: {agent.get('failures')}"
