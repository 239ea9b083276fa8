"""Plans of hosts n41 and n42, and of the study's A2000 and V100."""

from dataclasses import replace
from pathlib import Path

from orchestrator.hosts import Node, Route, elect, load_inventory
from orchestrator.hosts.facts import Interface
from orchestrator.planning import (
    CodeFolder,
    Draft,
    LaunchPlan,
    NodePlan,
    RunRequest,
    build_plan,
    choose_carrier,
    place,
    split_equally,
)
from tests.support.probed_hosts import facts, gpu
from trainer.shared import parse_settings

INVENTORY = Path(__file__).parents[2] / "inventory"
CODE = CodeFolder(sha256="c0de" * 16, source="/home/me/orch/trainer", files=17, size_bytes=91_000)
RESNET = RunRequest(
    kind="experiment",
    name="resnet152_cifar",
    command=("-m", "trainer", "--exp=resnet152_cifar"),
    settings=parse_settings("resnet152_cifar", {"batch": "64", "lr": "0.1"}),
)
SCRIPT = RunRequest(kind="script", name="train.py", command=("train.py", "--lr", "0.1"))


def plan(nodes, found, request=SCRIPT, master=None, *, cluster="lab", job="j-1"):
    """With equal shares."""
    election = elect(nodes, found)
    placement = place(nodes, found, replace(election, master=master or election.master), request)
    carrier = choose_carrier(placement.nodes, request)
    draft = Draft(cluster, job, "2026-11-21T09:12:00+00:00", CODE, request, placement, carrier)
    return build_plan(draft.with_split(split_equally(request.global_batch, placement.ranks)))


def study_node(name, gpu, ranks=1, gpus=0):
    """What `choose_nodes` is given. gpus: those that its ranks compute on; 0 is the CPU, whatever the GPU's label."""
    return NodePlan(
        name=name, node_rank=0, first_rank=0, ranks=ranks, address="10.0.0.1", interface=None,
        device="cuda" if gpus else "cpu", gpu=gpu, gpu_uuids=tuple(f"GPU-{number}" for number in range(gpus)),
        python="python", workdir="~", env={}, command=(), torchrun=(),
    )  # fmt: skip


def host(number, *, interface="eno1", gpus=1, cores=16, peers=(41, 42), **changes):
    """Facts of 192.168.1.<number>, with a route to every other."""
    address = f"192.168.1.{number}"
    cards = tuple(gpu(index=i, uuid=f"GPU-{number}-{i}") for i in range(gpus))
    fields = {
        "node": f"n{number}",
        "boot_id": f"boot-{number}",
        "cores": cores,
        "gpus": cards,
        "interfaces": (
            Interface(name="lo", addresses=("127.0.0.1/8",), mtu=65536, up=True),
            Interface(name=interface, addresses=(f"{address}/24",), mtu=1500, up=True),
        ),
        "routes": tuple(
            Route(peers=(f"192.168.1.{peer}",), interface=interface, source=address) for peer in peers if peer != number
        ),
    }
    return facts(**{**fields, **changes})


def node(number, **changes):
    return Node(**{"name": f"n{number}", "host": f"192.168.1.{number}", **changes})


def by_hand(**chosen):
    """An experiment with these settings, which a person set; its command has nothing before them."""
    settings = parse_settings("mnist_lenet", chosen)
    return RunRequest("experiment", "mnist_lenet", (), settings=settings, chosen=chosen)


def pair(first=None, second=None, **first_changes):
    """Nodes n41 (the master) and n42 with their facts."""
    nodes = [node(41, **first_changes), node(42)]
    return nodes, {"n41": first or host(41), "n42": second or host(42)}


def a2000_v100() -> LaunchPlan:
    nodes = load_inventory(INVENTORY / "a2000_v100.yaml").nodes
    found = {
        "a2000": host(41, interface="enp3s0", gpus=1, cores=8),
        "v100": host(42, interface="ens5f0", gpus=1, cores=20),
    }
    small = gpu("8.6", index=0, uuid="GPU-41-0", name="NVIDIA RTX A2000 12GB", memory_bytes=12 << 30)
    found["a2000"] = found["a2000"].model_copy(update={"gpus": (small,)})
    made = plan(nodes, found, RESNET, cluster="a2000-v100", job="resnet152_cifar-20261121-0912-k3f")
    shown = {name: made.settings[name] for name in ("exp", "batch", "lr")}
    return made.model_copy(update={"settings": shown})


KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIIwTE+fxDMYBe2YkEnmyVDFbxpXVhLYsHkLdoDPMlIpM"
