"""Notes what the hooks in torch see, and makes a record of each step of it, a few times a second.

    watch = Watch(torch, os.environ)
    watch.note(ASKS, source); watch.note(GETS, source, 32); watch.note(CALLS, 32, True); watch.note(BACKWARD, mark)
    watch.note(STEP, weakref.ref(optimizer), time.time())

No call raises: what goes wrong ends the watching.

A step ends with the step of the first optimiser that takes one. Where several take turns, the others' belong to it.

The callback of a framework (`trainer.integrations`) finds the watch of its process as `current`, and adds what it alone
knows to its records: `expects`, `tells`, `writes`. It tells of a step after it: the newest one is kept back for that.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from threading import get_ident
from typing import Any

from .step_clock import Clock, HostClock, clock_of
from .step_course import Course, TakenStep
from .step_file import GaveWay, StepFile
from .step_record import start_fields, step_times
from .step_told import SeenStep

ASKS, GETS, ENDS, CALLS, BACKWARD, STEP, TELLS = range(7)
"""A batch is asked of a source; is there; there is no more; the network is called; a backward or a step has ended; a
framework's callback tells of the last step."""
LOOKS_EVERY_S = 1.0
MOST_NOTES = 4000
LEADS_AFTER = 200
"""An optimiser that has taken so many steps since the first one's last is the one that counts from then on."""
current: Watch | None = None
"""That of this process."""


