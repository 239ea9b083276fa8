"""Brings home what a job wrote beside its logs: checkpoints, and every new or changed file of its working folder.

    listings = list_outputs(hosts, {plan.job: plan})           by node: Listing(files, skipped), or that host's error
    with collect.alone(run.pull_lock, ...):
        pulled = pull(plan, hosts, run, wanted, show, connections.reopen)

A file lies in `nodes/<node>/files/` under the name that it has in the job's folder on its host, whole and as its host's
SHA-256 has it, or not at all; it keeps its host's time of change, which with its size shows whether it is here already.
Until it is whole it lies in `.incoming`, under a name that identifies the file and its state: whatever broke or
ended the pull, the next one goes on from there. A newer state of a file takes the older one's place.

A host is not trusted: names are checked, counts and sizes bounded, free space here is looked at before and all along,
nothing is written outside of the run folder, and what comes is bytes and never loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal

from orchestrator.errors import ConnectError, HostError, OrchError, ProbeError
from orchestrator.files import folder_beneath, make_folder, sync
from orchestrator.jobs.collect import SPARE_BYTES, refuse_if_full
from orchestrator.jobs.frames import End, FilePiece, Held, Left, Whole, read_frames
from orchestrator.paths import RunFolder
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.text import one_line
from orchestrator.transport import ask
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import for_each
from orchestrator.transport.resumed import on_each_link
from orchestrator.units import format_bytes

LIST_S = 120.0
MAX_FILES = 100_000
MAX_NAME, MAX_PART_BYTES, MAX_DEPTH = 1024, 255, 64
MAX_SIZE_BYTES = 1 << 50
LOOK_BYTES = 16 << 20
"""After so many bytes the free space is looked at again."""
SETTLE_FILES, SETTLE_BYTES = 64, 64 << 20
"""Files are brought to the disk in groups: one commit of the file system then serves many small ones."""
ROOTS = ("checkpoints", "src", "checkpoint_dir")
SKIPPED = {
    "links": "links, which are not followed",
    "special": "neither files nor folders",
    "foreign": "another user's",
    "odd_names": "with names that are too long or not printable",
    "more": f"beyond the first {MAX_FILES}",
}
ZEROS = bytes(1 << 20)

Phase = Literal["connects", "looks", "pulls", "done"]


@dataclass(frozen=True)
class Output:
    """One file that a job wrote."""

    name: str
    """In the job's folder: `src/snapshot.pt`."""
    size: int
    mtime_ns: int
    inode: int
    disk_bytes: int
    """Fewer than `size` for a sparse file."""


@dataclass(frozen=True)
class OutputListing:
    """What one host holds of a job's output."""

    files: tuple[Output, ...] = ()
    """Sorted by name."""
    skipped: Mapping[str, int] = field(default_factory=dict)
    """How many entries are not handed out, by SKIPPED's kinds."""
    gone: bool = False
    """Whether the host has no such job."""

    @property
    def notices(self) -> list[str]:
        return [f"{count} left on the host: {SKIPPED[why]}" for why, count in self.skipped.items() if count]


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


# ---- what there is --------------------------------------------------------------------------------------------


def list_outputs(
    hosts: Mapping[str, ConnectedHost], jobs: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, OutputListing] | HostError]:
    """By node and job. jobs: by node, the ids to ask for."""

    def one(host: ConnectedHost) -> dict[str, OutputListing]:
        return _listed(host, jobs[host.node])

    return for_each(hosts, one, deadline_s=LIST_S)


def _listed(host: ConnectedHost, jobs: Sequence[str]) -> dict[str, OutputListing]:
    heard = {job: _Heard() for job in jobs}
    with ask.exchange(host, "outputs", {"workdir": host.workdir, "jobs": list(jobs)}) as words:
        for word in words:
            if "job" in word:
                ask.understood(host.node, partial(_take_in, word, heard))
    return {job: one.listing() for job, one in heard.items()}


class _Heard:
    """What a host has reported of one job so far."""

    def __init__(self) -> None:
        self.files: dict[str, Output] = {}
        self.skipped: dict[str, int] = {}
        self.gone = False

    def listing(self) -> OutputListing:
        return OutputListing(tuple(self.files[name] for name in sorted(self.files)), self.skipped, self.gone)


def _take_in(word: Mapping[str, Any], heard: Mapping[str, _Heard]) -> None:
    """Raises ValueError, KeyError, TypeError for what a host would not say."""
    known = heard[word["job"]]
    known.gone |= "gone" in word
    for row in word.get("files", ()):
        output = _output(*row)
        known.files[output.name] = output
    if len(known.files) > MAX_FILES:
        raise ValueError(f"more than {MAX_FILES} files")
    skipped = word.get("skipped", {})
    known.skipped |= {why: int(skipped[why]) for why in SKIPPED if why in skipped}


