"""Sums over ranks with GPUs: beside backward on NCCL, through the hosts' memory on Gloo, with CPUs among them."""

from __future__ import annotations

import statistics

import pytest

from tests.cuda.machine import LIMIT_S, Host, Job, Rank

LENET = ("--exp", "mnist_lenet", "--data", "synthetic", "--samples", "480", "--batch", "12", "--eval_every", "0")
STEPS = ("--steps", "8", "--bucket_mib", "0.05", "--cuda_graph", "off")  # LeNet would be one piece of a graph
SLOW_LINK = {"FAKE_KERNEL_US": 1000, "FAKE_LINK_GBPS": 0.1}
"""A step computes for some 45 ms, its gradients travel for 20."""
PAIR = (Host(2),)
WITH_A_CPU = (Host(2), Host(1, device="cpu"))
LOCAL = ("--fidelity", "local", "--local_steps", "4", "--local_overlap", "2")
ON_GLOO = {
    "ddp": ("--strategy", "ddp"),
    "half": ("--strategy", "ddp", "--fidelity", "half"),
    "local": ("--strategy", "ddp", *LOCAL),
    "allreduce": ("--strategy", "allreduce"),
    "allreduce_flat": ("--strategy", "allreduce_flat"),
    "reduce_scatter": ("--strategy", "reduce_scatter"),
    "allgather": ("--strategy", "allgather"),
    "gather_scatter": ("--strategy", "gather_scatter"),
}


BACK_ENDS = pytest.mark.parametrize("back_end", ["1", "0"], ids=["ProcessGroupNCCL2", "ProcessGroupNCCL"])


def run(machine, arguments, hosts=PAIR, limit_s=LIMIT_S, **knobs: object) -> list[Rank]:
    job = Job((*LENET, *STEPS, *arguments), hosts=hosts, knobs={**SLOW_LINK, **knobs}, limit_s=limit_s)
    ranks = machine.run(job)
    assert not [rank.output for rank in ranks if rank.exit_code]
    return ranks


def usual(rank: Rank, name: str) -> float:
    return statistics.median(rank.times(name, skip=4))


@BACK_ENDS
def test_gradients_travel_beside_backward_and_computing_is_as_long_as_alone(machine, back_end):
    (alone,) = run(machine, ("--strategy", "none"), hosts=(Host(1),))
    for rank in run(machine, ("--strategy", "ddp", "--backend", "nccl"), TORCH_DIST_USE_NCCL2=back_end):
        assert usual(rank, "compute_ms") == pytest.approx(usual(alone, "compute_ms"), rel=0.05)
        assert usual(rank, "comm_ms") > 15
        assert usual(rank, "exposed_ms") < 0.5 * usual(rank, "comm_ms")


@BACK_ENDS
def test_a_sum_that_still_travels_when_training_ends_arrives_before_ranks_leave(machine, back_end):
    """The older back end waits for it in a thread of its own, which moves no virtual clock: it would hang here."""
    way = ("--strategy", "ddp", "--backend", "nccl", *LOCAL)
    for rank in run(machine, way, TORCH_DIST_USE_NCCL2=back_end, limit_s=30):
        assert rank.rows("end")[0]["now_s"] > rank.rows("epoch")[-1]["now_s"] + 0.015  # of the 20 ms that a sum travels


@pytest.mark.parametrize("amp", ["none", "fp16"])
def test_between_two_averages_local_sends_nothing_at_all(machine, amp):
    for rank in run(machine, ("--strategy", "ddp", "--backend", "nccl", *LOCAL, "--amp", amp)):
        (start,), (end,) = rank.rows("start"), rank.rows("end")
        assert end["counts"]["collectives"] - start["counts"]["collectives"] == 2


def test_one_call_a_parameter_costs_the_host_no_event_each(machine):
    for rank in run(machine, ("--strategy", "allreduce", "--backend", "nccl")):
        usually = rank.counts(skip=3)[0]
        assert usually["collectives"] == 10
        assert usually["events_made"] < 10


def test_gradients_in_one_buffer_are_written_back_together(machine):
    for rank in run(machine, ("--strategy", "allreduce_flat", "--backend", "nccl")):
        assert rank.counts(skip=3)[0]["copies_on_device"] < 5  # of ten parameters


@pytest.mark.parametrize("way", ON_GLOO)
def test_gloo_sums_what_lies_on_two_gpus_of_a_host(machine, way):
    for rank in run(machine, (*ON_GLOO[way], "--backend", "gloo")):
        assert sum(counts["copies_to_device"] for counts in rank.counts(skip=0)) > 0


@pytest.mark.parametrize("way", ["ddp", "half", "local", "allreduce", "reduce_scatter"])
def test_gpus_and_cpus_train_together(machine, way):
    # A name of its own has every job begin in new processes: those of several hosts share no store of an earlier one.
    run(machine, ON_GLOO[way], hosts=WITH_A_CPU, JOB=way)


@pytest.mark.parametrize("hosts", [PAIR, WITH_A_CPU], ids=["GPUs", "a CPU among them"])
def test_fsdp_over_gloo_is_refused_before_the_start_in_one_line(machine, hosts):
    job = Job((*LENET, "--strategy", "fsdp", "--backend", "gloo"), hosts=hosts, knobs={"JOB": "fsdp"})
    for rank in machine.run(job):
        assert rank.exit_code == 1
        assert [line for line in rank.output.splitlines() if line.startswith("error: ")] == [
            "error: strategy fsdp: gloo cannot gather the weights of GPUs; use nccl, with a GPU for each rank, or "
            "strategy ddp"
        ]
        assert not rank.rows("start")


def test_collectives_over_gloo_are_measured_in_the_hosts_memory(machine):
    asked = ("--exp", "collectives", "--max_bytes", "4096", "--factor", "64", "--budget_s", "10", "--iterations", "3")
    first, _ = machine.run(Job((*asked, "--backend", "gloo"), hosts=PAIR, knobs={"FAKE_CLOCK": "real"}))
    assert not first.exit_code, first.output
    assert [row["device"] for row in first.rows("start")] == ["cpu"]
    assert {row["error"] for row in first.rows("collective")} == {None}
    assert "not on GPUs" in first.output
