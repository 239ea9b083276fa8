"""The metric schema and its writer: one flat JSON object a line, one file a rank. Imports no torch.

    {"event": "start", "schema": 1, "host": "v100", "rank": 0, "world_size": 2, ...}
    {"event": "step", "step": 0, "epoch": 0, "samples": 32, "t_ms": 9.1, "load_ms": 2.0, ...}

Steps and epochs count from 0. Every duration is measured on one host's monotonic clock; only `wall` is a time of day.
A value that JSON cannot hold (NaN, infinity) is written as null. Every line also says its `event`.

| event | field | meaning |
| --- | --- | --- |
| start | schema | version of this table, 1 |
| start | host, node | host name; the name that the launcher gave this host (`ORCH_NODE`), else the host name |
| start | rank, local_rank, world_size | this rank, its number on this host, the number of all ranks |
| start | device, device_name | `cpu` or `cuda:0`; what the device calls itself |
| start | torch, nccl, backend | versions (nccl null without GPUs); what carries gradients |
| start | model, parameters, gradient_bytes | name; trainable parameters; bytes of a gradient; null: no training |
| start | batch_per_rank | this rank's share of a full batch; null: no training |
| start | batch_norm_groups | [samples, how many] of the groups that BatchNorm sees in a full batch; null: it has none |
| start | work | its part of the network's work on a batch (pipeline, tensor); null: it has the whole network |
| start | steps | updates, or measurements, of the whole run |
| start | paced | does this rank stand in for a GPU that is not there? |
| start | settings | every setting, as `settings.Settings` names them |
| start | samples_from | of a script that is only watched, how its samples are counted: `batch` (--batch), `loader`, |
| | | `network` (what a DataLoader gave, DDP was called with: first dimension), `framework` (as a callback of |
| | | `integrations` tells them), `unknown`; else null |
| setting | name, value, why | a setting that this rank changed after its `start`, and why |
| step | step, epoch | number of this update over the whole run; the epoch it belongs to |
| step | samples | this rank's since its previous step line: over an epoch and all ranks they add up to the data set |
| step | t_ms | end of the previous step to the end of this one; starts again after an evaluation or checkpoint |
| step | load_ms | until the batch lies on the device, what lies between two steps included |
| step | compute_ms | then until its own last gradient was ready; without a pipeline's bubble, tensor's exchanges |
| step | exposed_ms | then until the summed gradient was there: the wire and the wait for slower ranks |
| step | comm_ms | with a gradient handed over and not yet summed, beside backward, or all exposed; local: exposed |
| step | optim_ms | then until the weights were updated |
| step | bubble_before_ms | in a pipeline, of exposed: the wait for what the stage before sends; else null |
| step | bubble_behind_ms | the same for what the stage behind sends back |
| step | wire_ms | in a pipeline, beside compute: with a message of its own that the kernel had not yet taken whole |
| tasks | step | number of an update, over the whole run, whose marks these are |
| tasks | tasks | rows of task, micro-batch or null, begin, end, arrival and sending: ms since the step began, by the |
| | | rank's own clock. Arrival: of what the task needs from a neighbour; sending: of its result to one; or null |
| tasks | left_out | later rows that did not go into the record |
| step | loss | SUM of the losses of this rank's samples of this step; null in a run with paced ranks |
| step | wall | Unix time at the end of the step |
| epoch | epoch, steps, samples, loss, epoch_s | updates; samples and mean loss over ALL ranks; s since it, or `start` |
| eval | epoch, step | after which epoch and update |
| eval | samples, accuracy, per_class, loss | exact test samples over ALL ranks; 0..1; 0..1 or null each; mean loss |
| eval | eval_s | duration |
| target | epoch, step, samples | the evaluation that reached `target_accuracy`; samples of the whole run before it |
| target | accuracy, total_s | 0..1; since the start of the process |
| collective | step, operation, bytes | number of this measurement; what was measured; bytes of the whole array |
| collective | iterations, time_ms | times measured; median of each one's slowest rank; or 0 and null |
| collective | algbw_gbps, busbw_gbps | decimal Gbit/s, as nccl-tests defines them (see `alpha_beta`) |
| collective | error | why it was not measured, or null |
| link | source, target | ranks, of two hosts; one sends to the other while all else is quiet |
| link | bytes, time_ms, gbps | sent; median; algorithm bandwidth |
| profile | samples, step_ms | of each batch size measured: its samples; median of forward, backward and optimiser |
| profile | lateness | paced: of each size, how late backward ended, as a part of a step (median); else null |
| profile | fixed_ms, sample_ms, worst_error | the line through the largest of those that count (all, or two or more |
| | | that were at most 1 % late); the worst distance from it, as a part |
| profile | largest | samples of the largest batch that counts |
| profile | cap | the most samples that fit into memory at once; null: it was not reached |
| profile | forward_ms, optim_ms | medians at the largest size: of forward, of the optimiser |
| profile | again_samples, again_ms | a size that was measured once more at the end, and what it took then |
| profile | blocks | of a network that is a chain of blocks, what each takes; else, and of a paced rank, null: |
| | | samples, the sizes of micro-batches measured; forward, backward (for inputs) and weights, of each |
| | | block fixed_ms and sample_ms; stretches, timed by themselves; of_whole, all blocks' time at the |
| | | largest size by that of the whole network's forward and backward |
| profile | batch | samples of an update over all ranks, as the settings or the script say |
| profile | network | its blocks: outputs, numbers that leave one for one sample; layers, with the shapes of their |
| | | weights and work, multiplications for one sample; null: it has too many layers, or not 32 bits |
| rebalance | step | the first update with the new shares, over the whole run |
| rebalance | shares, before | samples of a full batch for each rank, from then on and until then |
| rebalance | spread | of the ranks' compute times before, (max - min) / mean |
| checkpoint | step | after which update; written by rank 0 alone |
| checkpoint | name, bytes | of the file; 0 bytes where it could not be written |
| checkpoint | write_ms | for which training stood still; part of no step |
| checkpoint | failure | why it could not be written, else null; the run goes on |
| copy | step, name, bytes, failure | of a checkpoint on a second host, as above; written by the rank that keeps it |
| copy | copy_ms | from the checkpoint's end until it was there; training went on |
| end | status | `succeeded`, `failed` or `interrupted` |
| end | message | one line of what failed, or null |
| end | total_s | since the start of the process |
| end | peak_memory_bytes | allocated on the GPU; paced: what the network would take there; else of the process |
| end | lateness | paced: how late backward ended, as a part of a step (median; a profile: of its latest size that |
| | | counts); else null |
| end | valid | paced: was lateness at most 1 %? Beyond it the CPU was the limit, not the pace; else null |
| end | dropped | lines that could not be written; mostly the disk had no room for them |
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trainer.shared.errors import TrainError

SCHEMA = 1
LATE = 0.01
"""A paced rank whose backward ends later than this part of a step, in the median, had too little CPU for its pace."""

EVENT_FIELDS: dict[str, tuple[str, ...]] = {
    "start": (
        *("schema", "host", "node", "rank", "local_rank", "world_size", "device", "device_name", "torch", "nccl"),
        *("backend", "model", "parameters", "gradient_bytes", "batch_per_rank", "batch_norm_groups", "work", "steps"),
        *("paced", "settings", "samples_from"),
    ),
    "setting": ("name", "value", "why"),
    "step": (
        *("step", "epoch", "samples", "t_ms", "load_ms", "compute_ms", "exposed_ms", "comm_ms", "optim_ms"),
        *("bubble_before_ms", "bubble_behind_ms", "wire_ms", "loss", "wall"),
    ),
    "tasks": ("step", "tasks", "left_out"),
    "epoch": ("epoch", "steps", "samples", "loss", "epoch_s"),
    "eval": ("epoch", "step", "samples", "accuracy", "per_class", "loss", "eval_s"),
    "target": ("epoch", "step", "samples", "accuracy", "total_s"),
    "collective": ("step", "operation", "bytes", "iterations", "time_ms", "algbw_gbps", "busbw_gbps", "error"),
    "link": ("source", "target", "bytes", "time_ms", "gbps"),
    "profile": (
        *("samples", "step_ms", "lateness", "fixed_ms", "sample_ms", "worst_error", "largest", "cap", "forward_ms"),
        *("optim_ms", "again_samples", "again_ms", "blocks", "batch", "network"),
    ),
    "rebalance": ("step", "shares", "before", "spread"),
    "checkpoint": ("step", "name", "bytes", "write_ms", "failure"),
    "copy": ("step", "name", "bytes", "copy_ms", "failure"),
    "end": ("status", "message", "total_s", "peak_memory_bytes", "lateness", "valid", "dropped"),
}

Fields = Callable[[], dict[str, Any]]
"""Of a line that waits."""
_NAMES = {event: frozenset(names) for event, names in EVENT_FIELDS.items()}
_encode = json.JSONEncoder(allow_nan=False).encode  # one for all lines: json.dumps makes one for each

# What whoever reads these files may count on; a script of one's own may write anything.
STEP_COUNTS = ("step", "samples")
"""Whole numbers without which a step line says nothing."""
STAGE_TIMES = ("bubble_before_ms", "bubble_behind_ms", "wire_ms")
"""Of a step in a pipeline; null elsewhere, and absent from older records."""
STEP_TIMES = tuple(name for name in EVENT_FIELDS["step"] if name.endswith("_ms") and name not in STAGE_TIMES)
TASKS = ("forward", "backward", "weights", "sum", "optimiser")
"""What a row of a `tasks` event may be. backward: for what went into the stage; weights: for its own weights, where
these come later; sum: of gradients, over the ranks that hold the same blocks."""
MOST_TASKS = 800
"""Rows of a `tasks` event, so that it fits into a line."""
LARGEST = 1e12
"""No count or duration of a step is larger; a larger one would only overflow the sums."""
LINE_LIMIT = 64 * 2**10
"""Bytes of a line with its newline."""
NOT_FINITE = ".not_finite"
"""What the name of a rank's records and of its mark differ by. `orchestrator/remote/rank.py` reads the mark."""
WITHIN_S = 0.1
"""A step's line is written so long after its end at the latest."""


