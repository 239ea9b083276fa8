"""What in a work folder belongs to whom: listed, ended and removed where it is ours, and never touched where it is not.

Requests, by `action`, each with {"workdir", "owner": {"id", "name"}, "cluster"}, which together say who asks:

    survey    what is there: {"mine", "others": [{"job", "cluster", "owner", "state", "alive"}], "strange": [names]}
    reap      list of everybody, and with `end` end of ours, what jobs without a living supervisor left behind; who is
              stopped, to go on
    down      end our jobs, then remove them, and of what several share what nobody else needs
    adopt     make `jobs` of this cluster ours, whoever started them

Ours is a job whose node.json (agent.json, where no job came of it) names this owner and this cluster. Removed are job
folders of ours, code that no job left there names, environments without another user, and folders that are then empty:
by their marks and never by a name alone, for a person may have chosen the same.

The answer is one JSON object; {"error", "remedy"} where the host refuses.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from . import processes, trouble
from .agent import identity, lives, look, stopped, tell, wait_gone
from .answer import Refused, reply
from .claim import alone_in
from .layout import GONE, JOB_ID, VENV_MARKER, VERSION, Job, Work, read_json, remove, write_json
from .leftovers import forgotten
from .workfolder import MARK, content, danger, names, unfit

END_S = 10.0
DOWN_S = 40.0
ALONE_S = 5.0
"""A start takes a second or two; `orch setup` is not waited for."""
SHOWN = 50
_CODE = re.compile(r"[0-9a-f]{64}|\.[0-9a-f]{64}\.\d+")
"""Whole, or half unpacked when its `prepare` was killed."""
_LOCK = re.compile(r"gpu-.+\.lock|venv\.lock")
LOCK_BYTES = 200
"""More than any job's id has."""


def main(request: dict[str, Any]) -> None:
    reply(request, {action.__name__: action for action in (survey, reap, down, adopt)}[request["action"]])


# ---- whose ----------------------------------------------------------------------------------------------------


def whose(job: Job) -> tuple[str, str] | None:
    """Owner id ("" for an older orch's, which wrote none) and cluster; None where no job of orch lies there."""
    for told in (job.read_node(), job.read_agent()):
        if told.get("job") == job.id:
            owner = told.get("owner") or {}
            return str(owner.get("id", "")), str(told.get("cluster", ""))
    return None


def is_mine(job: Job, request: dict[str, Any]) -> bool:
    return whose(job) == (request["owner"]["id"], request["cluster"])


def forget_old_secrets(jobs: Iterable[Job], request: dict[str, Any]) -> None:
    """Of jobs of this cluster that are over: an older orch left them in place. It named no owner either."""
    ours = [(owner, request["cluster"]) for owner in (request["owner"]["id"], "")]
    for job in (job for job in jobs if whose(job) in ours):
        agent = job.read_agent()
        if (job.is_final() or "pid" in agent) and not lives(agent):
            job.forget_secrets()


def entry(job: Job) -> dict[str, Any]:
    node, agent = job.read_node(), job.read_agent()
    told = node or agent
    owner = told.get("owner") or {}
    return {
        "job": job.id,
        "cluster": told.get("cluster"),
        "owner": owner.get("name"),
        "state": agent.get("state"),
        "alive": lives(agent),
    }


def _jobs(work: Work) -> list[Job]:
    return [job for job in work.all_jobs() if not job.root.is_symlink() and whose(job)]


def survey(request: dict[str, Any]) -> dict[str, Any]:
    work = Work(request["workdir"])
    if content(work.root) == "absent":
        return {"mine": [], "others": [], "strange": []}
    jobs = _jobs(work)
    forget_old_secrets(jobs, request)
    return {
        "mine": [entry(job) for job in jobs if is_mine(job, request)],
        "others": [entry(job) for job in jobs if not is_mine(job, request)],
        "strange": list(strange(work))[:SHOWN],
    }


def strange(work: Work) -> Iterator[str]:
    """What lies there and is not of orch, relative to the work folder."""
    folders = (work.jobs, work.codes, work.venvs, work.locks)
    for name in names(work.root):
        folder = work.root / name
        if folder in folders and folder.is_dir():
            yield from (f"{name}/{path.name}" for path in sorted(folder.iterdir()) if not _is_ours(work, path))
        elif name != MARK:
            yield name


