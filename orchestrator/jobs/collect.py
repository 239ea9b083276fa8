"""Pulls a job's files into its run folder: only what is new, in place, checked by hash.

    with claimed(run):
        collected = collect(plan, hosts, run)

A file here only ever grows: at any moment, also when a link broke or this program was killed, it is a beginning of
the host's file, and the next collect goes on from its end. At the end of each pull the host's SHA-256 over all that
it ever handed out has to agree; a file that does not is set aside (`stdout.log.damaged-1`) and pulled again. A
file that was cut, replaced or rotated on its host begins again here too, and what there was before stays beside it:
`stdout.log.1` is the oldest generation, `stdout.log.2` the one after it. File names are ours; the host only fills them.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from orchestrator.errors import HostError, OrchError, ProbeError
from orchestrator.files import Digest, digest_of, flock, resolved, sync, write_json
from orchestrator.jobs.frames import HEAD_BYTES, Agent, End, FilePiece, Held, names_of
from orchestrator.jobs.watch import watch
from orchestrator.paths import RunFolder
from orchestrator.planning.launch_plan import LaunchPlan, NodePlan
from orchestrator.text import one_line
from orchestrator.transport.ask import ConnectedHost
from orchestrator.units import format_bytes

ORPHAN_S = 0.5
"""A collect that is killed just as it starts a program leaves its lock with a child that has not yet become another
program (fork(2) shares it, execve(2) drops it): so long may that take."""
MAX_LOG_BYTES = 1 << 30
SPARE_BYTES, LOOK_BYTES = 16 << 20, 4 << 20
"""So much is left free on the disk here; it is looked at after so many new bytes, and again."""
MAX_GENERATIONS = 1000
"""The most generations of one file, whatever its host says."""


class HeldError(OrchError):
    """Another program pulls into this run folder at this moment."""


@dataclass
class Collected:
    """What one collection brought, by node."""

    new_bytes: int = 0
    """What was pulled this time."""
    agents: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Every host's record."""
    errors: dict[str, HostError] = field(default_factory=dict)
    """Hosts whose part is missing or incomplete."""
    notices: list[str] = field(default_factory=list)
    """What a person should know about files that began again or were damaged."""


@contextlib.contextmanager
def claimed(run: RunFolder) -> Iterator[None]:
    """Keeps every other collect out of this folder, and removes what a killed one left half written.

    Raises HeldError, which says who is there; the lock goes with its holder, however that ends.
    """
    with alone(run.lock, f"is collecting into {run.root}", "try again when it is done"):
        for leftover in [*run.root.glob(".*.????????"), *run.nodes.glob("*/.*.????????")]:
            leftover.unlink(missing_ok=True)  # temporary files of `files.write_atomic`
        yield


@contextlib.contextmanager
def alone(lock: Path, doing: str, remedy: str) -> Iterator[None]:
    """Holds this lock file. Raises HeldError: who holds it, and what that one is doing."""
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
    """Whether the lock could be had."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)  # flock(2) knows no time limit


def collect(
    plan: LaunchPlan,
    hosts: Mapping[str, ConnectedHost],
    run: RunFolder,
    progress: Callable[[str, int], None] = lambda node, size: None,
    *,
    limit_bytes: int = MAX_LOG_BYTES,
) -> Collected:
    """progress(node, bytes) is called for every piece that comes. limit_bytes: of a file no more than its first so
    many. The folder should be `claimed`. Raises OSError where the disk here is all but full.

    A host that fails, or no longer has anything of the job, leaves what was there before.
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
    """All hosts' files of one job, on their way into its run folder."""

    def __init__(
        self, plan: LaunchPlan, run: RunFolder, progress: Callable[[str, int], None], limit_bytes: int
    ) -> None:
        self.collected = Collected()
        self._plan, self._run, self._progress, self._limit_bytes = plan, run, progress, limit_bytes
        self._pulls = {node.name: _Pull(node, run.node(node.name)) for node in plan.nodes}
        self._look_at = LOOK_BYTES

    def stream(self, hosts: Mapping[str, ConnectedHost]) -> dict[str, list[str]]:
        """One stream of every host to its end. Returns, by node, the files that were set aside as damaged."""
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
        if record.get("gone") is True:  # what is known of this host's part is as good as it gets
            return
        if record.get("state") != "lost" or not self._run.agent(name).exists():
            write_json(self._run.agent(name), record)

    def _end(self, name: str, end: End) -> list[str]:
        """Its files that are damaged, set aside."""
        self.collected.notices += self._pulls[name].note_left(self._run.left(name), end.left)
        damaged = self._pulls[name].check(end.files)
        words = "no longer matched the file on its host; set aside as damaged and pulled again"
        self.collected.notices += [f"{name}: {file} {words}" for file in damaged]
        return damaged


