"""Copies a job's output files from its hosts: checkpoints, and new or changed files of its working folder.

    with collect.alone(run.pull_lock, ...):
        pulled = pull(plan, hosts, run, wanted, show, connections.reopen)

A file appears in `nodes/<node>/files/` only when complete and equal to its host's SHA-256, with its host's modification
time; size and time show whether it is here already. Until then it is in `.incoming`, where the next pull continues it.
Small files come first; a file that fails does not stop the others.

The host is not trusted: names, counts and sizes are checked, free space is checked before and during the pull, and
nothing is written outside of the run folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal

from orchestrator.errors import ConnectError, HostError, OrchError, ProbeError
from orchestrator.files import folder_beneath, hash_file, make_folder, sync
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.connections import Connections
from orchestrator.jobs.collect import SPARE_BYTES, refuse_if_full
from orchestrator.jobs.frames import End, FilePiece, Held, Left, Whole, read_files
from orchestrator.jobs.job_store import JobStore
from orchestrator.paths import RunFolder
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.transport import ask
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import errors_by_node, for_each, on_each_link, values
from orchestrator.units import format_bytes, one_line

LOOK_BYTES = 16 << 20
"""Bytes between two checks of the free space."""
SETTLE_FILES, SETTLE_BYTES = 64, 64 << 20
"""Files are synced in groups: one commit of the file system serves many small files."""

_OF_THIS_FILE = {errno.EFBIG, errno.ENAMETOOLONG, errno.EINVAL, errno.EOVERFLOW}
"""A file system refuses one file with these errors but may accept others."""

MOST_BREAKS = 4
"""Broken connections allowed at a file that makes no progress."""

Phase = Literal["connects", "looks", "pulls", "done"]


@dataclass(frozen=True)
class PullProgress:
    """here_bytes: of the requested bytes."""

    node: str
    phase: Phase
    here_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Pulled:
    """left: by name, why a file did not come."""

    files: int
    bytes: int
    left: Mapping[str, str]


def pull(
    plan: LaunchPlan,
    hosts: Mapping[str, ConnectedHost],
    run: RunFolder,
    wanted: Mapping[str, Sequence[Output]],
    show: Callable[[PullProgress], None],
    reopen: Callable[[str], ConnectedHost],
) -> dict[str, Pulled | HostError]:
    """Skips files that are here. show: called from several threads. reopen: opens a lost connection again. Needs the
    lock of `collect.alone`. A file larger than the free space is left. Raises OrchError if the others have too little
    room.
    """
    too_large = {node: _too_large(run, node, outputs) for node, outputs in wanted.items()}
    wanted = {node: [one for one in outputs if one.name not in too_large[node]] for node, outputs in wanted.items()}
    _refuse_too_much(run, wanted)
    hosts = {name: hosts[name] for name in wanted if name in hosts}
    sessions = {
        name: _Session(host, plan.job, run, wanted[name], too_large[name], show) for name, host in hosts.items()
    }
    return on_each_link(sessions, reopen)


def _too_large(run: RunFolder, node: str, outputs: Sequence[Output]) -> dict[str, str]:
    """Files that do not fit even without the others, and why they stay on the host: often sparse files."""
    free = shutil.disk_usage(run.root).free
    return {
        one.name: f"{format_bytes(one.size)} do not fit on the disk here ({format_bytes(free)} free)"
        for one in outputs
        if one.size - _partial_size(partial_path(run, node, one)) + SPARE_BYTES > free and not is_here(run, node, one)
    }


def _refuse_too_much(run: RunFolder, wanted: Mapping[str, Sequence[Output]]) -> None:
    lacking = [(node, one) for node, outputs in wanted.items() for one in outputs if not is_here(run, node, one)]
    needed = sum(max(0, output.size - _partial_size(partial_path(run, node, output))) for node, output in lacking)
    free = shutil.disk_usage(run.root).free
    if needed and needed + SPARE_BYTES > free:
        node, largest = max(lacking, key=lambda each: each[1].size)
        raise OrchError(
            f"{run.root}: {format_bytes(needed)} are to come, and {format_bytes(free)} are free there; "
            f"the largest file is {largest.name} of {node} ({format_bytes(largest.size)})",
            "choose files by a pattern, or another disk with --out",
        )


def partial_path(run: RunFolder, node: str, output: Output) -> Path:
    """The name identifies the file and its state."""
    state = f"{output.size}:{output.mtime_ns}:{output.inode}"
    return run.incoming(node) / f"{_short(output.name)}-{_short(state)}.part"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class _Session:
    """One host's pull over any number of connections."""

    def __init__(
        self,
        host: ConnectedHost,
        job: str,
        run: RunFolder,
        wanted: Sequence[Output],
        left: Mapping[str, str],
        show: Callable[[PullProgress], None],
    ) -> None:
        self.host = host
        self.moved_bytes = 0
        """The most bytes that were here at once: repeated bytes are no progress."""
        self._job, self._run, self._show = job, run, show
        self._asked = frozenset(_short(output.name) for output in wanted)
        self._total_bytes = sum(output.size for output in wanted)
        self._lacking = {output.name: output for output in wanted if not is_here(run, host.node, output)}
        self._here_bytes = self._total_bytes - sum(output.size for output in self._lacking.values())
        self._files, self._bytes, self._unlooked_bytes = 0, 0, 0
        self._left = {**left}
        self._stuck, self._breaks = set[str](), 0
        self._coming: _Incoming | None = None
        self._whole: list[tuple[_Incoming, Whole]] = []

    def run(self) -> Pulled:
        """Raises ConnectError if the connection broke, ProbeError if the host sends anything that was not requested."""
        moved_before = self.moved_bytes
        try:
            self._stream()
            if self._lacking:  # damaged in transit
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
        """Removes parts of older states of these files only."""
        incoming = self._run.incoming(self.host.node)
        with contextlib.suppress(OSError):
            for path in incoming.iterdir():
                if path.name.partition("-")[0] in self._asked:
                    path.unlink()
            incoming.rmdir()

    def _stream(self) -> None:
        """Reads one stream. Then a file is here, left, or damaged and still lacking."""
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
        """A file at which a connection broke comes last on the next connection, and is left if that breaks, too."""
        self._breaks += 1
        if not self._lacking or self._breaks > MOST_BREAKS:
            return
        first = min(self._lacking.values(), key=self._turn)
        name = self._coming.name if self._coming else first.name
        if name in self._stuck:
            self._close()
            self._leave(name, f"did not come: {error.message.removeprefix(f'{error.node}: ')}")
        self._stuck.add(name)
        self.moved_bytes += 1  # the other files are worth another connection

    def _turn(self, output: Output) -> tuple[bool, int]:
        """Small files first; files at which a connection broke last."""
        return output.name in self._stuck, output.size

    def _begun(self, output: Output) -> Held | None:
        size = _partial_size(partial_path(self._run, self.host.node, output))
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
        self._bytes += len(piece.data)
        self._here_bytes += len(piece.data)
        self._unlooked_bytes += len(piece.data)
        if self._unlooked_bytes > LOOK_BYTES:
            self._unlooked_bytes = 0
            refuse_if_full(self._run.root)
        self.moved_bytes = max(self.moved_bytes, self._here_bytes)
        self._report("pulls")

    def _open(self, name: str) -> _Incoming:
        """A host sends one file after the other."""
        if self._coming is None or self._coming.name != name:
            self._close()
            if name not in self._lacking:
                raise ProbeError(self.host.node, f"sent {one_line(name)} a second time")
            path = partial_path(self._run, self.host.node, self._lacking[name])
            self._coming = _Incoming(name, path)
            self._here_bytes += self._coming.at
        return self._coming

    def _close(self) -> None:
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
        """Syncs complete files before they get their names, so that named files survive a power cut."""
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
    """Its first `at` bytes are here."""

    def __init__(self, name: str, path: Path) -> None:
        make_folder(path.parent)
        self.name, self.path = name, path
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.fdopen(os.open(path, flags, 0o600), "r+b", buffering=0)
        self._sha256, self.at = hash_file(self._file)

    def is_sound(self, whole: Whole) -> bool:
        return self.at == whole.size and self._sha256.hexdigest() == whole.sha256

    def add(self, piece: FilePiece) -> None:
        left = memoryview(piece.data)
        while left:
            left = left[self._file.write(left) :]
        self._sha256.update(piece.data)
        self.at = piece.end

    def restart(self) -> None:
        self._sha256, self.at = hashlib.sha256(), 0
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


