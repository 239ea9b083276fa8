"""Hosts with GPUs and hosts without in one job, over Gloo: nobody waits for ever, whatever the ranks share."""

from __future__ import annotations

import pytest

from tests.cuda.machine import LENET, Host, Job, problems

GPU, CPU, TWO_GPUS, TWO_CPUS = Host(), Host(device="cpu"), Host(2), Host(2, device="cpu")
LIMIT_S = 60  # of a job that takes two: a hang is found after it


@pytest.mark.parametrize("more", [(), ("--fidelity", "half")], ids=["exact", "half"])
@pytest.mark.parametrize(
    "hosts", [(GPU, CPU), (TWO_GPUS, CPU), (GPU, TWO_CPUS)], ids=["one each", "two GPUs", "two CPU ranks"]
)
def test_gpu_and_cpu_hosts_train_together(machine, hosts, more):
    """Ranks of one host add up among themselves first, and 16-bit sums go another way than others: on every rank, or
    none.
    """
    ranks = machine.run(Job((*LENET, "--strategy", "ddp", "--backend", "gloo", *more), hosts, limit_s=LIMIT_S))
    assert not (words := problems(ranks)), words