def _is_ours(work: Work, path: Path) -> bool:
    """Whether orch made this entry of one of its four folders, for whomever."""
    if path.name.startswith(GONE):
        return True
    if path.parent == work.jobs:
        return path.is_dir() and whose(Job(path)) is not None
    if path.parent == work.venvs:
        return (path / VENV_MARKER).is_file()
    return _is_lock(path) if path.parent == work.locks else bool(_CODE.fullmatch(path.name))


def _is_lock(path: Path) -> bool:
    """Whether it says what `keeper` and `environment` write there: nothing, or a job's id."""
    if not _LOCK.fullmatch(path.name) or path.is_symlink() or not path.is_file():
        return False
    with open(path, "rb") as file:
        said = file.read(LOCK_BYTES)
    return not said or bool(JOB_ID.fullmatch(said.decode(errors="replace")))


# ---- ending and removing --------------------------------------------------------------------------------------


def reap(request: dict[str, Any]) -> dict[str, Any]:
    found = []
    work = Work(request["workdir"])
    forget_old_secrets(_jobs(work), request)
    for job in work.all_jobs():
        agent = job.read_agent()
        still = stopped(agent)
        pids = [] if lives(agent) else processes.marked(job.root)
        told = [f"its {role} is stopped, {processes.describe(one)}" for role, one in still.items()]
        told += [processes.describe(pid) for pid in pids]
        if told:
            mine = is_mine(job, request)
            found.append({**entry(job), "mine": mine, "processes": told[:SHOWN]})
            if request["end"] and mine:
                found[-1]["stayed"] = _wake(job, still) if still else _end(job)
    return {"found": found, **_reap_programs(end=request["end"])}


def _reap_programs(*, end: bool) -> dict[str, Any]:
    """Those that a silent link left: of this user, whatever job they were about."""
    programs = forgotten()
    if end:
        processes.end_all(programs, signal.SIGKILL)
    return {"programs": [processes.describe(program) for program in programs][:SHOWN]}


def _wake(job: Job, still: dict[str, processes.Identity]) -> list[str]:
    """Has who was stopped go on: a supervisor sees for itself whether its lease is over, a keeper without one ends what
    is left, and itself. What did not.
    """
    for one in still.values():
        one.signal(signal.SIGCONT)
    deadline = time.monotonic() + END_S
    while (asleep := stopped(job.read_agent())) and time.monotonic() < deadline:
        time.sleep(0.02)
    agent = job.read_agent()
    if not identity(agent).is_alive():
        wait_gone(agent.get("keeper"), END_S)
        return _end(job) + [processes.describe(one) for one in asleep.values()]
    return [processes.describe(one) for one in asleep.values()]


def _end(job: Job) -> list[str]:
    deadline = time.monotonic() + END_S
    while (pids := processes.marked(job.root)) and time.monotonic() < deadline:
        processes.end_all(pids, signal.SIGKILL)
        time.sleep(0.02)
    return [processes.describe(pid) for pid in pids]


def down(request: dict[str, Any]) -> dict[str, Any]:
    """{"removed": [paths, less those of jobs], "ended": [jobs that ran], "jobs": {removed job: its last record},
    "left": as `survey`'s others, "strange": [names], "why": what else stays, and why}.
    """
    work = Work(request["workdir"])
    answer: dict[str, Any] = {"removed": [], "ended": [], "jobs": {}, "left": [], "strange": [], "why": []}
    if found := danger(work.root):
        raise Refused(*found)
    if content(work.root) != "ours":
        answer["why"] = [". ".join(found)] if (found := unfit(work.root)) else []
        return answer
    answer["ended"] = _end_ours(work, request)
    with alone_in(work, ALONE_S) as alone:
        if alone:
            _clear_halves(work, answer["why"])
        for job in _jobs(work):
            agent = look(job)
            # Without a supervisor's word its `prepare` may be at work.
            if is_mine(job, request) and not agent["alive"] and (alone or "pid" in agent):
                answer["jobs"][job.id] = {key: agent.get(key) for key in ("state", "ended", "first_failure")}
                _clear(job.root, answer["why"])
        if alone:
            answer["removed"] += [str(path) for path in _remove_shared(work, request, answer["why"])]
        else:
            answer["why"].append("code and environments: `orch run` or `orch setup` is at work there")
        there = _jobs(work)
        answer["left"], answer["strange"] = [entry(job) for job in there], list(strange(work))[:SHOWN]
        if alone and names(work.root) == [MARK]:
            (work.root / MARK).unlink()
            with contextlib.suppress(OSError):  # somebody put something there, or the folder above is not ours
                work.root.rmdir()
                answer["removed"].append(str(work.root))
    return answer


