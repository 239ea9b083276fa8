"""Before gradients travel by NCCL: one version on all ranks, and a first sum that ends. Real ranks, over Gloo."""

import pytest
import torch
import torch.distributed as dist

from tests.support.gloo_ranks import group_of
from trainer.ranks import process_group


def sums(rank, who):
    """who: the ranks that take part now; rank 0 waits no longer than it takes to see that nobody comes."""
    limit_s = 0.5 if who == (0,) else 30.0
    return process_group.first_sum(group_of(2), torch.device("cpu"), limit_s) if rank in who else None


def test_a_sum_that_waits_for_somebody_is_seen_and_waited_for_no_longer(gang):
    assert gang.run(sums, (0, 1))[:2] == [True, True]
    assert gang.run(sums, (0,))[0] is False
    assert gang.run(sums, (1,))[1] is True  # rank 0 waits for it in its thread still


def raises(rank, _):
    """A group that this rank does not belong to."""
    others = dist.new_group([0])
    try:
        return process_group.first_sum(others, torch.device("meta"), 30.0) if rank == 0 else None
    except Exception as error:
        return type(error).__name__


def test_what_torch_raises_is_raised_where_it_can_be_caught(gang):
    assert gang.run(raises, None)[0].endswith("Error")


def test_unequal_versions_are_reported_by_node_and_equal_ones_are_not():
    assert process_group.unlike(["2.27.5 a", "2.27.5 a", "2.27.5 b"]) == ""
    words = process_group.unlike(["2.27.5 a", "2.27.5 a", "2.29.3 b"])
    assert "2.27.5 on a; 2.29.3 on b" in words and "one build of torch" in words


@pytest.mark.parametrize(
    ("here", "advice"), [((2, 2, 1), "NCCL_P2P_DISABLE=1"), ((1, 1, 1), "NCCL_SOCKET_IFNAME, or NCCL_IB_DISABLE=1")]
)
def test_a_first_sum_without_end_names_the_ranks_and_what_to_try(here, advice):
    lines = [process_group.rank_line(rank == 2, count, f"host {rank}") for rank, count in enumerate(here)]
    words = process_group.stuck(lines)
    assert "did not end within 60 s on rank 0 (host 0), 1 (host 1); " in words
    assert advice in words
    assert process_group.stuck([process_group.rank_line(True, count, "a") for count in here]) == ""


def test_many_ranks_are_counted_and_get_longer():
    words = process_group.stuck([process_group.rank_line(False, 1, "a")] * 1000)
    assert words.count("(a)") == 8 and "and 992 more" in words and "within 200 s" in words


def test_the_version_is_that_of_the_library_that_torch_loads():
    has_nccl = torch.distributed.is_nccl_available()
    assert (process_group.version() is not None) == has_nccl
    assert not has_nccl or process_group.version().count(".") == 2