class Watch:
    def __init__(self, torch: Any, environment: Mapping[str, str]) -> None:
        self.is_on = bool(environment.get("ORCH_METRICS"))
        self.network: str | None = None
        """The class of what DistributedDataParallel holds."""
        self._thread: int | None = None
        """The one that trains, once it is known."""
        self._torch, self._environment = torch, dict(environment)
        self._alone = int(environment.get("WORLD_SIZE", 1)) == 1
        self._share = int(environment["ORCH_SHARE"]) if "ORCH_SHARE" in environment else None
        self._file = StepFile(environment.get("ORCH_METRICS", ""))
        self._began_s = time.monotonic()
        self._notes: list[tuple[Any, ...]] = []
        self._clock: Clock | None = HostClock()
        self._make_mark: Callable[[], Any] = self._clock.mark
        self._course = Course()
        self._leader: Callable[[], Any] = lambda: None
        self._others_steps = 0
        self._steps = 0
        self._left: deque[SeenStep] = deque()
        """Steps that are not yet written."""
        self._due_s = 0.0
        self._samples_from: str | None = None
        self._expected: dict[str, Any] = {}
        """What a callback has said of the run, as the `start` record names it."""
        self._is_told = False
        """Is there a callback that tells of steps?"""
        self.has_untold = False
        """Has a step been seen since it told of one?"""
        atexit.register(self._leave)
        os.register_at_fork(after_in_child=self._is_elsewhere)

    # ---- what is seen ---------------------------------------------------------------------------------------------

    def note(self, kind: int, *what: Any) -> None:
        """Of the thread that trains."""
        try:
            if self._thread is None or self._thread == get_ident():
                self._notes.append((kind, self._make_mark(), *what))
                if kind == STEP:
                    self.has_untold = True
                    self._has_stepped(what[0])
                elif len(self._notes) > MOST_NOTES:
                    self._look()
        except Exception as error:
            self.end(error)

    def mark(self) -> Any:
        """Of this moment; None where none can be made."""
        try:
            return self._make_mark() if self.is_on else None
        except Exception as error:
            return self.end(error)

    def _has_stepped(self, optimizer: Callable[[], Any]) -> None:
        now_s = time.monotonic()
        if now_s >= self._due_s:
            self._due_s = now_s + LOOKS_EVERY_S
            self._look()
            if self._thread is None and self._left:
                self._begin(optimizer())
            self._write(keep=int(self._is_told))

    # ---- what a callback adds ---------------------------------------------------------------------------------------

    def expects(self, first: int, steps: int | None, counts_samples: bool) -> None:
        """A callback will tell of steps. first: the number of the next one, which is not 0 where a run is resumed;
        steps: of the whole run. Once steps are seen, their numbers go on.
        """
        if not self._is_told and not self._steps:
            self._steps = first
            self._expected |= {} if steps is None else {"steps": steps}
            self._expected |= {"samples_from": "framework"} if counts_samples else {}
        self._is_told = True

    def tells(self, facts: Mapping[str, Any]) -> None:
        """Of the last step; `step_told` has the facts."""
        self.has_untold = False
        self.note(TELLS, dict(facts))

    def last_step(self) -> int | None:
        """The number of the newest one; None where none has been seen."""
        try:
            self._look()
            return self._steps - 1 if self._is_ours() else None
        except Exception as error:
            self.end(error)
            return None

    def writes(self, event: str, fields: Mapping[str, Any]) -> None:
        """A record that is not of a step."""
        try:
            if self._is_ours():
                self._file.write([(event, dict(fields))])
        except Exception as error:
            self.end(error)

    def _is_ours(self) -> bool:
        """Have records been begun, in this thread?"""
        return self.is_on and self._thread == get_ident()

    # ---- what is made of it ---------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Has the course told what was noted."""
        notes, self._notes = self._notes, []
        course = self._course
        tell: dict[int, Callable[..., None]] = {
            ASKS: course.asks,
            GETS: course.gets,
            ENDS: course.ends,
            CALLS: course.calls,
        }
        for kind, mark, *what in notes:
            if kind == STEP:
                self._take_step(mark, *what)
            elif kind == BACKWARD:
                course.ends_backward(mark, what[0])
            elif kind == TELLS:
                if self._left:
                    self._left[-1].hears(what[0], mark)
            else:
                tell[kind](mark, *what)

    def _take_step(self, mark: Any, optimizer: Callable[[], Any], wall_s: float) -> None:
        if not self._leads(optimizer):
            self._course.moves(mark)
            return
        self._left.append(SeenStep(self._steps, wall_s, self._course.ends_step(mark)))
        self._steps += 1

    def _leads(self, optimizer: Callable[[], Any]) -> bool:
        """Whether it is this one whose steps count."""
        if optimizer is not self._leader and self._leader() is not None:
            self._others_steps += 1
            if self._others_steps < LEADS_AFTER:
                return False
        self._others_steps, self._leader = 0, optimizer
        return True

    def _begin(self, optimizer: Any) -> None:
        """The first step shows who trains what, where. Of a GPU's, what it took is not known: nobody had marked it."""
        self._thread = get_ident()
        self._samples_from = self._choose_samples(self._left[0].taken)
        fields = start_fields(self._torch, self._environment, optimizer, self.network, self._samples_from)
        self._file.write([("start", {**fields, **self._expected})])
        clock = clock_of(self._torch, fields["device"].partition(":")[0])
        if not isinstance(clock, HostClock):
            self._left[0].taken.stretches.clear()
            self._clock = clock
        if clock:
            self._make_mark = clock.mark
            self._course.begins_step(clock.mark())

    def _choose_samples(self, step: TakenStep) -> str:
        if self._share is not None:
            return "batch"
        return "loader" if step.samples is not None else "network" if step.called_with else "unknown"

    def _write(self, keep: int = 0) -> None:
        """The steps that the device is done with. keep: so many of the newest are not written."""
        done = []
        while len(self._left) > keep and self._is_over(self._left[0]):
            done.append(("step", self._fields(self._left.popleft())))
        self._file.write(done)

    def _is_over(self, step: SeenStep) -> bool:
        return self._clock is None or step.last_mark is None or self._clock.is_over(step.last_mark)

    def _fields(self, step: SeenStep) -> dict[str, Any]:
        taken = step.taken
        counted = {"batch": self._share, "loader": taken.samples or taken.called_with, "network": taken.called_with}
        samples = counted.get(self._samples_from or "") or 0
        times = step_times(taken, self._clock, alone=self._alone) if self._clock and taken.stretches else {}
        return {"step": step.number, **step.told_fields(samples), **times, "wall": step.wall_s}

    # ---- its end --------------------------------------------------------------------------------------------------

    def end(self, error: Exception) -> None:
        """The script writes records of its own, or something failed, which is said once."""
        if not self.is_on:
            return
        self.is_on = False
        if not isinstance(error, GaveWay):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(f"orch: steps are no longer measured: {type(error).__name__}: {error}\n")

    def _is_elsewhere(self) -> None:
        """In a process that was forked from ours."""
        self.is_on = False

    def _leave(self) -> None:
        """With the interpreter."""
        if not self.is_on or self._thread is None:
            return
        try:
            self._look()
            self._write()
            self._file.write([("end", self._end_fields())])
        except Exception as error:
            self.end(error)

    def _end_fields(self) -> dict[str, Any]:
        failure = getattr(sys, "last_value", None)
        status = "succeeded" if failure is None else "failed"
        if isinstance(failure, KeyboardInterrupt):
            status = "interrupted"
        cuda = self._torch.cuda
        on_gpu = not isinstance(self._clock, HostClock) and cuda.is_initialized()
        peak = cuda.max_memory_allocated() if on_gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {
            "status": status,
            "message": None if failure is None else f"{type(failure).__name__}: {failure}".splitlines()[0][:300],
            "total_s": time.monotonic() - self._began_s,
            "peak_memory_bytes": peak,
            "dropped": 0,
        }
