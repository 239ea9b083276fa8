"""One rank of `python -m trainer` with a small network that has all that a checkpoint must keep: BatchNorm, dropout.

Meant for a fork server, so that torch is imported once for many ranks.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path

from torch import nn

from trainer import __main__, train  # noqa: F401 - train: imported before the fork
from trainer.checkpoints import checkpoint
from trainer.setup import training_task
from trainer.shared import experiments


def small_network(name: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(shape[0], 4, 5, stride=3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
        *(nn.Dropout(0.2), nn.Linear(4 * 8 * 8, classes)),
    )


def write_slowly(path: Path, content: checkpoint.Checkpoint) -> int:
    time.sleep(float(os.environ["WRITE_S"]))
    return write(path, content)


write = checkpoint.write_file


def run_rank(folder: Path, name: str, environment: dict[str, str], arguments: list[str]) -> None:
    """Ends the process with the trainer's exit code; `folder`/`name`.out and .err hold what it printed."""
    os.chdir(folder)
    os.environ.update(environment)
    for stream, ending in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{name}.{ending}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), stream)
    if "WRITE_S" in environment:
        checkpoint.write_file = write_slowly
    if "LENET" not in environment:
        training_task.build_model = small_network
    if "FILE_BYTES" in environment:
        import resource
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write fails, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(environment["FILE_BYTES"]),) * 2)
    experiments.DATA_SETS["mnist"] = dataclasses.replace(experiments.DATA_SETS["mnist"], test_samples=100)
    sys.exit(__main__.main(arguments))
