"""The two studies of MNIST that compare back ends, and ways to start."""

from __future__ import annotations

from orchestrator.planning.starters import Starter
from orchestrator.results.published import BACKENDS, METHODS
from orchestrator.studies.rows import Study, StudyRow

_BATCH = 64


def _backends() -> tuple[StudyRow, ...]:
    published = {(name, ranks): cells for name, ranks, *cells in BACKENDS.rows}
    return tuple(
        StudyRow(
            name=f"{name.lower()}-{ranks}",
            cells=(name, str(ranks)),
            exp="mnist_lenet",
            settings={
                "backend": name.lower(),
                "batch": str(_BATCH * ranks),
                "strategy": "ddp",
                "shares": "equal",
                "augment": "none",
            },
            ranks=ranks,
            gpus=int(name == "NCCL"),
            against=f"{name.lower()}-1",
            published=tuple(published.get((name, str(ranks)), ("", "", ""))),
        )
        for name in ("NCCL", "Gloo")
        for ranks in (1, 2, 4, 8)
    )


_DATA_PARALLEL, _DDP = "DataParallel, 8 GPUs", "DDP, 8 processes, num_workers 4"


def _methods() -> tuple[StudyRow, ...]:
    return (
        _method("one-0", "one process", 1, 0, "none", "process", "one process, num_workers 0"),
        _method("one-4", "one process", 1, 4, "none", "process", "one process, num_workers 4"),
        _method("dp", "DataParallel", 1, 4, "dp", "process", _DATA_PARALLEL, gpus=2),
        _method("ddp-1-0", "DDP", 1, 0, "ddp", None, "DDP with 1 process, num_workers 0"),
        _method("ddp-1-4", "DDP", 1, 4, "ddp", None, "DDP with 1 process, num_workers 4"),
        _method("ddp-8", "DDP", 8, 4, "ddp", None, _DDP),
        _method("ddp-2", "DDP", 2, 4, "ddp", None),
        _method("spawn", "DDP, by mp.spawn", 2, 4, "ddp", "spawn"),
        _method("torchrun", "DDP, by torchrun", 2, 4, "ddp", "torchrun"),
        _method("launch", "DDP, by torch.distributed.launch", 2, 4, "ddp", "launch"),
    )


def _method(
    name: str,
    label: str,
    ranks: int,
    workers: int,
    strategy: str,
    starter: Starter | None,
    published_as: str = "",
    gpus: int = 0,
) -> StudyRow:
    """published_as: the study's name of it; "" where it has no such row."""
    published = {method: (seconds, accuracy) for method, accuracy, seconds in METHODS.rows}
    return StudyRow(
        name=name,
        cells=(label, str(ranks), str(workers)),
        exp="mnist_lenet",
        settings={
            "strategy": strategy,
            "batch": str(_BATCH),
            "shares": "equal",
            "augment": "affine",
            "loader": "workers",
            "num_workers": str(workers),
        },
        ranks=ranks,
        gpus=gpus,
        starter=starter,
        published=published.get(published_as, ("", "")),
    )


BACKENDS_STUDY = Study(
    title="MNIST over ranks and back ends",
    source=BACKENDS.hardware,
    columns=("back end", "ranks"),
    figures=("total_s", "accuracy"),
    published=("published s", "published speed-up", "published accuracy"),
    rows=_backends(),
    note="Each rank has 64 samples of an update, at one learning rate for all rows. speed-up: the time of one rank of "
    f"the same back end by this row's. {BACKENDS.note}",
)

METHODS_STUDY = Study(
    title="MNIST by one process, DataParallel and DDP, however it is started",
    source=METHODS.hardware,
    columns=("method", "processes", "num_workers"),
    figures=("total_s", "epoch_s", "accuracy"),
    published=("published s", "published accuracy"),
    rows=_methods(),
    note="Each update has 64 samples over all processes. DDP by itself is started by orch. How many loader processes "
    f"the study's DataParallel had is not given; here it has 4. {METHODS.note}",
    shows_learning=True,
)