def _end_ours(work: Work, request: dict[str, Any]) -> list[str]:
    """Cancels what runs of ours (its supervisors end it on the other hosts, too). Raises Refused where that fails."""
    mine = [job for job in _jobs(work) if is_mine(job, request)]
    live = [job for job in mine if lives(job.read_agent())]
    for job in live:
        tell(job, {"request": "cancel"})
    for job in live:
        wait_gone(job.read_agent().get("keeper"), DOWN_S)
    stayed = [process for job in mine if not lives(job.read_agent()) for process in _end(job)]
    stayed += [f"the supervisor of {job.id}" for job in live if lives(job.read_agent())]
    if stayed:
        raise Refused(f"does not end: {', '.join(stayed)}", "end these by hand, then `orch down` again")
    return [job.id for job in live]


def _remove_shared(work: Work, request: dict[str, Any], why: list[str]) -> Iterator[Path]:
    """Nobody else is at work there."""
    left = _jobs(work)
    needed = {job.read_node().get("code") for job in left}
    for path in _entries(work.codes):
        if path.is_dir() and _CODE.fullmatch(path.name) and path.name not in needed and _clear(path, why):
            yield path
    pythons = [str(job.read_node().get("python", "")) for job in left if lives(job.read_agent())]
    for path in _entries(work.venvs):
        if path.name.startswith("torch-") and VERSION.fullmatch(path.name.removeprefix("torch-")):
            if words := _needed(path, pythons, request):
                why.append(f"{path.name}: {words}")
            elif _clear(path, why):
                yield path
    _remove_empty(_entries(work.jobs))
    yield from _remove_empty((work.jobs, work.codes, work.venvs))
    if not work.jobs.exists() and not work.venvs.exists():
        for path in _entries(work.locks):
            if _is_lock(path):
                path.unlink()
        yield from _remove_empty((work.locks,))


def _clear_halves(work: Work, why: list[str]) -> None:
    """What an earlier removal did not get done with."""
    for path in [path for folder in (work.jobs, work.codes, work.venvs) for path in _entries(folder)]:
        if path.name.startswith(GONE):
            _clear(path, why)


def _clear(folder: Path, why: list[str]) -> bool:
    """Whether all of it could be removed; else `why` gets a line. What can be removed of it is gone all the same."""
    try:
        remove(folder)
    except OSError as error:
        why.append(f"a part of {folder.parent.name}/{folder.name}: {trouble.words(error, folder)}")
        return False
    return True


def _needed(venv: Path, pythons: list[str], request: dict[str, Any]) -> str:
    """Who else needs this environment; "" where nobody does. It is not ours any more."""
    marker = read_json(venv / VENV_MARKER)
    if "users" not in marker:
        return "an older orch made it" if marker else "`orch setup` did not make it"
    mine = (request["owner"]["id"], request["cluster"])
    rest = [user for user in marker["users"] if (user["owner"]["id"], user["cluster"]) != mine]
    if rest != marker["users"]:
        write_json(venv / VENV_MARKER, {**marker, "users": rest})
    if rest:
        return ", ".join(f"used by cluster {user['cluster']} of {user['owner']['name']}" for user in rest)
    return "a job that runs uses it" if any(python.startswith(f"{venv}/") for python in pythons) else ""


def _entries(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if not path.is_symlink()] if folder.is_dir() else []


def _remove_empty(folders: Iterable[Path]) -> list[Path]:
    removed = []
    for folder in folders:
        with contextlib.suppress(OSError):  # it is not there, or holds something
            folder.rmdir()
            removed.append(folder)
    return removed


# ---- taking over ----------------------------------------------------------------------------------------------


def adopt(request: dict[str, Any]) -> dict[str, Any]:
    """{"adopted": [jobs]}: those of `jobs` that are there, belong to this cluster, and were not ours before."""
    adopted = []
    work = Work(request["workdir"])
    if found := unfit(work.root):
        raise Refused(*found)
    for job in (work.job(name) for name in request["jobs"]):
        node, found_owner = job.read_node(), whose(job)
        if node and found_owner and found_owner[1] == request["cluster"] and not is_mine(job, request):
            write_json(job.node, {**node, "owner": request["owner"]})
            if job.is_final():  # it may have ended, and blanked its secrets, since we read them
                job.forget_secrets()
            adopted.append(job.id)
    return {"adopted": adopted}
