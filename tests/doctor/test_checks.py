"""Every check of `orch doctor`, from facts alone: a sound cluster, and one fault at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.doctor import CHECKS, Collective, Mesh, Observations, judge
from orchestrator.errors import AuthError, ConnectError, HostKeyError, ProbeError
from orchestrator.hosts import Disk, Limit, NetworkCard, Occupant
from orchestrator.hosts.facts import Interface
from tests.support.examined_hosts import GPU_UUIDS, UNLIMITED, gpu_health, host, pairs, seen
from tests.support.probed_hosts import CPU_TORCH, CU132, GIB, NO_GPU, PACED, gpu, torch

NAMES = ("a2000", "v100", "a16")


def link(**changes):
    return Interface(**{"name": "eno1", "addresses": ("192.168.1.43/24",), "mtu": 1500, "up": True, **changes})


def a16(**changes):
    """The host that is changed; changes of its parts as of `host`."""
    return host("a16", **changes)


def of_facts(**changes):
    return a16(facts_changes=changes)


def of_health(**changes):
    return a16(health_changes=changes)


def of_gpu(**changes):
    return of_health(gpus=(gpu_health(0), gpu_health(1, **changes)))


def occupied(**changes):
    there = Occupant(**{"pid": 4711, "memory_bytes": GIB, "user": "alice", "command": "python3 train.py", **changes})
    first, second = (gpu(index=index, uuid=uuid) for index, uuid in enumerate(GPU_UUIDS["a16"]))
    return of_facts(gpus=(first, second.model_copy(update={"occupants": (there,)})))


def limit(name, soft):
    return of_health(limits={"nofile": UNLIMITED, "nproc": UNLIMITED, name: Limit(soft=soft, hard=soft)})


def nfs(name, path="/export/home/ubuntu/.orch"):
    return host(name, health_changes={"disk": Disk(kind="nfs4", source="nas:/home", path=path)})


def way(**changes):
    return seen(mesh=Mesh(pairs(**changes)))


def failed(**changes):
    return seen(collective=Collective(("gloo", "nccl"), "nccl", "no answer", job="j", **changes))


def lost(error):
    return seen(unreached={"a16": error}, hosts=seen().hosts[:2], mesh=Mesh(()))


# id -> (what is seen, level, where, words of what was seen, words of the remedy)
FAULTS = {
    "P01 off": (lost(ConnectError("a16", "no SSH login", "is it on?")), "block", ("a16",), "no SSH login", "is it on"),
    "P01 key": (lost(AuthError("a16", "refused the key", "ssh -i")), "block", ("a16",), "refused the key", "ssh -i"),
    "P01 slow": (seen(a16(login_s=9.0)), "warn", ("a16",), "login takes 9.0s", "UseDNS"),
    "P02": (lost(HostKeyError("a16", "key changed", "compare it")), "block", ("a16",), "key changed", "compare"),
    "P03": (seen(a16(logins_tried=3)), "warn", ("a16",), "hung up 2 times", "MaxStartups"),
    "P04 shell": (lost(ProbeError("a16", "no answer from python3", "`python:`")), "block", ("a16",), "no answer", "py"),
    "P04 old": (
        seen(of_facts(python_version="3.10.9", torch=None, torch_error="No module")),
        "block",
        ("a16",),
        "no torch",
        "orch setup",
    ),
    "P04 vision": (
        seen(of_facts(torch=torch(devices=2, nccl="2.14.3", torchvision=None))),
        "warn",
        ("a16",),
        "no torchvision",
        "same source",
    ),
    "P05 NCCL": (
        seen(of_facts(torch=torch(devices=2, nccl="2.18.1"))),
        "block",
        NAMES,
        "2.14.3 on a2000, v100; 2.18.1 on a16",
        "orch setup",
    ),
    "P05 torch": (
        seen(of_facts(torch=torch(devices=2, nccl="2.14.3", version="2.1.0"))),
        "warn",
        NAMES,
        "2.0 on a2000, v100; 2.1 on a16",
        "orch setup",
    ),
    "P05 Python": (
        seen(of_facts(python_version="3.12.1")),
        "warn",
        NAMES,
        "3.10 on a2000, v100; 3.12 on a16",
        "`python:`",
    ),
    "P06 beside": (
        seen(
            a16(
                node_changes={"gpu": None, "gpus": None, "ranks": 2},
                facts_changes={**NO_GPU, "gpu_error": "NVML", "torch": CPU_TORCH},
            )
        ),
        "block",
        ("a16",),
        "no usable GPU (NVML)",
        "set `device: cpu` to train without it",
    ),
    "P04 NCCL": (
        seen(of_facts(torch=torch(devices=2, nccl_available=False))),
        "warn",
        ("a16",),
        "so Gloo carries the gradients",
        "install a build of torch with NCCL",
    ),
    "P06": (
        seen(of_facts(gpus=(), gpu_error="Failed to initialize NVML: Driver/library version mismatch")),
        "block",
        ("a16",),
        "driver is broken",
        "reboot",
    ),
    "P07 build": (
        seen(of_facts(torch=torch(devices=2, nccl="2.14.3", arch_list=CU132))),
        "block",
        ("a16",),
        "sm_70",
        "sm_70",
    ),
    "P07 kernel": (
        seen(of_gpu(computes="CUDA error: an illegal access")),
        "block",
        ("a16",),
        "GPU 1 computes nothing",
        "gpu-reset -i 1",
    ),
    "P08 lost": (
        seen(of_facts(gpus=(gpu(),), torch=torch(devices=1, nccl="2.14.3"))),
        "block",
        ("a16",),
        "declares 2 GPUs, the host shows 1",
        "`gpus:`",
    ),
    "P09": (seen(occupied()), "warn", ("a16",), "GPU 1 (Tesla V100-PCIE-16GB) is in use by alice's", "--share"),
    "P10 errors": (seen(of_gpu(uncorrected=3)), "warn", ("a16",), "GPU 1 has had 3 memory errors", "replace it"),
    "P10 rows": (seen(of_gpu(replacement_due=True)), "warn", ("a16",), "a reset would replace", "gpu-reset -i 1"),
    "P10 no rows": (seen(of_gpu(replacement_failed=True)), "warn", ("a16",), "no spare rows", "replace it"),
    "P10 hot": (seen(of_gpu(slowed_by=0x48)), "warn", ("a16",), "GPU 1 is slowed by heat", "fans"),
    "P10 clock": (seen(of_gpu(clock_mhz=600)), "warn", ("a16",), "set to 600 MHz, below its own 1200", "-rac -i 1"),
    "P10 power": (seen(of_gpu(limit_watts=100)), "warn", ("a16",), "100 W, below its own 250", "-pl 250 -i 1"),
    "P10 lanes": (seen(of_gpu(link_width=4)), "warn", ("a16",), "4 of its 16 PCIe lanes", "reseat the card"),
    "P11 state": (seen(of_gpu(fabric="In Progress")), "block", ("a16",), "GPU 1: the NVSwitch fabric", "fabricmanager"),
    "P11 error": (
        seen(of_facts(torch=torch(devices=0, nccl="2.14.3", cuda_error="CUDA: Error 802: system not yet initialized"))),
        "block",
        ("a16",),
        "wait for their NVSwitches",
        "fabricmanager",
    ),
    "P12": (
        seen(mesh=Mesh((), {"a16": "Cannot assign requested address"})),
        "block",
        ("a16",),
        "Cannot assign",
        "`address:`",
    ),
    "P13": (
        seen(mesh=Mesh(pairs(kind="silent", opens="sudo ufw")), master="a16"),
        "block",
        ("a2000", "a16"),
        "the address does not answer",
        "sudo ufw",
    ),
    "P14 silent": (
        way(kind="silent", opens="sudo ufw"),
        "block",
        ("a2000", "a16"),
        "no connection is made",
        "firewall on a16?",
    ),
    "P14 filtered": (
        way(kind="filtered", opens="sudo ufw"),
        "block",
        ("a2000", "a16"),
        "answers on another port",
        "sudo ufw",
    ),
    "P14 refused": (way(kind="refused", opens="sudo ufw"), "block", ("a2000", "a16"), "is refused", "sudo ufw"),
    "P14 mute": (way(kind="mute"), "block", ("a2000", "a16"), "another program or host accepts", "ip neigh"),
    "P15 route": (seen(of_facts(unrouted=("192.168.1.41",))), "block", ("a16",), "no route to a2000", "route"),
    "P15 docker": (
        seen(
            of_facts(interfaces=(link(name="docker0"),), routes=({"interface": "docker0", "source": "192.168.1.43"},))
        ),
        "warn",
        ("a16",),
        "belongs to containers",
        "`interface:`",
    ),
    "P15 address": (
        seen(
            a16(
                address="192.168.1.43",
                facts_changes={"interfaces": (link(addresses=("192.168.77.1/24", "192.168.1.43/24")),)},
            ),
            host("a2000", facts_changes={"interfaces": (link(addresses=("192.168.1.41/24", "192.168.77.1/24")),)}),
        ),
        "block",
        ("a16",),
        "eno1 has several addresses, and Gloo takes the first, 192.168.77.1, which other hosts have, too",
        "make 192.168.1.43 the first address of eno1",
    ),
    "P15 down": (
        seen(of_facts(interfaces=(link(up=False, speed_bps=2.5e9),))),
        "warn",
        ("a16",),
        "eno1, its interface for training, is down",
        "ip link set",
    ),
    "P15 loopback": (seen(a16(address="127.0.0.1")), "block", ("a16",), "no other machine reaches", "`address:`"),
    "P16 Debian": (
        seen(of_facts(hostname_addresses=("127.0.1.1",))),
        "warn",
        ("a16",),
        "leads to 127.0.1.1",
        "/etc/hosts",
    ),
    "P16 nowhere": (seen(of_facts(hostname_addresses=())), "warn", ("a16",), "leads to no address", "/etc/hosts"),
    "P17 GPUs": (
        seen(
            a16(facts_changes={"boot_id": "boot v100", "gpus": host("v100").facts.gpus}, health_changes={"disk": None})
        ),
        "block",
        ("v100", "a16"),
        "one machine, with 2 GPUs in common",
        "one entry",
    ),
    "P17 machine": (
        seen(a16(facts_changes={"boot_id": "boot v100"}, health_changes={"disk": None})),
        "warn",
        ("v100", "a16"),
        "are one machine",
        "one entry",
    ),
    "P17 address": (
        seen(a16(address="192.168.1.42")),
        "block",
        ("v100", "a16"),
        "one training address, 192.168.1.42",
        "`address:`",
    ),
    "P18": (seen(a16(address="fd00::43")), "block", NAMES, "IPv4 on a2000, v100; IPv6 on a16", "IPv4"),
    "P19 way": (way(kind="small only"), "block", ("a2000", "a16"), "large packets do not", "MTU"),
    "P19 MTU": (
        seen(of_facts(interfaces=(link(mtu=9000, speed_bps=2.5e9),))),
        "warn",
        NAMES,
        "1500 on a2000, v100; 9000 on a16",
        "mtu 1500",
    ),
    "P20 slow": (way(bits_per_s=0.9e9), "warn", ("a2000", "a16"), "900Mbps measured, with 2.5Gbps", "cables"),
    "P20 host": (
        seen(
            mesh=Mesh(
                pairs([way for name in ("a2000", "v100") for way in ((name, "a16"), ("a16", name))], bits_per_s=1e8)
            )
        ),
        "warn",
        ("a16",),
        "at most 100Mbps to or from it, with 2.5Gbps",
        "cables",
    ),
    "P20 far": (way(round_trip_s=0.05), "warn", ("a2000", "a16"), "50.0 ms", "orch plan"),
    "P20 half": (
        seen(of_health(cards={"eno1": NetworkCard(duplex="half")})),
        "warn",
        ("a16",),
        "half duplex",
        "ethtool eno1",
    ),
    "P20 100": (
        seen(a16(facts_changes={"interfaces": (link(speed_bps=1e8),)}, node_changes={"bandwidth_bps": None})),
        "warn",
        ("a16",),
        "runs at 100 Mbps",
        "ethtool",
    ),
    "P20 below": (
        seen(of_facts(interfaces=(link(speed_bps=1e9),))),
        "warn",
        ("a16",),
        "1Gbps, below the 2.5Gbps",
        "cable",
    ),
    "P20 damaged": (
        seen(of_health(cards={"eno1": NetworkCard(duplex="full", crc_errors=400, packets=10**6)})),
        "warn",
        ("a16",),
        "400 damaged packets",
        "cable",
    ),
    "P21": (seen(limit("memlock", 8 << 20)), "warn", ("a16",), "may lock 8.0MiB", "memlock"),
    "P22": (
        seen(of_health(gpus=(gpu_health(0, iommu="DMA"), gpu_health(1, iommu="DMA-FQ")))),
        "warn",
        ("a16",),
        "between GPU 0 and 1",
        "iommu=pt",
    ),
    "P23 host": (
        failed(guilty=("a16",)),
        "block",
        ("a16",),
        "by nccl fails, but works without that host: no answer",
        "node release a16",
    ),
    "P23 pair": (
        failed(guilty=("v100", "a16")),
        "block",
        ("v100", "a16"),
        "works if either is left out",
        "logs --job j",
    ),
    "P23 all": (failed(), "block", NAMES, "an all-reduce by nccl fails: no answer", "logs --job j"),
    "P24": (seen(of_facts(workdir_error="Permission denied")), "block", ("a16",), "cannot be written", "`workdir:`"),
    "P25 shm": (seen(of_facts(shm_bytes=64 << 20)), "warn", ("a16",), "/dev/shm holds only 64.0MiB", "container"),
    "P25 disk": (seen(of_facts(disk_free_bytes=10 << 20)), "warn", ("a16",), "only 10.0MiB free", "`workdir:`"),
    "P25 inodes": (seen(of_facts(disk_free_inodes=12)), "warn", ("a16",), "only 12 inodes", "delete files"),
    "P26 files": (seen(limit("nofile", 256)), "warn", ("a16",), "256 files (`ulimit -n`)", "ubuntu - nofile"),
    "P26 processes": (seen(limit("nproc", 100)), "warn", ("a16",), "100 processes", "ubuntu - nproc"),
    "P27": (seen(of_facts(clock_offset_s=-61.0)), "warn", ("a16",), "1m01s behind of the others", "set-ntp"),
    "P28 session": (
        seen(of_health(environment={"NCCL_ALGO": "Tree"})),
        "warn",
        NAMES,
        "NCCL_ALGO is not the same everywhere: Ring on a2000, v100; Tree on a16",
        "env",
    ),
    "P28 inventory": (
        seen(a16(node_changes={"env": {"NCCL_PROTO": "LL"}})),
        "warn",
        NAMES,
        "(not set) on a2000, v100; LL on a16",
        "NCCL_PROTO",
    ),
    "P29": (
        seen(of_health(environment={"NCCL_ALGO": "Ring", "RANK": "0", "MASTER_ADDR": "10.0.0.9", "PET_NNODES": "2"})),
        "warn",
        ("a16",),
        "RANK, MASTER_ADDR, PET_NNODES",
        "grep -n RANK ~/.bashrc",
    ),
    "P30 tried": (
        seen(a16(outlives=False)),
        "block",
        ("a16",),
        "ends with its SSH connection",
        "KillExcludeUsers=root ubuntu",
    ),
    "P30 set": (
        seen(a16(outlives=None, health_changes={"kills_left": True})),
        "warn",
        ("a16",),
        "KillUserProcesses",
        "logind",
    ),
    "P31 processes": (
        seen(of_health(jobs=("mnist-1",))),
        "warn",
        ("a16",),
        "job mnist-1 has processes",
        "cancel --job mnist-1",
    ),
    "P31 GPUs": (seen(occupied(job="mnist-1")), "block", ("a16",), "job mnist-1 runs on GPUs", "cancel --job mnist-1"),
    "P32 memory": (
        seen(of_health(group_memory_bytes=4 * GIB)),
        "warn",
        ("a16",),
        "4.0GiB of the host's 64.0GiB",
        "user-1000.slice",
    ),
    "P32 processes": (seen(of_health(group_pids=100)), "warn", ("a16",), "100 processes", "TasksMax"),
    "P32 cores": (seen(of_health(group_cpus=2.0)), "warn", ("a16",), "2 of its 16 cores", "OMP_NUM_THREADS"),
    "P33": (seen(a16(node_changes={"ranks": 1})), "warn", NAMES, "2 on a2000, v100; 1 on a16", "`ranks:`"),
    "P34": (seen(of_health(data=None)), "warn", ("a16",), "lacks MNIST", "orch data push"),
    "P35 NFS": (seen(nfs("v100"), nfs("a16")), "block", ("v100", "a16"), "one work folder", "`workdir:`"),
    "P36 due": (
        seen(of_health(reboot=("linux-image",))),
        "warn",
        ("a16",),
        "a reboot is due (for linux-image)",
        "`reboot` there",
    ),
    "P36 young": (seen(of_health(uptime_s=30.0)), "warn", ("a16",), "came up 30.0s ago", "last -x"),
}


VERBS = {"look", "reseat", "replace", "take", "wait,", "set"}
OF_ERRORS = {"P01 off", "P01 key", "P02"}
"""Whose remedies these tests made up."""


def test_of_a_sound_cluster_every_check_passes():
    found = judge(seen())
    assert found.findings == ()
    assert found.passed == tuple(check.id for check in CHECKS)
    assert found.summary == f"{len(CHECKS)} checks passed, 0 findings, 0 not applicable"


@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_found_where_it_is_and_by_its_own_check_alone(case):
    looked_at, level, where, words, remedy = FAULTS[case]
    (finding,) = judge(looked_at).findings
    assert (finding.id, finding.level, finding.where) == (case.split()[0], level, where)
    assert words in finding.seen
    assert remedy in finding.remedy
    assert finding.causes


@pytest.mark.parametrize("case", FAULTS)
def test_a_remedy_says_what_to_do(case):
    """A command, a key of the inventory, or an action of one's own: never what is wrong once more."""
    for finding in judge(FAULTS[case][0]).findings:
        first = finding.remedy.split()[0]
        assert "`" in finding.remedy or first in VERBS or case in OF_ERRORS, finding.remedy


