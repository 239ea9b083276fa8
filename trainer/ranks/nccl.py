"""What has to be right before gradients travel by NCCL: one version on all ranks, and a first sum that ends.

    words = unlike([f"{version()} {node}", ...])       # "" or what is wrong, from every rank's line
    ended = first_sum(group, device, limit_s=60)       # False: NCCL waits for something that will not come
    words = stuck([rank_line(ended, 2, node), ...])

NCCL before 2.23.4 does not compare versions, and what it cannot do (reach the memory of another GPU behind an IOMMU,
send over an interface that leads nowhere) it does by waiting, for as long as the process group allows: ten minutes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist

FIRST_SUM_S = 60.0
A_RANK_S = 0.2
"""Meeting takes longer in large jobs."""


def version() -> str | None:
    """The version of the NCCL library that is loaded; None where this torch was built without."""
    return ".".join(str(part) for part in torch.cuda.nccl.version()) if dist.is_nccl_available() else None


def unlike(lines: Sequence[str]) -> str:
    """lines: each rank's version and node. "" where the versions are the same, else which node has which."""
    nodes = dict[str, list[str]]()
    for line in lines:
        found, _, node = line.partition(" ")
        nodes.setdefault(found, []).append(node)
    if len(nodes) < 2:
        return ""
    versions = "; ".join(f"{found} on {', '.join(dict.fromkeys(names))}" for found, names in nodes.items())
    return f"NCCL must be the same on all ranks, and is not ({versions}): install one build of torch everywhere"


def patience_s(ranks: int) -> float:
    """How long the first sum of so many ranks may take."""
    return max(FIRST_SUM_S, A_RANK_S * ranks)


def first_sum(group: dist.ProcessGroup, device: torch.device, limit_s: float) -> bool:
    """Adds up one element over all ranks; whether that ended in time. Raises what torch raises.

    In a thread of its own: who waits in NCCL hears nothing, not even the clock.
    """
    failures: list[BaseException] = []

    def add_up() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            one = torch.ones(1, device=device)
            dist.all_reduce(one, group=group)
            one.item()  # waits for the device
        except BaseException as error:
            failures.append(error)

    adding = threading.Thread(target=add_up, daemon=True)
    adding.start()
    adding.join(limit_s)
    if failures:
        raise failures[0]
    return not adding.is_alive()


def rank_line(ended: bool, ranks_here: int, node: str) -> str:
    return f"{'ended' if ended else 'waits'} {ranks_here} {node}"


def stuck(lines: Sequence[str]) -> str:
    """lines: each rank's `rank_line`. "" where the sum ended on all, else on whom it did not, and what to try."""
    ranks = [line.split(" ", 2) for line in lines]
    waiting = [f"{rank} ({node})" for rank, (state, _, node) in enumerate(ranks) if state == "waits"]
    if not waiting:
        return ""
    shown = ", ".join(waiting[:8]) + (f" and {len(waiting) - 8} more" if len(waiting) > 8 else "")
    seen = f"a first sum of one number over NCCL did not end within {patience_s(len(ranks)):g} s on rank {shown}"
    if any(int(here) > 1 for _, here, _ in ranks):
        advice = "the GPUs of a host may not reach each other's memory (IOMMU, a split board): try NCCL_P2P_DISABLE=1"
    else:
        advice = "the hosts may not reach each other as NCCL tries to: look at NCCL_SOCKET_IFNAME, or NCCL_IB_DISABLE=1"
    return f"{seen}; {advice} in the environment, and NCCL_DEBUG=INFO shows how far it came"
