"""A job's place in the queue for this host's GPUs. Asked again and again by the controller that waits.

Request: {"action", "workdir", "node", "job", "owner", "gpus"}; the actions are
- look       who waits for one of these GPUs, and has them
- take       leaves a ticket with this "number"
- renew      and how it stands; with "lease_s" for so long
- leave      takes the ticket back
- cancel     marks it, so that the controller that renews it hears of it

The answer is {"tickets", "ahead", "held", "cancelled"}: who waits for these GPUs, who of them goes before this job, and
which jobs have them now; {"lost": true} where there is no ticket to renew.
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
from .turns import Ticket, ahead


def main(request: dict[str, Any]) -> None:
    reply(request, act)


def act(request: dict[str, Any]) -> dict[str, Any]:
    action, job, said = request["action"], request.get("job", ""), dict[str, Any]()
    if action == "take":
        take(request)
    elif action != "look":
        word = {"do": action, "owner": request["owner"], "lease_s": request.get("lease_s", tickets.LEASE_S)}
        heard = tickets.tell(job, request["node"], word)
        if heard is None:
            return {"lost": True}
        said = {"cancelled": heard["cancelled"]}
    if action in ("leave", "cancel"):
        return said
    gpus = request["gpus"]
    there = [ticket for ticket in tickets.there() if not set(gpus).isdisjoint(ticket.gpus)]
    rows = {"tickets": there, "ahead": ahead(job, gpus, there)}
    return {
        **said,
        **{name: [ticket._asdict() for ticket in found] for name, found in rows.items()},
        "held": held(WorkFolder(request["workdir"]), job, gpus),
    }


def take(request: dict[str, Any]) -> None:
    """Once, also where the first answer was lost on its way and this is asked again."""
    job, node, owner, number = (request[key] for key in ("job", "node", "owner", "number"))
    there = tickets.tell(job, node, {"do": "renew", "owner": owner})
    if there is None or there["number"] != number:
        tickets.take(Ticket(job, number, request["gpus"]), node, owner)


def held(work: WorkFolder, job: str, gpus: list[str]) -> list[dict[str, Any]]:
    """Which other jobs have these GPUs: whoever's on this machine, and those of this work folder."""
    found = []
    for gpu in gpus:
        holder = holder_of(gpu) or _of_this_folder(work, gpu)
        if holder and holder.job != job:
            since_s = None
            with contextlib.suppress(ProcessLookupError):  # it has ended this very moment
                since_s = age_s(identify(holder.pid)) if holder.pid else None
            found.append({"job": holder.job, "user": holder.user, "since_s": since_s})
    return found


def _of_this_folder(work: WorkFolder, gpu: str) -> Holder | None:
    """The job that holds the GPU's lock, if one does. The lock is not touched: a start may want it now."""
    try:
        job = work.job((work.locks / f"gpu-{gpu}.lock").read_text(errors="replace")[:200].strip() or "none")
    except (OSError, ValueError):
        return None
    agent = job.read_agent()
    return Holder(user_name(os.getuid()), job.id, int(agent["pid"])) if lives(agent) else None
