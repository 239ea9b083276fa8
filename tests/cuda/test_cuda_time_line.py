"""ResNet-152 on the time line: what each way to stay together costs beside computing, at links of 2.5 and 20 Gbps.

One step takes a GPU about 100 ms here, launched by a host that needs 24 ms for it. The gradient's 233 MB take 745 ms
at 2.5 Gbps and 93 ms at 20. On the virtual clock these figures are the same on any machine, however busy.
"""

from __future__ import annotations

import functools
import statistics

import pytest

from tests.cuda.machine import Host, Job, problems

RESNET = (
    *("--exp", "resnet152_cifar", "--data", "synthetic", "--augment", "none", "--eval_every", "0"),
    *("--samples", "512", "--batch", "8", "--lr", "0.0001"),
)
KERNEL_US = 75
SLOW_GBPS, FAST_GBPS = 2.5, 20
PAIR = (Host(), Host())
DDP = ("--strategy", "ddp", "--bucket_mib", "25")
SKIP = 3  # steps in which memory is allocated, DDP finds out the order of gradients, and a CUDA graph is captured
# Of each job, its arguments, and how fast its link is.
JOBS = {
    "ddp": ((*DDP, "--steps", "6"), SLOW_GBPS),
    "half": ((*DDP, "--fidelity", "half", "--steps", "6"), SLOW_GBPS),
    "ddp, fast": ((*DDP, "--steps", "6"), FAST_GBPS),
    "local": (("--fidelity", "local", "--local_steps", "3", "--local_overlap", "1", "--steps", "8"), SLOW_GBPS),
}
# At most so often in a step, as counted with torch 2.15 on 2026-11-22. CUDA graphs spare the host nearly all of a plain
# step's 1,356 launches. DDP's own logger waits eight times in each of its first ten steps.
MOST_LAUNCHES, MOST_GRAPHS, MOST_COLLECTIVES, MOST_EVENT_WAITS, MOST_COPIES_TO_HOST = 11, 26, 9, 9, 1
RECEIVES = {3, 6}  # local's steps that take over an average: one after each third


def play(machine, arguments, hosts, link_gbps):
    job = Job((*RESNET, *arguments), hosts, {"FAKE_KERNEL_US": KERNEL_US, "FAKE_LINK_GBPS": link_gbps})
    ranks = machine.run(job)
    assert not (words := problems(ranks)), words
    return ranks


@pytest.fixture(scope="module")
def alone(machine):
    """Milliseconds of computing in a step by itself."""
    (rank,) = play(machine, ("--strategy", "none", "--steps", "6"), (Host(),), SLOW_GBPS)
    return statistics.median(rank.times("compute_ms", SKIP))


@pytest.fixture(scope="module")
def played(machine):
    """played(name): the ranks of that job, which is played once."""
    return functools.cache(lambda name: play(machine, JOBS[name][0], PAIR, JOBS[name][1]))


def wire_ms(rank, link_gbps, bits=32):
    """Of one gradient between two ranks: each sends and receives it once."""
    (start,) = rank.rows("start")
    return 1000 * 8 * start["gradient_bytes"] * bits / 32 / (1e9 * link_gbps)


@pytest.mark.parametrize("name", JOBS)
def test_computing_takes_as_long_as_alone(played, alone, name):
    """The wire is never counted as computing: shares and stragglers are judged by it."""
    for rank in played(name):
        assert rank.times("compute_ms", SKIP) == pytest.approx([alone] * len(rank.times("t_ms", SKIP)), rel=0.05)


@pytest.mark.parametrize(("name", "bits"), [("ddp", 32), ("half", 16), ("ddp, fast", 32)])
def test_gradients_travel_beside_backward(played, alone, name, bits):
    """Nothing travels before it is computed, which takes a forward and a bit of backward, and nothing waits for more:
    from then on the wire is the limit.
    """
    wire = wire_ms(played(name)[0], JOBS[name][1], bits)
    for rank in played(name):
        for t_ms in rank.times("t_ms", SKIP):
            assert 0.45 * alone + wire < t_ms < 0.65 * alone + wire


@pytest.mark.parametrize("name", ["ddp", "half", "ddp, fast"])
def test_what_is_exposed_is_what_computing_does_not_hide(played, name):
    for rank in played(name):
        for row in rank.rows("step")[SKIP:]:
            assert row["exposed_ms"] == pytest.approx(row["t_ms"] - row["compute_ms"], abs=2)
            assert row["comm_ms"] >= row["exposed_ms"]


def test_local_waits_for_the_wire_only_where_it_receives(played):
    for rank in played("local"):
        exposed = {row["step"] for row in rank.rows("step")[1:] if row["exposed_ms"] > 1}
        assert exposed == RECEIVES


def test_a_step_asks_no_more_of_cuda_than_it_needs(played):
    for rank in played("ddp"):
        for step in rank.counts(SKIP):
            assert step["launches"] <= MOST_LAUNCHES and step["graph_launches"] <= MOST_GRAPHS
            assert step["collectives"] <= MOST_COLLECTIVES
            assert step["event_waits"] <= MOST_EVENT_WAITS and not step["stream_waits"] + step["device_waits"]
            assert step["copies_to_host"] <= MOST_COPIES_TO_HOST
