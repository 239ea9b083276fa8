"""A job's place in the queue for this host's GPUs. The controller that waits asks again and again.

Request: {"action", "workdir", "node", "job", "owner", "gpus"}; the actions are
- look       reports the queue for these GPUs and who has them
- take       leaves a ticket with this "number", then as look
- renew      renews the ticket, for "lease_s" if given, then as look
- leave      takes the ticket back
- cancel     marks the ticket, so that its controller gives up at its next renewal

Answer: {"tickets", "ahead", "held", "silent", "cancelled"}: the queue for these GPUs, the part of it before this job,
the other jobs that have them now, the logins whose sockets gave no answer ("" for an unknown login);
{"lost": true} if there is no such ticket.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from . import tickets
from .agent import lives
from .answer import reply
from .gpu_claim import Holder, holder_of
from .layout import WorkFolder
from .occupants import user_name
from .processes import age_s, identify
from .tickets import Ticket, ahead


def main(request: dict[str, Any]) -> None:
    reply(request, act)


def act(request: dict[str, Any]) -> dict[str, Any]:
    action, job, cancelled = request["action"], request.get("job", ""), False
    if action == "take":
        take(request)
    elif action != "look":
        lease_s = request.get("lease_s", tickets.LEASE_S)
        answer = tickets.send(job, request["node"], {"do": action, "owner": request["owner"], "lease_s": lease_s})
        if answer is None:
            return {"lost": True}
        cancelled = answer["cancelled"]
    if action in ("leave", "cancel"):
        return {"cancelled": cancelled}
    gpus = request["gpus"]
    everybody, silent = tickets.all_tickets()
    queue = [ticket for ticket in everybody if not set(gpus).isdisjoint(ticket.gpus)]
    return {
        "tickets": [ticket._asdict() for ticket in queue],
        "ahead": [ticket._asdict() for ticket in ahead(job, gpus, queue)],
        "held": held(WorkFolder(request["workdir"]), job, gpus),
        "silent": silent,
        "cancelled": cancelled,
    }


def take(request: dict[str, Any]) -> None:
    """Once, even if the first answer was lost on its way and the controller asks again."""
    job, node, owner, number = (request[key] for key in ("job", "node", "owner", "number"))
    existing = tickets.send(job, node, {"do": "renew", "owner": owner})
    if existing is None or existing["number"] != number:
        tickets.take(Ticket(job, number, request["gpus"]), node, owner)


def held(work: WorkFolder, job: str, gpus: list[str]) -> list[dict[str, Any]]:
    """The other jobs that have these GPUs: of any login on this machine, and of this work folder."""
    found = []
    for gpu in gpus:
        holder = holder_of(gpu) or _of_this_folder(work, gpu)
        if holder and holder.job != job:
            since_s = None
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                since_s = age_s(identify(holder.pid)) if holder.pid else None
            found.append({"job": holder.job, "user": holder.user, "since_s": since_s})
    return found


def _of_this_folder(work: WorkFolder, gpu: str) -> Holder | None:
    """The living job that holds the GPU's lock file. The lock itself is not tried: a start may want it now."""
    try:
        job = work.job((work.locks / f"gpu-{gpu}.lock").read_text(errors="replace")[:200].strip() or "none")
    except (OSError, ValueError):
        return None
    agent = job.read_agent()
    return Holder(user_name(os.getuid()), job.id, int(agent["pid"])) if lives(agent) else None
