"""What `orch why` shows: the verdict, then each rank on a line, then all frames where they are wanted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from orchestrator.errors import HostError
from orchestrator.jobs.looks import HostLook, ProcessLook, StackFrame
from orchestrator.jobs.record import Verdict
from orchestrator.jobs.standing import Standing, standings_of
from orchestrator.units import format_duration
from orchestrator.views import console
from orchestrator.views.tables import table

COLUMNS = ("node", "rank", "does", "at", "step", "wrote", "stands")
DROP = ("wrote", "step", "at")
DOES = {"waits": "waits", "busy": "uses the CPU", "disk": "waits for a disk", "stopped": "stopped"}


def print_why(verdict: Verdict, outcomes: Mapping[str, HostLook | HostError], *, all_frames: bool) -> None:
    colour = "red" if verdict.is_alarm else "green"
    console.out.print(Text.assemble((verdict.kind.replace("-", " "), colour), ": ", console.plain(verdict.reason)))
    if verdict.place:
        console.put(f"  {verdict.place}{f': {verdict.line}' if verdict.line else ''}")
    if verdict.remedy:
        console.out.print(Text.assemble("  ", ("try:", "bold"), " ", console.plain(verdict.remedy)))
    standings = standings_of(outcomes)
    if standings:
        rows = [_cells(standing) for standing in standings]
        console.out.print(table(None, COLUMNS, rows, drop=DROP, text=("stands",)))
    for standing in standings if all_frames else ():
        host = outcomes[standing.node]
        if isinstance(host, HostLook):
            _print_frames(host, standing)


def _cells(one: Standing) -> tuple[Any, ...]:
    look = one.look
    if not one.is_live:
        how = look.signal or ("" if look.exit_code is None else f"exit code {look.exit_code}")
        return (one.node, str(one.rank), "has ended" if look.ended else "has not begun", "", "", "", how)
    step = "" if look.step is None else str(look.step)
    wrote = f"{format_duration(look.quiet_s)} ago"
    return (one.node, str(one.rank), DOES[look.does], one.at, step, wrote, one.place or _program(look.script))


def _program(process: ProcessLook | None) -> str:
    """What is known of a process that is no Python of ours."""
    if process is None:
        return ""
    return f"({process.name}, state {process.state}{f', {process.wchan}' if process.wchan else ''})"


def _print_frames(host: HostLook, one: Standing) -> None:
    for process in one.look.processes:
        console.put(f"\n{one.name}, pid {process.pid} {_program(process)}")
        for thread in process.threads or ():
            console.put("  main thread" if thread.main else "  another thread")
            for frame in thread.frames:
                console.put(f"    {_frame(frame, host.src)}")
    if one.look.more:
        console.put(f"  and {one.look.more} more processes")
    for way in one.look.connections:
        waits = f"{way.unsent:,} bytes not confirmed, {way.unread:,} not read, sent again {way.retransmits} times"
        console.put(f"  to {way.to} port {way.port}: {waits}")


def _frame(frame: StackFrame, src: str) -> str:
    return f"{frame.place(src)}{f': {frame.text}' if frame.text else ''}"
