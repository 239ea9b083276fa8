"""Brings home what a job wrote beside its logs: checkpoints, and every new or changed file of its working folder.

    with collect.alone(run.pull_lock, ...):
        pulled = pull(plan, hosts, run, wanted, show, connections.reopen)

A file lies in `nodes/<node>/files/` under the name that it has in the job's folder on its host, whole and as its host's
digest has it, or not at all; it keeps its host's time of change, which with its size shows whether it is here already.
Until it is whole it lies in `.incoming`, under a name that identifies the file and its state: whatever broke or
ended the pull, the next one goes on from there. A newer state of a file takes the older one's place.

Small files come first, a hole of a sparse file is neither sent nor hashed, and a file that does not come holds up no
other: it is left, with the reason.

A host is not trusted: `listing` checks names, counts and sizes; free space here is looked at before and all along,
nothing is written outside of the run folder, and what comes is bytes and never loaded.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from orchestrator.errors import ConnectError, HostError, OrchError, ProbeError
from orchestrator.files import Digest, digest_of, folder_beneath, make_folder, sync
from orchestrator.jobs.collect import SPARE_BYTES, refuse_if_full
from orchestrator.jobs.frame_stream import read_files
from orchestrator.jobs.frames import End, FilePiece, Held, Left, Whole
from orchestrator.jobs.listing import Output, is_here
from orchestrator.paths import RunFolder
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.text import one_line
from orchestrator.transport import ask
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.resumed import on_each_link
from orchestrator.units import format_bytes

LOOK_BYTES = 16 << 20
"""After so many bytes the free space is looked at again."""
SETTLE_FILES, SETTLE_BYTES = 64, 64 << 20
"""Files are brought to the disk in groups: one commit of the file system then serves many small ones."""

_OF_THIS_FILE = {errno.EFBIG, errno.ENAMETOOLONG, errno.EINVAL, errno.EOVERFLOW}
"""Errors by which a file system refuses one file, and may take the others."""

MOST_BREAKS = 4
"""So often the link may break at files that do not get on."""

Phase = Literal["connects", "looks", "pulls", "done"]


@dataclass(frozen=True)
class PullProgress:
    """How far the pull from one host is."""

    node: str
    phase: Phase
    here_bytes: int
    """What is here of all that was asked for."""
    total_bytes: int


@dataclass(frozen=True)
class Pulled:
    """What one pull brought from one host."""

    files: int
    """How many came now."""
    bytes: int
    """How many came now."""
    left: Mapping[str, str]
    """By name, why a file did not come."""


def pull(
    plan: LaunchPlan,
    hosts: Mapping[str, ConnectedHost],
    run: RunFolder,
    wanted: Mapping[str, Sequence[Output]],
    show: Callable[[PullProgress], None],
    reopen: Callable[[str], ConnectedHost],
) -> dict[str, Pulled | HostError]:
    """All hosts at once; what is here already does not come again. show: called from several threads. reopen: a new
    connection to a host whose link broke. The folder should be held (`collect.alone`).

    Raises OrchError where this disk has too little room.
    """
    _refuse_too_much(run, wanted)
    hosts = {name: hosts[name] for name in wanted if name in hosts}
    sessions = {name: _Session(host, plan.job, run, wanted[name], show) for name, host in hosts.items()}
    return on_each_link(sessions, reopen)


def _refuse_too_much(run: RunFolder, wanted: Mapping[str, Sequence[Output]]) -> None:
    lacking = [(node, output) for node, outputs in wanted.items() for output in outputs]
    needed = sum(
        max(0, min(output.size, output.disk_bytes) - _partial_size(_partial(run, node, output)))
        for node, output in lacking
        if not is_here(run, node, output)
    )
    free = shutil.disk_usage(run.root).free
    if needed and needed + SPARE_BYTES > free:
        raise OrchError(
            f"{run.root}: {format_bytes(needed)} are to come, and {format_bytes(free)} are free there",
            "choose files by a pattern, or another disk with --out",
        )


def _partial(run: RunFolder, node: str, output: Output) -> Path:
    """Its name identifies the file and the state of it that is to come."""
    state = f"{output.size}:{output.mtime_ns}:{output.inode}"
    return run.incoming(node) / f"{_short(output.name)}-{_short(state)}.part"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class _Session:
    """A pull from one host, over as many links as it takes."""

    def __init__(
        self,
        host: ConnectedHost,
        job: str,
        run: RunFolder,
        wanted: Sequence[Output],
        show: Callable[[PullProgress], None],
    ) -> None:
        self.host = host
        self.moved_bytes = 0
        """So much of what was asked for has been here at once: a host that sends the same again gets nowhere."""
        self._job, self._run, self._show = job, run, show
        self._asked = frozenset(_short(output.name) for output in wanted)
        self._total_bytes = sum(output.size for output in wanted)
        self._lacking = {output.name: output for output in wanted if not is_here(run, host.node, output)}
        self._here_bytes = self._total_bytes - sum(output.size for output in self._lacking.values())
        self._files, self._bytes, self._unlooked_bytes = 0, 0, 0
        self._left: dict[str, str] = {}
        self._stuck, self._breaks = set[str](), 0
        self._coming: _Incoming | None = None
        self._whole: list[tuple[_Incoming, Whole]] = []

    def run(self) -> Pulled:
        """Raises ConnectError where the link broke, ProbeError for a host that sends what nobody asked for."""
        moved_before = self.moved_bytes
        try:
            self._stream()
            if self._lacking:  # damaged on their way
                self._stream()
        except ConnectError as error:
            if self.moved_bytes == moved_before:
                self._put_off(error)
            raise
        finally:
            self._close()
            self._settle()
        if self._lacking:
            words = f"{one_line(min(self._lacking))} arrived damaged twice"
            raise ProbeError(self.host.node, words, "look at this host's disk, then pull again")
        self._remove_older()
        self._report("done")
        return Pulled(self._files, self._bytes, self._left)

    def _remove_older(self) -> None:
        """States of these files that are no longer asked for. What came in part of others is for their next pull."""
        incoming = self._run.incoming(self.host.node)
        with contextlib.suppress(OSError):
            for path in incoming.iterdir():
                if path.name.partition("-")[0] in self._asked:
                    path.unlink()
            incoming.rmdir()

    def _stream(self) -> None:
        """One stream to its end: then each file is here, is left, or still lacks because it came damaged."""
        if not self._lacking:
            return
        self._report("looks")
        held = {name: begun for name, output in self._lacking.items() if (begun := self._begun(output))}
        rows = [
            [o.name, o.size, o.mtime_ns, o.inode, held[o.name].offset if o.name in held else 0]
            for o in sorted(self._lacking.values(), key=self._turn)
        ]
        request = {"workdir": self.host.workdir, "job": self._job, "files": rows}
        node, asked = self.host.node, frozenset(self._lacking)
        marker = ask.new_marker()
        with ask.open_stream(self.host, "sender", request, marker) as chunks:
            for frame in read_files(node, chunks, asked, held, marker=marker.encode()):
                if isinstance(frame, End):
                    return
                if isinstance(frame, FilePiece):
                    self._add(frame)
                elif isinstance(frame, Whole):
                    if frame.file not in self._left:
                        self._finish(frame)
                    held.pop(frame.file, None)
                elif isinstance(frame, Left):
                    self._leave(frame.file, self._left.get(frame.file, frame.why))
        raise ConnectError(node, "its answer ended too early", "pull again: it resumes where this one stopped")

    def _put_off(self, error: ConnectError) -> None:
        """A file that did not get on comes last over the next link, and is left if that breaks at it, too."""
        self._breaks += 1
        if not self._lacking or self._breaks > MOST_BREAKS:
            return
        name = (
            self._coming.name if self._coming else min(self._lacking, key=lambda name: self._turn(self._lacking[name]))
        )
        if name in self._stuck:
            self._close()
            self._leave(name, f"did not come: {error.message.removeprefix(f'{error.node}: ')}")
        self._stuck.add(name)
        self.moved_bytes += 1  # the others are worth another link

    def _turn(self, output: Output) -> tuple[bool, int]:
        """Small files first, and those behind which a link broke last."""
        return output.name in self._stuck, min(output.size, output.disk_bytes)

    def _begun(self, output: Output) -> Held | None:
        """What came of this file before."""
        size = _partial_size(_partial(self._run, self.host.node, output))
        return Held(size, output.inode) if 0 < size <= output.size else None

    def _add(self, piece: FilePiece) -> None:
        if piece.file in self._left:
            return
        try:
            self._take(piece)
        except OSError as error:
            if error.errno not in _OF_THIS_FILE:
                raise
            self._leave(piece.file, f"cannot be written here: {error.strerror}")

    def _leave(self, name: str, why: str) -> None:
        self._left[name] = why
        self._lacking.pop(name, None)

    def _take(self, piece: FilePiece) -> None:
        coming = self._open(piece.file)
        if piece.offset == 0 and coming.at:
            self._here_bytes -= coming.at
            coming.restart()
        coming.add(piece)
        self._bytes += piece.end - piece.offset
        self._here_bytes += piece.end - piece.offset
        self._unlooked_bytes += len(piece.data)
        if self._unlooked_bytes > LOOK_BYTES:
            self._unlooked_bytes = 0
            refuse_if_full(self._run.root)
        self.moved_bytes = max(self.moved_bytes, self._here_bytes)
        self._report("pulls")

    def _open(self, name: str) -> _Incoming:
        """The file that comes now: a host hands out one after the other."""
        if self._coming is None or self._coming.name != name:
            self._close()
            if name not in self._lacking:
                raise ProbeError(self.host.node, f"sent {one_line(name)} a second time")
            path = _partial(self._run, self.host.node, self._lacking[name])
            self._coming = _Incoming(name, path)
            self._here_bytes += self._coming.at
        return self._coming

    def _close(self) -> None:
        """What has come of the file stays for the next time."""
        if self._coming:
            self._coming.close()
            self._here_bytes -= self._coming.at
        self._coming = None

    def _finish(self, whole: Whole) -> None:
        coming = self._open(whole.file)
        if not coming.is_sound(whole):
            self._here_bytes -= coming.at
            coming.restart()
            return
        coming.close()
        self._coming = None
        del self._lacking[whole.file]
        self._whole.append((coming, whole))
        if len(self._whole) >= SETTLE_FILES or sum(whole.size for _, whole in self._whole) >= SETTLE_BYTES:
            self._settle()

    def _settle(self) -> None:
        """Brings the files that are whole to the disk and gives them their names: what has a name survives a power
        cut.
        """
        whole, self._whole = self._whole, []
        for coming, state in whole:
            os.utime(coming.path, ns=(state.mtime_ns, state.mtime_ns))
            sync(coming.path)
        for coming, state in whole:
            *above, last = state.file.split("/")
            try:
                with folder_beneath(self._run.files(self.host.node), above) as folder:
                    os.rename(coming.path, last, dst_dir_fd=folder)
                    os.fsync(folder)
                self._files += 1
            except (NotADirectoryError, IsADirectoryError) as error:
                self._left[state.file] = f"something else is in its place here ({error.strerror})"

    def _report(self, phase: Phase) -> None:
        self._show(PullProgress(self.host.node, phase, self._here_bytes, self._total_bytes))


class _Incoming:
    """A file of which so many bytes (`at`) are here."""

    def __init__(self, name: str, path: Path) -> None:
        make_folder(path.parent)
        self.name, self.path = name, path
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags, 0o600), "r+b", buffering=0)
        self._digest, self.at = digest_of(self._file)
        self._file.seek(self.at)

    def is_sound(self, whole: Whole) -> bool:
        """Whether it is what the host has: to be asked once, when all has come."""
        return self.at == whole.size and self._digest.hexdigest() == whole.sha256

    def add(self, piece: FilePiece) -> None:
        left = memoryview(piece.data)
        while left:
            left = left[self._file.write(left) :]
        self._digest.add(piece.data)
        self._digest.add_zeros(piece.hole)
        self.at = piece.end
        if piece.hole:
            self._file.truncate(self.at)
            self._file.seek(self.at)

    def restart(self) -> None:
        self._digest, self.at = Digest(), 0
        self._file.seek(0)
        self._file.truncate()

    def close(self) -> None:
        self._file.close()


def _partial_size(path: Path) -> int:
    try:
        found = path.lstat()
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0
