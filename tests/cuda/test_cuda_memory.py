"""What a profile makes of a GPU's memory."""

from __future__ import annotations

from tests.cuda.machine import Job, problems

PROFILE = ("--exp", "resnet152_cifar", "--data", "synthetic", "--loader", "workers", "--batch", "2048")
SLOW_KERNEL_US = 2000  # so that a size is not measured fifteen times


def profile(machine, *more, **knobs):
    (rank,) = ranks = machine.run(Job((*PROFILE, "--profile_s", "300", *more), knobs=knobs))
    assert not problems(ranks)
    (found,) = rank.rows("profile")
    return rank, found


def test_memory_that_was_too_little_for_one_batch_is_there_for_the_next(machine):
    """The most samples that fit lie between two sizes that were tried, and memory returns to what a run needs."""
    _, found = profile(machine, FAKE_GIB=6, FAKE_KERNEL_US=SLOW_KERNEL_US)
    cap = found["cap"]
    assert cap & (cap - 1), f"{cap} samples are a power of two: whatever was tried beyond it found no memory"
    assert max(found["samples"]) < cap < 2 * max(found["samples"])


def test_a_workspace_that_finds_no_memory_is_a_batch_that_does_not_fit(machine):
    """cuDNN's own words for it are that it is "unable to find an engine"."""
    _, found = profile(machine, FAKE_GIB=6, FAKE_WS_MIB=64, FAKE_KERNEL_US=SLOW_KERNEL_US)
    assert found["cap"]
