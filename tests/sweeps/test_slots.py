"""The slots of a sweep: hosts, hosts together, or GPUs of a host, each GPU in one of them."""

from __future__ import annotations

import pytest

from orchestrator.errors import UsageError
from orchestrator.hosts import Cluster, Problem
from orchestrator.measuring import slots_of, usable
from orchestrator.sweeps import SweepSpec
from tests.support.plans import host, node, plan


def cluster(*, first: int = 4, second: int = 2, released=(), **changes) -> Cluster:
    """Hosts n41 and n42 with this number of GPUs."""
    nodes = (node(41, **changes), node(42))
    facts = {"n41": host(41, gpus=first), "n42": host(42, gpus=second)}
    return Cluster(schema=1, name="rack", file="rack.yaml", nodes=nodes, facts=facts, released=tuple(released))


def sweep(**values) -> SweepSpec:
    return SweepSpec(grid={"lr": "1,2"}, **values)


def test_each_gpu_is_in_one_slot_and_reaches_the_plan_of_its_jobs():
    rack = cluster()
    found = slots_of(rack, rack.nodes, sweep(gpus=2), {})
    assert [slot.name for slot in found.all] == ["n41/0", "n41/1", "n42"] and not found.notes
    uuids = []
    for slot in found.all:
        (planned,) = plan(
            [slot.cluster.node(*slot.nodes)], {name: slot.cluster.facts[name] for name in slot.nodes}
        ).nodes
        assert planned.ranks == 2 and planned.env["CUDA_VISIBLE_DEVICES"] == ",".join(planned.gpu_uuids)
        uuids += planned.gpu_uuids
    assert sorted(uuids) == [f"GPU-{host}-{index}" for host, count in ((41, 4), (42, 2)) for index in range(count)]


def test_hosts_with_too_few_gpus_are_named_and_without_any_it_is_refused():
    rack = cluster(second=1)
    found = slots_of(rack, rack.nodes, sweep(gpus=2), {})
    assert [slot.name for slot in found.all] == ["n41/0", "n41/1"] and "n42 not used" in found.notes[0]
    with pytest.raises(UsageError, match="no host has 8 GPUs"):
        slots_of(rack, rack.nodes, sweep(gpus=8), {})


def test_gpus_that_the_inventory_chooses_cannot_be_shared_out():
    rack = cluster(env={"CUDA_VISIBLE_DEVICES": "0,1"})
    with pytest.raises(UsageError, match="n41: its `env:` sets CUDA_VISIBLE_DEVICES"):
        slots_of(rack, rack.nodes, sweep(gpus=1), {})


def test_a_host_without_gpus_has_a_slot_for_each_rank():
    rack = cluster(first=0, second=0, ranks=3)
    found = slots_of(rack, rack.nodes, sweep(gpus=1), {})
    assert [slot.name for slot in found.all] == ["n41/0", "n41/1", "n41/2", "n42"]
    assert {slot.cluster.node("n41").ranks for slot in found.all[:3]} == {1}


def test_hosts_of_similar_speed_work_together():
    nodes = tuple(node(number) for number in (41, 42, 43))
    facts = {f"n{number}": host(number) for number in (41, 42, 43)}
    rack = Cluster(schema=1, name="rack", file="rack.yaml", nodes=nodes, facts=facts)
    found = slots_of(rack, nodes, sweep(hosts=2), {"n41": 100.0, "n42": 900.0, "n43": 800.0})
    assert [slot.nodes for slot in found.all] == [("n42", "n43")] and "n41 not used" in found.notes[0]
    with pytest.raises(UsageError, match="a job takes 4 hosts, and 3 can be used"):
        slots_of(rack, nodes, sweep(hosts=4), {})


def test_only_usable_hosts_take_part():
    nodes, notes = usable(cluster(released=["n41"]), [])
    assert [each.name for each in nodes] == ["n42"] and not notes
    with pytest.raises(UsageError, match="no host of cluster rack can be used"):
        usable(cluster(released=["n41"]), ["n41"])
    broken = cluster().model_copy(update={"problems": {"n42": Problem(message="is off")}})
    assert usable(broken, [])[1] == ("left out: n42, released or unusable at the last `orch up`",)
