"""The metric schema and its writer: one flat JSON object per line, one file per rank. Imports no torch.

    {"event": "start", "schema": 1, "host": "v100", "rank": 0, "world_size": 2, ...}
    {"event": "step", "step": 0, "epoch": 0, "samples": 32, "t_ms": 9.1, "load_ms": 2.0, ...}

Steps and epochs count from 0. Durations are from one host's monotonic clock. NaN and infinity become null.
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
"""A paced rank's backward may end this late, as a part of a step (median); beyond it the CPU was too slow."""

EVENTS: dict[str, dict[str, str]] = {
    "start": {
        "schema": "version of this table, 1",
        "host, node": "host name; the launcher's name for this host (ORCH_NODE), otherwise the host name",
        "rank, local_rank, world_size": "this rank, its number on this host, the number of ranks",
        "device, device_name": "cpu or cuda:0; the device's own name",
        "torch, nccl, backend": "versions (nccl: null without GPUs); the back end for gradients",
        "model, parameters, gradient_bytes": "name; trainable parameters; bytes of a gradient; null: no training",
        "batch_per_rank": "this rank's share of a full batch; null: no training",
        "batch_norm_groups": "[samples, count] of BatchNorm's groups in a full batch; null: no BatchNorm",
        "work": "this rank's part of the network's work per batch (pipeline, tensor); null: the whole network",
        "steps": "updates, or measurements, of the whole run",
        "paced": "whether this rank simulates a GPU",
        "settings": "all settings, as in `settings.Settings`",
        "samples_from": "how a watched script's samples are counted: batch (--batch), loader, network (the first "
        "dimension of a DataLoader's batch that DDP was called with), framework (reported by a callback of "
        "`integrations`), unknown; otherwise null",
    },
    "setting": {"name, value, why": "a setting that this rank changed after its `start`, and why"},
    "step": {
        "step, epoch": "number of this update in the whole run; its epoch",
        "samples": "of this rank since its last step line; the sum over an epoch and all ranks is the data set",
        "t_ms": "since the end of the last step; restarts after an evaluation or checkpoint",
        "load_ms": "until the batch is on the device, with all time between two steps",
        "compute_ms": "then until this rank's last gradient is ready, without a pipeline's bubble, tensor's exchanges",
        "exposed_ms": "then until the summed gradient is there: the network, and waiting for slower ranks",
        "comm_ms": "with gradients handed over but not summed, during backward or exposed; local: exposed",
        "optim_ms": "then until the weights are updated",
        "bubble_before_ms": "the part of exposed_ms spent waiting for the previous stage; null without a pipeline",
        "bubble_behind_ms": "the part of exposed_ms spent waiting for the next stage; null without a pipeline",
        "wire_ms": "with a message that the kernel had not taken completely, during compute; null without a pipeline",
        "loss": "SUM of the losses of this rank's samples of this step (of a watched script without known samples, "
        "0: their mean); null in a run with paced ranks",
        "wall": "Unix time at the end of the step",
    },
    "tasks": {
        "step": "the update of these marks",
        "tasks": "rows of task, micro-batch or null, begin, end, arrival and sending: ms since the step began, on the "
        "rank's clock. Arrival: of input from a neighbour; sending: of the result to a neighbour; or null. With "
        "fidelity=late also forwards of this update before the step, and of the next one, whose micro-batches count on",
        "left_out": "number of later rows that are missing here",
    },
    "epoch": {
        "epoch, steps, samples, loss, epoch_s": "updates; samples and mean loss over ALL ranks; duration without "
        "evaluations",
    },
    "eval": {
        "epoch, step": "the epoch and update before it",
        "samples, accuracy, per_class, loss": "test samples over ALL ranks; 0..1; 0..1 or null per class; mean loss",
        "bits_per_byte": "the loss of text in bits, divided by the test's bytes per token; otherwise null",
        "eval_s": "duration",
    },
    "target": {
        "epoch, step, samples": "the evaluation that reached `target_accuracy`; samples of the whole run before it",
        "accuracy, total_s": "0..1; since the start of the process",
    },
    "collective": {
        "step, operation, bytes": "number of this measurement; its operation; bytes of the whole array",
        "iterations, time_ms": "times measured; median of each one's slowest rank; or 0 and null",
        "algbw_gbps, busbw_gbps": "decimal Gbit/s, as defined by nccl-tests (see `alpha_beta`)",
        "error": "why it was not measured, or null",
    },
    "link": {
        "source, target": "ranks on two hosts; one sends to the other while nothing else is sent",
        "bytes, time_ms, gbps": "sent; median; algorithm bandwidth",
    },
    "profile": {
        "samples, step_ms": "batch sizes; median of forward, backward and optimiser at each",
        "lateness": "paced: per size, how late backward ended, as a part of a step (median); otherwise null",
        "fixed_ms, sample_ms, worst_error": "the line through the largest valid sizes (all, or two or more at most 1 % "
        "late); the largest distance from it, as a part",
        "largest": "samples of the largest valid batch",
        "cap": "the most samples that memory holds at once; null: not reached",
        "forward_ms, optim_ms": "medians at the largest size",
        "again_samples, again_ms": "a size that was measured again at the end, and its time then",
        "blocks": "time of each block of a network that is a chain of blocks (null otherwise, and if paced): samples, "
        "sizes of micro-batches; forward, backward (for inputs) and weights, fixed_ms and sample_ms per block; "
        "stretches, timed by themselves; of_whole, all blocks' time at the largest size as a part of the network's",
        "batch": "samples of an update over all ranks, by the settings or the script",
        "network": "per block: outputs, numbers per sample that leave it; layers, with the shapes of their weights, "
        "work, multiplications per sample, and batch_norm; null: too many layers, or not 32 bits",
    },
    "rebalance": {
        "step": "the first update with the new shares, in the whole run",
        "shares, before": "samples of a full batch per rank, new and old",
        "spread": "of the ranks' compute times before, (max - min) / mean",
    },
    "checkpoint": {
        "step": "the update before it; written by rank 0 only",
        "name, bytes": "of the file; 0 bytes if it could not be written",
        "write_ms": "pause of training, in no step",
        "failure": "why it could not be written, or null; the run continues",
    },
    "copy": {
        "step, name, bytes": "like `checkpoint`, of a copy on a second host; written by the rank that keeps it",
        "copy_ms": "from the checkpoint's end until the copy was complete, during training",
        "failure": "why it could not be written, or null",
    },
    "end": {
        "status": "succeeded, failed or interrupted",
        "message": "one line on the failure, or null",
        "total_s": "since the start of the process",
        "peak_memory_bytes": "allocated on the GPU; paced: predicted for the network; otherwise of the process",
        "lateness": "paced: how late backward ended, as a part of a step (median; a profile: of all valid sizes);  "
        "otherwise null",
        "valid": "paced: whether lateness was at most 1 %, beyond which the CPU was the limit; otherwise null",
        "dropped": "lines that could not be written, mostly because of a full disk",
    },
}
"""The fields of each event and their meaning."""
EVENT_FIELDS = {event: tuple(", ".join(rows).split(", ")) for event, rows in EVENTS.items()}

