"""The study of the ways to start training on several GPUs, on images of ImageNet's size that are made up."""

from __future__ import annotations

from typing import Any

from orchestrator.studies.rows import Study, StudyRow

_CLOSE, _NOT_CLOSE = "close together", "not among these"


_STRATEGIES = {"dp": "dp", "horovod": "horovod"}


def _row(name: str, label: str, published: str = _CLOSE, amp: str = "none", **more: Any) -> StudyRow:
    settings = {
        "data": "synthetic",
        "samples": "12800",
        "batch": "64",
        "steps": "20",
        "epochs": "1",
        "eval_every": "0",
        "shares": "equal",
        "augment": "none",
        "loader": "workers",
        "strategy": _STRATEGIES.get(name, "ddp"),
        "amp": amp,
    }
    return StudyRow(
        name=name, cells=(label,), exp="resnet50_imagenet", settings=settings, published=(published,), **more
    )


_NO_SLURM = "Slurm starts ranks itself (srun), and orch starts them over SSH"

STARTERS_STUDY = Study(
    title="ResNet-50 on images of 3 x 224 x 224, by the ways to start it on several GPUs of one host",
    source="a survey, on four V100s",
    columns=("way",),
    figures=("samples_per_s", "step_ms", "total_s"),
    published=("published",),
    rows=(
        _row("dp", "DataParallel", _NOT_CLOSE, ranks=1, starter="process", gpus=2),
        _row("launch", "torch.distributed.launch", starter="launch"),
        _row("torchrun", "torchrun", starter="torchrun"),
        _row("spawn", "mp.spawn", starter="spawn"),
        _row("amp", "torchrun and torch.amp, for Apex", amp="fp16", starter="torchrun", gpus=1),
        _row("horovod", "Horovod", starter="torchrun", needs_horovod=True),
        _row("slurm", "Slurm", never=_NO_SLURM),
    ),
    note="The survey gives no figures: it found all but DataParallel close together. Each way takes all ranks of one "
    "host, and trains on images that are made up. Horovod's ranks are started by torchrun. total is from the start of "
    "a rank's process to its end; ranks of mp.spawn are forked where torch is imported already.",
)
