"""What the controller asks of a host about a job that is there: one short program a request (see `loader`).

Requests, by `action`; what makes a job is a program of its own (`prepare`):

    go        tell the supervisor where the hub is; ranks start as soon as every host has joined
    undo      end a prepared supervisor and remove the job's folder; cancel one that has been told to go
    cancel    ask the supervisor to end the job, everywhere
    fence     the same for a start that was left half done, and keep what of it is still under way from beginning
    status    the agent records of one job or of all, and whether their supervisors live
    checkpoint the newest checkpoint of a job
    recall    the plans of jobs that the controller does not know, with their agent records
    reap      list, and on request end, what jobs without a living supervisor left behind; who is stopped, to go on
    down      remove everything of ours from the work folder, if nothing runs

The answer is one JSON object; {"error", "remedy"} where the host refuses.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import processes
from .agent import identity, lives, look, stopped
from .answer import Refused, reply
from .layout import READY_S, Job, Work, write_last_word
from .leftovers import forgotten
from .talk import try_lock

UNDO_S = 10.0
DOWN_S = 40.0
RECALL_BYTES = 1 << 19
"""Plans of so many bytes go into one answer, and none that is larger by itself."""


def main(request: dict[str, Any]) -> None:
    actions = (go, undo, cancel, fence, status, checkpoint, recall, reap, down)
    reply(request, {action.__name__: action for action in actions}[request["action"]])


# ---- starting -------------------------------------------------------------------------------------------------


def go(request: dict[str, Any]) -> dict[str, Any]:
    job = _job(request)
    if not _tell(job, {"go": {"hub_port": request["hub_port"]}}):
        raise Refused(f"the supervisor of {job.id} is gone", "run again; `orch logs` may say why")
    return {}


# ---- stopping -------------------------------------------------------------------------------------------------


def undo(request: dict[str, Any]) -> dict[str, Any]:
    """Ends a supervisor that has not been told to go, and removes the job's folder. Nothing but what this very launch
    made: an earlier job of the same name, or one that already runs, stays. fence: its `prepare` may still come.
    """
    job = _job(request)
    if request["fence"]:
        _close_folder(job)
    agent = job.read_agent()
    if not job.has_token(request["token"]):
        return {}
    # Not "undo": a `go` may lie unread before this line, and then the job has to be stopped.
    _tell(job, {"request": "cancel"})
    if "go" not in agent:
        _wait_gone(agent.get("keeper"), UNDO_S)
    if "go" in job.read_agent():
        return {"told": True}
    if lives(agent):
        raise Refused(f"the supervisor of {job.id} does not end", "see `orch reap`")
    _remove(job.root)
    return {}


def cancel(request: dict[str, Any]) -> dict[str, Any]:
    job = _job(request)
    return {"told": job.root.is_dir() and not job.is_final() and _tell(job, {"request": "cancel"})}


def fence(request: dict[str, Any]) -> dict[str, Any]:
    _close_folder(_job(request))
    return cancel(request)


def _close_folder(job: Job) -> None:
    """A job's folder is its lock: a `prepare` that is still on its way finds it taken and gives up. One that is at work
    is waited for, so that its supervisor can be told.
    """
    job.root.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        job.root.mkdir(mode=0o700)
        _write_undone(job)
    deadline = time.monotonic() + READY_S
    while job.root.is_dir() and not job.read_agent():
        if time.monotonic() > deadline:  # its maker died at work
            _write_undone(job)
        time.sleep(0.02)


def _write_undone(job: Job) -> None:
    write_last_word(job, {"schema": 1, "job": job.id, "state": "undone", "ended": time.time()})


def reap(request: dict[str, Any]) -> dict[str, Any]:
    found = []
    for job in Work(request["workdir"]).all_jobs():
        agent = job.read_agent()
        still = stopped(agent)
        pids = [] if lives(agent) else processes.marked(job.root)
        told = [f"its {role} is stopped, {processes.describe(one)}" for role, one in still.items()]
        told += [processes.describe(pid) for pid in pids]
        if told:
            found.append({"job": job.id, "processes": told[:50]})
            if request["end"]:
                found[-1]["stayed"] = _wake(job, still) if still else _end(job)
    return {"found": found, **_reap_programs(end=request["end"])}


def _reap_programs(*, end: bool) -> dict[str, Any]:
    """Those that a silent link left: of this user, whatever job they were about."""
    programs = forgotten()
    if end:
        processes.end_all(programs, signal.SIGKILL)
    return {"programs": [processes.describe(program) for program in programs][:50]}


def _wake(job: Job, still: dict[str, processes.Identity]) -> list[str]:
    """Has who was stopped go on: a supervisor sees for itself whether its lease is over, a keeper without one ends what
    is left, and itself. What did not.
    """
    for one in still.values():
        one.signal(signal.SIGCONT)
    deadline = time.monotonic() + UNDO_S
    while (asleep := stopped(job.read_agent())) and time.monotonic() < deadline:
        time.sleep(0.02)
    agent = job.read_agent()
    if not identity(agent).is_alive():
        _wait_gone(agent.get("keeper"), UNDO_S)
        return _end(job) + [processes.describe(one) for one in asleep.values()]
    return [processes.describe(one) for one in asleep.values()]


def _end(job: Job) -> list[str]:
    deadline = time.monotonic() + UNDO_S
    while (pids := processes.marked(job.root)) and time.monotonic() < deadline:
        processes.end_all(pids, signal.SIGKILL)
        time.sleep(0.02)
    return [processes.describe(pid) for pid in pids]


def down(request: dict[str, Any]) -> dict[str, Any]:
    """Cancels what still runs here (its supervisors end it on the other hosts, too), then removes our folders."""
    work = Work(request["workdir"])
    live = [job for job in work.all_jobs() if lives(job.read_agent())]
    for job in live:
        _tell(job, {"request": "cancel"})
    for job in live:
        _wait_gone(job.read_agent().get("keeper"), DOWN_S)
    stayed = [process for job in work.all_jobs() for process in _end(job)]
    stayed += [f"the supervisor of {job.id}" for job in live if lives(job.read_agent())]
    if stayed:
        raise Refused(f"does not end: {', '.join(stayed)}", "end these by hand, then `orch down` again")
    with _no_setup(work):
        removed = [str(folder) for folder in (work.jobs, work.codes, work.venvs, work.locks) if folder.is_dir()]
        for folder in removed:
            _remove(folder)
    with contextlib.suppress(OSError):  # holds something that is not ours
        work.root.rmdir()
    return {"removed": removed}


@contextlib.contextmanager
def _no_setup(work: Work) -> Iterator[None]:
    """Keeps `orch setup` out. Raises Refused where one is at work."""
    if not work.venv_lock.exists():
        yield
        return
    with open(work.venv_lock, "rb+") as lock:
        if not try_lock(lock.fileno()):
            raise Refused("`orch setup` is at work there", "wait for it, or end it with Ctrl-C")
        yield


# ---- looking --------------------------------------------------------------------------------------------------


def status(request: dict[str, Any]) -> dict[str, Any]:
    work = Work(request["workdir"])
    jobs = [work.job(request["job"])] if request.get("job") else work.all_jobs()
    found = {job.id: look(job) for job in jobs[-200:] if job.root.is_dir()}
    for job in jobs:
        # Where supervisor and keeper were killed, nobody else will; one that is being made has no record yet.
        if "pid" in found.get(job.id, {}) and not found[job.id]["alive"]:
            job.forget_secrets()
    return {"jobs": found}


def checkpoint(request: dict[str, Any]) -> dict[str, Any]:
    """{"path"}: null where there is none. folder: where the job was told to put them, "" for its own."""
    job = _job(request)
    folder = job.src / Path(request["folder"]).expanduser() if request["folder"] else job.checkpoints
    found = [path for path in folder.glob("step-*.pt") if re.fullmatch(r"step-\d{9}\.pt", path.name)]
    return {"path": str(max(found)) if found else None}


def recall(request: dict[str, Any]) -> dict[str, Any]:
    """{"jobs": {id: {"plan", "agent"}}, "more"}: newest first, as many as one answer holds. `known` are left out."""
    known, jobs, size = frozenset(request["known"]), dict[str, Any](), 0
    unknown = [job for job in Work(request["workdir"]).all_jobs() if job.id not in known]
    for job in sorted(unknown, key=lambda job: job.root.stat().st_mtime, reverse=True):
        try:
            text = job.plan.read_text()
            plan = json.loads(text)
        except (OSError, ValueError, RecursionError):  # made by an earlier version, or a start that was undone
            continue
        if len(text) > RECALL_BYTES:
            continue
        size += len(text)
        if size > RECALL_BYTES:
            return {"jobs": jobs, "more": True}
        jobs[job.id] = {"plan": plan, "agent": look(job)}
    return {"jobs": jobs, "more": False}


def _remove(folder: Path | str) -> None:
    import shutil  # slow to import, and `go` is waited for

    shutil.rmtree(folder)


def _wait_gone(record: dict[str, Any] | None, timeout_s: float) -> None:
    if record and identity(record).is_alive():
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(int(record["pid"]))
            select.select([handle], [], [], timeout_s)
            os.close(handle)


def _tell(job: Job, message: dict[str, Any]) -> bool:
    """One line into the supervisor's FIFO; False where nobody reads it."""
    try:
        handle = os.open(job.control, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        os.write(handle, json.dumps(message).encode() + b"\n")
    finally:
        os.close(handle)
    return True


def _job(request: dict[str, Any]) -> Job:
    return Work(request["workdir"]).job(request["job"])