def test_every_check_is_seen_to_find_something():
    assert {case.split()[0] for case in FAULTS} == {check.id for check in CHECKS}


HARMLESS = {
    "an idle card": seen(of_gpu(slowed_by=0x1)),
    "a card at its power cap": seen(of_gpu(slowed_by=0x4)),
    "a card that says nothing of itself": seen(of_health(gpus=())),
    "a clone of a disk image": seen(of_facts(machine_id="m"), host("v100", facts_changes={"machine_id": "m"})),
    "hosts kept to their CPUs": seen(
        *(host(name, node_changes={"device": "cpu"}, facts_changes={**NO_GPU, "torch": CPU_TORCH}) for name in NAMES)
    ),
    "another card's duplex": seen(
        of_health(cards={"eno1": NetworkCard(duplex="full"), "wlan0": NetworkCard(duplex="half")})
    ),
    "few damaged packets of many": seen(
        of_health(cards={"eno1": NetworkCard(duplex="full", crc_errors=400, packets=10**12)})
    ),
    "variables that the plan sets": seen(of_health(environment={"NCCL_ALGO": "Ring", "NCCL_SOCKET_IFNAME": "eth9"})),
    "a group as large as its host": seen(of_health(group_memory_bytes=1 << 50, group_pids=1 << 20, group_cpus=16.0)),
    "one server, two folders": seen(nfs("v100", "/export/a"), nfs("a16", "/export/b")),
    "hidden files beside the data": seen(of_health(data=("MNIST", ".cache"))),
    "a clock that is less sure than it is off": seen(of_facts(clock_offset_s=-61.0, clock_error_s=40.0)),
    "a pair that was not tried": way(kind="not tried", round_trip_s=None, bits_per_s=None),
    "a link that nobody declared": seen(
        a16(node_changes={"bandwidth_bps": None}), mesh=Mesh(pairs(bits_per_s=1e6, kind="open"))
    ),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_what_is_harmless_is_no_finding(case):
    assert judge(HARMLESS[case]).findings == ()


def test_a_gpu_that_another_has_for_itself_blocks_and_is_not_called_broken():
    there = Occupant(pid=4711, memory_bytes=GIB, user="alice", command="python3 train.py")
    mine, theirs = (gpu(index=index, uuid=uuid) for index, uuid in enumerate(GPU_UUIDS["a16"]))
    theirs = theirs.model_copy(update={"occupants": (there,), "compute_mode": "Exclusive_Process"})
    sick = a16(
        facts_changes={"gpus": (mine, theirs)},
        health_changes={"gpus": (gpu_health(0), gpu_health(1, computes="CUDA error: busy or unavailable"))},
    )
    (finding,) = judge(seen(sick)).findings
    assert (finding.id, finding.level) == ("P09", "block")
    assert "-c DEFAULT" in finding.remedy


def test_containers_of_one_machine_have_disks_of_their_own_where_the_kernel_says_so():
    def container(name, device):
        disk = Disk(kind="overlay", source="overlay", path="/root/.orch", device=device)
        return host(name, {"transport": "local"}, {"boot_id": "one"}, {"disk": disk})

    assert judge(seen(container("v100", 51), container("a16", 52))).findings == ()
    (finding,) = judge(seen(container("v100", 51), container("a16", 51))).findings
    assert (finding.id, finding.where) == ("P35", ("v100", "a16"))


def test_a_value_that_may_be_a_secret_is_not_shown():
    found = judge(seen(a16(node_changes={"env": {"TORCH_HUB_TOKEN": "hunter2"}}))).findings
    assert "hunter2" not in str(found)


def test_what_blocks_comes_first_and_the_summary_counts_it():
    found = judge(seen(a16(login_s=9.0, outlives=False)))
    assert [finding.id for finding in found.findings] == ["P30", "P01"]
    assert found.blocks
    assert f"{len(CHECKS) - 2} checks passed, 2 findings (1 blocks)" in found.summary


def test_what_does_not_apply_says_why():
    alone = replace(
        host("a2000", node_changes={"paced": PACED}, facts_changes={**NO_GPU, "torch": CPU_TORCH, "rdma": ()})
    )
    found = judge(Observations((alone,)))
    assert found.findings == ()
    assert found.not_applicable["P10"] == "no GPU there"
    assert found.not_applicable["P14"] == "one host alone"
    assert found.not_applicable["P21"] == "no InfiniBand there"
    assert "not applicable (one host alone: P05, P12" in found.summary


def test_without_any_host_the_logins_alone_are_judged():
    found = judge(Observations((), {"a16": ConnectError("a16", "no SSH login", "is it on?")}))
    assert [finding.id for finding in found.findings] == ["P01"]
    assert found.passed == ("P02", "P04")
