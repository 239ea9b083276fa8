"""Which hosts run a study's row, and the reasons why none can."""

from __future__ import annotations

import pytest

from orchestrator.studies import StudyRow, choose_nodes, load_study
from tests.support.plans import study_node as node


def row_of(study, name):
    return next(row for row in load_study(study).rows if row.name == name)


def wants(ranks, **more):
    return StudyRow(name="r", ranks=ranks, **more)


def test_a_row_takes_the_hosts_that_it_names_and_no_others():
    row = row_of("mixed_clusters", "a16_a16_a2000-ddp")
    hosts = [node("spare", "Tesla V100-16GB"), node("small", "RTX A2000"), node("double", "NVIDIA A16", 2)]
    assert choose_nodes(row, hosts) == {"small": 1, "double": 2}
    assert choose_nodes(row, [node("single", "A16", 1), hosts[1]]) == (
        "needs hosts with 2 x A16 and 1 x A2000; there are 1 x A16, 1 x RTX A2000"
    )


def test_a_row_that_needs_a_number_of_ranks_spreads_them_over_as_many_hosts_as_fit():
    hosts = [node("one", None), node("two", None, 2), node("three", None)]
    assert choose_nodes(wants(2), hosts) == {"one": 1, "three": 1}
    assert choose_nodes(wants(1), hosts) == {"one": 1}
    assert choose_nodes(wants(2), hosts[1:2]) == {"two": 2}
    assert "needs 7 ranks in all" in choose_nodes(wants(7), hosts)


def test_hosts_of_more_ranks_give_a_part_of_them():
    hosts = [node("small", None, 3), node("large", None, 8)]
    assert choose_nodes(wants(2), hosts) == {"large": 2}
    assert choose_nodes(wants(10), hosts) == {"large": 8, "small": 2}
    assert choose_nodes(wants(11), hosts) == {"small": 3, "large": 8}


def test_many_hosts_of_which_no_choice_fits_are_answered_at_once():
    assert choose_nodes(wants(8), [node(str(number), None, 9) for number in range(300)]) == {"0": 8}


def test_a_command_that_starts_its_ranks_has_one_host():
    hosts = [node("one", None), node("four", None, 4), node("two", None, 2)]
    assert choose_nodes(wants(2, starter="spawn"), hosts) == {"two": 2}
    assert choose_nodes(wants(0, starter="torchrun"), hosts) == {"four": 4}
    for ranks in (0, 2):
        assert choose_nodes(wants(ranks, starter="spawn"), [node("a", None), node("b", None)]) == (
            "needs 2 ranks on one host, the hosts have 1 x CPU, 1 x CPU; set `ranks` in the file"
        )


def test_ranks_that_need_gpus_get_hosts_that_have_them():
    hosts = [node("cpu", None, 4), node("rtx", "RTX 3090", 4, gpus=4)]
    assert choose_nodes(row_of("mnist_backends", "nccl-2"), hosts) == {"rtx": 2}
    assert choose_nodes(row_of("mnist_backends", "gloo-8"), hosts) == {"cpu": 4, "rtx": 4}
    assert choose_nodes(row_of("mnist_methods", "dp"), hosts) == {"rtx": 1}
    assert choose_nodes(row_of("mnist_backends", "nccl-8"), hosts) == (
        "needs 8 ranks with a GPU each in all, the hosts have 4 x CPU, 4 x RTX 3090; set `ranks` in the file"
    )


def test_a_row_that_needs_a_package_takes_a_host_that_has_it():
    row, hosts = row_of("ways_to_start", "horovod"), [node("large", None, 4), node("small", None, 2)]
    assert (row.settings, row.starter) == ({"strategy": "horovod"}, "torchrun")
    assert choose_nodes(row, hosts, {"horovod": ["small"]}) == {"small": 2}
    assert choose_nodes(row, hosts, {"horovod": ["small", "large"]}) == {"large": 4}
    assert choose_nodes(row_of("ways_to_start", "torchrun"), hosts) == {"large": 4}


def test_slurms_row_takes_a_host_that_is_one_of_its_nodes():
    row, hosts = row_of("ways_to_start", "slurm"), [node("large", None, 4), node("small", None, 2)]
    assert row.starter == "srun"
    assert choose_nodes(row, hosts, {"slurm": ["small"], "horovod": ["large"]}) == {"small": 2}


@pytest.mark.parametrize(
    ("study", "name", "words"),
    [
        ("mnist_backends", "nccl-1", "needs a GPU for each rank; the hosts have 2 x CPU"),
        ("mnist_backends", "gloo-4", "needs 4 ranks in all, the hosts have 2 x CPU; set `ranks` in the file"),
        ("mnist_methods", "dp", "needs 2 GPUs or more in one host; the hosts have 2 x CPU"),
        ("ways_to_start", "amp", "needs a GPU for each rank; the hosts have 2 x CPU"),
        ("ways_to_start", "horovod", "needs the package horovod, which `orch up` has found on no host"),
        ("ways_to_start", "slurm", "needs Slurm, and no host was one of its nodes in service at `orch up`"),
    ],
)
def test_a_row_that_two_ranks_on_a_cpu_cannot_run_says_why(study, name, words):
    assert choose_nodes(row_of(study, name), [node("here", None, 2)]) == words
