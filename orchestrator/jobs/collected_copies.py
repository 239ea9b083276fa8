"""What is here of a job whose hosts may no longer hold anything of it: the run folders that it was collected into.

copy = newest_copy(jobs, plan.job)          the newest run folder with its logs, wherever it lies
raise nothing_left(jobs, plan)              an error that says what removed the files, and where the copy is
for lines in copied_lines(plan, copy): ...
"""

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
from orchestrator.jobs.job_store import RememberedJobs
from orchestrator.jobs.launch import ASK_S, on_all
from orchestrator.jobs.lines import LogLine, Splitter
from orchestrator.paths import RunFolder
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.transport import ask
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import errors, values

PIECE_BYTES = 1 << 18


def newest_copy(jobs: RememberedJobs, job: str) -> RunFolder | None:
    """None where the job was collected nowhere, as far as this $ORCH_HOME knows."""
    copies = [RunFolder(folder) for folder in jobs.run_folders(job)]
    return next((copy for copy in copies if copy.summary.is_file()), None)


def is_removed(jobs: RememberedJobs, plan: LaunchPlan) -> bool:
    """Whether `orch down` has removed the job's files from all of its hosts."""
    removal = jobs.removal(plan.job)
    return removal is not None and {node.name for node in plan.nodes} <= {*removal.nodes}


def nothing_left(jobs: RememberedJobs, plan: LaunchPlan) -> OrchError:
    """What to tell a person who asks the hosts for this job's files."""
    removal, copy = jobs.removal(plan.job), newest_copy(jobs, plan.job)
    what = f"its files were removed by `orch down` on {_date(removal.at)}" if removal else "no host holds its files"
    what += "" if copy else "; as far as is known here it was collected nowhere"
    if copy:
        written = copy.job if copy.job.is_file() else copy.summary  # which a report writes anew
        when = datetime.fromtimestamp(written.stat().st_mtime).astimezone().isoformat(timespec="seconds")
        remedy = f"what was collected on {_date(when)} is in {copy.root}; `orch report --job {plan.job}` shows it"
    else:
        remedy = "`orch report --out DIR` looks for it in another folder of runs"
    return OrchError(f"{plan.job}: {what}", remedy)


def _date(iso: str) -> str:
    """`2026-11-22 06:40`, in this machine's time."""
    return datetime.fromisoformat(iso).astimezone().strftime("%Y-%m-%d %H:%M")


def copied_lines(plan: LaunchPlan, run: RunFolder) -> Iterator[tuple[LogLine, ...]]:
    """Every line of every rank that was collected, log after log."""
    splitter = Splitter()
    ranks = [(node.name, rank) for node in plan.nodes for rank in node.rank_numbers]
    for (node, rank), log in itertools.product(ranks, LOGS):
        for piece in _pieces(run.rank(node, rank) / log, f"rank-{rank}/{log}", rank):
            if lines := tuple(splitter.split(node, piece)):
                yield lines
    if lines := tuple(splitter.rest()):
        yield lines


def last_of(events: Iterable[Event], lines: int) -> Iterator[Event]:
    """The last of each log in the order in which they were printed, where that is known, else log after log. What is no
    line comes before them.
    """
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


# The last lines of a job's logs: where they begin on each host, which a watch then takes for what is here already.
#
# offsets = tails(plan, hosts, wanted, follow=False)      wanted: lines by rank; of all others nothing comes
# for name, item in watch(plan, hosts, offsets=offsets, follow=False): ...

FILES_ASKED = 100
"""At once: each answers with up to 6 KB."""


def tails(
    plan: LaunchPlan,
    hosts: Mapping[str, ConnectedHost],
    wanted: Mapping[int, int | None],
    *,
    follow: bool,
    since_wall: float | None = None,
) -> dict[str, dict[str, Held]]:
    """By node and file. wanted: how many lines of each log of a rank, None for all. follow: what tells of the job's
    progress comes whole. since_wall: of these lines those that were printed then or later, by this machine's clock.
    Raises HostsError.
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
        since_s = None if since_wall is None else max(0.0, time.time() - since_wall)  # the host has a clock of its own
        request = {"workdir": node.workdir, "job": plan.job, "lines": lines, "since_s": since_s}
        answer = ask.ask(host, "tails", request, timeout_s=ASK_S)
        held |= ask.understood(host.node, partial(_held, answer, lines))
    return held


def _parts(names: Mapping[str, int | None]) -> Iterator[dict[str, int | None]]:
    rest = iter(names.items())
    while part := dict(islice(rest, FILES_ASKED)):
        yield part


def _held(answer: Mapping[str, Any], asked: Mapping[str, int | None]) -> dict[str, Held]:
    """Raises ValueError, KeyError, TypeError, AttributeError for what a host would not say."""
    held = {}
    for name, (offset, inode, text) in answer["files"].items():
        head = base64.b64decode(text, validate=True)
        if name not in asked or type(offset) is not int or type(inode) is not int:
            raise ValueError(f"where {name!r} begins")
        if offset < 0 or len(head) != min(offset, HEAD_BYTES):
            raise ValueError(f"how {name!r} begins")
        held[name] = Held(offset, inode, head)
    return held