# Output files as the hosts list them. Names are checked, counts and sizes bounded.
#
#     list_outputs(hosts, {"a": [plan.job]})             by node: {job: OutputListing}, or the host's error

LIST_S = 120.0
MAX_FILES = 100_000
MAX_NAME, MAX_PART_BYTES, MAX_DEPTH = 1024, 255, 64
MAX_SIZE_BYTES = 1 << 50
ROOTS = ("checkpoints", "src", "checkpoint_dir")
SKIPPED = {
    "links": "links, which are not followed",
    "special": "neither files nor folders",
    "foreign": "another user's",
    "odd_names": "with names that are too long or not printable",
    "more": f"beyond the first {MAX_FILES}",
}


@dataclass(frozen=True)
class Output:
    """name: in the job's folder, like `src/snapshot.pt`. foreign: an unchanged copy of another host's file of an
    earlier job.
    """

    name: str
    size: int
    mtime_ns: int
    inode: int
    foreign: bool = False


@dataclass(frozen=True)
class OutputListing:
    """skipped: entries not handed out, by SKIPPED's kinds. gone: the host has no such job."""

    files: tuple[Output, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    gone: bool = False

    @property
    def notices(self) -> list[str]:
        return [f"{count} left on the host: {SKIPPED[why]}" for why, count in self.skipped.items() if count]


def list_outputs(
    hosts: Mapping[str, ConnectedHost], jobs: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, OutputListing] | HostError]:
    """jobs: ids by node."""

    def one(host: ConnectedHost) -> dict[str, OutputListing]:
        return _listed(host, jobs[host.node])

    return for_each(hosts, one, deadline_s=LIST_S)


