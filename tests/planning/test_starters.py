"""A host's ranks started by what a person would type there: the plan has one process for all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.planning import started_by
from tests.support.plans import RESNET, host, node, plan

TRAINER = ("-m", "trainer", "--exp=mnist_lenet")


@pytest.mark.parametrize(
    ("starter", "typed"),
    [
        ("process", "-m trainer --exp=mnist_lenet"),
        ("spawn", "-m trainer --exp=mnist_lenet --spawn=2"),
        ("srun", "-m trainer --exp=mnist_lenet --srun=2"),
        ("torchrun", "-m torch.distributed.run --standalone --nproc-per-node=2 -m trainer --exp=mnist_lenet"),
        ("launch", "-m torch.distributed.launch --standalone --nproc-per-node=2 -m trainer --exp=mnist_lenet"),
    ],
)
def test_each_starter_is_the_command_that_a_person_types(starter, typed):
    assert " ".join(started_by(starter, TRAINER, 2)) == typed


def test_the_plan_has_one_process_for_all_ranks_of_the_host():
    made = plan([node(41)], {"n41": host(41, gpus=4)}, replace(RESNET, starter="spawn"))
    (here,) = made.nodes
    assert (here.starts_ranks, here.ranks, made.world_size) == (True, 4, 4)
    assert here.torchrun[here.torchrun.index("--nproc-per-node") + 1] == "1"
    assert here.command[-1] == "--spawn=4"
    assert len(here.gpu_uuids) == 4
