"""A host's two snapshots of its ranks, taken by `orch why` (`remote/why.py`), as checked values. Pure."""

from __future__ import annotations

import re
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from orchestrator.record import Record, Words

Count = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
# A process that moves more between the snapshots makes progress; heartbeats and background threads move less.
MOVES_BYTES = 1 << 16
LIBRARIES = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3|^<")


class StackFrame(NamedTuple):
    file: Words
    line: Count
    function: Words
    text: Words
    """Only of the job's own code."""

    def is_own(self, src: str) -> bool:
        return self.file.startswith(f"{src}/") or not self.file.startswith(("/", "<"))

    def place(self, src: str) -> str:
        function = "" if self.function == "<module>" else f" in {self.function}"
        return f"{self.file.removeprefix(f'{src}/')}:{self.line}{function}"


class ThreadSnapshot(Record):
    main: bool
    frames: Annotated[tuple[StackFrame, ...], Field(max_length=64)]
    """Innermost first."""

    def own_frame(self, src: str) -> StackFrame | None:
        """The innermost frame of the job's code, else outside of libraries, else of all."""
        own = (frame for frame in self.frames if frame.is_own(src))
        apart = (frame for frame in self.frames if not LIBRARIES.search(frame.file))
        return next(own, None) or next(apart, None) or next(iter(self.frames), None)


class ProcessSnapshot(Record):
    pid: Count
    name: Words
    state: Words
    """A letter of proc(5)."""
    wchan: Words
    """"" if unknown."""
    same: bool
    """Its main thread is at the same line in both snapshots."""
    idle: bool
    """It used almost no CPU in between."""
    moved_bytes: Count = 0
    threads: Annotated[tuple[ThreadSnapshot, ...], Field(max_length=16)] | None = None
    """None if it is not Python, handles our signal itself, or does not answer."""

    @property
    def stands(self) -> bool:
        return self.same and self.idle and not self.moves_data

    @property
    def moves_data(self) -> bool:
        return self.moved_bytes >= MOVES_BYTES

    @property
    def frames(self) -> tuple[StackFrame, ...]:
        return self.threads[0].frames if self.threads else ()

    def own_frame(self, src: str) -> StackFrame | None:
        return self.threads[0].own_frame(src) if self.threads else None


class WaitingConnection(Record):
    to: Words
    port: Count
    unsent: Count
    """Not confirmed by the peer."""
    unread: Count
    """Not read by the rank."""
    retransmits: Count
    """Unanswered repetitions."""


class RankSnapshot(Record):
    rank: Count
    ended: bool
    exit_code: int | None = None
    signal: Words | None = None
    does: Literal["waits", "busy", "disk", "stopped"] = "waits"
    """See `remote/stillness.py`."""
    grew: bool = False
    """Wrote logs or metrics."""
    quiet_s: Seconds = 0.0
    """Since its last output."""
    step: Count | None = None
    step_s: Seconds | None = None
    """The longest of its last steps."""
    wrapper: Words = ""
    """Our process that reads its output."""
    wrapper_pid: Count = 0
    full_pipes: Annotated[tuple[Words, ...], Field(max_length=2)] = ()
    processes: Annotated[tuple[ProcessSnapshot, ...], Field(max_length=64)] = ()
    """The script first; () if the rank has ended or not begun."""
    more: Count = 0
    net_bytes: Count = 0
    connections: Annotated[tuple[WaitingConnection, ...], Field(max_length=64)] = ()

    @property
    def moves_data(self) -> bool:
        return self.net_bytes >= MOVES_BYTES or any(one.moves_data for one in self.processes)

    @property
    def script(self) -> ProcessSnapshot | None:
        return self.processes[0] if self.processes else None


class HostSnapshot(Record):
    state: Words | None = None
    alive: bool = False
    src: Words
    frozen: Annotated[tuple[Words, ...], Field(max_length=2)] = ()
    """Stopped by a signal: supervisor, keeper."""
    gpu_lines: Annotated[tuple[str, ...], Field(max_length=1000)] = ()
    ranks: Annotated[tuple[RankSnapshot, ...], Field(max_length=1024)]
