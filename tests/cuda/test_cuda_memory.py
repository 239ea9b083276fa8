"""What a profile makes of a GPU's memory."""

from __future__ import annotations

import pytest

from tests.cuda.machine import Job, problems

PROFILE = ("--exp", "mnist_lenet", "--data", "synthetic", "--loader", "workers", "--batch", "65536")
KNOBS = {"FAKE_GIB": 0.5, "FAKE_KERNEL_US": 20000}  # a slow GPU, so that no size is measured fifteen times


def profile(machine, **knobs):
    (rank,) = ranks = machine.run(Job((*PROFILE, "--profile_s", "200"), knobs={**KNOBS, **knobs}))
    assert not (words := problems(ranks)), words
    (found,) = rank.rows("profile")
    return found


@pytest.fixture(scope="module")
def plain(machine):
    """The profile of a GPU whose convolutions need no workspace."""
    return profile(machine)


def test_memory_that_was_too_little_for_one_batch_is_there_for_the_next(plain):
    """The most samples that fit lie between two sizes that were tried."""
    cap, largest = plain["cap"], max(plain["samples"])
    assert cap & (cap - 1), f"{cap} samples are a power of two: whatever was tried beyond it found no memory"
    assert largest < cap < 2 * largest


def test_a_workspace_that_finds_no_memory_is_a_batch_that_does_not_fit(machine, plain):
    """cuDNN's own words for it are that it is "unable to find an engine". 200 MiB: what fits is found to a sixteenth,
    and a step has other peaks of memory than its convolutions, so that a smaller workspace makes no difference.
    """
    cap = profile(machine, FAKE_WS_MIB=200)["cap"]
    assert plain["cap"] / 2 < cap < plain["cap"]


def test_blocks_are_timed_on_the_gpus_own_time_line(plain):
    """Every kernel takes 20 ms here, whatever the samples: what there is is fixed, but where torch adds up larger
    gradients with more kernels.
    """
    blocks = plain["blocks"]
    assert (blocks["samples"][0], blocks["samples"][-1]) == (8, max(plain["samples"]))
    assert (len(blocks["samples"]), blocks["stretches"]) == (3, 2)
    for task in ("forward", "backward", "weights"):
        for fixed_ms, sample_ms in blocks[task]:
            assert fixed_ms >= 20
            whole_kernels = pytest.approx((20 * round(fixed_ms / 20), 0), abs=1e-4)
            assert task == "backward" or (fixed_ms, sample_ms) == whole_kernels