Fields = Callable[[], dict[str, Any]]
"""The fields of a queued line."""
_NAMES = {event: frozenset(names) for event, names in EVENT_FIELDS.items()}
_encode = json.JSONEncoder(allow_nan=False).encode  # one encoder for all lines: json.dumps makes one per call

# For readers of these files. Scripts may write anything.
STEP_COUNTS = ("step", "samples")
"""Required integers of a step line."""
STAGE_TIMES = ("bubble_before_ms", "bubble_behind_ms", "wire_ms")
"""Null without a pipeline, and missing in older records."""
STEP_TIMES = tuple(name for name in EVENT_FIELDS["step"] if name.endswith("_ms") and name not in STAGE_TIMES)
TASKS = ("forward", "backward", "weights", "sum", "optimiser")
"""backward: for the stage's inputs; weights: for its own weights, if computed later; sum: of gradients over the ranks
with the same blocks.
"""
MOST_TASKS = 800
"""Rows of a `tasks` event, to fit into a line."""
LARGEST = 1e12
"""Upper bound of a step's counts and durations, to avoid overflow in sums."""
LINE_LIMIT = 64 * 2**10
"""Bytes with the newline."""
NOT_FINITE = ".not_finite"
"""Suffix of the mark's file name. `orchestrator/remote/rank.py` reads it."""
WITHIN_S = 0.1
"""Longest delay of a step's line."""


