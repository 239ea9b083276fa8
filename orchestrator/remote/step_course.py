"""Where the time of a training step goes, told from outside: from marks that are made while a script runs.

    course = Course()
    course.asks(mark, source)              a batch is asked of a source, and
    course.gets(mark, source, 32)          is there: 32 samples
    course.calls(mark, 32, True)           the network is called with 32 samples; their gradients will be exchanged
    course.ends_backward(mark, computed)   with the mark of its own last gradient
    course.ends_step(mark)                 TakenStep(stretches=[("load", mark, mark), ...], samples=32, ...)

Each stretch between two marks belongs to one part of the step, as `trainer.shared.metrics` has them: `load` until the
network is called, `compute` until the last gradient, `exposed` until the exchanged one, `optim` until the optimiser has
moved the weights. A mark is whatever the clock gives: a stretch is a pair of them, measured later.

Which source a script trains on shows when a backward follows. Until then what passes after a batch was asked of it is
held back: batches that no backward follows were judged, and their time belongs to no step. Nor does the pause between a
source's end and the next one's first batch.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

Mark = Any
Stretch = tuple[str, Mark, Mark]
"""`load`, `compute`, `exposed` or `optim`; from, to."""
KNOWN = 4
"""So many sources that were trained on are remembered."""


class Source:
    """What gives batches, once: an iterator of a loader."""

    def __init__(self) -> None:
        self.trained = False
        """Has a backward followed one of its batches?"""
        self.is_over = False
        self.waiting: deque[int] = deque()
        """Samples of the batches that were given and not yet trained on."""


@dataclass(frozen=True)
class TakenStep:
    stretches: list[Stretch]
    """In their order."""
    samples: int | None
    """Of the batches that its backwards followed; None where no source gave any."""
    called_with: int
    """Samples that the network was called with."""
    exchanged: bool
    """Have gradients been exchanged that the marks saw?"""


class Course:
    def __init__(self) -> None:
        self._asked: Source | None = None
        """The source that was asked last."""
        self._asks: dict[Source, int] = {}
        """How often each was asked since the last backward."""
        self._held: dict[Source, list[Stretch]] = {}
        """What passed since a batch was asked of a source that has not been trained on."""
        self._known: list[Source] = []
        """The newest that were trained on."""
        self.begins_step(None)

    def begins_step(self, now: Mark | None) -> None:
        """now: None where it is not known when the step began."""
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
        """samples: None where it is not known how many."""
        self._spend("load", now)
        self._after = "batch"
        if samples is not None:
            source.waiting.append(samples)

    def ends(self, now: Mark, source: Source) -> None:
        """It was asked, and has no more."""
        self.gets(now, source, None)
        source.is_over = True

    def calls(self, now: Mark, samples: int | None, exchanges: bool) -> None:
        """exchanges: whether gradients of this call are to be summed over the ranks in its backward."""
        self._settle()
        self._spend("load" if self._after in ("step", "batch") else "compute", now)
        self._after, self._call_samples, self._exchanges = "call", samples or 0, exchanges

    def ends_backward(self, now: Mark, computed: Mark | None) -> None:
        """computed: the mark of the last gradient of its own; None where it is not known."""
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
        """An optimiser has moved weights; the step goes on."""
        self._spend("compute" if self._after in ("batch", "call") else "optim", now)
        self._after = "step"

    def ends_step(self, now: Mark) -> TakenStep:
        """The optimiser that counts the steps has moved its weights."""
        self.moves(now)
        step = TakenStep(self._stretches, self._samples, self._called_with, self._exchanged)
        self.begins_step(now)
        return step

    # ---- what belongs where ---------------------------------------------------------------------------------------

    def _spend(self, part: str, until: Mark) -> None:
        """What passed since the last mark went to this part, or is held back."""
        if self._last is not None:
            held = self._held.get(self._asked) if part == "load" and self._asked else None
            _add(self._stretches if held is None else held, (part, self._last, until))
        self._last = until

    def _settle(self) -> None:
        """Decides what was held back: a batch is about to be trained on, or has been."""
        chosen = self._trained_on()
        if chosen is None:
            return
        if chosen is not self._asked:  # what passed since the last batch was judged belongs to no step
            self._asked, self._last = chosen, None
        chosen.trained, times = True, self._asks.get(chosen, 0)
        for source, stretches in self._held.items():
            # Sources that are asked in turn, as by zip(), are trained on together.
            if source is chosen or (self._asks.get(source) == times and not source.is_over):
                source.trained = True
                for stretch in stretches:
                    _add(self._stretches, stretch)
        self._held.clear()
        self._asks.clear()
        if chosen not in self._known:
            self._known = [*self._known[1 - KNOWN :], chosen]

    def _trained_on(self) -> Source | None:
        """The one that was asked last; after a judgement, the one whose batch was asked for before."""
        if self._asked is None or self._asked.trained or not self._asked.is_over:
            return self._asked
        return next((source for source in self._known if source.waiting), self._asked)


def _add(stretches: list[Stretch], new: Stretch) -> None:
    """As part of the last one, where it goes on."""
    if stretches and stretches[-1][0] == new[0] and stretches[-1][2] is new[1]:
        stretches[-1] = (new[0], stretches[-1][1], new[2])
    else:
        stretches.append(new)


# Marks on a device's time line, for a process that only looks on.
#
#     clock = clock_of(torch, "cuda")
#     first, last = clock.mark(), clock.mark()
#     clock.is_over(last) and clock.ms(first, last)
#
# A GPU runs behind the program that feeds it, so a mark there is an event that the GPU stamps. Nobody waits for it: it
# is
# asked whether it is over, and read later.


class HostClock:
    """Of the processor: what it was told to do is done when the call returns."""

    def mark(self) -> Mark:
        return time.perf_counter()

    def is_over(self, mark: Mark) -> bool:
        return True

    def ms(self, begin: Mark, end: Mark) -> float:
        return float(end - begin) * 1000


class CudaClock:
    """Of the stream that is the current one when a mark is made."""

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
    """device: its type; None where nothing is known of the time line of such devices."""
    if device == "cuda":
        return CudaClock(torch)
    return HostClock() if device == "cpu" else None
