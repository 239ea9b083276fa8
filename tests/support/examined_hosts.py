"""A cluster of three hosts as `orch doctor` examined it, with nothing wrong, each part changed by keywords."""

from dataclasses import replace

from orchestrator.doctor import Collective, Host, Mesh, Observations, Pair
from orchestrator.hosts import Disk, GpuHealth, Health, Limit, NetworkCard, RdmaPort, Route
from orchestrator.hosts.facts import Interface
from tests.support.probed_hosts import facts, gpu, node, torch

NAMES = ("a2000", "v100", "a16")
UNLIMITED = Limit(soft=None, hard=None)
GPU_UUIDS = {name: (f"GPU-{name}-0", f"GPU-{name}-1") for name in NAMES}


def gpu_health(index, **changes):
    sound = {"uncorrected": 0, "slowed_by": 1, "clock_mhz": 1200, "default_clock_mhz": 1200, "limit_watts": 250}
    more = {"default_limit_watts": 250, "link_width": 16, "most_link_width": 16, "fabric": "Completed"}
    return GpuHealth(**{"index": index, **sound, **more, "iommu": "identity", **changes})


def health(name="v100", **changes):
    sound = {
        "limits": {"nofile": Limit(soft=1024, hard=1 << 20), "nproc": UNLIMITED, "memlock": UNLIMITED},
        "environment": {"NCCL_DEBUG": "INFO" if name == "v100" else "WARN", "NCCL_ALGO": "Ring"},
        "uptime_s": 86400.0,
        "kills_left": False,
        "cards": {"eno1": NetworkCard(duplex="full", packets=1000)},
        "gpus": (gpu_health(0), gpu_health(1)),
        "data": ("MNIST",),
        "disk": Disk(kind="ext4", source="/dev/sda1", path="/home/ubuntu/.orch"),
    }
    return Health(**{**sound, **changes})


def host(name="v100", node_changes=None, facts_changes=None, health_changes=None, **changes):
    number = 41 + NAMES.index(name)
    address = f"192.168.1.{number}"
    own = {"name": name, "host": address, "gpu": "Tesla V100-16GB", "gpus": 2, "bandwidth_bps": 2.5e9}
    found = {
        "node": name,
        "hostname": name,
        "hostname_addresses": (address,),
        "boot_id": f"boot {name}",
        "gpus": tuple(gpu(index=index, uuid=uuid) for index, uuid in enumerate(GPU_UUIDS[name])),
        "torch": torch(devices=2, nccl="2.14.3"),
        "interfaces": (Interface(name="eno1", addresses=(f"{address}/24",), mtu=1500, speed_bps=2.5e9, up=True),),
        "routes": (Route(interface="eno1", source=address),),
        "rdma": (RdmaPort(device="mlx5_0", link_layer="Ethernet"),),
    }
    return Host(
        node=node(**{**own, **(node_changes or {})}),
        facts=facts(**{**found, **(facts_changes or {})}),
        health=health(name, **(health_changes or {})),
        **{"address": address, "login_s": 0.3, "outlives": True, **changes},
    )


def pairs(ways=(("a2000", "a16"),), **changes):
    """changes: what is wrong with these ways."""
    everybody = [(start, end) for start in NAMES for end in NAMES if start != end]
    sound = {"kind": "open", "round_trip_s": 0.0003, "bits_per_s": 2.3e9}
    return tuple(Pair(*way, **{**sound, **(changes if way in ways else {})}) for way in everybody)


def seen(*changed, **changes):
    """changed: hosts in place of those of their names. changes: fields of Observations."""
    hosts = {name: host(name) for name in NAMES} | {one.name: one for one in changed}
    return replace(
        Observations(tuple(hosts.values()), mesh=Mesh(pairs()), master="v100", collective=Collective(("gloo", "nccl"))),
        **changes,
    )
