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


# Appends the records of steps that are seen from outside to a rank's metrics file, until the script writes its own.
#
#     file = StepFile(path)                    before the script begins
#     file.write([("step", {...}), ...])       raises GaveWay where somebody else writes there, OSError where nobody can
#
# The records are those of `trainer.shared.metrics`, which no host has for a script that does not train by it. A field
# that is not known is absent.


class GaveWay(Exception):
    """The script writes records of its own: there is no more to write."""


class StepFile:
    """A rank that was started again goes on behind what its first start has left."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._begins = self._ends = _size(path)
        """Bytes, or None before the file is there: what lies between is ours."""
        self._file: int | None = None
        self._first = b""

    def write(self, events: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """events: name and fields each."""
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
        """Takes away what is ours, so that the script's records alone are left. Raises GaveWay."""
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


# What the metrics of a watched script say of it: who the rank is, what it trains, what each step took.
#
# start_fields(torch, environment, optimizer, network, "loader")
# step_times(step, clock, alone=False)

SCHEMA = 1
CLOCKED = ("load", "compute", "exposed", "optim")


def start_fields(
    torch: Any, environment: Mapping[str, str], optimizer: Any, network: str | None, samples_from: str
) -> dict[str, Any]:
    """network: the name of the class that is trained, where it is known."""
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
    """In milliseconds, as a `step` record names them. alone: is there no other rank to exchange gradients with?

    Where they are exchanged in a way that is not seen, what of the time went to that is not known either.
    """
    spent_ms = dict.fromkeys(CLOCKED, 0.0)
    for part, begin, end in step.stretches:
        spent_ms[part] += clock.ms(begin, end)
    known = CLOCKED if alone or step.exchanged else ("load",)
    parts = {f"{part}_ms": round(spent_ms[part], 3) for part in known}
    return {"t_ms": round(sum(spent_ms.values()), 3), **parts}


def cpu_name() -> str:
    """As the kernel calls it; `cpu` where it does not say."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "cpu")
    except OSError:
        return "cpu"


# A step that the hooks have seen, and what the callback of a framework told of it. Pure.
#
#     seen = SeenStep(120, 1763900000.2, taken)
#     seen.hears({"epoch": 3, "samples": 32, "loss": 0.41}, mark)
#     seen.told_fields(samples=16)            {"epoch": 3, "samples": 32, "loss": 13.12}
#
# Facts are those that `trainer.integrations` gives: `epoch`, `samples` (this rank's), and `loss`, the mean over them.
# What a callback does not know is absent. A loss may be a number that the device still has to copy: only here it is
# read.


@dataclass
class SeenStep:
    number: int
    """Over the whole run."""
    wall_s: float
    """The time of day of its end."""
    taken: TakenStep
    told: dict[str, Any] = field(default_factory=dict)
    told_at: Mark | None = None

    @property
    def last_mark(self) -> Mark | None:
        """When the device has passed it, everything of this step can be read."""
        return self.told_at or (self.taken.stretches[-1][2] if self.taken.stretches else None)

    def hears(self, facts: Mapping[str, Any], now: Mark) -> None:
        """May come in several parts; of one fact the last counts."""
        self.told.update(facts)
        self.told_at = now

    def told_fields(self, samples: int) -> dict[str, Any]:
        """As a `step` record names them. samples: as many as the hooks have counted, for who does not tell it."""
        samples = self.told.get("samples", samples)
        fields: dict[str, Any] = {"epoch": self.told["epoch"]} if "epoch" in self.told else {}
        fields["samples"] = samples
        if "loss" in self.told:
            loss = float(self.told["loss"]) * samples
            fields["loss"] = loss if math.isfinite(loss) else None
        return fields
