"""How fast each host reaches each other one, both ways: `measure_links(...)`, the end of a run of `--exp collectives`.

    v100 -> a2000          28.9 ms   2.32 Gbps

One path at a time, while all other ranks wait: what a flat ring or a tree makes of a slow path is left to the planner.
A host's first rank speaks for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations

import torch
import torch.distributed as dist

from trainer.compute.timer import Timer
from trainer.ranks.agreement import agreed
from trainer.shared.alpha_beta import algorithm_gbps
from trainer.shared.metrics import MetricsWriter

LINK_BYTES = 8 << 20
"""27 ms at 2.5 Gbps: many times what a message costs."""
TIMES = 3


def measure_links(
    nodes: Sequence[str], group: dist.ProcessGroup, device: torch.device, timer: Timer, deadline_s: float,
    metrics: MetricsWriter,
) -> None:  # fmt: skip
    """nodes: of each rank. Rank 0 records and says it; after `deadline_s` on any rank's clock the rest is left out."""
    first_ranks = [nodes.index(node) for node in dict.fromkeys(nodes)]
    paths = list(permutations(first_ranks, 2))
    buffer = torch.ones(LINK_BYTES // 4, device=device)
    speaks = dist.get_rank() == 0
    for done, (source, target) in enumerate(paths):
        if agreed([deadline_s - time.monotonic()], dist.ReduceOp.MIN)[0] < 0:
            if speaks:
                print(f"{len(paths) - done} of {len(paths)} paths between hosts left out: budget_s is over", flush=True)
            return
        timed_together(timer, partial(pass_on, buffer[:256], source, target, group))  # sets the connection up
        taken_s = [timed_together(timer, partial(pass_on, buffer, source, target, group)) for _ in range(TIMES)]
        time_s = statistics.median(agreed(taken_s, dist.ReduceOp.MAX))
        gbps = algorithm_gbps(LINK_BYTES, time_s)
        if speaks:
            figures = {"bytes": LINK_BYTES, "time_ms": round(1000 * time_s, 6), "gbps": gbps}
            metrics.write("link", source=source, target=target, **figures)
            print(f"{nodes[source]} -> {nodes[target]}  {1000 * time_s:10.3f} ms  {gbps:7.3f} Gbps", flush=True)


def pass_on(buffer: torch.Tensor, source: int, target: int, group: dist.ProcessGroup) -> None:
    """Nothing to do for all other ranks."""
    if dist.get_rank() == source:
        dist.send(buffer, target, group=group)
    elif dist.get_rank() == target:
        dist.recv(buffer, source, group=group)


# Timing work that all ranks begin at once.


def timed_together(timer: Timer, work: Callable[[], object]) -> float:
    """Seconds of this rank's work, which all ranks begin at once."""
    timer.wait()
    dist.barrier()  # over Gloo, between the hosts' programs
    begin = timer.mark()
    work()
    end = timer.mark()
    timer.wait()
    return timer.ms(begin, end) / 1000
