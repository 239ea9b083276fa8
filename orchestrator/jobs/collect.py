"""Copies a job's logs from its hosts into its run folder (only new bytes, checked by SHA-256), and reads the copies.

    with claimed(run):
        collected = collect(plan, hosts, run)

A local file only grows: after a broken connection or a kill it is a prefix of the host's file, and the next collect
continues there. A file that differs, or was cut, replaced or rotated on its host, is copied again; its old content is
appended to `stdout.log.previous`.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import fcntl
import itertools
import json
import os
import shutil
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any

from orchestrator.errors import HostError, HostsError, OrchError, ProbeError
from orchestrator.files import flock, hash_file, resolved, sync, write_json
from orchestrator.jobs.follow import Event, watch
from orchestrator.jobs.frames import HEAD_BYTES, LOGS, NODE_FILES, Agent, End, FilePiece, Held, names_of
from orchestrator.jobs.job_store import JobStore
from orchestrator.jobs.launch import ASK_S, on_all
from orchestrator.jobs.lines import LogLine, Splitter
from orchestrator.paths import RunFolder
from orchestrator.planning.launch_plan import LaunchPlan, NodePlan
from orchestrator.transport import ask
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import errors, values
from orchestrator.units import format_bytes, one_line

ORPHAN_S = 0.5
"""A killed collect's lock lives in a child that it just started until that runs its program: fork(2) shares the lock,
execve(2) drops it.
"""
MAX_LOG_BYTES = 1 << 30
SPARE_BYTES, LOOK_BYTES = 16 << 20, 4 << 20
"""Free space to keep on the local disk, checked after each LOOK_BYTES."""
MOST_RESTARTS = 10


class HeldError(OrchError):
    pass


@dataclass
class Collected:
    """By node."""

    new_bytes: int = 0
    agents: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, HostError] = field(default_factory=dict)
    """Hosts whose part is missing or incomplete."""
    notices: list[str] = field(default_factory=list)
    """For the user."""


@contextlib.contextmanager
def claimed(run: RunFolder) -> Iterator[None]:
    """Removes half-written files. Raises HeldError, which names the holder; the lock ends with its process."""
    with alone(run.lock, f"is collecting into {run.root}", "try again when it is done"):
        for leftover in [*run.root.glob(".*.????????"), *run.nodes.glob("*/.*.????????")]:
            leftover.unlink(missing_ok=True)  # temporary files of `files.write_atomic`
        yield


@contextlib.contextmanager
def alone(lock: Path, doing: str, remedy: str) -> Iterator[None]:
    """doing: the holder's work, for the HeldError of others."""
    resolved(lock).parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "a+", errors="replace") as file:
        if not _locked_within(file, ORPHAN_S):
            file.seek(0)
            holder = one_line(file.read(300)) or "another program"
            raise HeldError(f"{holder} {doing}", remedy)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')},")
        file.flush()
        yield


def _locked_within(file: IO[str], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)  # flock(2) has no time limit


def collect(
    plan: LaunchPlan,
    hosts: Mapping[str, ConnectedHost],
    run: RunFolder,
    progress: Callable[[str, int], None] = lambda node, size: None,
    *,
    limit_bytes: int = MAX_LOG_BYTES,
) -> Collected:
    """Needs `claimed`. progress(node, bytes): called for every piece. limit_bytes: per file. A host that fails or no
    longer has the job changes nothing here. Raises OSError if the local disk is nearly full.
    """
    fetch = _Fetch(plan, run, progress, limit_bytes)
    damaged = fetch.stream({node.name: hosts[node.name] for node in plan.nodes if node.name in hosts})
    if damaged:
        damaged = fetch.stream({name: hosts[name] for name in damaged})
    for name, files in damaged.items():
        words = f"arrived damaged twice: {', '.join(files)}"
        fetch.collected.errors[name] = ProbeError(name, words, "look at this host's disk, then collect again")
    return fetch.collected


class _Fetch:
    def __init__(
        self, plan: LaunchPlan, run: RunFolder, progress: Callable[[str, int], None], limit_bytes: int
    ) -> None:
        self.collected = Collected()
        self._plan, self._run, self._progress, self._limit_bytes = plan, run, progress, limit_bytes
        self._pulls = {node.name: _Pull(node, run.node(node.name)) for node in plan.nodes}
        self._look_at = LOOK_BYTES

    def stream(self, hosts: Mapping[str, ConnectedHost]) -> dict[str, list[str]]:
        """Returns, by node, damaged files to copy again."""
        damaged: dict[str, list[str]] = {}
        offsets = {name: self._pulls[name].held() for name in hosts}
        try:
            for name, item in watch(self._plan, hosts, offsets=offsets, follow=False, limit_bytes=self._limit_bytes):
                if isinstance(item, HostError):
                    self.collected.errors[name] = item
                elif isinstance(item, FilePiece):
                    self._add(name, item)
                elif isinstance(item, Agent):
                    self._keep_record(name, item.record)
                elif isinstance(item, End) and (found := self._end(name, item)):
                    damaged[name] = found
        finally:
            for name in hosts:
                self._pulls[name].sync()
        return damaged

    def _add(self, name: str, piece: FilePiece) -> None:
        self.collected.notices += self._pulls[name].add(piece)
        self.collected.new_bytes += piece.end - piece.offset
        self._progress(name, piece.end - piece.offset)
        if self.collected.new_bytes > self._look_at:
            self._look_at = self.collected.new_bytes + LOOK_BYTES
            refuse_if_full(self._run.root)

    def _keep_record(self, name: str, record: dict[str, Any]) -> None:
        self.collected.agents[name] = record
        if record.get("gone") is True:  # the local record is the best left
            return
        if record.get("state") != "lost" or not self._run.agent(name).exists():
            write_json(self._run.agent(name), record)

    def _end(self, name: str, end: End) -> list[str]:
        pull = self._pulls[name]
        damaged = pull.damaged(end.files)
        self.collected.notices += pull.note_left(self._run.left(name), end.left)
        self.collected.notices += [pull.set_aside(file, "does not match the file on its host") for file in damaged]
        return damaged


