"""What the controller asks of a host about a job that is there: one short program a request (see `loader`).

Requests, by `action`; what makes a job, and what removes it, are programs of their own (`prepare`, `belongings`):

    go        tell the supervisor where the hub is; ranks start as soon as every host has joined
    undo      end a prepared supervisor and remove the job's folder; cancel one that has been asked to start
    cancel    ask the supervisor to end the job, everywhere
    fence     the same for a start that was left half done, and keep what of it is still under way from beginning
    status    the agent records of one job or of all, and whether their supervisors live
    checkpoint the newest checkpoint of a job
    recall    the plans of jobs that the controller does not know, with their agent records

The answer is one JSON object; {"error", "remedy"} where the host refuses.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from pathlib import Path
from typing import Any

from .agent import agent_state, lives, tell, wait_gone
from .answer import Refused, reply
from .layout import READY_S, JobFolder, WorkFolder, drop, remove, write_json, write_last_word

UNDO_S = 10.0
RECALL_BYTES = 1 << 19
"""Plans of so many bytes go into one answer, and none that is larger by itself."""


def main(request: dict[str, Any]) -> None:
    actions = (go, undo, cancel, fence, status, checkpoint, recall)
    reply(request, {action.__name__: action for action in actions}[request["action"]])


# ---- starting -------------------------------------------------------------------------------------------------


def go(request: dict[str, Any]) -> dict[str, Any]:
    job = _job(request)
    write_json(job.peers, request["peers"])
    if not tell(job, {"go": {"hub_port": request["hub_port"]}}):
        raise Refused(f"the supervisor of {job.id} is gone", "run again; `orch logs` may say why")
    return {}


# ---- stopping -------------------------------------------------------------------------------------------------


def undo(request: dict[str, Any]) -> dict[str, Any]:
    """Ends a supervisor that has not been asked to start, and removes the job's folder: only what this very launch
    made; an earlier job of the same name, or one that already runs, stays. fence: its `prepare` may still come.
    """
    job = _job(request)
    drop(WorkFolder(request["workdir"]).handover(job.id))
    if request["fence"]:
        _close_folder(job, request)
    agent = job.read_agent()
    if not job.has_token(request["token"]):
        return {}
    # Not "undo": a `go` may lie unread before this line, and then the job has to be stopped.
    tell(job, {"request": "cancel"})
    if "go" not in agent:
        wait_gone(agent.get("keeper"), UNDO_S)
    if "go" in job.read_agent():
        return {"told": True}
    if lives(agent):
        raise Refused(f"the supervisor of {job.id} does not end", "see `orch reap`")
    remove(job.root)
    return {}


def cancel(request: dict[str, Any]) -> dict[str, Any]:
    job = _job(request)
    return {"told": job.root.is_dir() and not job.is_final() and tell(job, {"request": "cancel"})}


def fence(request: dict[str, Any]) -> dict[str, Any]:
    drop(WorkFolder(request["workdir"]).handover(request["job"]))
    _close_folder(_job(request), request)
    return cancel(request)


def _close_folder(job: JobFolder, request: dict[str, Any]) -> None:
    """A job's folder is its lock: a `prepare` that is still on its way finds it taken and gives up. One that is at work
    is waited for, so that its supervisor can be asked to end.
    """
    from .claim import claimed  # nothing else here needs it, and the jobs' states are asked for often

    undone = {"schema": 1, "job": job.id, "state": "undone", "ended": time.time()}
    undone |= {"owner": request["owner"], "cluster": request["cluster"]}
    with claimed(WorkFolder(request["workdir"])):
        job.root.parent.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            job.root.mkdir(mode=0o700)
            write_last_word(job, undone)
    deadline = time.monotonic() + READY_S
    while job.root.is_dir() and not job.read_agent():
        if time.monotonic() > deadline:  # its maker died at work
            write_last_word(job, undone)
        time.sleep(0.02)


# ---- looking --------------------------------------------------------------------------------------------------


def status(request: dict[str, Any]) -> dict[str, Any]:
    work = WorkFolder(request["workdir"])
    jobs = [work.job(request["job"])] if request.get("job") else work.all_jobs()
    agents = {job.id: agent_state(job) for job in jobs[-200:] if job.root.is_dir()}
    for job in jobs:
        # Where supervisor and keeper were killed, nobody else will; one that is being made has no record yet.
        if "pid" in agents.get(job.id, {}) and not agents[job.id]["alive"]:
            job.forget_secrets()
    return {"jobs": agents}


def checkpoint(request: dict[str, Any]) -> dict[str, Any]:
    """{"path"}: null where there is none. folder: where its settings put them, "" for its own."""
    job = _job(request)
    folder = job.src / Path(request["folder"]).expanduser() if request["folder"] else job.checkpoints
    paths = [path for path in folder.glob("step-*.pt") if re.fullmatch(r"step-\d{9}\.pt", path.name)]
    return {"path": str(max(paths)) if paths else None}


def recall(request: dict[str, Any]) -> dict[str, Any]:
    """{"jobs": {id: {"plan", "agent"}}, "more"}: newest first, as many as one answer holds. `known` are left out."""
    known, jobs, size = frozenset(request["known"]), dict[str, Any](), 0
    unknown = [job for job in WorkFolder(request["workdir"]).all_jobs() if job.id not in known]
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
        jobs[job.id] = {"plan": plan, "agent": agent_state(job)}
    return {"jobs": jobs, "more": False}


def _job(request: dict[str, Any]) -> JobFolder:
    return WorkFolder(request["workdir"]).job(request["job"])
