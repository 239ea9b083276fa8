"""The launch plan of made-up hosts. `data/plan/` holds what `orch run --dry-run` shows for a2000_v100.

A change that is meant: `ORCH_WRITE_GOLDEN=1 pytest tests/planning/test_build.py`, then read the difference.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import UsageError
from orchestrator.hosts import Node, Paced, Route
from orchestrator.hosts.facts import Interface
from orchestrator.planning import Attempt, LaunchPlan, kinds_of
from orchestrator.views import dry_run
from tests.support.cost import growth
from tests.support.plans import RESNET, a2000_v100, by_hand, host, node, pair, plan
from tests.support.probed_hosts import facts, gpu

DATA = Path(__file__).parents[1] / "data" / "plan"


def golden(name: str, text: str) -> None:
    if os.environ.get("ORCH_WRITE_GOLDEN"):
        (DATA / name).write_text(text)
    assert text == (DATA / name).read_text()


def test_the_plan_of_the_study_as_a_document():
    golden("a2000_v100.json", a2000_v100().model_dump_json(by_alias=True, indent=1) + "\n")


def test_the_plan_of_the_study_as_people_read_it(capsys):
    dry_run.print_plan(a2000_v100())
    golden("a2000_v100.txt", capsys.readouterr().out)


def test_a_plan_goes_to_json_and_back_unchanged():
    made = a2000_v100()
    assert LaunchPlan.model_validate(json.loads(made.model_dump_json(by_alias=True))) == made


def test_the_master_is_rank_0_wherever_it_stands_in_the_file():
    nodes, found = pair()
    for master, other in (("n41", "n42"), ("n42", "n41")):
        made = plan(nodes, found, master=master)
        assert [(n.name, n.node_rank, n.first_rank) for n in made.nodes] == [(master, 0, 0), (other, 1, 1)]
        assert made.master_address == made.nodes[0].address == f"192.168.1.{master[1:]}"
        for one in made.nodes:
            assert one.torchrun[one.torchrun.index("--master-addr") + 1] == made.master_address
            assert one.torchrun[one.torchrun.index("--node-rank") + 1] == str(one.node_rank)


def test_each_host_names_its_own_interface_for_nccl_exactly():
    nodes, found = pair(host(41, interface="eth0"), host(42, interface="eth01"))
    first, second = plan(nodes, found).nodes
    assert (first.interface, second.interface) == ("eth0", "eth01")
    assert (first.env["NCCL_SOCKET_IFNAME"], first.env["GLOO_SOCKET_IFNAME"]) == ("=eth0", "eth0,eth0")
    assert (second.env["NCCL_SOCKET_IFNAME"], second.env["GLOO_SOCKET_IFNAME"]) == ("=eth01", "eth01,eth01")


def test_a_declared_address_and_interface_beat_what_was_found():
    there = Route(peers=("10.9.0.1",), interface="eno1", source="192.168.1.42")
    nodes, found = pair(second=host(42, routes=(there,)), address="10.9.0.1", interface="ib0")
    first = plan(nodes, found, master="n41").nodes[0]
    assert (first.address, first.interface, first.env["GLOO_SOCKET_IFNAME"]) == ("10.9.0.1", "ib0", "ib0,ib0")


def test_an_interface_is_found_by_the_route_where_none_has_the_address():
    nodes, found = pair(host(41, interfaces=()))
    assert plan(nodes, found).node("n41").interface == "eno1"


def test_without_interface_nothing_is_said_to_the_libraries():
    nodes, found = pair(host(41, interfaces=(), routes=()), address="192.168.1.41")
    first = plan(nodes, found).node("n41")
    assert first.interface is None
    assert not [name for name in first.env if name.endswith("_IFNAME")]


def test_an_unknown_training_address_names_the_host_and_the_key_to_set():
    nodes, found = pair(second=host(42, routes=()))
    with pytest.raises(UsageError, match=r"^n42: its training address is unknown.*`address:` for n42"):
        plan(nodes, found)


def test_a_host_alone_trains_on_its_loopback():
    assert plan([node(41)], {"n41": host(41, peers=())}).master_address == "127.0.0.1"


def test_the_inventorys_environment_wins_over_ours():
    wanted = {"OMP_NUM_THREADS": "3", "NCCL_SOCKET_IFNAME": "bond0", "MY_OWN": "x"}
    nodes, found = pair(env=wanted)
    first = plan(nodes, found).node("n41")
    assert first.env.items() >= wanted.items()
    assert first.env["GLOO_SOCKET_IFNAME"] == "eno1,eno1"


def test_accelerate_is_set_to_the_cpu_where_no_host_trains_on_a_gpu():
    name = "ACCELERATE_USE_CPU"
    nodes, found = pair(second=host(42, gpus=0), device="cpu")
    assert [one.env[name] for one in plan(nodes, found).nodes] == ["true", "true"]
    assert name not in plan(nodes, found, RESNET).node("n41").env
    assert name not in plan(*pair(device="cpu")).node("n41").env  # n42 has a GPU
    nodes, found = pair(second=host(42, gpus=0), device="cpu", env={name: "no"})
    assert plan(nodes, found).node("n41").env[name] == "no"


def test_hosts_with_unequal_numbers_of_gpus_get_as_many_ranks():
    nodes, found = pair(host(41, gpus=3), host(42, gpus=1))
    made = plan(nodes, found, RESNET, master="n41")
    first, second = made.nodes
    assert (made.world_size, first.ranks, second.first_rank, second.ranks) == (4, 3, 3, 1)
    assert first.gpu_uuids == ("GPU-41-0", "GPU-41-1", "GPU-41-2")
    assert first.env["CUDA_VISIBLE_DEVICES"] == "GPU-41-0,GPU-41-1,GPU-41-2"
    assert second.env["CUDA_VISIBLE_DEVICES"] == "GPU-42-0"
    assert first.torchrun[first.torchrun.index("--nproc-per-node") + 1] == "3"


def test_ranks_of_the_inventory_beat_the_gpus_there_are_and_claim_no_more_of_them():
    nodes, found = pair(host(41, gpus=3), ranks=2)
    first = plan(nodes, found).node("n41")
    assert (first.ranks, first.gpu_uuids) == (2, ("GPU-41-0", "GPU-41-1"))


@pytest.mark.parametrize("named", ["2,0", "GPU-41-2, GPU-41-0,", "2,GPU-41-0,2"])
def test_gpus_that_the_inventorys_environment_names_are_the_jobs_by_uuid(named):
    """By index as nvidia-smi counts them, or by UUID: these are locked, watched and shown to CUDA, and no others."""
    nodes, found = pair(host(41, gpus=3), env={"CUDA_VISIBLE_DEVICES": named, "CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    first = plan(nodes, found).node("n41")
    assert (first.ranks, first.gpu_uuids) == (2, ("GPU-41-2", "GPU-41-0"))
    assert first.env["CUDA_VISIBLE_DEVICES"] == "GPU-41-2,GPU-41-0"
    assert first.env["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


def test_a_speed_is_that_of_the_gpu_which_the_job_gets():
    nodes, found = pair(host(41, gpus=2), env={"CUDA_VISIBLE_DEVICES": "1"})
    slow, fast = found["n41"].gpus[0], gpu(index=1, uuid="GPU-41-1", name="H100")
    found["n41"] = found["n41"].model_copy(update={"gpus": (slow, fast)})
    made = plan(nodes, found, by_hand(batch="8", shares="equal"))
    assert made.node("n41").gpu == "H100"
    assert kinds_of(made, found)["n41", 0].device_name == "H100"


@pytest.mark.parametrize(("named", "says"), [("3", "names GPU 3, which is not there"), ("GPU-4", "means several")])
def test_a_gpu_that_is_not_there_is_named_before_anything_starts(named, says):
    nodes, found = pair(host(41, gpus=3), env={"CUDA_VISIBLE_DEVICES": named})
    with pytest.raises(UsageError, match=f"^n41: .*{says}.*2 .GPU-41-2.*orch up"):
        plan(nodes, found)


def test_an_environment_that_hides_all_gpus_leads_to_the_key_that_does_so():
    nodes, found = pair(host(41, gpus=3), env={"CUDA_VISIBLE_DEVICES": ""})
    with pytest.raises(UsageError, match=r"^n41: its CUDA_VISIBLE_DEVICES names no GPU.*device: cpu"):
        plan(nodes, found)
    nodes, found = pair(host(41, gpus=3), env={"CUDA_VISIBLE_DEVICES": ""}, device="cpu")
    assert plan(nodes, found).node("n41").env["CUDA_VISIBLE_DEVICES"] == ""


def test_parts_of_a_gpu_stay_as_the_inventory_names_them():
    nodes, found = pair(host(41), env={"CUDA_VISIBLE_DEVICES": "MIG-5f3a"})
    assert plan(nodes, found).node("n41").env["CUDA_VISIBLE_DEVICES"] == "MIG-5f3a"


def test_a_gpu_that_no_program_may_use_is_left_out():
    nodes, found = pair(host(41, gpus=2))
    closed = found["n41"].gpus[0].model_copy(update={"compute_mode": "Prohibited"})
    found["n41"] = found["n41"].model_copy(update={"gpus": (closed, found["n41"].gpus[1])})
    first = plan(nodes, found).node("n41")
    assert (first.ranks, first.gpu_uuids) == (1, ("GPU-41-1",))


def test_gpus_of_a_driver_without_uuids_are_named_by_index():
    nodes, found = pair(host(41, gpus=0))
    found["n41"] = found["n41"].model_copy(update={"gpus": (gpu(index=0, uuid="[N/A]"),)})
    first = plan(nodes, found).node("n41")
    assert (first.env["CUDA_VISIBLE_DEVICES"], first.env["CUDA_DEVICE_ORDER"]) == ("0", "PCI_BUS_ID")


@pytest.mark.parametrize(
    ("gpus", "devices", "backend"),
    [((1, 1), ("cuda", "cuda"), "nccl"), ((0, 0), ("cpu", "cpu"), "gloo"), ((1, 0), ("cuda", "cpu"), "gloo")],
)
def test_the_backend_is_one_that_every_host_can(gpus, devices, backend):
    nodes, found = pair(host(41, gpus=gpus[0]), host(42, gpus=gpus[1]))
    made = plan(nodes, found, RESNET, master="n41")
    assert tuple(one.device for one in made.nodes) == devices
    for one, device in zip(made.nodes, devices, strict=True):
        assert one.command == (*RESNET.command, f"--device={device}", f"--backend={backend}")
        assert bool(one.gpu_uuids) == ("CUDA_VISIBLE_DEVICES" in one.env) == (device == "cuda")
    assert [note for note in made.notes if "Gloo" in note] == list(made.notes)
    assert bool(made.notes) == (len(set(devices)) > 1)


def test_what_a_person_set_by_hand_is_not_said_twice():
    nodes, found = pair()
    request = by_hand(backend="gloo")
    assert plan(nodes, found, request).nodes[0].command == ("--backend=gloo", "--device=cuda")


def test_a_device_set_by_hand_is_the_plans_device_too():
    nodes, found = pair(host(41, gpus=2), host(42, gpus=2))
    made = plan(nodes, found, by_hand(device="cpu"))
    for one in made.nodes:
        assert (one.device, one.gpu_uuids, one.command) == ("cpu", (), ("--device=cpu", "--backend=gloo"))


def test_what_a_host_trains_on_is_no_gpu_where_it_trains_on_its_cpu():
    nodes, found = pair(host(41, gpus=1), host(42, gpus=1))
    assert [one.gpu for one in plan(nodes, found, by_hand(device="cpu")).nodes] == [None, None]
    mixed = (nodes[0], nodes[1].model_copy(update={"device": "cpu"}))
    assert [bool(one.gpu) for one in plan(mixed, found, by_hand(backend="gloo")).nodes] == [True, False]


def test_a_script_gets_its_own_arguments_and_nothing_else():
    nodes, found = pair()
    made = plan(nodes, found)
    assert {one.command for one in made.nodes} == {("train.py", "--lr", "0.1")}
    assert {one.shares for one in made.nodes} == {()}


def test_nodes_that_are_one_machine_share_its_cores():
    nodes, found = pair(host(41, cores=12, boot_id="same"), host(42, cores=12, boot_id="same", gpus=2))
    assert {one.env["OMP_NUM_THREADS"] for one in plan(nodes, found).nodes} == {"4"}
    nodes, found = pair(host(41, cores=12), host(42, cores=12, gpus=2))
    assert [one.env["OMP_NUM_THREADS"] for one in plan(nodes, found, master="n41").nodes] == ["12", "6"]


def test_a_rank_always_has_a_thread():
    nodes, found = pair(host(41, cores=2, gpus=8))
    assert plan(nodes, found).node("n41").env["OMP_NUM_THREADS"] == "1"


@given(batch=st.integers(1, 5000), ranks=st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_shares_add_up_to_the_batch_and_every_rank_has_one(batch, ranks):
    numbers = range(11, 11 + len(ranks))
    nodes = [node(number, ranks=count) for number, count in zip(numbers, ranks, strict=True)]
    found = {f"n{number}": host(number, gpus=0, peers=numbers) for number in numbers}
    made = plan(nodes, found, by_hand(batch=str(batch)))
    assert [len(one.shares) for one in made.nodes] == [one.ranks for one in made.nodes]
    shares = [share for one in made.nodes for share in one.shares]
    assert sum(shares) == batch
    assert max(shares) - min(shares) <= 1
    assert any("fewer samples than there are ranks" in note for note in made.notes) == (batch < sum(ranks))


def test_paced_hosts_compute_on_the_cpu_and_the_plan_says_so():
    nodes, found = pair(paced=Paced(samples_per_s=333))
    made = plan(nodes, found, RESNET)
    assert made.node("n41").device == "cpu"
    assert made.node("n41").paced["samples_per_s"] == 333
    assert json.loads(made.node("n41").env["ORCH_PACED"]) == {"samples_per_s": 333}
    assert "ORCH_PACED" not in plan(*pair(), RESNET).node("n41").env
    assert any(note.startswith("n41: paced") for note in made.notes)


def test_paced_hosts_that_learn_do_so_like_one_network():
    nodes, found = pair(paced=Paced(samples_per_s=333, like="resnet152_cifar"))
    made = plan(nodes[:1], found, RESNET)
    assert json.loads(made.nodes[0].env["ORCH_PACED"])["like"] == "resnet152_cifar"
    assert [note for note in made.notes if "paced like resnet152_cifar, each rank learns within its time" in note]
    with pytest.raises(UsageError, match="simulate different networks"):
        plan(nodes, found, RESNET)


def test_building_a_plan_changes_nothing_it_was_given_and_gives_the_same_again():
    nodes, found = pair(env={"A": "1"})
    before = [one.model_dump_json() for one in (*nodes, *found.values())]
    first, second = plan(nodes, found, RESNET), plan(nodes, found, RESNET)
    assert first == second
    assert [one.model_dump_json() for one in (*nodes, *found.values())] == before


def many(count):
    names = [(f"h{index}", f"10.0.{index // 250}.{index % 250 + 1}") for index in range(count)]
    nodes = [Node(name=name, host=address) for name, address in names]
    found = {}
    for index, (name, address) in enumerate(names):
        peer = names[index - 1][1]
        routes = (Route(peers=(peer,), interface="eno1", source=address),)
        interfaces = (Interface(name="eno1", addresses=(f"{address}/16",), mtu=1500, up=True),)
        found[name] = facts(node=name, boot_id=name, routes=routes, interfaces=interfaces)
    return nodes, found


def test_a_plan_of_a_thousand_hosts_costs_no_more_for_each_host_than_that_of_250():
    few, thousand = many(250), many(1000)
    assert growth(lambda: plan(*few, RESNET), lambda: plan(*thousand, RESNET)) < 12  # 16 if each host asks each other
    made = plan(*thousand, RESNET)
    assert (made.world_size, made.nodes[999].first_rank) == (1000, 999)


def test_secrets_of_the_inventory_are_not_in_what_is_printed_or_kept():
    made = plan(*pair(env={"HF_TOKEN": "canary", "AWS_SECRET_ACCESS_KEY": "canary", "NCCL_DEBUG": "INFO"}))
    assert "canary" in made.model_dump_json()
    assert "canary" not in made.masked().model_dump_json()
    assert [node.env.get("NCCL_DEBUG") for node in made.masked().nodes].count("INFO") == 1


@pytest.mark.parametrize(("every", "keepers", "notes"), [("0", (), 1), ("500", ("n42", "n41"), 0)])
def test_the_plan_names_who_keeps_checkpoints(every, keepers, notes):
    request = replace(by_hand(batch="6", checkpoint_every=every), attempt=Attempt(number=1, most=2))
    made = plan(*pair(), request, master="n42")
    assert made.checkpoints == keepers
    assert [one.env.get("ORCH_CHECKPOINT_COPY") for one in made.nodes] == ["n41" if keepers else None] * 2
    assert len([note for note in made.notes if note.startswith("retried without checkpoints")]) == notes
    nodes, found = pair()
    alone = plan(nodes[:1], found, request)
    assert alone.checkpoints == (("n41",) if keepers else ())
    assert "ORCH_CHECKPOINT_COPY" not in alone.nodes[0].env


def test_the_split_of_a_batch_is_shown_by_size():
    made = a2000_v100()
    assert dry_run.split_words(made) == "32 samples on each host (equal shares)"
    first, second = made.nodes
    unequal = made.model_copy(update={"nodes": (first, second.model_copy(update={"shares": (16,)}))})
    assert dry_run.split_words(unequal) == "32 on v100; 16 on a2000 (unequal shares)"
