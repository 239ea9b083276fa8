"""What jobs without a living supervisor left behind, and who of a job is stopped: listed; if ours, ended or woken."""

from __future__ import annotations

import signal
import time
from typing import Any

from . import processes
from .agent import identity, lives, stopped, wait_gone
from .layout import JobFolder, WorkFolder
from .leftovers import forgotten
from .ownership import SHOWN, entry, forget_old_secrets, is_mine, jobs_of_orch

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
    """Those that a silent link left: of this user, whatever job they were about."""
    programs = forgotten()
    if end:
        processes.end_all(programs, signal.SIGKILL)
    return {"programs": [processes.describe(program) for program in programs][:SHOWN]}


def _wake(job: JobFolder, still: dict[str, processes.Identity]) -> list[str]:
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
        return end_marked(job) + [processes.describe(one) for one in asleep.values()]
    return [processes.describe(one) for one in asleep.values()]


def end_marked(job: JobFolder) -> list[str]:
    killing, deadline = processes.Killing(), time.monotonic() + END_S
    while (pids := processes.marked(job.root)) and time.monotonic() < deadline:
        killing.of(pids)
        time.sleep(0.02)
    return [processes.describe(pid) for pid in pids]
