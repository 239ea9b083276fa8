"""What in a work folder belongs to whom: listed, ended and removed where it is ours, and never touched where it is not.

Requests, by `action`, each with {"workdir", "owner": {"id", "name"}, "cluster"}, which together say who asks:

    survey    what is there: {"mine", "others": [{"job", "cluster", "owner", "state", "alive"}], "strange": [names]}
    reap      list of everybody, and with `end` end of ours, what jobs without a living supervisor left behind; who is
              stopped, to go on
    mend      what `reap` does, and of ours what no job will ever need
    down      end our jobs, then remove them, and of what several share what nobody else needs
    adopt     make `jobs` of this cluster ours, whoever started them

Whose something is, `ownership` says; `reaping`, `mending` and `removal` act on it.

The answer is one JSON object; {"error", "remedy"} where the host refuses.
"""

from __future__ import annotations

from typing import Any

from .answer import Refused, reply
from .layout import WorkFolder, write_json
from .mending import mend
from .ownership import SHOWN, entry, forget_old_secrets, is_mine, jobs_of_orch, strange, whose
from .reaping import reap
from .removal import down
from .workfolder import content, unfit


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
    """{"adopted": [jobs]}: those of `jobs` that are there, belong to this cluster, and were not ours before."""
    adopted = []
    work = WorkFolder(request["workdir"])
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