def _listed(host: ConnectedHost, jobs: Sequence[str]) -> dict[str, OutputListing]:
    reported = {job: _Reported() for job in jobs}
    with ask.exchange(host, "outputs", {"workdir": host.workdir, "jobs": list(jobs)}) as parts:
        for part in parts:
            if "job" in part:
                ask.understood(host.node, partial(_add, part, reported))
    return {job: one.listing() for job, one in reported.items()}


class _Reported:
    def __init__(self) -> None:
        self.files: dict[str, Output] = {}
        self.skipped: dict[str, int] = {}
        self.gone = False

    def listing(self) -> OutputListing:
        return OutputListing(tuple(self.files[name] for name in sorted(self.files)), self.skipped, self.gone)


def _add(part: Mapping[str, Any], reported: Mapping[str, _Reported]) -> None:
    """Raises ValueError, KeyError, TypeError if malformed."""
    job = reported[part["job"]]
    job.gone |= "gone" in part
    foreign = frozenset(part.get("foreign", ()))
    for row in part.get("files", ()):
        output = _output(*row)
        job.files[output.name] = replace(output, foreign=True) if output.name in foreign else output
    if len(job.files) > MAX_FILES:
        raise ValueError(f"more than {MAX_FILES} files")
    skipped = part.get("skipped", {})
    job.skipped |= {why: int(skipped[why]) for why in SKIPPED if why in skipped}


def _output(name: Any, *numbers: Any) -> Output:
    if not isinstance(name, str) or len(name) > MAX_NAME or not name.isprintable():
        raise ValueError("a file name")
    top, *parts = name.split("/")
    if top not in ROOTS or not 0 < len(parts) <= MAX_DEPTH or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"file name {name[:80]!r}")
    if any(len(os.fsencode(part)) > MAX_PART_BYTES for part in parts):
        raise ValueError(f"file name {name[:80]!r}")
    if len(numbers) != 3 or not all(type(number) is int and 0 <= number < 1 << 64 for number in numbers):
        raise ValueError(f"the numbers of {name[:80]!r}")
    if numbers[0] > MAX_SIZE_BYTES or numbers[1] >= 1 << 63:
        raise ValueError(f"the numbers of {name[:80]!r}")
    return Output(name, *numbers)


def matching(files: Iterable[Output], globs: Sequence[str]) -> tuple[Output, ...]:
    """All files without patterns. `*` crosses `/`. A pattern may omit the folders above: `snapshot.pt` matches
    `src/snapshot.pt`, and `checkpoints` matches all files in it.
    """
    return tuple(output for output in files if not globs or any(_matches(output.name, glob) for glob in globs))


def _matches(name: str, glob: str) -> bool:
    glob = glob.removeprefix("./").rstrip("/")
    names = (name, name.partition("/")[2], *([] if "/" in glob else [name.rpartition("/")[2]]))
    return any(fnmatchcase(each, pattern) for each in names for pattern in (glob, f"{glob}/*"))


