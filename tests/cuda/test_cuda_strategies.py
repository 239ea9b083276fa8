"""Every way to stay together, on NCCL and Gloo, with 1 to 3 ranks, with a rank that has no share: all run, each rank on
its own GPU, with no more calls of CUDA than it needs.
"""

from __future__ import annotations

import functools

import pytest

from tests.cuda.machine import LENET, Host, Job, problems
from trainer.compute.models import build_model
from trainer.shared import AFTER_BACKWARD, gpu_work

WAYS = {
    **dict.fromkeys(("ddp", *AFTER_BACKWARD, "parameter_average", "fsdp", "tensor"), ()),
    "ddp half": ("--fidelity", "half"),
    "ddp local": ("--fidelity", "local", "--local_steps", "2", "--local_overlap", "1"),
    "ddp compressed": ("--fidelity", "compressed", "--compress_after", "0"),
}
JOBS = [
    (way, backend, ranks)
    for ranks in (1, 2, 3)  # outermost: jobs of as many ranks share their processes
    for backend in ("nccl", "gloo")
    for way in WAYS
    if (backend, way) != ("gloo", "fsdp")
]
ZERO = "host-0:0=2,host-0:1=1,host-0:2=0"
# Most kernels and copies on the device, and most collectives, of a step of LeNet; counted with torch 2.15.
MOST_CALLS = {
    "ddp": (57, 1),
    "allreduce": (47, 10),
    "allreduce_flat": (48, 1),
    "reduce_broadcast": (48, 2),
    "gather_scatter": (52, 2),
    "allgather": (49, 2),
    "reduce_scatter": (48, 3),
    "parameter_average": (51, 1),
    "fsdp": (61, 6),
    "tensor": (53, 14),
    "ddp half": (59, 1),
    "ddp local": (59, 1),
    "ddp compressed": (150, 2),
}
MOST_CALLS_OF_OTHERS = (50, 3)
# The host waits for the stream that computes, and reads the loss; nothing for each layer.
MOST_WAITS, MOST_COPIES_TO_HOST = 2, 1
SKIP = 1  # steps in which memory is allocated


@pytest.fixture(scope="module")
def played(machine):
    """played(way, backend, ranks): the ranks of that job, which is played once."""

    def play(way: str, backend: str, ranks: int):
        own = ("--strategy", way.split()[0], *WAYS[way], "--backend", backend)
        return machine.run(Job((*LENET, *own, *(("--shares", ZERO) if ranks == 3 else ())), hosts=(Host(ranks),)))

    return functools.cache(play)


@pytest.mark.parametrize(("way", "backend", "ranks"), JOBS)
def test_it_runs_and_keeps_to_its_gpu(played, way, backend, ranks):
    """With three ranks one has no share, and takes part in every sum."""
    assert not (words := problems(played(way, backend, ranks))), words


@pytest.mark.parametrize("way", WAYS)
def test_it_runs_on_the_process_group_that_torch_had_before_2_15(machine, way):
    own = ("--strategy", way.split()[0], *WAYS[way], "--backend", "nccl")
    assert not (
        words := problems(machine.run(Job((*LENET, *own), hosts=(Host(2),), knobs={"TORCH_DIST_USE_NCCL2": "0"})))
    ), words


@pytest.mark.parametrize("way", WAYS)
def test_a_step_asks_no_more_of_cuda_than_it_needs(played, way):
    launches, collectives = MOST_CALLS.get(way, MOST_CALLS_OF_OTHERS)
    for rank in played(way, "nccl", 2):
        for step in rank.counts(SKIP):
            assert step["launches"] + step["copies_on_device"] <= launches
            assert step["collectives"] <= collectives
            assert step["stream_waits"] <= MOST_WAITS
            assert step["copies_to_host"] <= MOST_COPIES_TO_HOST
            assert not step["device_waits"]


def test_powersgd_starts_as_many_kernels_as_the_plan_charges(played):
    shapes = [parameter.shape for parameter in build_model("lenet", (1, 28, 28), 10).parameters()]
    works = gpu_work.compressing(0, gpu_work.compressed(shapes, rank=2), rank=2)
    compressed, exact = (played(way, "nccl", 2)[0].counts(SKIP)[0] for way in ("ddp compressed", "allreduce_flat"))
    assert compressed["launches"] - exact["launches"] == pytest.approx(sum(work.kernels for work in works), rel=0.05)


def test_fsdp_on_gpus_asks_for_nccl(played):
    (refused,) = played("fsdp", "gloo", 1)
    assert refused.exit_code == 1
    assert "use nccl" in refused.output and "Traceback" not in refused.output
