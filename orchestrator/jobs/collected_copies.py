"""Reads logs from local copies if hosts no longer have them; finds where the last N lines begin on the hosts."""

from __future__ import annotations

import base64
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from orchestrator.errors import HostsError, OrchError
from orchestrator.jobs.follow import Event
from orchestrator.jobs.frames import HEAD_BYTES, LOGS, NODE_FILES, FilePiece, Held
from orchestrator.jobs.job_store import JobStore
from orchestrator.jobs.launch import ASK_S, on_all
from orchestrator.jobs.lines import LogLine, Splitter
from orchestrator.paths import RunFolder
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.transport import ask
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import errors, values

PIECE_BYTES = 1 << 18


def newest_copy(jobs: JobStore, job: str) -> RunFolder | None:
    """None without a known copy."""
    copies = [RunFolder(folder) for folder in jobs.run_folders(job)]
    return next((copy for copy in copies if copy.summary.is_file()), None)


def is_removed(jobs: JobStore, plan: LaunchPlan) -> bool:
    removal = jobs.removal(plan.job)
    return removal is not None and {node.name for node in plan.nodes} <= {*removal.nodes}


def nothing_left(jobs: JobStore, plan: LaunchPlan) -> OrchError:
    removal, copy = jobs.removal(plan.job), newest_copy(jobs, plan.job)
    what = f"its files were removed by `orch down` on {_date(removal.at)}" if removal else "no host holds its files"
    what += "" if copy else "; no collected copy is known here"
    if copy:
        written = copy.job if copy.job.is_file() else copy.summary  # a report writes the summary again
        when = datetime.fromtimestamp(written.stat().st_mtime).astimezone().isoformat(timespec="seconds")
        remedy = f"the copy collected on {_date(when)} is in {copy.root}; `orch report --job {plan.job}` shows it"
    else:
        remedy = "`orch report --out DIR` looks for it in another folder of runs"
    return OrchError(f"{plan.job}: {what}", remedy)


def _date(iso: str) -> str:
    """`2026-11-22 06:40`, in local time."""
    return datetime.fromisoformat(iso).astimezone().strftime("%Y-%m-%d %H:%M")


def copied_lines(plan: LaunchPlan, run: RunFolder) -> Iterator[tuple[LogLine, ...]]:
    splitter = Splitter()
    ranks = [(node.name, rank) for node in plan.nodes for rank in node.rank_numbers]
    for (node, rank), log in itertools.product(ranks, LOGS):
        for piece in _pieces(run.rank(node, rank) / log, f"rank-{rank}/{log}", rank):
            if lines := tuple(splitter.split(node, piece)):
                yield lines
    if lines := tuple(splitter.rest()):
        yield lines


def last_of(events: Iterable[Event], lines: int) -> Iterator[Event]:
    """In the order of printing if known, else log after log. Other events pass through first."""
    kept: dict[tuple[str, int, str], deque[LogLine]] = {}
    for event in events:
        if isinstance(event, tuple):
            for line in event:
                kept.setdefault(line[:3], deque(maxlen=lines)).append(line)
        else:
            yield event
    if last := sorted(itertools.chain.from_iterable(kept.values()), key=lambda line: line.wall or 0.0):
        yield tuple(last)


def _pieces(path: Path, name: str, rank: int) -> Iterator[FilePiece]:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        while data := file.read(PIECE_BYTES):
            yield FilePiece(name, rank, file.tell() - len(data), data)


# The last lines of a job's logs: the offset on each host at which they begin. `watch` then skips everything before.
#
#     offsets = tails(plan, hosts, wanted, follow=False)      wanted: lines by rank; none of other ranks
#     for name, item in watch(plan, hosts, offsets=offsets, follow=False): ...

FILES_ASKED = 100
"""Each takes up to 6 KB of an answer."""


def tails(
    plan: LaunchPlan,
    hosts: Mapping[str, ConnectedHost],
    wanted: Mapping[int, int | None],
    *,
    follow: bool,
    since_wall: float | None = None,
) -> dict[str, dict[str, Held]]:
    """By node and file. wanted: lines per log of each rank, None for all. follow: with the files that show progress.
    since_wall: by the local clock. Raises HostsError.
    """
    found = on_all(plan, lambda name: _of_host(plan, hosts[name], wanted, follow, since_wall), ASK_S, only=hosts)
    if errors(found):
        raise HostsError(errors(found))
    return values(found)


def _of_host(
    plan: LaunchPlan, host: ConnectedHost, wanted: Mapping[int, int | None], follow: bool, since_wall: float | None
) -> dict[str, Held]:
    node, held = plan.node(host.node), dict[str, Held]()
    names: dict[str, int | None] = {
        f"rank-{rank}/{log}": wanted.get(rank, 0) for rank in node.rank_numbers for log in LOGS
    }
    if not follow:
        names |= {f"rank-{rank}/metrics.jsonl": 0 for rank in node.rank_numbers} | dict.fromkeys(NODE_FILES, 0)
    for lines in _parts(names):
        since_s = None if since_wall is None else max(0.0, time.time() - since_wall)  # the host has its own clock
        request = {"workdir": node.workdir, "job": plan.job, "lines": lines, "since_s": since_s}
        answer = ask.ask(host, "tails", request, timeout_s=ASK_S)
        held |= ask.understood(host.node, partial(_held, answer, lines))
    return held


def _parts(names: Mapping[str, int | None]) -> Iterator[dict[str, int | None]]:
    rest = iter(names.items())
    while part := dict(islice(rest, FILES_ASKED)):
        yield part


def _held(answer: Mapping[str, Any], asked: Mapping[str, int | None]) -> dict[str, Held]:
    held = {}
    for name, (offset, inode, text) in answer["files"].items():
        head = base64.b64decode(text, validate=True)
        if name not in asked or type(offset) is not int or type(inode) is not int:
            raise ValueError(f"where {name!r} begins")
        if offset < 0 or len(head) != min(offset, HEAD_BYTES):
            raise ValueError(f"how {name!r} begins")
        held[name] = Held(offset, inode, head)
    return held
