"""Turns reports from `step_hooks` into one metrics record per step, timed by `step_course`.

    watch = Watch(torch, os.environ)
    watch.note(ASKS, source); watch.note(GETS, source, 32); watch.note(CALLS, 32, True)
    watch.note(BACKWARD, mark, loss); watch.note(STEP, weakref.ref(optimizer), time.time())

No call raises: an error ends the measurement. A step ends with the step of the first optimiser; other optimisers' steps
belong to it. A framework's callback (`trainer.integrations`) finds its process's watch as `current` and adds facts by
`expects`, `tells` and `writes`. It reports a step afterwards, so that the newest step is kept back for it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import resource
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

from .step_course import Clock, Course, HostClock, Mark, TakenStep, clock_of

ASKS, GETS, ENDS, CALLS, SHARES, SHARED, BACKWARD, STEP, TELLS = range(9)
"""A batch is requested; arrives; the source is empty; the network is called; the ranks begin to share its buffers; have
shared them; a backward or a step has ended; a framework's callback reports the last step.
"""
LOOKS_EVERY_S = 1.0
MOST_NOTES = 4000
LEADS_AFTER = 200  # an optimiser that takes this many steps without one of the first becomes the first
current: Watch | None = None  # this process's watch


class Watch:
    def __init__(self, torch: Any, environment: Mapping[str, str]) -> None:
        self.is_on = bool(environment.get("ORCH_METRICS"))
        self.network: str | None = None  # class name of the module in DistributedDataParallel
        self._thread: int | None = None  # the training thread, once known
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
        self._losses: list[Any] = []  # of the backwards since the last step
        self._left: deque[SeenStep] = deque()  # steps not written yet
        self._due_s = 0.0
        self._samples_from: str | None = None
        self._expected: dict[str, Any] = {}  # fields for the `start` record from a callback
        self._has_callback = False  # a callback reports steps
        self.has_untold = False  # a step has ended since its last report
        atexit.register(self._leave)
        os.register_at_fork(after_in_child=self._is_elsewhere)

    # ---- notes ------------------------------------------------------------------------------------------------------

    def note(self, kind: int, *what: Any) -> None:
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
            self._write(keep=int(self._has_callback))

    # ---- a framework's callback -------------------------------------------------------------------------------------

    def expects(self, first: int, steps: int | None, counts_samples: bool) -> None:
        """A callback will report steps. first: number of the next step (not 0 in a resumed run); steps: of the whole
        run. After steps were seen, their numbers continue.
        """
        if not self._has_callback and not self._steps:
            self._steps = first
            self._expected |= {} if steps is None else {"steps": steps}
            self._expected |= {"samples_from": "framework"} if counts_samples else {}
        self._has_callback = True

    def tells(self, facts: Mapping[str, Any]) -> None:
        self.has_untold = False
        self.note(TELLS, dict(facts))

    def last_step(self) -> int | None:
        try:
            self._look()
            return self._steps - 1 if self._is_ours() else None
        except Exception as error:
            self.end(error)
            return None

    def writes(self, event: str, fields: Mapping[str, Any]) -> None:
        try:
            if self._is_ours():
                self._file.write([(event, dict(fields))])
        except Exception as error:
            self.end(error)

    def _is_ours(self) -> bool:
        return self.is_on and self._thread == get_ident()

    # ---- records ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        notes, self._notes = self._notes, []
        course = self._course
        tell: dict[int, Callable[..., None]] = {
            ASKS: course.asks,
            GETS: course.gets,
            ENDS: course.ends,
            CALLS: course.calls,
            SHARES: course.shares,
            SHARED: course.shared,
        }
        for kind, mark, *what in notes:
            if kind == STEP:
                self._take_step(mark, *what)
            elif kind == BACKWARD:
                course.ends_backward(mark, what[0])
                self._losses += [what[1]] if what[1] is not None else []
            elif kind == TELLS:
                if self._left:
                    self._left[-1].add(what[0], mark)
            else:
                tell[kind](mark, *what)

    def _take_step(self, mark: Any, optimizer: Callable[[], Any], wall_s: float) -> None:
        losses, self._losses = self._losses, []
        if not self._leads(optimizer):
            self._course.moves(mark)
            return
        self._left.append(SeenStep(self._steps, wall_s, self._course.ends_step(mark), losses))
        self._steps += 1

    def _leads(self, optimizer: Callable[[], Any]) -> bool:
        if optimizer is not self._leader and self._leader() is not None:
            self._others_steps += 1
            if self._others_steps < LEADS_AFTER:
                return False
        self._others_steps, self._leader = 0, optimizer
        return True

    def _begin(self, optimizer: Any) -> None:
        # Writes the `start` record. On a GPU the first step has no times, since it has no GPU marks.
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
        return {"step": step.number, **step.fields(samples), **times, "wall": step.wall_s}

    # ---- its end --------------------------------------------------------------------------------------------------

    def end(self, error: Exception) -> None:
        if not self.is_on:
            return
        self.is_on = False
        if not isinstance(error, GaveWay):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(f"orch: steps are no longer measured: {type(error).__name__}: {error}\n")

    def _is_elsewhere(self) -> None:
        self.is_on = False

    def _leave(self) -> None:
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


# Appends records to a rank's metrics file until the script writes its own there. The format is that of
# `trainer.shared.metrics`, without unknown fields.
#
#     file = StepFile(path)                    before the script begins
#     file.write([("step", {...}), ...])       raises GaveWay if another writer appears, OSError if writing fails


class GaveWay(Exception):
    """The script writes its own records."""


class StepFile:
    def __init__(self, path: str) -> None:
        self._path = path
        self._begins = self._ends = _size(path)  # our records lie between these offsets; None before the file exists
        self._file: int | None = None
        self._first = b""

    def write(self, events: Iterable[tuple[str, dict[str, Any]]]) -> None:
        lines = [json.dumps({"event": event, **fields}) for event, fields in events]
        data = "".join(f"{line}\n" for line in lines).encode()
        if _size(self._path) != self._ends:
            self._give_way()
        if self._file is None:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            self._begins = self._ends = self._begins or 0
            self._first = data[: data.index(b"\n") + 1]
        written = os.write(self._file, data)
        self._ends = (self._ends or 0) + written
        if written < len(data):
            raise OSError("the disk is full")

    def _give_way(self) -> None:
        if self._file is not None and os.pread(self._file, len(self._first), self._begins or 0) == self._first:
            theirs = b""
            while part := os.pread(self._file, 1 << 20, (self._ends or 0) + len(theirs)):
                theirs += part
            os.ftruncate(self._file, self._begins or 0)
            os.write(self._file, theirs)
        raise GaveWay


def _size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return None


SCHEMA = 1
CLOCKED = ("load", "compute", "exposed", "optim")


def start_fields(
    torch: Any, environment: Mapping[str, str], optimizer: Any, network: str | None, samples_from: str
) -> dict[str, Any]:
    weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]
    device = weights[0].device if weights else torch.device("cpu")
    on_gpu, met = device.type == "cuda", torch.distributed.is_available() and torch.distributed.is_initialized()
    host = socket.gethostname()
    return {
        "schema": SCHEMA,
        "host": host,
        "node": environment.get("ORCH_NODE") or host,
        "rank": int(environment.get("RANK", 0)),
        "local_rank": int(environment.get("LOCAL_RANK", 0)),
        "world_size": int(environment.get("WORLD_SIZE", 1)),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "torch": str(torch.__version__),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "backend": torch.distributed.get_backend() if met else None,
        "model": network,
        "parameters": sum(weight.numel() for weight in weights),
        "gradient_bytes": sum(weight.numel() * weight.element_size() for weight in weights),
        "batch_per_rank": int(environment["ORCH_SHARE"]) if "ORCH_SHARE" in environment else None,
        "paced": False,
        "settings": {},
        "samples_from": samples_from,
    }


def step_times(step: TakenStep, clock: Clock, *, alone: bool) -> dict[str, float]:
    """Milliseconds, named as in a `step` record. alone: there is no rank to exchange gradients with.

    If gradients are exchanged out of sight, only `load` and the total are known.
    """
    spent_ms = dict.fromkeys(CLOCKED, 0.0)
    for part, begin, end in step.stretches:
        spent_ms[part] += clock.ms(begin, end)
    known = CLOCKED if alone or step.exchanged else ("load",)
    parts = {f"{part}_ms": round(spent_ms[part], 3) for part in known}
    return {"t_ms": round(sum(spent_ms.values()), 3), **parts}


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "cpu")
    except OSError:
        return "cpu"


# A step that the hooks have seen, with a framework's facts about it: `epoch`, `samples` (this rank's), `loss` (their
# mean). Missing facts are absent. A loss may still be on the device: it is read only here. Without a framework's loss
# the step's is the mean of the scalars whose backwards were called.
#
#     seen = SeenStep(120, 1763900000.2, taken, losses)
#     seen.add({"epoch": 3, "samples": 32, "loss": 0.41}, mark)
#     seen.fields(samples=16)                  {"epoch": 3, "samples": 32, "loss": 13.12}


@dataclass
class SeenStep:
    number: int  # over the whole run
    wall_s: float  # time of day at its end
    taken: TakenStep
    losses: list[Any]  # scalars whose backwards were called
    facts: dict[str, Any] = field(default_factory=dict)
    facts_mark: Mark | None = None

    @property
    def last_mark(self) -> Mark | None:
        return self.facts_mark or (self.taken.stretches[-1][2] if self.taken.stretches else None)

    def add(self, facts: Mapping[str, Any], now: Mark) -> None:
        self.facts.update(facts)
        self.facts_mark = now

    def fields(self, samples: int) -> dict[str, Any]:
        """Named as in a `step` record. samples: the hooks' count, if no callback reports it."""
        samples = self.facts.get("samples", samples)
        fields: dict[str, Any] = {"epoch": self.facts["epoch"]} if "epoch" in self.facts else {}
        fields["samples"] = samples
        losses = [self.facts["loss"]] if "loss" in self.facts else self.losses
        if losses:
            loss = sum(map(float, losses)) / len(losses) * (samples or 1)
            fields["loss"] = loss if math.isfinite(loss) else None
        return fields