def without_copies(plan: LaunchPlan, found: Mapping[str, OutputListing]) -> dict[str, OutputListing]:
    """Leaves out copies of the master's checkpoints."""
    master = found.get(plan.master, OutputListing())
    originals = {(os.path.basename(output.name), output.size) for output in master.files}

    def is_copy(output: Output) -> bool:
        folder, name = os.path.split(output.name)
        return folder == "checkpoints" and (name, output.size) in originals

    return {
        node: replace(listing, files=tuple(output for output in listing.files if not is_copy(output)))
        if node in plan.checkpoints[1:]
        else listing
        for node, listing in found.items()
    }


def checkpoint_globs(plan: LaunchPlan) -> list[str]:
    own = os.path.normpath(plan.recorded.checkpoint_dir or ".")
    inside = [f"src/{own}"] if own != "." and not own.startswith(("/", "~", "..")) else []
    return ["checkpoints/*", "checkpoint_dir/*", *inside]


def is_here(run: RunFolder, node: str, output: Output) -> bool:
    """Whether this state of the file is complete here."""
    try:
        found = (run.files(node) / output.name).lstat()
    except OSError:
        return False
    same_time = found.st_mtime_ns == output.mtime_ns or (
        found.st_mtime_ns % 10**9 == 0 and 0 <= output.mtime_ns - found.st_mtime_ns < 10**9
    )  # some file systems store whole seconds
    return stat.S_ISREG(found.st_mode) and found.st_size == output.size and same_time


def nowhere(runs: Sequence[RunFolder], node: str, files: Iterable[Output]) -> list[Output]:
    """Files that no run folder has, except in a folder that the user chose: they stay there."""
    own = [output for output in files if not output.name.startswith("checkpoint_dir/")]
    return [output for output in own if not any(is_here(run, node, output) for run in runs)]


# Output files by job, and the files that no run folder has yet.


@dataclass(frozen=True)
class Outputs:
    """errors: hosts that could not be asked."""

    found: Mapping[str, OutputListing]
    errors: Mapping[str, HostError]


@dataclass(frozen=True)
class Unpulled:
    """Files that `orch down` would remove and no run folder has."""

    files: Mapping[str, Sequence[tuple[str, Output]]]
    """By job: (node, file)."""
    errors: Mapping[str, HostError]


def outputs(plan: LaunchPlan, hosts: Mapping[str, ConnectedHost]) -> Outputs:
    listed = list_outputs(hosts, {name: [plan.job] for name in hosts})
    by_node = {name: listings[plan.job] for name, listings in values(listed).items()}
    return Outputs(without_copies(plan, by_node), errors_by_node(listed))


def unpulled(
    jobs: JobStore, connections: Connections, cluster: Cluster, there: Mapping[str, Sequence[str]]
) -> Unpulled:
    """there: by node, this home's jobs that it holds. A host with a job that cannot be read here, or that ran on hosts
    of other names, is an error; but several may have one work folder.
    """
    plans, unread = dict[str, LaunchPlan](), dict[str, HostError]()
    for job in {job for ids in there.values() for job in ids}:
        holders = {name for name, ids in there.items() if job in ids}
        with suppress(OrchError):
            plans[job] = jobs.plan(job)
        ran_on = {node.name for node in plans[job].nodes} if job in plans else set[str]()
        why = "it ran on hosts of other names" if ran_on else "unknown or damaged here"
        shares_a_folder = ran_on and ran_on <= holders
        for name in () if shares_a_folder else holders - ran_on:
            unread[name] = HostError(name, f"holds {job}, {why}", "`orch jobs --rescan`, then `orch pull`")
    opened = connections.open([cluster.node(name) for name, ids in there.items() if ids and name not in unread])
    listed = list_outputs(values(opened), there)
    files: dict[str, list[tuple[str, Output]]] = {}
    for job, plan in plans.items():
        own = {node.name for node in plan.nodes}
        found = {name: seen[job] for name, seen in values(listed).items() if name in own and job in seen}
        runs = [RunFolder(folder) for folder in jobs.run_folders(job)]
        for name, listing in without_copies(plan, found).items():
            if lacking := nowhere(runs, name, listing.files):
                files.setdefault(job, []).extend((name, output) for output in lacking)
    return Unpulled(files, {**unread, **errors_by_node(opened), **errors_by_node(listed)})
