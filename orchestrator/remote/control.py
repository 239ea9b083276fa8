"""Requests of the controller about a prepared job; `prepare` creates jobs, `belongings` removes them.

By `action`:

    go         send the hub's address to the supervisor; ranks start as soon as every host has joined
    undo       end a prepared supervisor and remove the job's folder; cancel a job that was asked to start
    cancel     ask the supervisor to end the job on all hosts
    fence      cancel a half-done start, and keep its late parts from beginning
    status     agent records of one job or of all, and whether their supervisors are alive
    checkpoint the newest checkpoint of a job
    recall     plans and agent records of jobs that the controller has no record of

The answer is one JSON object; a refusal is {"error", "remedy"}.
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
from .layout import READY_S, JobFolder, WorkFolder, drop, remove, write_final_record, write_json

UNDO_S = 10.0
RECALL_BYTES = 1 << 19  # most bytes of plans in one answer; larger plans are left out


def main(request: dict[str, Any]) -> None:
    actions = (go, undo, cancel, fence, status, checkpoint, recall)
    reply(request, {action.__name__: action for action in actions}[request["action"]])


# ---- starting -------------------------------------------------------------------------------------------------


def go(request: dict[str, Any]) -> dict[str, Any]:
    job = _job(request)
    write_json(job.peers, request["peers"])
    if not tell(job, {"go": {"hub_port": request["hub_port"], "at_once": request["at_once"]}}):
        raise Refused(f"the supervisor of {job.id} is gone", "run again; `orch logs` may show why")
    return {}


# ---- stopping -------------------------------------------------------------------------------------------------


def undo(request: dict[str, Any]) -> dict[str, Any]:
    """Removes only the folder of this launch: an earlier job of the same name, or a job that runs, stays. fence: its
    `prepare` may still arrive.
    """
    job = _job(request)
    drop(WorkFolder(request["workdir"]).handover(job.id))
    if request["fence"]:
        _close_folder(job, request)
    agent = job.read_agent()
    if not job.has_token(request["token"]):
        return {}
    # Not "undo": if a `go` is still unread before this line, the job must be stopped.
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
    # A job's folder is its lock: a late `prepare` finds the folder and gives up. A `prepare` that is already working is
    # waited for, so that its supervisor can be asked to end.
    from .claim import claimed  # imported only here: `status` runs often

    undone = {"schema": 1, "job": job.id, "state": "undone", "ended": time.time()}
    undone |= {"owner": request["owner"], "cluster": request["cluster"]}
    with claimed(WorkFolder(request["workdir"])):
        job.root.parent.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            job.root.mkdir(mode=0o700)
            write_final_record(job, undone)
    deadline = time.monotonic() + READY_S
    while job.root.is_dir() and not job.read_agent():
        if time.monotonic() > deadline:  # `prepare` died halfway
            write_final_record(job, undone)
        time.sleep(0.02)


# ---- looking --------------------------------------------------------------------------------------------------


def status(request: dict[str, Any]) -> dict[str, Any]:
    work = WorkFolder(request["workdir"])
    jobs = [work.job(request["job"])] if request.get("job") else work.all_jobs()
    agents = {job.id: agent_state(job) for job in jobs[-200:] if job.root.is_dir()}
    for job in jobs:
        # If supervisor and keeper were killed, no other process clears the secrets. A job being prepared has no pid
        # yet.
        if "pid" in agents.get(job.id, {}) and not agents[job.id]["alive"]:
            job.forget_secrets()
    return {"jobs": agents}


def checkpoint(request: dict[str, Any]) -> dict[str, Any]:
    """{"path"}: null without a checkpoint. folder: from the job's settings, "" for the default."""
    job = _job(request)
    folder = job.src / Path(request["folder"]).expanduser() if request["folder"] else job.checkpoints
    paths = [path for path in folder.glob("step-*.pt") if re.fullmatch(r"step-\d{9}\.pt", path.name)]
    return {"path": str(max(paths)) if paths else None}


def recall(request: dict[str, Any]) -> dict[str, Any]:
    """{"jobs": {id: {"plan", "agent"}}, "more"}: newest first, as many as fit. Jobs in `known` are left out."""
    known, jobs, size = frozenset(request["known"]), dict[str, Any](), 0
    unknown = [job for job in WorkFolder(request["workdir"]).all_jobs() if job.id not in known]
    for job in sorted(unknown, key=lambda job: job.root.stat().st_mtime, reverse=True):
        try:
            text = job.plan.read_text()
            plan = json.loads(text)
        except (OSError, ValueError, RecursionError):  # an earlier version's, or an undone start
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
