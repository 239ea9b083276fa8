"""A job's output files (checkpoints, new or changed files of its working folder), as its hosts list them.

    found = list_outputs(hosts, {"a": [plan.job]})             by node, then job: an OutputListing; or the host's error

The host is not trusted: names are checked, counts and sizes are bounded.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from orchestrator.errors import HostError
from orchestrator.paths import RunFolder
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.transport import ask
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import for_each

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
    """name: in the job's folder, like `src/snapshot.pt`. foreign: an unchanged copy of a file that another host wrote
    in an earlier job.
    """

    name: str
    size: int
    mtime_ns: int
    inode: int
    foreign: bool = False


@dataclass(frozen=True)
class OutputListing:
    """One host's output files of a job, sorted by name. skipped: entries that are not handed out, counted by SKIPPED's
    kinds. gone: the host has no such job.
    """

    files: tuple[Output, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    gone: bool = False

    @property
    def notices(self) -> list[str]:
        return [f"{count} left on the host: {SKIPPED[why]}" for why, count in self.skipped.items() if count]


def list_outputs(
    hosts: Mapping[str, ConnectedHost], jobs: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, OutputListing] | HostError]:
    """By node and job. jobs: by node, the job ids."""

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
    """The host's report of one job so far."""

    def __init__(self) -> None:
        self.files: dict[str, Output] = {}
        self.skipped: dict[str, int] = {}
        self.gone = False

    def listing(self) -> OutputListing:
        return OutputListing(tuple(self.files[name] for name in sorted(self.files)), self.skipped, self.gone)


def _add(part: Mapping[str, Any], reported: Mapping[str, _Reported]) -> None:
    """Raises ValueError, KeyError, TypeError for a malformed report."""
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
    """The files that match one of these shell patterns; all files without patterns. `*` crosses `/`. A pattern may omit
    the folders above: `snapshot.pt` matches `src/snapshot.pt`, and `checkpoints` matches all files in it.
    """
    return tuple(output for output in files if not globs or any(_matches(output.name, glob) for glob in globs))


def _matches(name: str, glob: str) -> bool:
    glob = glob.removeprefix("./").rstrip("/")
    names = (name, name.partition("/")[2], *([] if "/" in glob else [name.rpartition("/")[2]]))
    return any(fnmatchcase(each, pattern) for each in names for pattern in (glob, f"{glob}/*"))


def without_copies(plan: LaunchPlan, found: Mapping[str, OutputListing]) -> dict[str, OutputListing]:
    """Leaves out copies of checkpoints that the master has, too: they hold the same bytes."""
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
    """Patterns for a job's checkpoints."""
    own = os.path.normpath(plan.recorded.checkpoint_dir or ".")
    inside = [f"src/{own}"] if own != "." and not own.startswith(("/", "~", "..")) else []
    return ["checkpoints/*", "checkpoint_dir/*", *inside]


def is_here(run: RunFolder, node: str, output: Output) -> bool:
    """Whether this state of the file is complete in this run folder."""
    try:
        found = (run.files(node) / output.name).lstat()
    except OSError:
        return False
    same_time = found.st_mtime_ns == output.mtime_ns or (
        found.st_mtime_ns % 10**9 == 0 and 0 <= output.mtime_ns - found.st_mtime_ns < 10**9
    )  # some file systems store whole seconds
    return stat.S_ISREG(found.st_mode) and found.st_size == output.size and same_time


def nowhere(runs: Sequence[RunFolder], node: str, files: Iterable[Output]) -> list[Output]:
    """The files that none of these run folders has, except those in a folder that the user chose: they stay there."""
    own = [output for output in files if not output.name.startswith("checkpoint_dir/")]
    return [output for output in own if not any(is_here(run, node, output) for run in runs)]
