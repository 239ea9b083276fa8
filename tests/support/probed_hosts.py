"""Hosts as they were probed: a V100's inventory entry and facts, each changed by keywords."""

from orchestrator.hosts import Gpu, Node, NodeFacts, Occupant, Paced, Route, TorchFacts
from orchestrator.hosts.facts import Interface

GIB = 1 << 30
CU117 = ("sm_37", "sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86")
CU132 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
PACED = Paced(samples_per_s=333)


def node(**changes):
    return Node(**{"name": "v100", "host": "192.168.1.42", "gpu": "Tesla V100-16GB", "gpus": 1, **changes})


def gpu(capability="7.0", **changes):
    fields = {"index": 0, "name": "Tesla V100-PCIE-16GB", "uuid": "GPU-1", "memory_bytes": 16 * GIB}
    more = {"memory_used_bytes": 0, "driver": "525.105.17", "bus_id": "0:3B:00.0", "compute_capability": capability}
    return Gpu(**{**fields, **more, **changes})


def torch(**changes):
    fields = {"version": "2.0.1+cu117", "cuda": "11.7", "arch_list": CU117, "torchvision": "0.15.2"}
    return TorchFacts(**{**fields, "gloo": True, "nccl_available": True, "devices": 1, **changes})


def facts(**changes):
    fields = {
        "node": "v100",
        "hostname": "v100",
        "os": "Ubuntu 22.04",
        "kernel": "5.15",
        "machine": "x86_64",
        "cores": 16,
        "memory_bytes": 64 * GIB,
        "disk_free_bytes": 100 * GIB,
        "shm_bytes": 32 * GIB,
        "clock_offset_s": 0.1,
        "boot_id": "b",
        "machine_id": "m",
        "user": "ubuntu",
        "uid": 1000,
        "python_version": "3.10.12",
        "python_executable": "/opt/conda/bin/python",
        "gpus": (gpu(),),
        "torch": torch(),
        "interfaces": (Interface(name="eno1", addresses=("192.168.1.42/24",), mtu=1500, speed_bps=2.5e9, up=True),),
        "routes": (Route(peers=("192.168.1.41",), interface="eno1", source="192.168.1.42"),),
        "workdir": "/home/ubuntu/.orch",
    }
    return NodeFacts(**{**fields, **changes})


OTHER = Occupant(pid=4711, memory_bytes=12 * GIB, user="alice", command="python3 train.py")
NO_GPU = {"gpus": (), "gpu_error": "nvidia-smi: command not found"}
CPU_TORCH = torch(version="2.0.1+cpu", cuda=None, arch_list=(), devices=0, nccl_available=False)
