"""What a supervisor's record (agent.json) says, and whether somebody still stands behind it."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from . import processes
from .layout import FINAL_STATES, Job


def look(job: Job) -> dict[str, Any]:
    """The agent's record, its node's place in the job, and whether somebody still stands behind it."""
    agent = job.read_agent()
    with contextlib.suppress(OSError, ValueError):
        node = json.loads(job.node.read_text())
        agent["plan"] = {key: node[key] for key in ("exp", "members", "is_master", "cluster", "created")}
    agent["alive"] = lives(agent)
    if not agent["alive"] and agent.get("state") not in FINAL_STATES:
        agent |= job.read_agent()  # it may have spoken its last word between the two looks
    if not agent["alive"] and agent.get("state") not in FINAL_STATES:
        agent["left"] = len(processes.marked(job.root))
    return agent


def lives(agent: dict[str, Any]) -> bool:
    """Whether the supervisor or its keeper runs: while the keeper does, it is still ending what is left."""
    found = [agent, agent.get("keeper") or {}]
    return any(identity(one).is_alive() for one in found if "start_time" in one)


def stopped(agent: dict[str, Any]) -> dict[str, processes.Identity]:
    """Of supervisor and keeper, who is there and stands still by a signal (state T): they hold the job's GPU locks."""
    found = {"supervisor": agent, "keeper": agent.get("keeper") or {}}
    there = {role: identity(one) for role, one in found.items() if "start_time" in one}
    return {role: one for role, one in there.items() if one.is_alive() and processes.is_stopped(one.pid)}


def identity(record: dict[str, Any]) -> processes.Identity:
    return processes.Identity(int(record["pid"]), int(record["start_time"]), str(record["boot_id"]))
