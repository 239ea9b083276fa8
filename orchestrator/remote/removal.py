"""`orch down` on a host: ends our jobs, then removes them, and of what several share what nobody else needs.

Removed are job folders of ours, code that no job left there names, environments without another user, and folders that
are then empty.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from . import trouble
from .agent import agent_state, lives, tell, wait_gone
from .answer import Refused
from .claim import alone_in
from .layout import GONE, VENV_MARKER, VERSION, JobFolder, WorkFolder, read_json, remove, write_json
from .ownership import CODE, SHOWN, entry, is_lock, is_mine, jobs_of_orch, strange
from .reaping import end_marked
from .workfolder import MARK, content, danger, names, unfit

DOWN_S = 40.0
ALONE_S = 5.0
"""A start takes a second or two; `orch setup` is not waited for."""


def down(request: dict[str, Any]) -> dict[str, Any]:
    """{"removed": [paths, less those of jobs], "ended": [jobs that ran], "jobs": {removed job: its last record},
    "left": as `survey`'s others, "strange": [names], "why": what else stays, and why}.
    """
    work = WorkFolder(request["workdir"])
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
        for job in jobs_of_orch(work):
            agent = agent_state(job)
            # Without a supervisor's word its `prepare` may be at work.
            if is_mine(job, request) and not agent["alive"] and (alone or "pid" in agent):
                answer["jobs"][job.id] = {key: agent.get(key) for key in ("state", "ended", "first_failure")}
                clear(job.root, answer["why"])
        if alone:
            answer["removed"] += [str(path) for path in _remove_shared(work, request, answer["why"])]
        else:
            answer["why"].append("code and environments: `orch run` or `orch setup` is at work there")
        there = jobs_of_orch(work)
        answer["left"], answer["strange"] = [entry(job) for job in there], list(strange(work))[:SHOWN]
        if alone and names(work.root) == [MARK]:
            (work.root / MARK).unlink()
            with contextlib.suppress(OSError):  # somebody put something there, or the folder above is not ours
                work.root.rmdir()
                answer["removed"].append(str(work.root))
    return answer


def _end_ours(work: WorkFolder, request: dict[str, Any]) -> list[str]:
    """Cancels what runs of ours (its supervisors end it on the other hosts, too). Raises Refused where that fails."""
    mine = [job for job in jobs_of_orch(work) if is_mine(job, request)]
    live = [job for job in mine if lives(job.read_agent())]
    for job in live:
        tell(job, {"request": "cancel"})
    for job in live:
        wait_gone(job.read_agent().get("keeper"), DOWN_S)
    stayed = [process for job in mine if not lives(job.read_agent()) for process in end_marked(job)]
    stayed += [f"the supervisor of {job.id}" for job in live if lives(job.read_agent())]
    if stayed:
        raise Refused(f"does not end: {', '.join(stayed)}", "end these by hand, then `orch down` again")
    return [job.id for job in live]


def _remove_shared(work: WorkFolder, request: dict[str, Any], why: list[str]) -> Iterator[Path]:
    """Nobody else is at work there."""
    left = jobs_of_orch(work)
    needed = {job.read_node().get("code") for job in left}
    for path in entries(work.codes):
        if path.is_dir() and CODE.fullmatch(path.name) and path.name not in needed and clear(path, why):
            yield path
    pythons = [str(job.read_node().get("python", "")) for job in left if lives(job.read_agent())]
    for path in entries(work.venvs):
        if path.name.startswith("torch-") and VERSION.fullmatch(path.name.removeprefix("torch-")):
            if words := _needed(path, pythons, request):
                why.append(f"{path.name}: {words}")
            elif clear(path, why):
                yield path
    for path in entries(work.handovers):
        if is_mine(JobFolder(path), request) and clear(path, why):
            yield path
    _remove_empty(entries(work.jobs))
    yield from _remove_empty((work.jobs, work.codes, work.venvs, work.handovers))
    if not work.jobs.exists() and not work.venvs.exists():
        for path in entries(work.locks):
            if is_lock(path):
                path.unlink()
        yield from _remove_empty((work.locks,))


def _clear_halves(work: WorkFolder, why: list[str]) -> None:
    """What an earlier removal did not get done with."""
    for path in halves(work):
        clear(path, why)


def halves(work: WorkFolder) -> list[Path]:
    """What removals left that were cut short."""
    there = [path for folder in (work.jobs, work.codes, work.venvs, work.handovers) for path in entries(folder)]
    return [path for path in there if path.name.startswith(GONE)]


def clear(folder: Path, why: list[str]) -> bool:
    """Whether all of it could be removed; else `why` gets a line. What can be removed of it is gone all the same."""
    try:
        remove(folder)
    except OSError as error:
        why.append(f"a part of {folder.parent.name}/{folder.name}: {trouble.words(error, folder)}")
        return False
    return True


def _needed(venv: Path, pythons: list[str], request: dict[str, Any]) -> str:
    """Who else needs this environment; "" where nobody does. It is no longer ours."""
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


def entries(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if not path.is_symlink()] if folder.is_dir() else []


def _remove_empty(folders: Iterable[Path]) -> list[Path]:
    removed = []
    for folder in folders:
        with contextlib.suppress(OSError):  # it is not there, or holds something
            folder.rmdir()
            removed.append(folder)
    return removed