def process_peak_memory_bytes() -> int:
    """The most memory this process has held, in bytes (Linux counts it in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class MetricsWriter:
    """Appends events to `path`; to nothing where it is None.

    A line goes to the kernel at once, so that a killed process loses none, save where steps follow each other within
    WITHIN_S: their lines go together, beside training, and a killed process loses those of its last WITHIN_S. None is
    fsynced, since that would cost more than a training step. A disk that takes no more never ends a run: its lines are
    dropped and counted, which is said on standard error once, and a line that was cut is completed before the next.
    `peak_memory_bytes` and `lateness` may be replaced once the device is known.
    """

    def __init__(self, path: Path | None) -> None:
        self.peak_memory_bytes: Callable[[], int] = process_peak_memory_bytes
        self.lateness: Callable[[], float | None] = lambda: None
        self._started_s = time.monotonic()
        self._path = path
        self._lock = threading.Lock()  # a second thread writes the last line when the first one hangs
        self._ended = threading.Event()
        self._dropped = 0
        self._waiting: list[Callable[[], bytes]] = []  # lines to be written together
        self._written_s = -math.inf
        self._is_beside = False
        self._rest = b""  # of a line that the disk cut
        self._is_marked = False
        if path:  # an earlier start of this rank may have left a mark
            path.with_name(path.name + NOT_FINITE).unlink(missing_ok=True)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if path else None
        except OSError as error:
            raise TrainError(f"cannot write metrics to {path} (ORCH_METRICS): {error.strerror}") from error

    def write(self, event: str, **fields: Any) -> None:
        """One line; ignores what comes after `end`. Raises ValueError where an event has other fields than its own."""
        _check_names(event, fields)
        if self._file is None:
            return
        line = _line_of(event, fields)
        with self._lock:
            if self._ended.is_set():
                return
            if event == "end":
                self._write_all()
                self._ended.set()
                line = _line_of(event, {**fields, "dropped": self._dropped})
            self._add(event, lambda: line)

    def write_beside(self, event: str, fields: Fields) -> None:
        """The same; the fields are asked for when the line is written, perhaps by another thread. One whose fields
        cannot be had is dropped.
        """
        if self._file is None:
            return
        with self._lock:
            if not self._ended.is_set():
                self._add(event, partial(_asked_line, event, fields))

    def _add(self, event: str, line: Callable[[], bytes]) -> None:
        is_first = not self._waiting  # of those that wait; the others are left to the thread that waits with them
        self._waiting.append(line)
        if event != "step" or (is_first and time.monotonic() >= self._written_s + WITHIN_S):
            self._write_all()
        elif not self._is_beside:
            self._is_beside = True
            threading.Thread(target=self._write_late, daemon=True, name="metrics").start()

    def _write_late(self) -> None:
        """As long as steps wait: they have to stand in the file, too, where the next one hangs."""
        while not self._ended.wait(WITHIN_S):
            with self._lock:
                if not self._waiting:
                    self._is_beside = False
                    return
                self._write_all()

    def _write_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._written_s = time.monotonic()
        lines = [made for line in waiting if (made := self._made(line))]
        try:
            if lines:
                self._append(b"".join(lines))
        except OSError as error:
            self._drop(len(lines), f"cannot write metrics to {self._path}: {error.strerror}")

    def _made(self, line: Callable[[], bytes]) -> bytes:
        try:
            return line()
        except Exception as error:  # whatever it is: the lines beside it are written
            self._drop(1, f"a line of the metrics was left out: {type(error).__name__}: {error}")
            return b""

    def _append(self, lines: bytes) -> None:
        """Raises OSError where nothing of them can be written; the rest of a line that was cut comes before them."""
        assert self._file is not None  # noqa: S101 - for the type checker
        if self._rest:
            self._rest = self._rest[os.write(self._file, self._rest) :]
            if self._rest:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._rest = lines[os.write(self._file, lines) :]

    def _drop(self, lines: int, words: str) -> None:
        is_first = not self._dropped
        self._dropped += lines
        if is_first:
            with contextlib.suppress(OSError):  # standard error may lie on the same disk
                sys.stderr.write(f"{words}; training goes on\n")

    def mark_not_finite(self, step: int, epoch: int, loss: float, of: str) -> bool:
        """Whether this is the first loss of this rank that is not finite. The mark lies beside the records, where the
        host's supervisor looks for it: a job reports it also if nobody reads its records. of: LOSSES.
        """
        if self._is_marked:
            return False
        self._is_marked = True
        if self._path:
            mark = {"step": step, "epoch": epoch, "loss": str(loss), "of": of}
            with contextlib.suppress(OSError):  # a full disk: standard output has it, too
                self._path.with_name(self._path.name + NOT_FINITE).write_text(json.dumps(mark) + "\n")
        return True

    @property
    def total_s(self) -> float:
        """Since the start of the process."""
        return time.monotonic() - self._started_s

    def end(self, status: str, message: str | None = None) -> None:
        """The last line; a second call does nothing."""
        lateness = self.lateness()
        self.write(
            "end",
            status=status,
            message=message,
            total_s=self.total_s,
            peak_memory_bytes=self.peak_memory_bytes(),
            lateness=lateness,
            valid=None if lateness is None else lateness <= LATE,
            dropped=0,  # `write` knows
        )


def _check_names(event: str, fields: Mapping[str, Any]) -> None:
    if fields.keys() != _NAMES[event]:
        raise ValueError(f"{event} has the fields {EVENT_FIELDS[event]}, not {tuple(fields)}")


def _asked_line(event: str, fields: Fields) -> bytes:
    now = fields()
    _check_names(event, now)
    return _line_of(event, now)


def _line_of(event: str, fields: Mapping[str, Any]) -> bytes:
    record = {"event": event, **fields}
    try:
        text = _encode(record)
    except ValueError:  # few records hold what JSON cannot
        text = _encode(_without_nan(record))
    return text.encode() + b"\n"


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return value
