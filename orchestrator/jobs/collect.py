"""Copies a job's logs from its hosts into its run folder: only new bytes, checked by SHA-256.

    with claimed(run):
        collected = collect(plan, hosts, run)

A local file only grows: after a broken connection or a kill it is a prefix of the host's file, and the next collect
continues there. A file that differs, or was cut, replaced or rotated on its host, is copied again; its old content is
appended to `stdout.log.previous`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from orchestrator.errors import HostError, OrchError, ProbeError
from orchestrator.files import flock, hash_file, resolved, sync, write_json
from orchestrator.jobs.frames import HEAD_BYTES, Agent, End, FilePiece, Held, names_of
from orchestrator.jobs.watch import watch
from orchestrator.paths import RunFolder
from orchestrator.planning.launch_plan import LaunchPlan, NodePlan
from orchestrator.text import one_line
from orchestrator.transport.ask import ConnectedHost
from orchestrator.units import format_bytes

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
        if previous.exists():
            refuse_if_full(path.parent, path.stat().st_size)
            with open(path, "rb") as old, open(previous, "ab") as kept:
                shutil.copyfileobj(old, kept)
            sync(previous)
            path.unlink()
        else:
            sync(path)
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
