"""What the metrics of a watched script say of it: who the rank is, what it trains, what each step took.

start_fields(torch, environment, optimizer, network, "loader")
step_times(step, clock, alone=False)
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from .step_clock import Clock
from .step_course import TakenStep

SCHEMA = 1
CLOCKED = ("load", "compute", "exposed", "optim")


def start_fields(
    torch: Any, environment: Mapping[str, str], optimizer: Any, network: str | None, samples_from: str
) -> dict[str, Any]:
    """network: the name of the class that is trained, where it is known."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]
    device = weights[0].device if weights else torch.device("cpu")
    on_gpu, met = device.type == "cuda", torch.distributed.is_available() and torch.distributed.is_initialized()
    host = socket.gethostname()
    return {
        "schema": SCHEMA,
        "host": host,
        "node": environment.get("ORCH_NODE") or host,
        "rank": int(environment.get("RANK", 0)),
        "local_rank": int(environment.get("LOCAL_RANK", 0)),
        "world_size": int(environment.get("WORLD_SIZE", 1)),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "torch": str(torch.__version__),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "backend": torch.distributed.get_backend() if met else None,
        "model": network,
        "parameters": sum(weight.numel() for weight in weights),
        "gradient_bytes": sum(weight.numel() * weight.element_size() for weight in weights),
        "batch_per_rank": int(environment["ORCH_SHARE"]) if "ORCH_SHARE" in environment else None,
        "paced": False,
        "settings": {},
        "samples_from": samples_from,
    }


def step_times(step: TakenStep, clock: Clock, *, alone: bool) -> dict[str, float]:
    """In milliseconds, as a `step` record names them. alone: is there no other rank to exchange gradients with?

    Where they are exchanged in a way that is not seen, what of the time went to that is not known either.
    """
    spent_ms = dict.fromkeys(CLOCKED, 0.0)
    for part, begin, end in step.stretches:
        spent_ms[part] += clock.ms(begin, end)
    known = CLOCKED if alone or step.exchanged else ("load",)
    parts = {f"{part}_ms": round(spent_ms[part], 3) for part in known}
    return {"t_ms": round(sum(spent_ms.values()), 3), **parts}


def cpu_name() -> str:
    """As the kernel calls it; `cpu` where it does not say."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "cpu")
    except OSError:
        return "cpu"
