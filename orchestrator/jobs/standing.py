"""What one rank is at, from what its host saw of it in two looks. Pure.

    standing = standing_of("alpha", rank_look, src)
    standing.at, standing.moves, standing.place         "collective", False, "train.py:31 in step"

A frame of the person's own code is named where there is one, not torch's below it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from orchestrator.errors import HostError
from orchestrator.jobs.looks import HostLook, ProcessLook, RankLook, StackFrame

At = Literal["ended", "begins", "stopped", "pipe", "disk", "loader", "collective", "lock", "elsewhere"]

LOADER = re.compile(r"/torch/utils/data/")
FETCHES = re.compile(r"/torch/utils/data/_utils/fetch\.py$")
COLLECTIVE = re.compile(r"/torch/(distributed|autograd|cuda|nn/parallel)/|/horovod/")
LOCK = re.compile(r"/(threading|queue|concurrent/futures/\w+|multiprocessing/\w+)\.py$")
LOCK_WORDS = re.compile(r"\bacquire\(|^(async )?with ")
"""What a line holds that waits for a lock without a frame of Python's library below it."""
COLLECTIVE_WORDS = re.compile(
    r"\b(wait|synchronize|item|backward|barrier|all_\w+|broadcast\w*|reduce\w*|gather|scatter|recv|send)\(",
    re.IGNORECASE,
)
"""The same of a line that waits for other ranks, or for a GPU that does."""


@dataclass(frozen=True)
class Standing:
    node: str
    rank: int
    at: At
    moves: bool
    """Whether it got on between the two looks: moved data, used the CPU, or stood at another line."""
    look: RankLook
    frame: StackFrame | None
    """Where it stands, of the person's own code if possible."""
    place: str
    """The same in words; "" where nothing is known."""
    process: ProcessLook | None
    """The one that stands there: the script, or a worker of its DataLoader."""
    besides: tuple[str, ...] = ()
    """Where its other threads stand, those of the person's own code."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.node}"

    @property
    def script_is_same(self) -> bool:
        return self.look.script is not None and self.look.script.same and not self.look.grew

    @property
    def is_live(self) -> bool:
        return self.at not in ("ended", "begins")


def standings_of(outcomes: Mapping[str, HostLook | HostError]) -> list[Standing]:
    """Of all ranks that were seen, in their order. outcomes: by host."""
    seen = {name: found for name, found in outcomes.items() if isinstance(found, HostLook)}
    found = [standing_of(name, rank, host.src) for name, host in seen.items() for rank in host.ranks]
    return sorted(found, key=lambda one: one.rank)


def standing_of(node: str, look: RankLook, src: str) -> Standing:
    script = look.script
    at = _at(look, src)
    process = script
    if at in ("loader", "disk"):
        process = next(_stuck_workers(look, at), script)
    frame = process.own_frame(src) if process else None
    gets_on = script is not None and (look.grew or look.does == "busy" or not script.same or look.moves_data)
    moves = gets_on and at != "stopped"
    return Standing(
        node=node,
        rank=look.rank,
        at=at,
        moves=moves,
        look=look,
        frame=frame,
        place=frame.place(src) if frame else "",
        process=process,
        besides=tuple(_besides(process, src)),
    )


def _besides(process: ProcessLook | None, src: str) -> Iterator[str]:
    for thread in (process.threads or ())[1:] if process else ():
        frame = thread.own_frame(src)
        if frame and frame.is_own(src):
            yield frame.place(src)


def _at(look: RankLook, src: str) -> At:
    script = look.script
    if look.ended or script is None:
        return "ended" if look.ended else "begins"
    if look.does == "stopped":
        return "stopped"
    if look.full_pipes and look.does == "waits" and script.same and not look.grew:
        return "pipe"
    if look.does == "disk" or any(_stuck_workers(look, "disk")):
        return "disk"
    return _by_frames(script, src)


def _by_frames(script: ProcessLook, src: str) -> At:
    """The frames below the person's own say what the line waits for; those above it, whether it makes a batch."""
    own = script.own_frame(src)
    below = [frame.file for frame in script.frames[: script.frames.index(own)]] if own else []
    if _any(COLLECTIVE, below):
        return "collective"
    if _any(LOADER, (frame.file for frame in script.frames)):
        return "loader"
    if _any(LOCK, below):
        return "lock"
    text = own.text if own else ""
    if COLLECTIVE_WORDS.search(text):
        return "collective"
    return "lock" if script.wchan.startswith("futex") and LOCK_WORDS.search(text) else "elsewhere"


def _stuck_workers(look: RankLook, at: At) -> Iterator[ProcessLook]:
    """Those of its processes that hold it up: that wait for a disk, or make a batch and stand still."""
    for one in look.processes[1:]:
        holds_up = one.state == "D" if at == "disk" else _makes_batch(one)
        if holds_up and one.stands:
            yield one


def _makes_batch(one: ProcessLook) -> bool:
    """A worker that is stopped shows no frames, and is known by the name that torch gives it."""
    files = [frame.file for frame in one.frames]
    return _any(FETCHES, files) or (one.state in ("T", "t", "D") and one.name == "pt_data_worker")


def _any(pattern: re.Pattern[str], files: Iterable[str]) -> bool:
    return any(pattern.search(file) for file in files)
