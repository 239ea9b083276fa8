"""How ranks begin on NCCL: what is not the same on all of them, and a first sum that never ends, are said at once."""

from __future__ import annotations

import pytest

from tests.cuda.machine import LENET, Host, Job


def job(prelude: str) -> Job:
    command = (*LENET, "--strategy", "ddp", "--backend", "nccl")
    return Job(command, hosts=(Host(1), Host(1)), prelude=f"tests.cuda.test_cuda_start:{prelude}", limit_s=60)


def another_library_on_rank_1() -> None:
    import os

    import torch

    if os.environ["RANK"] == "1":
        torch.cuda.nccl.version = lambda: (2, 14, 3)


def rank_1_stays_away() -> None:
    """Rank 0 waits inside NCCL for a communicator that will not come about."""
    import os

    from trainer.ranks import process_group

    process_group.FIRST_SUM_S = 2.0
    if os.environ["RANK"] == "1":
        process_group.first_sum = lambda *_: True


@pytest.mark.parametrize(
    ("prelude", "words"),
    [
        ("another_library_on_rank_1", ("NCCL must be the same on all ranks", "2.14.3 on host-1", "one build of torch")),
        ("rank_1_stays_away", ("did not end within 2 s on rank 0 (host-0); ", "NCCL_IB_DISABLE=1")),
    ],
)
def test_every_rank_ends_with_one_clear_message(machine, prelude, words):
    for rank in machine.run(job(prelude)):
        assert rank.exit_code == 1, rank.output
        assert all(part in rank.output for part in words), rank.output
        assert "Traceback" not in rank.output