def process_peak_memory_bytes() -> int:
    """Linux counts in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class MetricsWriter:
    """Appends events to `path`, or to nothing if it is None.

    `peak_memory_bytes` and `lateness` may be replaced once the device is known.
    """

    # A line goes to the kernel at once, except for steps less than WITHIN_S apart, which a thread writes together: a
    # killed process loses at most these. No line is fsynced, which would cost more than a step. A full disk never ends
    # a run: lines are dropped and counted, with one warning, and a cut line is completed before the next.

    def __init__(self, path: Path | None) -> None:
        self.peak_memory_bytes: Callable[[], int] = process_peak_memory_bytes
        self.lateness: Callable[[], float | None] = lambda: None
        self._started_s = time.monotonic()
        self._path = path
        self._lock = threading.Lock()  # a second thread writes the last line if the first one hangs
        self._ended = threading.Event()
        self._dropped = 0
        self._waiting: list[Callable[[], bytes]] = []  # to be written together
        self._written_s = -math.inf
        self._is_beside = False
        self._rest = b""  # rest of a line that the disk cut
        self._is_marked = False
        if path:  # an earlier start of this rank may have left a mark
            path.with_name(path.name + NOT_FINITE).unlink(missing_ok=True)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if path else None
        except OSError as error:
            raise TrainError(f"cannot write metrics to {path} (ORCH_METRICS): {error.strerror}") from error

    def write(self, event: str, **fields: Any) -> None:
        """Ignored after `end`. Raises ValueError if the fields are not the event's."""
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
        """Calls `fields` when the line is written, perhaps in another thread. If that fails, the line is dropped."""
        if self._file is None:
            return
        with self._lock:
            if not self._ended.is_set():
                self._add(event, partial(_asked_line, event, fields))

    def _add(self, event: str, line: Callable[[], bytes]) -> None:
        is_first = not self._waiting  # later lines wait for the thread
        self._waiting.append(line)
        if event != "step" or (is_first and time.monotonic() >= self._written_s + WITHIN_S):
            self._write_all()
        elif not self._is_beside:
            self._is_beside = True
            threading.Thread(target=self._write_late, daemon=True, name="metrics").start()

    def _write_late(self) -> None:
        # Steps must reach the file even if the next one hangs.
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
        except Exception as error:  # the other lines are written anyway
            self._drop(1, f"a line of the metrics was left out: {type(error).__name__}: {error}")
            return b""

    def _append(self, lines: bytes) -> None:
        """Writes the rest of a cut line first. Raises OSError if nothing can be written."""
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
            with contextlib.suppress(OSError):  # standard error may be on the same disk
                sys.stderr.write(f"{words}; training goes on\n")

    def mark_not_finite(self, step: int, epoch: int, loss: float, of: str) -> bool:
        """Returns whether this is the rank's first non-finite loss. of: LOSSES."""
        # The host's supervisor reads the mark next to the records, so a job reports it even if no program reads its
        # records.
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
        """Writes the last line, once."""
        lateness = self.lateness()
        self.write(
            "end",
            status=status,
            message=message,
            total_s=self.total_s,
            peak_memory_bytes=self.peak_memory_bytes(),
            lateness=lateness,
            valid=None if lateness is None else lateness <= LATE,
            dropped=0,  # `write` sets it
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
    except ValueError:  # few records contain NaN or infinity
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
