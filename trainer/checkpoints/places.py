"""Where checkpoints are, and whether there may be any."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoints.file import newest
from trainer.checkpoints.optimizer_state import kinds_of
from trainer.shared.errors import TrainError
from trainer.shared.settings import Settings

if TYPE_CHECKING:
    from trainer.training.run import Run


def folder_of(settings: Settings) -> Path:
    """The person's word, else the job's own folder, else one beside the person."""
    named = settings.checkpoint_dir or os.environ.get("ORCH_CHECKPOINTS") or "checkpoints"
    return Path(named).expanduser().absolute()


def source_of(settings: Settings) -> Path | None:
    """What to go on from: what the person names, and after a restart by torchrun the newest of this very job."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts.isdecimal() and int(restarts) > 0 and settings.checkpoint_every and newest(folder_of(settings)):
        return folder_of(settings)
    return Path(settings.resume).expanduser().absolute() if settings.resume else None


def check_kind(run: Run) -> None:
    """Raises TrainError where this kind of run can have no checkpoints."""
    if run.settings.strategy == "fsdp":
        raise TrainError("checkpoint_every, resume: fsdp keeps the optimiser in pieces; use another strategy for these")
    if not run.learns or run.info.pace:
        raise TrainError("checkpoint_every, resume: a run with paced ranks learns nothing that could be kept")
    if kinds_of(run.optimizer) is None:
        raise TrainError(
            "checkpoint_every, resume: they keep what SGD, Adam and AdamW remember, and would lose that of "
            f"{type(run.optimizer).__name__}; leave them out, or use one of these three"
        )
