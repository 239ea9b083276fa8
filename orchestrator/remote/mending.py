"""What starts and ends that were cut short left of ours on a host: listed, and with `end` put in order.

That is what `reaping` finds, and folders in which nobody will ever run anything: halves of a removal or of an upload,
and jobs of ours that were prepared and never began. What a job wrote stays, whatever became of it, and so does all
that belongs to others. Claims on GPUs and places in a queue end with who holds them, and leave nothing to mend.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .agent import lives
from .claim import alone_in
from .layout import JobFolder, WorkFolder
from .leftovers import OLD_S
from .ownership import CODE, is_mine, jobs_of_orch
from .processes import marked
from .reaping import reap
from .removal import ALONE_S, clear, entries, halves
from .workfolder import content


def mend(request: dict[str, Any]) -> dict[str, Any]:
    """What `reap` answers, and {"folders": [names within the work folder], "why": what stays, and why}."""
    work, why, left = WorkFolder(request["workdir"]), list[str](), list[Path]()
    answer = reap(request)
    with alone_in(work, ALONE_S) as alone:
        if alone:
            left = [folder for folder in _left(work, request) if not request["end"] or clear(folder, why)]
        elif content(work.root) == "ours":
            why.append("folders were not looked at: `orch run` or `orch setup` is at work there")
    return {**answer, "folders": [str(path.relative_to(work.root)) for path in left], "why": why}


def _left(work: WorkFolder, request: dict[str, Any]) -> Iterator[Path]:
    """Old ones alone: somebody may be removing them, and the folder of a start that was undone keeps what of that is
    still on its way from beginning after all.
    """
    found = halves(work)
    found += [path for path in entries(work.codes) if path.name.startswith(".") and CODE.fullmatch(path.name)]
    found += [job.root for job in jobs_of_orch(work) if is_mine(job, request) and _never_began(job)]
    yield from (path for path in found if time.time() - path.stat().st_ctime > OLD_S)


def _never_began(job: JobFolder) -> bool:
    agent = job.read_agent()
    is_over = agent.get("state", "undone") == "undone" and not lives(agent) and not marked(job.root)
    return is_over and not any(job.root.glob("rank-*"))
