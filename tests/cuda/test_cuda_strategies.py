"""Every way to stay together, on NCCL and Gloo, with 1 to 3 ranks, with a rank that has no share: all run, each rank on
its own GPU.
"""

from __future__ import annotations

import pytest

from tests.cuda.machine import Host, Job, problems

LENET = (
    *("--exp", "mnist_lenet", "--data", "synthetic", "--augment", "none", "--eval_every", "0"),
    *("--samples", "48", "--batch", "12", "--steps", "4"),
)
WAYS = {
    "ddp": (),
    "allreduce": (),
    "allreduce_flat": (),
    "reduce_broadcast": (),
    "gather_scatter": (),
    "allgather": (),
    "reduce_scatter": (),
    "parameter_average": (),
    "fsdp": (),
    "ddp half": ("--fidelity", "half"),
    "ddp local": ("--fidelity", "local", "--local_steps", "2", "--local_overlap", "1"),
}
ZERO = "host-0:0=2,host-0:1=1,host-0:2=0"


def job(way: str, backend: str, ranks: int, *more: str) -> Job:
    own = ("--strategy", way.split()[0], *WAYS[way], "--backend", backend)
    return Job((*LENET, *own, *more), hosts=(Host(ranks),))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["nccl"])
@pytest.mark.parametrize("ranks", [1, 2, 3])  # outermost: jobs of as many ranks share their processes
def test_it_runs_and_touches_no_other_gpu(machine, way, backend, ranks):
    assert not problems(machine.run(job(way, backend, ranks)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["nccl"])
def test_a_rank_without_a_share_takes_part(machine, way, backend):
    assert not problems(machine.run(job(way, backend, 3, "--shares", ZERO)))