def _output(name: Any, *numbers: Any) -> Output:
    if not isinstance(name, str) or len(name) > MAX_NAME or not name.isprintable():
        raise ValueError("a file name")
    top, *parts = name.split("/")
    if top not in ROOTS or not 0 < len(parts) <= MAX_DEPTH or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"file name {name[:80]!r}")
    if any(len(os.fsencode(part)) > MAX_PART_BYTES for part in parts):
        raise ValueError(f"file name {name[:80]!r}")
    if len(numbers) != 4 or not all(type(number) is int and 0 <= number < 1 << 64 for number in numbers):
        raise ValueError(f"what it reports of {name[:80]!r}")
    if numbers[0] > MAX_SIZE_BYTES or numbers[1] >= 1 << 63:
        raise ValueError(f"what it reports of {name[:80]!r}")
    return Output(name, *numbers)


def matching(files: Iterable[Output], globs: Sequence[str]) -> tuple[Output, ...]:
    """Those that one of these shell patterns means, all where there is none. `*` crosses `/`, and a pattern may leave
    out what leads to the file: `snapshot.pt` and `src/snapshot.pt` mean the same, `checkpoints` all that is in it.
    """
    return tuple(output for output in files if not globs or any(_fits(output.name, glob) for glob in globs))


def _fits(name: str, glob: str) -> bool:
    glob = glob.removeprefix("./").rstrip("/")
    ways = (name, name.partition("/")[2], *([] if "/" in glob else [name.rpartition("/")[2]]))
    return any(fnmatchcase(way, form) for way in ways for form in (glob, f"{glob}/*"))


def checkpoint_globs(plan: LaunchPlan) -> list[str]:
    """What means a job's checkpoints."""
    own = os.path.normpath(str(plan.settings.get("checkpoint_dir") or "."))
    inside = [f"src/{own}"] if own != "." and not own.startswith(("/", "~", "..")) else []
    return ["checkpoints/*", "checkpoint_dir/*", *inside]


def is_here(run: RunFolder, node: str, output: Output) -> bool:
    """Whether this state of the file lies whole in this run folder."""
    try:
        found = (run.files(node) / output.name).lstat()
    except OSError:
        return False
    same_time = found.st_mtime_ns == output.mtime_ns or (
        found.st_mtime_ns % 10**9 == 0 and 0 <= output.mtime_ns - found.st_mtime_ns < 10**9
    )  # some file systems keep whole seconds
    return stat.S_ISREG(found.st_mode) and found.st_size == output.size and same_time


def nowhere(runs: Sequence[RunFolder], node: str, files: Iterable[Output]) -> list[Output]:
    """Those that none of these run folders has. What lies in a folder of the person's own is not the job's to lose."""
    own = [output for output in files if not output.name.startswith("checkpoint_dir/")]
    return [output for output in own if not any(is_here(run, node, output) for run in runs)]


# ---- bringing it home -----------------------------------------------------------------------------------------


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
        self._coming: _Incoming | None = None
        self._whole: list[tuple[_Incoming, Whole]] = []

    def run(self) -> Pulled:
        """Raises ConnectError where the link broke, ProbeError for a host that sends what nobody asked for."""
        try:
            self._stream()
            if self._lacking:  # damaged on their way
                self._stream()
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
            for o in self._lacking.values()
        ]
        request = {"workdir": self.host.workdir, "job": self._job, "files": rows}
        node, asked = self.host.node, frozenset(self._lacking)
        marker = ask.new_marker()
        with ask.open_stream(self.host, "sender", request, marker) as chunks:
            for frame in read_frames(node, chunks, frozenset(), held, marker=marker.encode(), asked=asked):
                if isinstance(frame, End):
                    return
                if isinstance(frame, FilePiece):
                    self._add(frame)
                elif isinstance(frame, Whole):
                    self._finish(frame)
                    held.pop(frame.file, None)
                elif isinstance(frame, Left):
                    self._left[frame.file] = frame.why
                    self._lacking.pop(frame.file, None)
        raise ConnectError(node, "its answer ended too early", "pull again: it resumes where this one stopped")

    def _begun(self, output: Output) -> Held | None:
        """What came of this file before."""
        size = _partial_size(_partial(self._run, self.host.node, output))
        return Held(size, output.inode) if 0 < size <= output.size else None

    def _add(self, piece: FilePiece) -> None:
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
        if (coming.at, coming.sha256) != (whole.size, whole.sha256):
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
        self._digest, self.at = hashlib.sha256(), 0
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags, 0o600), "r+b", buffering=0)
        while piece := self._file.read(len(ZEROS)):
            self._digest.update(piece)
            self.at += len(piece)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def add(self, piece: FilePiece) -> None:
        left = memoryview(piece.data)
        while left:
            left = left[self._file.write(left) :]
        self._digest.update(piece.data)
        for at in range(0, piece.hole, len(ZEROS)):
            self._digest.update(ZEROS[: piece.hole - at])
        self.at = piece.end
        if piece.hole:
            self._file.truncate(self.at)
            self._file.seek(self.at)

    def restart(self) -> None:
        self._digest, self.at = hashlib.sha256(), 0
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
