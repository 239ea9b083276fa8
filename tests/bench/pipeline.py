"""ResNet-152 trained for real as a pipeline over two hosts: its losses beside one process's, its memory beside ddp's.

    sudo .venv/bin/python tests/bench/pipeline.py [--short] [--stages alpha:0-20,beta:21-51]

Nothing is paced. One process on one host accumulates over the same micro-batches with the same seed: each update's mean
loss should be the pipeline's to the last bits. Memory is that of each rank's process as its kernel counts it: VmRSS,
the median of what was seen after the third update, and VmHWM, its peak. --short: fewer and smaller updates. Exits 1
where a loss differs by more than 1e-5, or where a rank of the pipeline holds more than one of ddp.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rack import ROOT, Rack, rack, show_machine

DISKS = Path("/var/lib/orch-lab")
NODES = ("alpha", "beta")
CLOSE = 1e-5
SETTLED = 3
"""Updates after which a process has all that it will hold."""
MB = 1e6


@dataclass(frozen=True)
class Trained:
    """losses: the mean loss of each update, over all ranks. memory: of each rank, VmRSS and VmHWM in bytes."""

    losses: tuple[float, ...]
    memory: tuple[tuple[int, int], ...]


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--short", action="store_true", help="5 updates of 8 samples, in place of 20 of 16")
    options.add_argument("--stages", default="", help="as the setting; by default the work is divided evenly")
    asked = options.parse_args()
    steps, batch = (5, 8) if asked.short else (20, 16)
    common = {"data": "synthetic", "samples": steps * batch, "batch": batch, "steps": steps, "eval_every": 0}
    common |= {"epochs": 1, "num_workers": 0, "lr": 0.001}
    show_machine()
    with rack(ROOT / "inventory" / "lab_pair.yaml") as lab:
        alone = trained(lab, NODES[:1], strategy="none", accumulate=4, **common)
        piped = trained(lab, NODES, strategy="pipeline", accumulate=4, stages=asked.stages, **common)
        ddp = trained(lab, NODES, strategy="ddp", **common)
    furthest = show_losses(alone, piped)
    show_memory(alone, piped, ddp)
    smaller = all(own < other for own, other in zip(piped.memory, ddp.memory, strict=True))
    return 0 if furthest <= CLOSE and smaller else 1


def trained(lab: Rack, nodes: Sequence[str], **settings: Any) -> Trained:
    """Runs to its end, while the ranks' processes are watched."""
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    only = ["--nodes", ",".join(nodes)]
    job = lab.person.types("run", "--detach", "--exp", "resnet152_cifar", *words, *only).stdout.strip()
    ended = threading.Event()
    seen: dict[int, list[tuple[int, int]]] = {rank: [] for rank in range(len(nodes))}
    watch = threading.Thread(target=watched, args=(lab, job, nodes, ended, seen))
    watch.start()
    try:
        lab.person.types("logs", "-f", "--job", job, timeout_s=900)
    finally:
        ended.set()
        watch.join()
    steps: dict[int, float] = {}
    for rank in range(len(nodes)):
        for line in lines_of(lab, job, rank):
            if line["event"] == "step":
                steps[line["step"]] = steps.get(line["step"], 0.0) + line["loss"] / settings["batch"]
    assert lab.person.job(job)["state"] == "succeeded", f"{job} failed: {lab.person.job(job)}"
    memory = tuple((int(statistics.median(rss for rss, _ in of)), max(peak for _, peak in of)) for of in seen.values())
    return Trained(tuple(loss for _, loss in sorted(steps.items())), memory)


def watched(
    lab: Rack, job: str, nodes: Sequence[str], ended: threading.Event, seen: dict[int, list[tuple[int, int]]]
) -> None:
    """Adds (VmRSS, VmHWM) to each rank's list, again and again, once it has settled."""
    while not ended.wait(0.3):
        for rank, node in enumerate(nodes):
            if sum(line["event"] == "step" for line in lines_of(lab, job, rank)) < SETTLED:
                continue
            pid = lab.person.agent(node, job)["ranks"][str(rank)]["pid"]
            status = lab.lab.host_exec(node, ["cat", f"/proc/{pid}/status"]).stdout
            found = [re.search(rf"{name}:\s+(\d+) kB", status) for name in ("VmRSS", "VmHWM")]
            if found[0] and found[1]:
                seen[rank].append((int(found[0][1]) << 10, int(found[1][1]) << 10))


def lines_of(lab: Rack, job: str, rank: int) -> list[dict[str, Any]]:
    """What a rank has recorded until now."""
    paths = list((DISKS / lab.lab.cluster).glob(f"*/home/lab/.orch/jobs/{job}/rank-{rank}/metrics.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().split("\n")[:-1]]


def show_losses(alone: Trained, piped: Trained) -> float:
    """Gives the largest difference."""
    print("update  one process     pipeline  difference")
    apart = [abs(one - other) for one, other in zip(alone.losses, piped.losses, strict=True)]
    for number, rows in enumerate(zip(alone.losses, piped.losses, apart, strict=True)):
        print("{:6} {:12.7f} {:12.7f} {:11.1e}".format(number, *rows))
    print(f"the furthest: {max(apart):.1e}")
    return max(apart)


def show_memory(alone: Trained, piped: Trained, ddp: Trained) -> None:
    print("resident memory, MB: after an update (peak)")
    for name, run in (("one process", alone), ("pipeline", piped), ("ddp", ddp)):
        cells = [f"{node} {rss / MB:6.0f} ({peak / MB:.0f})" for node, (rss, peak) in zip(NODES, run.memory)]  # noqa: B905 - one process has one node
        print(f"{name:12} {', '.join(cells)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
