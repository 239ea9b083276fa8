"""One rank of jobs on the stand-in: the trainer as it is, with every record's counters beside it.

`time` in the trainer's modules is the stand-in's virtual clock on ranks with a GPU, so that what they measure on the
host and what on the GPU is one time.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from trainer.__main__ import main
from trainer.compute import graphs
from trainer.ranks import ending
from trainer.shared import MetricsWriter

_LIBRARY = ctypes.CDLL(None)  # preloaded
_LIBRARY.standin_now.restype = ctypes.c_double
_LIBRARY.standin_spend.argtypes = [ctypes.c_double]
_LIBRARY.standin_counter_names.restype = ctypes.c_char_p
_LIBRARY.standin_used_bytes.restype = ctypes.c_size_t
_MOST_GPUS = 16


class VirtualTime:
    """In place of the module `time`. A pause is work of the host's here: it takes no real time."""

    perf_counter = monotonic = staticmethod(_LIBRARY.standin_now)
    sleep = staticmethod(_LIBRARY.standin_spend)
    time = staticmethod(time.time)


def counts() -> dict[str, int]:
    """What this process has asked of CUDA so far."""
    names = _LIBRARY.standin_counter_names().decode().split()
    values = (ctypes.c_long * len(names))()
    _LIBRARY.standin_counts(values)
    return dict(zip(names, values, strict=True))


def contexts() -> set[int]:
    return {gpu for gpu in range(_MOST_GPUS) if _LIBRARY.standin_context(gpu)}


def be(
    shape: dict[str, Any], environment: dict[str, str], jobs: int, answers: int, not_ours: Sequence[int]
) -> NoReturn:
    """Plays one job after another; a job that ends badly ends the process with its exit code."""
    for descriptor in not_ours:
        os.close(descriptor)
    os.environ.update({**environment, **{name: str(value) for name, value in shape["knobs"].items()}})
    if environment["DEVICE"] == "cuda":
        _use_virtual_time()
    ending.leave = _leave
    if shape["prelude"]:
        module, _, name = shape["prelude"].partition(":")
        getattr(importlib.import_module(module), name)()
    with open(jobs) as lines:
        for line in lines:
            _play(json.loads(line))
            os.write(answers, b".")
    os._exit(0)


class Done(BaseException):
    """In place of the process's end."""


def _leave(exit_code: int) -> NoReturn:
    if exit_code == 0:
        raise Done
    _end(exit_code)


def _end(exit_code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _play(job: dict[str, Any]) -> None:
    number, device = os.environ["RANK"], os.environ["DEVICE"]
    os.environ["MASTER_PORT"] = str(job["port"])
    _write_into(Path(job["folder"], f"{number}.out"))
    _record_into(Path(job["folder"], f"{number}.events"))
    faulthandler.dump_traceback_later(0.9 * job["limit_s"])  # a job that hangs says where
    try:
        _end(main([*job["arguments"], "--device", device]))
    except Done:
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
        _end(70)


def draw_no_weights() -> None:
    """Nobody looks at a number here, and to draw ResNet-152's 60 million first weights takes seconds."""
    for name in ("uniform_", "normal_", "kaiming_uniform_", "kaiming_normal_"):
        setattr(torch.nn.init, name, lambda tensor, *_, **__: tensor)


def compare_no_numbers() -> None:
    """Nothing is computed here: replays and plain passes leave whatever their memory held before."""
    graphs.why_inexact = lambda far, apart: ""


def _write_into(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _use_virtual_time() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("trainer.") and getattr(module, "time", None) is time:
            module.time = VirtualTime


_write = MetricsWriter.write


def _record_into(path: Path) -> None:
    """Every record of the trainer's goes there as well, with the counters as they stand."""
    file, before = path.open("a", buffering=1), contexts()
    own = {int(os.environ["LOCAL_RANK"])} if os.environ["DEVICE"] == "cuda" else set[int]()

    def record(self: MetricsWriter, event: str, **fields: Any) -> None:
        _write(self, event, **fields)
        more = {"counts": counts(), "foreign": sorted(contexts() - before - own), "now_s": _LIBRARY.standin_now()}
        more["used_bytes"] = _LIBRARY.standin_used_bytes(torch.cuda.current_device() if own else 0)
        file.write(json.dumps({"event": event, **fields, **more}) + "\n")

    MetricsWriter.write = record
