"""What in a work folder belongs to whom: whose a job is, and which names there orch made at all.

Ours is a job whose node.json (agent.json, where no job came of it) names this owner and this cluster. What is orch's is
known by its mark and never by a name alone, for a person may have chosen the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .agent import lives
from .layout import GONE, JOB_ID, VENV_MARKER, JobFolder, WorkFolder
from .workfolder import MARK, names

SHOWN = 50
"""So many entries of a list are answered."""
CODE = re.compile(r"[0-9a-f]{64}|\.[0-9a-f]{64}\.\d+")
"""Whole, or half unpacked when its `prepare` was killed."""
_LOCK = re.compile(r"gpu-.+\.lock|venv\.lock")
LOCK_BYTES = 200
"""More than any job's id has."""


def whose(job: JobFolder) -> tuple[str, str] | None:
    """Owner id ("" for an older orch's, which wrote none) and cluster; None where no job of orch lies there."""
    for record in (job.read_node(), job.read_agent()):
        if record.get("job") == job.id:
            owner = record.get("owner") or {}
            return str(owner.get("id", "")), str(record.get("cluster", ""))
    return None


def is_mine(job: JobFolder, request: dict[str, Any]) -> bool:
    return whose(job) == (request["owner"]["id"], request["cluster"])


def forget_old_secrets(jobs: Iterable[JobFolder], request: dict[str, Any]) -> None:
    """Removes the secrets of ended jobs of this cluster: an older orch left them in place. It named no owner either."""
    ours = [(owner, request["cluster"]) for owner in (request["owner"]["id"], "")]
    for job in (job for job in jobs if whose(job) in ours):
        agent = job.read_agent()
        if (job.is_final() or "pid" in agent) and not lives(agent):
            job.forget_secrets()


def entry(job: JobFolder) -> dict[str, Any]:
    node, agent = job.read_node(), job.read_agent()
    record = node or agent
    owner = record.get("owner") or {}
    return {
        "job": job.id,
        "cluster": record.get("cluster"),
        "owner": owner.get("name"),
        "state": agent.get("state"),
        "alive": lives(agent),
    }


def jobs_of_orch(work: WorkFolder) -> list[JobFolder]:
    return [job for job in work.all_jobs() if not job.root.is_symlink() and whose(job)]


def strange(work: WorkFolder) -> Iterator[str]:
    """What lies there and is not of orch, relative to the work folder."""
    folders = (work.jobs, work.codes, work.venvs, work.locks, work.handovers)
    for name in names(work.root):
        folder = work.root / name
        if folder in folders and folder.is_dir():
            yield from (f"{name}/{path.name}" for path in sorted(folder.iterdir()) if not _is_ours(work, path))
        elif name != MARK:
            yield name


def _is_ours(work: WorkFolder, path: Path) -> bool:
    """Whether orch made this entry of one of its folders, for whomever."""
    if path.name.startswith(GONE):
        return True
    if path.parent in (work.jobs, work.handovers):
        return path.is_dir() and whose(JobFolder(path)) is not None
    if path.parent == work.venvs:
        return (path / VENV_MARKER).is_file()
    return is_lock(path) if path.parent == work.locks else bool(CODE.fullmatch(path.name))


def is_lock(path: Path) -> bool:
    """Whether it says what `keeper` and `environment` write there: nothing, or a job's id."""
    if not _LOCK.fullmatch(path.name) or path.is_symlink() or not path.is_file():
        return False
    with open(path, "rb") as file:
        said = file.read(LOCK_BYTES)
    return not said or bool(JOB_ID.fullmatch(said.decode(errors="replace")))
