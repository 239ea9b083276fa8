"""Divides a step into load, compute, exposed exchange and optimiser, from marks that hooks set.

    course = Course()
    course.asks(mark, source)              a batch is requested from a source, and
    course.gets(mark, source, 32)          arrives: 32 samples
    course.calls(mark, 32, True)           the network is called with 32 samples; their gradients will be exchanged
    course.shares(mark); course.shared(mark)       its buffers become rank 0's on all ranks
    course.ends_backward(mark, computed)   computed: the mark of this rank's last gradient
    course.ends_step(mark)                 TakenStep(stretches=[("load", mark, mark), ...], samples=32, ...)

A stretch between two marks belongs to one part, as in `trainer.shared.metrics`: `load` until the network is called,
`compute` until the last gradient, `exposed` until the exchanged gradients, and while buffers are shared, `optim` until
the optimiser has updated the weights. Stretches are measured later by the marks' clock.

A backward shows that a source is for training; until then its stretches are held back. Batches without a backward are
evaluation and belong to no step, like the pause between a source's end and the next one's first batch.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

Mark = Any
Stretch = tuple[str, Mark, Mark]  # `load`, `compute`, `exposed` or `optim`; from, to
KNOWN = 4  # number of training sources that are remembered


class Source:
    def __init__(self) -> None:
        self.trained = False  # a backward has followed one of its batches
        self.is_over = False
        self.waiting: deque[int] = deque()  # samples per batch that was given and not yet trained on


@dataclass(frozen=True)
class TakenStep:
    stretches: list[Stretch]
    samples: int | None  # of the batches trained on; None without a source
    called_with: int  # samples in calls of the network
    exchanged: bool  # gradients were exchanged within sight of the marks


class Course:
    def __init__(self) -> None:
        self._asked: Source | None = None  # the source asked last
        self._asks: dict[Source, int] = {}  # requests per source since the last backward
        self._held: dict[Source, list[Stretch]] = {}  # stretches of sources without a backward so far
        self._known: list[Source] = []  # the newest training sources
        self.begins_step(None)

    def begins_step(self, now: Mark | None) -> None:
        self._last, self._after = now, "step"
        self._stretches: list[Stretch] = []
        self._samples: int | None = None
        self._called_with, self._call_samples = 0, 0
        self._exchanged, self._exchanges = False, False

    # ---- marks ----------------------------------------------------------------------------------------------------

    def asks(self, now: Mark, source: Source) -> None:
        before = self._asked
        is_pause = before is not None and before is not source and before.is_over and before.trained
        if is_pause:
            self._last = now
        else:
            self._spend("compute" if self._after in ("call", "backward") else "load", now)
        self._asked = source
        self._asks[source] = self._asks.get(source, 0) + 1
        if not source.trained:
            self._held.setdefault(source, [])

    def gets(self, now: Mark, source: Source, samples: int | None) -> None:
        self._spend("load", now)
        self._after = "batch"
        if samples is not None:
            source.waiting.append(samples)

    def ends(self, now: Mark, source: Source) -> None:
        self.gets(now, source, None)
        source.is_over = True

    def calls(self, now: Mark, samples: int | None, exchanges: bool) -> None:
        """exchanges: the backward will sum this call's gradients over the ranks."""
        self._settle()
        self._spend("load" if self._after in ("step", "batch") else "compute", now)
        self._after, self._call_samples, self._exchanges = "call", samples or 0, exchanges

    def shares(self, now: Mark) -> None:
        """The ranks' buffers, within a call of the network."""
        self._spend("compute", now)

    def shared(self, now: Mark) -> None:
        self._spend("exposed", now)

    def ends_backward(self, now: Mark, computed: Mark | None) -> None:
        self._settle()
        if computed is not None:
            self._spend("compute", computed)
        self._spend("exposed" if self._exchanges and computed is not None else "compute", now)
        self._after = "backward"
        self._exchanged, self._exchanges = self._exchanged or self._exchanges, False
        self._called_with, self._call_samples = self._called_with + self._call_samples, 0
        if self._asked and self._asked.waiting:
            self._samples = (self._samples or 0) + self._asked.waiting.popleft()

    def moves(self, now: Mark) -> None:
        self._spend("compute" if self._after in ("batch", "call") else "optim", now)
        self._after = "step"

    def ends_step(self, now: Mark) -> TakenStep:
        self.moves(now)
        step = TakenStep(self._stretches, self._samples, self._called_with, self._exchanged)
        self.begins_step(now)
        return step

    # ---- parts of a step --------------------------------------------------------------------------------------------

    def _spend(self, part: str, until: Mark) -> None:
        if self._last is not None:
            held = self._held.get(self._asked) if part == "load" and self._asked else None
            _add(self._stretches if held is None else held, (part, self._last, until))
        self._last = until

    def _settle(self) -> None:
        chosen = self._trained_on()
        if chosen is None:
            return
        if chosen is not self._asked:  # the time since the last evaluation batch belongs to no step
            self._asked, self._last = chosen, None
        chosen.trained, times = True, self._asks.get(chosen, 0)
        for source, stretches in self._held.items():
            # Sources that are asked alternately, as by zip(), are trained on together.
            if source is chosen or (self._asks.get(source) == times and not source.is_over):
                source.trained = True
                for stretch in stretches:
                    _add(self._stretches, stretch)
        self._held.clear()
        self._asks.clear()
        if chosen not in self._known:
            self._known = [*self._known[1 - KNOWN :], chosen]

    def _trained_on(self) -> Source | None:
        # The source asked last; after an evaluation, the earlier source with a waiting batch.
        if self._asked is None or self._asked.trained or not self._asked.is_over:
            return self._asked
        return next((source for source in self._known if source.waiting), self._asked)


def _add(stretches: list[Stretch], new: Stretch) -> None:
    if stretches and stretches[-1][0] == new[0] and stretches[-1][2] is new[1]:
        stretches[-1] = (new[0], stretches[-1][1], new[2])
    else:
        stretches.append(new)


# Clocks for marks. A GPU runs behind the program that feeds it, so a mark there is an event on the GPU, queried without
# waiting and read later.
#
#     clock = clock_of(torch, "cuda")
#     first, last = clock.mark(), clock.mark()
#     clock.is_over(last) and clock.ms(first, last)


class HostClock:
    def mark(self) -> Mark:
        return time.perf_counter()

    def is_over(self, mark: Mark) -> bool:
        return True

    def ms(self, begin: Mark, end: Mark) -> float:
        return float(end - begin) * 1000


class CudaClock:
    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._capturing = getattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def mark(self) -> Mark:
        if self._capturing():
            raise RuntimeError("a CUDA graph is being captured, and its replays cannot be seen")
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_over(self, mark: Mark) -> bool:
        return bool(mark.query())

    def ms(self, begin: Mark, end: Mark) -> float:
        return float(begin.elapsed_time(end))


Clock = HostClock | CudaClock


def clock_of(torch: Any, device: str) -> Clock | None:
    """device: its type; None for types without a known clock."""
    if device == "cuda":
        return CudaClock(torch)
    return HostClock() if device == "cpu" else None
