"""A job's supervisor from outside: its record (agent.json), whether it is alive, and messages to it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from typing import Any

from . import processes
from .layout import FINAL_STATES, JobFolder


def agent_state(job: JobFolder) -> dict[str, Any]:
    """The agent's record, its node's part of the job, `alive`, and `left`: remaining processes of a dead supervisor."""
    agent = job.read_agent()
    with contextlib.suppress(KeyError):  # no node.json, or another version's
        node = job.read_node()
        agent["plan"] = {key: node[key] for key in ("exp", "members", "is_master", "cluster", "created")}
        agent["owner"] = node.get("owner")
    if agent.get("quiet_since"):
        quiet_s = (agent.get("ended") or time.time()) - agent["quiet_since"]
        agent["quiet_s"] = 60 * round(max(quiet_s, 60) // 60)  # whole minutes: a follower gets one change a minute
    if queue := agent.get("queue"):
        for row in (*queue.get("ahead", ()), *queue.get("held", ())):
            if row["since_s"] is not None:  # as of now, in steps: a follower gets every change
                row["since_s"] = 10.0 * round((row["since_s"] + max(0.0, time.time() - queue["at"])) / 10)
    agent["alive"] = lives(agent)
    if not agent["alive"] and agent.get("state") not in FINAL_STATES:
        agent |= job.read_agent()  # it may have written its final record in between
    if not agent["alive"] and agent.get("state") not in FINAL_STATES:
        agent["left"] = len(processes.marked(job.root))
    return agent


def lives(agent: dict[str, Any]) -> bool:
    # The supervisor or its keeper runs. The keeper runs until it has ended the job's processes.
    found = [agent, agent.get("keeper") or {}]
    return any(identity(one).is_alive() for one in found if "start_time" in one)


def stopped(agent: dict[str, Any]) -> dict[str, processes.Identity]:
    # Supervisor and keeper that a signal stopped (state T); they still hold the job's GPU locks.
    found = {"supervisor": agent, "keeper": agent.get("keeper") or {}}
    there = {role: identity(one) for role, one in found.items() if "start_time" in one}
    return {role: one for role, one in there.items() if one.is_alive() and processes.is_stopped(one.pid)}


def identity(record: dict[str, Any]) -> processes.Identity:
    return processes.Identity(int(record["pid"]), int(record["start_time"]), str(record["boot_id"]))


def tell(job: JobFolder, message: dict[str, Any]) -> bool:
    """Writes one line into the supervisor's FIFO; False if no process reads it."""
    try:
        handle = os.open(job.control, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        os.write(handle, json.dumps(message).encode() + b"\n")
    finally:
        os.close(handle)
    return True


def wait_gone(record: dict[str, Any] | None, timeout_s: float) -> None:
    if record and identity(record).is_alive():
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(int(record["pid"]))
            select.select([handle], [], [], timeout_s)
            os.close(handle)
