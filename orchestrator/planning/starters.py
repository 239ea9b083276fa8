"""Who starts the ranks of a host in place of orch: the command that a person would type there. Pure.

    started_by("spawn", ("-m", "trainer", "--exp=mnist_lenet"), 2)
    # ("-m", "trainer", "--exp=mnist_lenet", "--spawn=2")

One process of orch's stands for all ranks of the host, which meet at a store of their own on it.
"""

from __future__ import annotations

from typing import Literal

Starter = Literal["process", "spawn", "torchrun", "launch"]
_MODULES = {"torchrun": "torch.distributed.run", "launch": "torch.distributed.launch"}


def started_by(starter: Starter, command: tuple[str, ...], ranks: int) -> tuple[str, ...]:
    """Arguments after the interpreter. command: the trainer's; ranks: the host's. A `process` is one rank alone."""
    if starter == "process":
        return command
    if starter == "spawn":
        return (*command, f"--spawn={ranks}")
    return ("-m", _MODULES[starter], "--standalone", f"--nproc-per-node={ranks}", *command)
