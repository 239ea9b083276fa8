"""What a host saw of its ranks when it was asked why a job stands still, as values. Pure.

look = HostLook.model_validate(answer)      # of `remote/why.py`; ValueError where it makes no sense
look.ranks[0].script.own_frame(look.src)    # StackFrame(file="train.py", line=31, ...)
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from orchestrator.record import Record, Words

Count = Annotated[int, Field(ge=0, le=2**53)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
MOVES_BYTES = 1 << 16
"""Who moves more data than this in two seconds gets on; threads in the background, heartbeats and stacks are less."""
LIBRARIES = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3|^<")
"""Files that are not a person's own."""


class StackFrame(NamedTuple):
    file: Words
    line: Count
    function: Words
    text: Words
    """The line itself, of the job's own code; "" of any other."""

    def is_own(self, src: str) -> bool:
        """Whether it is of the job's own code."""
        return self.file.startswith(f"{src}/") or not self.file.startswith(("/", "<"))

    def place(self, src: str) -> str:
        """`train.py:31 in step`."""
        function = "" if self.function == "<module>" else f" in {self.function}"
        return f"{self.file.removeprefix(f'{src}/')}:{self.line}{function}"


class ThreadLook(Record):
    main: bool
    frames: Annotated[tuple[StackFrame, ...], Field(max_length=64)]
    """The innermost first."""

    def own_frame(self, src: str) -> StackFrame | None:
        """The innermost of the job's own code, else of no library, else of all."""
        own = (frame for frame in self.frames if frame.is_own(src))
        apart = (frame for frame in self.frames if not LIBRARIES.search(frame.file))
        return next(own, None) or next(apart, None) or next(iter(self.frames), None)


class ProcessLook(Record):
    """One process of a rank, looked at twice."""

    pid: Count
    name: Words
    state: Words
    """A letter of proc(5)."""
    wchan: Words
    """What in the kernel it waits for; "" where that is not known."""
    same: bool
    """Whether its main thread stands where it stood a moment before."""
    idle: bool
    """Whether it used next to no CPU in between."""
    moved_bytes: Count = 0
    """What it read and wrote in between."""
    threads: Annotated[tuple[ThreadLook, ...], Field(max_length=16)] | None = None
    """None of what is no Python, has its own handler for our signal, or does not answer."""

    @property
    def stands(self) -> bool:
        return self.same and self.idle and not self.moves_data

    @property
    def moves_data(self) -> bool:
        return self.moved_bytes >= MOVES_BYTES

    @property
    def frames(self) -> tuple[StackFrame, ...]:
        """Of its main thread."""
        return self.threads[0].frames if self.threads else ()

    def own_frame(self, src: str) -> StackFrame | None:
        return self.threads[0].own_frame(src) if self.threads else None


class WaitingConnection(Record):
    """A connection of a rank on which bytes wait."""

    to: Words
    port: Count
    unsent: Count
    """Bytes that the other side has not confirmed."""
    unread: Count
    """Bytes that the rank has not taken."""
    retransmits: Count
    """How often in a row the same bytes were sent again, and no word came."""


class RankLook(Record):
    rank: Count
    ended: bool
    exit_code: int | None = None
    signal: Words | None = None
    does: Literal["waits", "busy", "disk", "stopped"] = "waits"
    """See `remote/stillness.py`."""
    grew: bool = False
    """Whether it wrote to its logs or metrics between the two looks."""
    quiet_s: Seconds = 0.0
    """Since it wrote last."""
    step: Count | None = None
    step_s: Seconds | None = None
    """What the longest of its last steps took."""
    wrapper: Words = ""
    """The state of the process of ours that started it and reads what it prints."""
    wrapper_pid: Count = 0
    full_pipes: Annotated[tuple[Words, ...], Field(max_length=2)] = ()
    processes: Annotated[tuple[ProcessLook, ...], Field(max_length=64)] = ()
    """The script first; () of a rank that has ended or not begun."""
    more: Count = 0
    net_bytes: Count = 0
    """What the connections of all its processes carried in between."""
    connections: Annotated[tuple[WaitingConnection, ...], Field(max_length=64)] = ()

    @property
    def moves_data(self) -> bool:
        return self.net_bytes >= MOVES_BYTES or any(one.moves_data for one in self.processes)

    @property
    def script(self) -> ProcessLook | None:
        return self.processes[0] if self.processes else None


class HostLook(Record):
    state: Words | None = None
    """What the supervisor says of the job."""
    alive: bool = False
    src: Words
    """The folder of the job's own code."""
    frozen: Annotated[tuple[Words, ...], Field(max_length=2)] = ()
    """Which of supervisor and keeper are stopped by a signal."""
    gpu_lines: Annotated[tuple[str, ...], Field(max_length=1000)] = ()
    """Of its gpu.jsonl."""
    ranks: Annotated[tuple[RankLook, ...], Field(max_length=1024)]
