import pytest

from orchestrator.errors import ProbeError
from orchestrator.hosts import checks
from tests.support.probed_hosts import CPU_TORCH, CU132, NO_GPU, PACED, facts, gpu, node, torch

BLOCKED = {
    "old python": (node(), facts(python_version="3.8.10"), "python 3.8.10", "`python:`"),
    "no inodes": (
        node(),
        facts(workdir_error="No space left on device", disk_free_inodes=0),
        "no inode is free",
        "`df -i`",
    ),
    "work folder": (node(), facts(workdir_error="/srv: Permission denied"), "Permission denied", "`workdir:`"),
    "no torch": (node(), facts(torch=None, torch_error="No module named 'torch'"), "No module named", "`python:`"),
    "old torch": (node(), facts(torch=torch(version="1.12.1")), "1.12.1", "`python:`"),
    "torch alone": (node(), facts(torch=torch(gloo=False)), "no distributed", "`python:`"),
    "driver mismatch": (
        node(),
        facts(gpus=(), gpu_error="Failed to initialize NVML: Driver/library version mismatch"),
        "driver is broken",
        "reboot",
    ),
    "declared, none there": (node(), facts(**NO_GPU), "command not found", "device: cpu"),
    "a label promises one": (node(gpus=None), facts(**NO_GPU), "no usable GPU", "device: cpu"),
    "one of two is lost": (node(gpus=2), facts(), "declares 2 GPUs, the host shows 1", "`gpus:` of v100"),
    "cuda without a GPU": (node(gpu=None, gpus=None, device="cuda"), facts(gpus=()), "no GPU found", "nvidia-smi"),
    "CPU build": (node(), facts(torch=CPU_TORCH), "is a CPU build", "CUDA build"),
    "CPU build beside an undeclared GPU": (node(gpu=None, gpus=None), facts(torch=CPU_TORCH), "CPU build", "device"),
    "driver too old": (
        node(),
        facts(torch=torch(devices=0, cuda_error="The NVIDIA driver on your system is too old")),
        "driver on your system is too old",
        "update the driver",
    ),
    "torch sees fewer GPUs": (
        node(gpus=None),
        facts(gpus=(gpu(), gpu(index=1, uuid="GPU-2"))),
        "torch 2.0.1+cu117 sees 1 GPU, nvidia-smi shows 2",
        "`gpus: 1`",
    ),
    "a GPU that is closed": (node(), facts(gpus=(gpu(compute_mode="Prohibited"),)), "Prohibited", "-c DEFAULT"),
    "a driver that sleeps": (node(), facts(gpus=(), gpu_error="no answer in 30 s"), "no answer", "nvidia-smi -pm 1"),
    "old GPU, new torch": (node(), facts(torch=torch(version="2.15.0+cu132", arch_list=CU132)), "sm_70", "sm_70"),
}


@pytest.mark.parametrize("case", BLOCKED)
def test_a_host_is_blocked_with_a_remedy(case):
    declared, found, says, remedy = BLOCKED[case]
    error = checks.unusable(declared, found)
    assert isinstance(error, ProbeError)
    assert error.message.startswith("v100: ")
    assert says in error.message
    assert remedy in error.remedy


FREE = {
    "all is well": (node(), facts()),
    "torch was not asked for": (node(), facts(torch=None)),
    "kept to its CPU": (node(device="cpu"), facts(**NO_GPU, torch=CPU_TORCH)),
    "paced": (node(paced=PACED, gpus=2), facts(**NO_GPU, torch=CPU_TORCH)),
    "a CPU host": (node(gpu=None, gpus=None), facts(**NO_GPU, torch=CPU_TORCH)),
    "declared to have none": (node(gpus=0), facts(**NO_GPU, torch=CPU_TORCH)),
    "more than declared": (node(), facts(gpus=(gpu(), gpu(index=1, uuid="GPU-2")))),
    "one more than needed is closed": (
        node(),
        facts(gpus=(gpu(compute_mode="Prohibited"), gpu(index=1, uuid="GPU-2")), torch=torch(devices=2)),
    ),
    "an old driver does not report it": (node(), facts(gpus=(gpu(capability=None),))),
}


@pytest.mark.parametrize("case", FREE)
def test_a_host_is_not_blocked(case):
    assert checks.unusable(*FREE[case]) is None


@pytest.mark.parametrize(
    ("error", "device", "blocks"),
    [
        ("Failed to initialize NVML: Unknown Error", "auto", True),
        ("no answer in 30 s", "auto", True),
        ("No devices were found", "auto", False),
        ("nvidia-smi: command not found", "auto", False),
        ("Failed to initialize NVML: Unknown Error", "cpu", False),
    ],
)
def test_a_host_whose_driver_fails_trains_on_its_cpu_only_if_it_is_told_to(error, device, blocks):
    cpu = torch(version="2.11.0", cuda=None, devices=0)
    found = checks.unusable(node(gpu=None, gpus=None, device=device), facts(gpus=(), gpu_error=error, torch=cpu))
    assert bool(found) == blocks
    if found:
        assert "device: cpu" in found.remedy