def refuse_if_full(folder: Path) -> None:
    """Raises OSError before the disk of this folder is full to the last byte: others need it, too."""
    if shutil.disk_usage(folder).free < SPARE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


class _Pull:
    """The files of one node in its folder. `.pulled.json` there says which file on the host each of them came from."""

    def __init__(self, node: NodePlan, folder: Path) -> None:
        self._node, self._folder = node, folder
        self._note = folder / ".pulled.json"
        self._inodes = _read_inodes(self._note)
        self._grown: set[Path] = set()

    def held(self) -> dict[str, Held]:
        """What is here already, by the host's name for the file."""
        found = {}
        for name in names_of(self._node.rank_numbers):
            with contextlib.suppress(FileNotFoundError), open(self._folder / name, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                found[name] = Held(size, self._inodes.get(name), file.read(HEAD_BYTES))
        return found

    def add(self, piece: FilePiece) -> list[str]:
        """Appends it; a new generation of its file sets the older one aside. Returns notices."""
        path, notices = self._folder / piece.file, []
        path.parent.mkdir(parents=True, exist_ok=True)
        if piece.restarted and path.exists():
            aside = self._set_aside(path, "")
            words = f"was cut, replaced or rotated on its host; what it held before is here as {aside.name}"
            notices.append(f"{self._node.name}: {piece.file} {words}")
        if piece.offset == 0 and self._inodes.get(piece.file) != piece.inode:
            # Noted while there is no byte of it: whenever this program is killed, the note speaks of what is here.
            self._inodes[piece.file] = piece.inode
            write_json(self._note, self._inodes)
        with open(path, "ab") as file:
            file.write(piece.data)
            if piece.hole:
                file.truncate(piece.end)
        self._grown.add(path)
        return notices

    def check(self, files: Mapping[str, tuple[int, str]]) -> list[str]:
        """Sets aside every file that does not agree with the host's (size, digest). Returns their names."""
        damaged = [name for name, expected in files.items() if _fingerprint(self._folder / name) != expected]
        for path in [self._folder / name for name in damaged]:
            if path.exists():
                self._set_aside(path, "damaged-")
        return damaged

    def note_left(self, note: Path, left: Mapping[str, int]) -> list[str]:
        """Notes and reports the files of which more lies on the host than was asked for."""
        if left or note.exists():
            write_json(note, left)
        return [
            f"{self._node.name}: the last {format_bytes(size)} of {file} stayed on the host: --max-log brings more"
            for file, size in left.items()
        ]

    def sync(self) -> None:
        """Makes what has come outlast a power cut."""
        grown = [path for path in self._grown if path.exists()]
        for path in [*grown, *{path.parent for path in grown}]:
            sync(path)
        self._grown.clear()

    def _set_aside(self, path: Path, kind: str) -> Path:
        """Under the first free name: nothing that already lies there is ever replaced."""
        for number in range(1, MAX_GENERATIONS + 1):
            aside = path.with_name(f"{path.name}.{kind}{number}")
            if not aside.exists():
                sync(path)
                path.rename(aside)
                sync(path.parent)
                return aside
        raise ProbeError(self._node.name, f"restarted {path.name} more than {MAX_GENERATIONS} times")


def _read_inodes(note: Path) -> dict[str, int | None]:
    """By the host's name for the file. Without the note (or with a damaged one) a file is known by its beginning."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RecursionError):
        inodes = json.loads(note.read_text())
        return {str(name): inode for name, inode in inodes.items() if isinstance(inode, int)}
    return {}


def _fingerprint(path: Path) -> tuple[int, str]:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        digest, size = digest_of(file)
        return size, digest.hexdigest()
    return 0, Digest().hexdigest()
