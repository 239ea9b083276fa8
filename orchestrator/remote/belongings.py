"""Ownership in a work folder: lists, ends and removes our jobs and leftovers, and never touches others'.

Requests, by `action`, each with {"workdir", "owner": {"id", "name"}, "cluster"} of the caller:

    survey    list the jobs: {"mine", "others": [{"job", "cluster", "owner", "state", "alive"}], "strange": [names]}
    reap      list processes of all jobs without a living supervisor and stopped supervisors; `end`: end or wake ours
    mend      `reap`, and folders of ours that no job will use
    down      end and remove our jobs, and shared files that no other job needs
    adopt     take over `jobs` of this cluster from another owner

The answer is one JSON object; a refusal is {"error", "remedy"}.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from . import answer as trouble
from . import processes
from .agent import agent_state, identity, lives, stopped, tell, wait_gone
from .answer import Refused, reply
from .claim import alone_in
from .layout import GONE, JOB_ID, VENV_MARKER, VERSION, JobFolder, WorkFolder, read_json, remove, write_json
from .processes import Identity, age_s, identify, marked
from .workfolder import MARK, content, danger, names, unfit


def main(request: dict[str, Any]) -> None:
    reply(request, {action.__name__: action for action in (survey, reap, mend, down, adopt)}[request["action"]])


def survey(request: dict[str, Any]) -> dict[str, Any]:
    work = WorkFolder(request["workdir"])
    if content(work.root) == "absent":
        return {"mine": [], "others": [], "strange": []}
    jobs = jobs_of_orch(work)
    forget_old_secrets(jobs, request)
    return {
        "mine": [entry(job) for job in jobs if is_mine(job, request)],
        "others": [entry(job) for job in jobs if not is_mine(job, request)],
        "strange": list(strange(work))[:SHOWN],
    }


def adopt(request: dict[str, Any]) -> dict[str, Any]:
    """{"adopted": [jobs]}: existing jobs of this cluster that another owner started."""
    adopted = []
    work = WorkFolder(request["workdir"])
    if found := unfit(work.root):
        raise Refused(*found)
    for job in (work.job(name) for name in request["jobs"]):
        node, found_owner = job.read_node(), whose(job)
        if node and found_owner and found_owner[1] == request["cluster"] and not is_mine(job, request):
            write_json(job.node, {**node, "owner": request["owner"]})
            if job.is_final():  # it may have ended since we read its record, and cleared its secrets
                job.forget_secrets()
            adopted.append(job.id)
    return {"adopted": adopted}


# A job is ours if its node.json (or agent.json, if it was never prepared) names this owner and this cluster. Files of
# orch are recognized by their content or mark: a name could be a person's own.

SHOWN = 50  # most entries of a list in an answer
CODE = re.compile(r"[0-9a-f]{64}|\.[0-9a-f]{64}\.\d+")  # unpacked code, or half unpacked by a `prepare` that was killed
_LOCK = re.compile(r"gpu-.+\.lock|venv\.lock")
LOCK_BYTES = 200  # longer than any job id


def whose(job: JobFolder) -> tuple[str, str] | None:
    """Owner id ("" in records of old versions) and cluster; None if this is no job of orch."""
    for record in (job.read_node(), job.read_agent()):
        if record.get("job") == job.id:
            owner = record.get("owner") or {}
            return str(owner.get("id", "")), str(record.get("cluster", ""))
    return None


def is_mine(job: JobFolder, request: dict[str, Any]) -> bool:
    return whose(job) == (request["owner"]["id"], request["cluster"])


def forget_old_secrets(jobs: Iterable[JobFolder], request: dict[str, Any]) -> None:
    # Removes the secrets of ended jobs of this cluster: old versions left them, and recorded no owner.
    ours = [(owner, request["cluster"]) for owner in (request["owner"]["id"], "")]
    for job in (job for job in jobs if whose(job) in ours):
        agent = job.read_agent()
        if (job.is_final() or "pid" in agent) and not lives(agent):
            job.forget_secrets()


def entry(job: JobFolder) -> dict[str, Any]:
    node, agent = job.read_node(), job.read_agent()
    record = node or agent
    owner = record.get("owner") or {}
    return {
        "job": job.id,
        "cluster": record.get("cluster"),
        "owner": owner.get("name"),
        "state": agent.get("state"),
        "alive": lives(agent),
    }


def jobs_of_orch(work: WorkFolder) -> list[JobFolder]:
    return [job for job in work.all_jobs() if not job.root.is_symlink() and whose(job)]


def strange(work: WorkFolder) -> Iterator[str]:
    """Names relative to the work folder that orch did not create."""
    folders = (work.jobs, work.codes, work.venvs, work.locks, work.handovers)
    for name in names(work.root):
        folder = work.root / name
        if folder in folders and folder.is_dir():
            yield from (f"{name}/{path.name}" for path in sorted(folder.iterdir()) if not _is_ours(work, path))
        elif name != MARK:
            yield name


def _is_ours(work: WorkFolder, path: Path) -> bool:
    if path.name.startswith(GONE):
        return True
    if path.parent in (work.jobs, work.handovers):
        return path.is_dir() and whose(JobFolder(path)) is not None
    if path.parent == work.venvs:
        return (path / VENV_MARKER).is_file()
    return is_lock(path) if path.parent == work.locks else bool(CODE.fullmatch(path.name))


def is_lock(path: Path) -> bool:
    if not _LOCK.fullmatch(path.name) or path.is_symlink() or not path.is_file():
        return False
    with open(path, "rb") as file:
        text = file.read(LOCK_BYTES)
    return not text or bool(JOB_ID.fullmatch(text.decode(errors="replace")))


# `orch down` on a host. Code and environments go only if no other job or user needs them.

DOWN_S = 40.0
ALONE_S = 5.0  # a start takes 1 to 2 s; `orch setup` takes longer, and is reported instead of waited for


def down(request: dict[str, Any]) -> dict[str, Any]:
    """Returns {"removed": [paths, without jobs], "ended": [jobs that ran], "jobs": {removed job: its last record},
    "left": as `survey`'s others, "strange": [names], "why": [what else stays, and why]}.
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
            # Without a supervisor's record its `prepare` may still be working.
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
            with contextlib.suppress(OSError):  # new content, or no right to write in the folder above
                work.root.rmdir()
                answer["removed"].append(str(work.root))
    return answer


def _end_ours(work: WorkFolder, request: dict[str, Any]) -> list[str]:
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
    for path in halves(work):
        clear(path, why)


def halves(work: WorkFolder) -> list[Path]:
    there = [path for folder in (work.jobs, work.codes, work.venvs, work.handovers) for path in entries(folder)]
    return [path for path in there if path.name.startswith(GONE)]


def clear(folder: Path, why: list[str]) -> bool:
    """False, with a line in `why`, if a part of it could not be removed."""
    try:
        remove(folder)
    except OSError as error:
        why.append(f"a part of {folder.parent.name}/{folder.name}: {trouble.words(error, folder)}")
        return False
    return True


def _needed(venv: Path, pythons: list[str], request: dict[str, Any]) -> str:
    """Removes us from the environment's users; returns who else needs it, or ""."""
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
        with contextlib.suppress(OSError):  # absent or not empty
            folder.rmdir()
            removed.append(folder)
    return removed


# Leftover processes of jobs without a living supervisor, and stopped supervisors.

END_S = 10.0


def reap(request: dict[str, Any]) -> dict[str, Any]:
    found = []
    work = WorkFolder(request["workdir"])
    forget_old_secrets(jobs_of_orch(work), request)
    for job in work.all_jobs():
        agent = job.read_agent()
        still = stopped(agent)
        pids = [] if lives(agent) else processes.marked(job.root)
        living = [f"its {role} is stopped, {processes.describe(one)}" for role, one in still.items()]
        living += [processes.describe(pid) for pid in pids]
        if living:
            mine = is_mine(job, request)
            found.append({**entry(job), "mine": mine, "processes": living[:SHOWN]})
            if request["end"] and mine:
                found[-1]["stayed"] = _wake(job, still) if still else end_marked(job)
    return {"found": found, **_reap_programs(end=request["end"])}


def _reap_programs(*, end: bool) -> dict[str, Any]:
    programs = forgotten()
    if end:
        processes.end_all(programs, signal.SIGKILL)
    return {"programs": [processes.describe(program) for program in programs][:SHOWN]}


def _wake(job: JobFolder, still: dict[str, processes.Identity]) -> list[str]:
    """Continues a stopped supervisor, which checks its own lease, or a keeper, which then ends the job and itself.
    Returns processes that did not react.
    """
    for one in still.values():
        one.signal(signal.SIGCONT)
    deadline = time.monotonic() + END_S
    while (asleep := stopped(job.read_agent())) and time.monotonic() < deadline:
        time.sleep(0.02)
    agent = job.read_agent()
    if not identity(agent).is_alive():
        wait_gone(agent.get("keeper"), END_S)
        return end_marked(job) + [processes.describe(one) for one in asleep.values()]
    return [processes.describe(one) for one in asleep.values()]


def end_marked(job: JobFolder) -> list[str]:
    killing, deadline = processes.Killing(), time.monotonic() + END_S
    while (pids := processes.marked(job.root)) and time.monotonic() < deadline:
        killing.of(pids)
        time.sleep(0.02)
    return [processes.describe(pid) for pid in pids]


# Leftovers of interrupted starts and ends: half removed or half uploaded folders, and jobs of ours that were prepared
# but never began. A job's output always stays.


def mend(request: dict[str, Any]) -> dict[str, Any]:
    """`reap`'s answer, and {"folders": [names within the work folder], "why": [what stays, and why]}."""
    work, why, left = WorkFolder(request["workdir"]), list[str](), list[Path]()
    answer = reap(request)
    with alone_in(work, ALONE_S) as alone:
        if alone:
            left = [folder for folder in _left(work, request) if not request["end"] or clear(folder, why)]
        elif content(work.root) == "ours":
            why.append("folders were not looked at: `orch run` or `orch setup` is at work there")
    return {**answer, "folders": [str(path.relative_to(work.root)) for path in left], "why": why}


def _left(work: WorkFolder, request: dict[str, Any]) -> Iterator[Path]:
    # Old folders only: another process may be removing a young folder, and the folder of an undone start stops a late
    # `prepare`.
    found = halves(work)
    found += [path for path in entries(work.codes) if path.name.startswith(".") and CODE.fullmatch(path.name)]
    found += [job.root for job in jobs_of_orch(work) if is_mine(job, request) and _never_began(job)]
    yield from (path for path in found if time.time() - path.stat().st_ctime > OLD_S)


def _never_began(job: JobFolder) -> bool:
    agent = job.read_agent()
    is_over = agent.get("state", "undone") == "undone" and not lives(agent) and not marked(job.root)
    return is_over and not any(job.root.glob("rank-*"))


# Programs of ours whose connection died. A healthy program writes every second, so an old program that makes no context
# switch for `LOOK_S` is stuck.

OLD_S = 600.0
LOOK_S = 2.0
_BOOTSTRAP = "exec(compile(i.read(int(i.readline())),sys.argv[1],sys.argv[2]))"
"""Part of the command line in `orchestrator/transport/shell.py`."""


def forgotten(old_s: float = OLD_S) -> list[Identity]:
    active = {program: _switches(program.pid) for program in our_programs() if age_s(program) > old_s}
    if active:
        time.sleep(LOOK_S)
    return [program for program, before in active.items() if program.is_alive() and _switches(program.pid) == before]


def our_programs() -> list[Identity]:
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and int(name) != os.getpid() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                program = identify(int(name))  # identified before its command line is read, since pids are reused
                words = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace").split("\0")[1:5]
                if _is_program_of_ours(words):
                    found.append(program)
    return found


def _is_program_of_ours(words: list[str]) -> bool:
    if words[:1] == ["-c"]:  # a shell that waits for its `activate` line
        return len(words) == 3 and _BOOTSTRAP in words[1] and " orch-" in words[1]
    return len(words) == 4 and words[0] == "-Suc" and _BOOTSTRAP in words[1] and words[2].startswith("orch-")


def _switches(pid: int) -> int:
    count = 0
    with contextlib.suppress(OSError, ValueError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            lines = (thread / "status").read_text().splitlines()
            count += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return count
