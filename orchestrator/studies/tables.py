"""The reference studies as data: rows that can be run again, each beside what was published.

    study = STUDIES["bottlenecks"]
    study.rows[1].settings                          {"strategy": "allreduce", "slow": "rank:1,at:start,ms:1"}
    choose_nodes(study.rows[1], plan.nodes)         {"a2000": 1, "v100": 1}, or the reason why these hosts cannot run it

Published figures are their authors', on their machines: a reference, never a target.
"""

from __future__ import annotations

from orchestrator.results.published import LOADING, MIXED
from orchestrator.studies.mnist import BACKENDS_STUDY, METHODS_STUDY
from orchestrator.studies.rows import Study, StudyRow
from orchestrator.studies.starters import STARTERS_STUDY

_S1_CLUSTERS: dict[str, tuple[tuple[str, int], ...]] = {
    "3090 x 2": (("3090", 2),),
    "A2000 + A2000": (("A2000", 1), ("A2000", 1)),
    "A2000 + V100": (("A2000", 1), ("V100", 1)),
    "A16 + V100": (("A16", 1), ("V100", 1)),
    "A16 + A16 + A2000": (("A16", 2), ("A2000", 1)),
}


_PLAIN = {"lr_schedule": "constant", "lr_warmup": "0", "lr_batch": "0"}
_AS_THEN = {
    "mnist_lenet": {**_PLAIN, "epochs": "10", "lr": "0.02"},
    "resnet152_cifar": {**_PLAIN, "epochs": "30", "lr": "0.05"},
}
"""What rows have in place of an experiment's own recipe, so that they stay as they were: the studies give no rates."""


def _mixed_clusters() -> tuple[StudyRow, ...]:
    return tuple(
        StudyRow(
            name=f"{cluster.replace(' + ', '_').replace(' ', '')}-{strategy}".lower(),
            cells=(cluster, strategy),
            exp="resnet152_cifar",
            settings={
                **_AS_THEN["resnet152_cifar"],
                "strategy": strategy,
                "shares": "equal",
                "steps": "20",
                "eval_every": "0",
            },
            hosts=hosts,
            published=("no time given",),
        )
        for cluster, hosts in _S1_CLUSTERS.items()
        for strategy in ("allreduce", "ddp")
    )


def _bottlenecks() -> tuple[StudyRow, ...]:
    base = {
        **_AS_THEN["mnist_lenet"],
        "samples": "12800",
        "epochs": "1",
        "eval_every": "1",
        "augment": "none",
        "shares": "equal",
    }
    primitives = (
        ("all_reduce", "allreduce", 2, "12.08"),
        ("reduce + broadcast", "reduce_broadcast", 2, "12.25"),
        ("all_reduce", "allreduce", 1, "14.22"),
        ("reduce + broadcast", "reduce_broadcast", 1, "14.71"),
    )
    sleeps = (
        ("1 ms at the start", "start", "1", base, "12.34"),
        ("10 ms at every call", "call", "10", base, "36.61"),
        ("6 s in backward", "backward", "6000", {**base, "steps": "4", "eval_every": "0"}, "unfinished"),
    )
    return (
        *(
            StudyRow(
                name=f"{strategy}-{ranks}",
                cells=(label, str(ranks), "never"),
                exp="mnist_lenet",
                settings={**base, "strategy": strategy},
                ranks=ranks,
                published=(seconds,),
            )
            for label, strategy, ranks, seconds in primitives
        ),
        *(
            StudyRow(
                name=f"sleep-{where}",
                cells=("all_reduce", "2", label),
                exp="mnist_lenet",
                settings={**settings, "strategy": "allreduce", "slow": f"rank:1,at:{where},ms:{ms}"},
                ranks=2,
                published=(seconds,),
            )
            for label, where, ms, settings, seconds in sleeps
        ),
    )


def _input() -> tuple[StudyRow, ...]:
    one = {**_AS_THEN["mnist_lenet"], "strategy": "none", "augment": "affine"}
    workers = tuple(
        StudyRow(
            name=f"workers-{count}",
            cells=(f"workers, num_workers {count}",),
            exp="mnist_lenet",
            settings={**one, "loader": "workers", "num_workers": count},
            ranks=1,
            published=tuple(cells),
        )
        for count, *cells in LOADING.rows
    )
    resident = StudyRow(
        name="resident",
        cells=("resident",),
        exp="mnist_lenet",
        settings={**one, "loader": "resident"},
        ranks=1,
        published=("", "", "", ""),
    )
    return (*workers, resident)


STUDIES: dict[str, Study] = {
    "mixed_clusters": Study(
        title="ResNet-152 on CIFAR-10 over mixed clusters: one all_reduce a parameter, and DDP's buckets",
        source=MIXED.hardware,
        columns=("cluster", "strategy"),
        figures=("samples_per_s", "step_ms", "sync_ms", "efficiency"),
        published=("published",),
        rows=_mixed_clusters(),
        note="The study gives no times. Its claim: DDP's buckets, which travel during backward, beat one all_reduce a "
        "parameter after it.",
    ),
    "bottlenecks": Study(
        title="Collectives, and a rank that sleeps (LeNet on MNIST)",
        source="processes of one host stand for nodes; its number of steps is not given",
        columns=("primitive", "ranks", "rank 1 sleeps"),
        figures=("train_s", "sync_ms", "wait_ms", "accuracy"),
        published=("published s",),
        rows=_bottlenecks(),
        note="Compare the rows with each other: ours are one pass over 12,800 images (the last: 4 updates), the length "
        "of the study's is not known. wait is the largest of all hosts: what a slow rank costs shows up as waiting of "
        "the others. In the study rank 1 sleeps at every aggregation; all_reduce has ten calls an update here, one a "
        "parameter.",
    ),
    "input": Study(
        title="MNIST over ways to load and vary images",
        source="H100, one process, LeNet, 10 epochs, random affine",
        columns=("loader",),
        figures=("load_s", "update_s", "total_s", "accuracy"),
        published=("load (s)", "update (s)", "total (s)", "accuracy"),
        rows=_input(),
    ),
    "mnist_backends": BACKENDS_STUDY,
    "mnist_methods": METHODS_STUDY,
    "ways_to_start": STARTERS_STUDY,
}
