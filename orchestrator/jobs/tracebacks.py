"""Holds ranks' tracebacks back until it is known which one is the cause. Pure.

    tracebacks = Tracebacks(plan.job)
    tracebacks.take(lines, now_s)           # the lines to show now
    tracebacks.due(now_s, is_failing=False) # held ones of a job that goes on
    tracebacks.end(record)                  # Ending: the cause's whole traceback, and a line for the others

One failing rank makes all others fail, each with a traceback of its own, so that the first is buried among them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestrator.jobs.job_store import JobRecord
from orchestrator.jobs.lines import LogLine
from orchestrator.units import counted, one_line

HOLD_S = 2.0
"""A rank that dies of its error ends the job sooner; others go on, and only logged it."""
MOST_LINES = 2000
"""Limit for a rank."""
_BEGINS = re.compile(r".*Traceback \(most recent call last\):")  # perhaps behind a progress bar
_PREFIX = re.compile(r"\[rank\d+\]: ?")
_FRAME = re.compile(r'  File "(.+)", line (\d+)')
_NUMBERS = re.compile(r"[\[\]0-9a-fA-Fx.:]*\d[\[\]0-9a-fA-Fx.:]*")
# torch prints it for each connection if a host has no reverse DNS. The logs have it.
_NOISE = re.compile(r"The hostname of the client socket cannot be retrieved")


@dataclass(frozen=True)
class Ending:
    """lines: held ones to show. folded: one for each kind of failure that others only followed."""

    record: JobRecord
    lines: tuple[LogLine, ...] = ()
    folded: tuple[str, ...] = ()


class Tracebacks:
    def __init__(self, job: str) -> None:
        self._src = f"/jobs/{job}/src/"
        self._held: dict[tuple[str, int], list[LogLine]] = {}
        self._began_s: dict[tuple[str, int], float] = {}
        self._is_over = False

    def take(self, lines: Iterable[LogLine], now_s: float) -> tuple[LogLine, ...]:
        shown = []
        for line in lines:
            who = (line.node, line.rank)
            if line.stream == "stderr" and not self._is_over:
                if _NOISE.search(line.text):
                    continue
                if who in self._held or _BEGINS.match(line.text):
                    self._began_s.setdefault(who, now_s)
                    self._held.setdefault(who, []).append(line)
                    if len(self._held[who]) > MOST_LINES:
                        shown += self._let_go(who)
                    continue
            shown.append(line)
        return tuple(shown)

    def due(self, now_s: float, *, is_failing: bool) -> tuple[LogLine, ...]:
        late = [who for who, began_s in self._began_s.items() if now_s > began_s + HOLD_S and not is_failing]
        return tuple(line for who in late for line in self._let_go(who))

    def rest(self) -> tuple[LogLine, ...]:
        return tuple(line for who in [*self._held] for line in self._let_go(who))

    def end(self, record: JobRecord) -> Ending:
        self._is_over = True
        first = record.first_failure
        kept, kinds = list[LogLine](), dict[str, list[tuple[str, str]]]()
        for (node, rank), lines in self._held.items():
            words = what_failed([line.text for line in lines], self._src)
            is_cause = first is not None and (node, rank) == (first.node, first.rank)
            if is_cause or not words or not (record.state == "failed" or words.startswith("KeyboardInterrupt")):
                kept += lines
            else:
                kinds.setdefault(_NUMBERS.sub("", words), []).append((f"rank {rank} on {node}", words))
        self._held, self._began_s = {}, {}
        return Ending(record, tuple(kept), tuple(map(_folded, kinds.values())))

    def _let_go(self, who: tuple[str, int]) -> list[LogLine]:
        self._began_s.pop(who)
        return self._held.pop(who)


def _folded(alike: Sequence[tuple[str, str]]) -> str:
    who, words = alike[0]
    return f"{one_line(who) if len(alike) == 1 else counted(len(alike), 'rank')}: {one_line(words, 300)}"


def what_failed(texts: Sequence[str], src: str) -> str:
    """The exception of the last traceback, and its innermost place in the job's own code: `ValueError: no, a.py:4`. ""
    without one.
    """
    lines = [_PREFIX.sub("", text, count=1) if _PREFIX.match(text) else text for text in texts]
    begin = max((number for number, line in enumerate(lines) if _BEGINS.match(line)), default=len(lines))
    frames = list[str]()
    for line in lines[begin + 1 :]:
        if found := _FRAME.match(line):
            frames.append(f"{found[1]}:{found[2]}")
        elif line and not line.startswith(" "):
            own = [frame.partition(src)[2] for frame in frames if src in frame] or frames
            return ", ".join([line, *own[-1:]])
    return ""