def refuse_if_full(folder: Path, needed_bytes: int = 0) -> None:
    """Raises OSError before the disk is completely full: other programs need some space."""
    if shutil.disk_usage(folder).free < needed_bytes + SPARE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


class _Pull:
    """`.pulled.json` holds each file's inode on its host."""

    def __init__(self, node: NodePlan, folder: Path) -> None:
        self._node, self._folder = node, folder
        self._note = folder / ".pulled.json"
        self._inodes = _read_inodes(self._note)
        self._restarts = Counter[str]()
        self._grown: set[Path] = set()

    def held(self) -> dict[str, Held]:
        found = {}
        for name in names_of(self._node.rank_numbers):
            for aside in self._folder.glob(f"{name}.aside-*"):
                _append(aside, self._folder / f"{name}.previous")
            with contextlib.suppress(FileNotFoundError), open(self._folder / name, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                found[name] = Held(size, self._inodes.get(name), file.read(HEAD_BYTES))
        return found

    def add(self, piece: FilePiece) -> list[str]:
        path, notices = self._folder / piece.file, []
        path.parent.mkdir(parents=True, exist_ok=True)
        if piece.restarted:
            self._restarts[piece.file] += 1
            if self._restarts[piece.file] > MOST_RESTARTS:
                raise ProbeError(self._node.name, f"restarted {piece.file} more than {MOST_RESTARTS} times")
            notices.append(self.set_aside(piece.file, "was cut, replaced or rotated on its host"))
        if piece.offset == 0 and self._inodes.get(piece.file) != piece.inode:
            # Before the first byte, so that after a kill the note describes the file that is here.
            self._inodes[piece.file] = piece.inode
            write_json(self._note, self._inodes)
        with open(path, "ab") as file:
            file.write(piece.data)
        self._grown.add(path)
        return notices

    def damaged(self, files: Mapping[str, tuple[int, str]]) -> list[str]:
        """files: the host's (size, SHA-256)."""
        return [name for name, expected in files.items() if _fingerprint(self._folder / name) != expected]

    def set_aside(self, name: str, why: str) -> str:
        """Appends the content to NAME.previous. Returns a notice."""
        path = self._folder / name
        previous = path.with_name(f"{path.name}.previous")
        if not path.exists():
            return f"{self._node.name}: {name} {why}; it is pulled anew"
        sync(path)
        if previous.exists():
            refuse_if_full(path.parent, path.stat().st_size)
            aside = path.with_name(f"{path.name}.aside-{previous.stat().st_size}")
            path.rename(aside)
            sync(path.parent)
            _append(aside, previous)
        else:
            path.rename(previous)
            sync(path.parent)
        return f"{self._node.name}: {name} {why}; it is pulled anew, and its earlier content is in {previous.name}"

    def note_left(self, note: Path, left: Mapping[str, int]) -> list[str]:
        """left: bytes beyond the limit. Returns notices."""
        if left or note.exists():
            write_json(note, left)
        return [
            f"{self._node.name}: the last {format_bytes(size)} of {file} stayed on the host: --max-log brings more"
            for file, size in left.items()
        ]

    def sync(self) -> None:
        grown = [path for path in self._grown if path.exists()]
        for path in [*grown, *{path.parent for path in grown}]:
            sync(path)
        self._grown.clear()


def _append(aside: Path, previous: Path) -> None:
    """Removes `aside`. Its name has the earlier size of `previous`: after a kill it is appended there once more."""
    before_bytes = int(aside.name.rpartition("-")[2])
    with open(aside, "rb") as old, open(previous, "ab") as kept:
        kept.truncate(min(before_bytes, kept.tell()))
        shutil.copyfileobj(old, kept)
    sync(previous)
    aside.unlink()
    sync(previous.parent)


def _read_inodes(note: Path) -> dict[str, int | None]:
    """{} if the note is invalid; a file is then recognised by its beginning."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        inodes = json.loads(note.read_text())
        return {str(name): inode for name, inode in inodes.items() if isinstance(inode, int)}
    return {}


def _fingerprint(path: Path) -> tuple[int, str]:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        sha256, size = hash_file(file)
        return size, sha256.hexdigest()
    return 0, ""


# Reads logs from local copies if hosts no longer have them; finds where the last N lines begin on the hosts.

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


# The last lines of a job's logs: the offset on each host at which they begin. `follow` then skips everything before.
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
