"""A job's place in the queue for this host's GPUs. Asked again and again by the controller that waits.

Request: {"action", "workdir", "node", "job", "owner", "gpus", "longest_s"}; the actions are
- look       who waits for one of these GPUs, and has them
- take       leaves a ticket with this "number"
- renew      and how it stands; with "lease_s" for so long; with "starts_s" it was promised to start by then
- leave      takes the ticket back
- cancel     marks it, so that the controller that renews it hears of it

The answer is {"tickets", "ahead", "held", "silent", "goes_past", "cancelled"}: who waits for these GPUs, who of them
goes before this job, which jobs have them now, the logins whose sockets were asked in vain ("" for an unknown one), and
whether it is in the way of nobody if it starts all the same; {"lost": true} if there is no ticket to renew.
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
from .turns import Ticket, ahead, in_the_way


def main(request: dict[str, Any]) -> None:
    reply(request, act)


def act(request: dict[str, Any]) -> dict[str, Any]:
    action, job, said = request["action"], request.get("job", ""), dict[str, Any]()
    if action == "take":
        take(request)
    elif action != "look":
        word = {"do": action, "owner": request["owner"], "lease_s": tickets.LEASE_S}
        word |= {name: request[name] for name in ("lease_s", "starts_s") if name in request}
        heard = tickets.tell(job, request["node"], word)
        if heard is None:
            return {"lost": True}
        said = {"cancelled": heard["cancelled"]}
    if action in ("leave", "cancel"):
        return said
    gpus = request["gpus"]
    everybody, silent = tickets.seen()
    there = [ticket for ticket in everybody if not set(gpus).isdisjoint(ticket.gpus)]
    rows = {"tickets": there, "ahead": ahead(job, gpus, there)}
    return {
        **said,
        **{name: [ticket._asdict() for ticket in found] for name, found in rows.items()},
        "silent": silent,
        "held": held(WorkFolder(request["workdir"]), job, gpus),
        "goes_past": not in_the_way(job, gpus, request.get("longest_s"), there),
    }


def take(request: dict[str, Any]) -> None:
    """Once, also where the first answer was lost on its way and this is asked again."""
    job, node, owner, number = (request[key] for key in ("job", "node", "owner", "number"))
    there = tickets.tell(job, node, {"do": "renew", "owner": owner})
    if there is None or there["number"] != number:
        tickets.take(Ticket(job, number, request["gpus"], longest_s=request.get("longest_s")), node, owner)


def held(work: WorkFolder, job: str, gpus: list[str]) -> list[dict[str, Any]]:
    """Which other jobs have these GPUs: whoever's on this machine, and those of this work folder. left_s: so long at
    most; None where nobody knows.
    """
    found = []
    for gpu in gpus:
        holder = holder_of(gpu) or _of_this_folder(work, gpu)
        if holder and holder.job != job:
            since_s = None
            with contextlib.suppress(ProcessLookupError):  # it has ended this very moment
                since_s = age_s(identify(holder.pid)) if holder.pid else None
            left_s = None if since_s is None or holder.longest_s is None else max(0.0, holder.longest_s - since_s)
            found.append({"job": holder.job, "user": holder.user, "since_s": since_s, "left_s": left_s})
    return found


def _of_this_folder(work: WorkFolder, gpu: str) -> Holder | None:
    """The job that holds the GPU's lock, if one does. The lock is not touched: a start may want it now."""
    try:
        job = work.job((work.locks / f"gpu-{gpu}.lock").read_text(errors="replace")[:200].strip() or "none")
    except (OSError, ValueError):
        return None
    agent = job.read_agent()
    longest_s = job.read_node().get("longest_s")
    return Holder(user_name(os.getuid()), job.id, int(agent["pid"]), longest_s) if lives(agent) else None
