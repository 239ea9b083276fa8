"""The checks that `orch up` and `orch run` make by themselves: what they say, and of what they say nothing."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from orchestrator.doctor import Host, Observations, StartChecks, checks_at, judge
from orchestrator.errors import ProbeError
from orchestrator.hosts import Cluster, Health, NetworkCard, as_of_now
from orchestrator.jobs import Prepared
from orchestrator.paths import Home
from orchestrator.remote.health import now
from orchestrator.store import Store
from tests.support.examined_hosts import gpu_health
from tests.support.plans import study_node
from tests.support.probed_hosts import CPU_TORCH, NO_GPU, OTHER, PACED, facts, gpu, node, torch


def warnings(declared, found, **health):
    diagnosis = judge(Observations((Host(declared, found, Health(**health)),)), checks_at("up"))
    return tuple(finding.line for finding in diagnosis.findings if finding.level == "warn")


# ---- at `orch up` --------------------------------------------------------------------------------------------------

WARNED = {
    "clock ahead": (node(), facts(clock_offset_s=61.0), "1m01s ahead"),
    "clock behind": (node(), facts(clock_offset_s=-31.0), "31.0s behind"),
    "clock behind, by a slow shell": (
        node(),
        facts(clock_offset_s=-61.0, clock_error_s=10.0),
        "1m01s behind of this machine's (give or take 10.0s)",
    ),
    "small shm": (node(), facts(shm_bytes=64 << 20), "64.0MiB"),
    "full disk": (node(), facts(disk_free_bytes=10 << 20), "only 10.0MiB free for /home/ubuntu/.orch"),
    "few inodes": (node(), facts(disk_free_inodes=312), "only 312 inodes free for /home/ubuntu/.orch (`df -i`)"),
    "slow link": (node(bandwidth_bps=1e10), facts(), "eno1 runs at 2.5Gbps, below the 10Gbps declared"),
    "no such interface": (node(interface="eth9"), facts(), "no interface eth9"),
    "another image": (node(image="pytorch-2.1"), facts(), "image pytorch-2.1, but torch 2.0.1"),
    "torchvision": (node(), facts(torch=torch(torchvision=None, torchvision_error="operator nms")), "operator nms"),
    "no NCCL": (node(), facts(torch=torch(nccl_available=False)), "no NCCL"),
    "torch sees other GPUs": (
        node(),
        facts(gpus=(gpu(), gpu(index=1, uuid="GPU-2"))),
        "torch 2.0.1+cu117 sees 1 GPU, nvidia-smi shows 2: look at",
    ),
    "somebody is on a GPU": (
        node(),
        facts(gpus=(gpu(occupants=(OTHER,)),)),
        "GPU 0 (Tesla V100-PCIE-16GB) is in use by alice's python3 train.py (pid 4711, 12.0GiB)",
    ),
    "a warning beside a GPU": (
        node(),
        facts(gpu_warnings=("WARNING: infoROM is corrupted at gpu 0000:3B:00.0",)),
        "nvidia-smi reports: WARNING: infoROM is corrupted at gpu 0000:3B:00.0",
    ),
}


@pytest.mark.parametrize("case", WARNED)
def test_a_host_is_warned_about_in_one_line(case):
    declared, found, says = WARNED[case]
    (line,) = warnings(declared, found)
    assert line.startswith("v100: ")
    assert says in line


@pytest.mark.parametrize(
    ("declared", "found"),
    [
        (node(image="pytorch-2.0.1", bandwidth_bps=2.5e9), facts(hostname_addresses=("127.0.1.1",))),
        (node(image="pytorch-2.0"), facts(clock_offset_s=-29.0)),
        (node(), facts(clock_offset_s=-40.0, clock_error_s=40.0)),
        (node(image="our own"), facts(torch=None)),
        (node(), facts(disk_free_inodes=None)),
        (node(), facts(disk_free_inodes=1 << 20)),
        (node(paced=PACED, gpus=1), facts(**NO_GPU, torch=CPU_TORCH)),
        (node(gpu=None, gpus=None), facts(**NO_GPU, torch=CPU_TORCH)),
        (node(device="cpu"), facts(gpus=(gpu(occupants=(OTHER,)),))),
        (node(), facts(gpus=(gpu(memory_used_bytes=600 << 20),))),
    ],
)
def test_what_is_harmless_is_not_spoken_of(declared, found):
    assert warnings(declared, found) == ()


WELL_OFF = {"cards": {"eno1": NetworkCard(duplex="full")}, "uptime_s": 86400.0, "available_bytes": 8 << 30}


@pytest.mark.parametrize(
    ("health", "says"),
    [
        ({"gpus": (gpu_health(0, slowed_by=0x48),)}, "v100: GPU 0 is slowed by heat"),
        ({"cards": {"eno1": NetworkCard(duplex="half")}}, "v100: eno1 runs half duplex: look at"),
        ({"available_bytes": 100 << 20}, "v100: only 100.0MiB of its 64.0GiB memory are free: `ps aux"),
        ({"uptime_s": 30.0}, "v100: it came up 30.0s ago"),
    ],
)
def test_what_a_host_suffers_from_now_is_said_too(health, says):
    (line,) = warnings(node(), facts(), **{**WELL_OFF, **health})
    assert line.startswith(says)
    assert warnings(node(), facts(), **WELL_OFF) == ()


def test_gpus_that_wait_for_their_switches_block_and_no_driver_is_blamed():
    waits = torch(devices=0, cuda_error="CUDA: Error 802: system not yet initialized")
    (found,) = judge(Observations((Host(node(), facts(torch=waits), Health()),)), checks_at("up")).findings
    assert (found.id, found.level) == ("P11", "block") and "nvidia-fabricmanager" in found.remedy


# ---- before each start ---------------------------------------------------------------------------------------------


def test_what_a_host_says_now_is_put_over_what_is_remembered(tmp_path):
    said_at = time.time()
    found, health = as_of_now("v100", facts(disk_free_bytes=1), now(tmp_path), said_at, said_at + 0.1)
    assert found.disk_free_bytes > 1 and found.torch == facts().torch
    assert abs(found.clock_offset_s) < 60
    assert not found.interfaces[0].up  # this machine has no eno1
    assert health.uptime_s > 0 and health.available_bytes > 0


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"disk_free_bytes": "much"}, "disk_free_bytes"),
        ({"interfaces": "eno1"}, "interfaces"),
        ({"health": {"cards": []}}, "health.cards"),
        ({"health": {"uptime_s": -1}}, "health.uptime_s"),
        ({"clock": None}, "clock"),
    ],
)
def test_an_answer_that_makes_no_sense_is_refused(change, what, tmp_path):
    with pytest.raises(ProbeError, match=rf"v100: its answer makes no sense \({what}: "):
        as_of_now("v100", facts(), {**now(tmp_path), **change}, 0.0, 1.0)
    with pytest.raises(ProbeError):
        as_of_now("v100", facts(), None, 0.0, 1.0)


class Start:
    """Of a job with GPU-1 of v100, which is remembered as `facts` has it."""

    def __init__(self, tmp_path):
        store = Store(Home(tmp_path / "home"))
        store.save_cluster(Cluster(name="lab", file="lab.yaml", nodes=(node(),), facts={"v100": facts()}), current=True)
        self.said = []
        self.checks = StartChecks(store, self.said.append)
        planned = study_node("v100", "V100", gpus=1).model_copy(update={"gpu_uuids": ("GPU-1",)})
        self.plan = SimpleNamespace(cluster="lab", nodes=(planned,), share_gpus=False)

    def judge(self, found, health=None):
        host = Host(node(), found, health or Health())
        return self.checks._judge(self.plan, self.plan.nodes[0], host, set())

    def hear(self, said=None, login_s=0.1, **changes):
        wall = changes.pop("wall", 1000.0)
        link = {"name": "eno1", "addresses": ["192.168.1.40/24"], "mtu": 1500, "speed_bps": 2.5e9, "up": True}
        health = {"available_bytes": 1 << 36, "uptime_s": 1e6, "cards": {"eno1": {"duplex": "full"}}}
        raw = {
            "clock": {"began": wall, "ended": wall},
            "disk_free_bytes": changes.pop("free", 1 << 40),
            "disk_free_inodes": None,
            "shm_bytes": 1 << 40,
            "interfaces": [{**link, **changes.pop("link", {})}],
            "health": {**health, **changes},
        }
        host = SimpleNamespace(transport=SimpleNamespace(login_s=login_s, logins_tried=1))
        answers = {"v100": Prepared({"now": raw}, 999.9, 1000.1)}
        self.checks.check_prepared(self.plan, {"v100": host}, answers, set() if said is None else said)


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setattr("orchestrator.doctor.start.needed_bytes", lambda plan, node: 1 << 30)
    return Start(tmp_path)


@pytest.mark.parametrize(
    ("change", "id", "says"),
    [
        ({"free": 10 << 20}, "P25", "only 10.0MiB free for /home/ubuntu/.orch"),
        ({"link": {"speed_bps": 1e8}}, "P20", "eno1 runs at 100 Mbps"),
        ({"link": {"up": False}}, "P15", "eno1, its interface for training, is down"),
        ({"available_bytes": 1 << 20}, "P32", "only 1.0MiB of its 64.0GiB"),
        ({"uptime_s": 60.0}, "P36", "it came up 1m00s ago"),
        ({"wall": 939.0}, "P27", "its clock is 1m01s behind"),
        ({"login_s": 9.0}, "P01", "its login takes 9.0s"),
    ],
)
def test_what_has_changed_since_is_one_line_before_a_start(start, change, id, says):
    said = set()
    start.hear(said, **change)
    start.hear(said, **change)  # by another plan of the same start
    (line,) = start.said
    assert line.startswith(f"v100: {says}")
    assert [(one.id, one.level) for one in start.checks.findings] == [(id, "warn")]


def test_of_a_host_that_is_as_it_was_nothing_is_said(start):
    start.hear()
    assert start.judge(facts()) is None
    assert (start.said, start.checks.findings) == ([], [])


def test_a_driver_that_broke_since_blocks_as_doctor_says_it(start):
    refusal = start.judge(facts(gpus=(), gpu_error="Failed to initialize NVML: Driver/library version mismatch"))
    assert refusal.message.startswith("v100: its driver is broken") and "reboot" in refusal.remedy
    assert [(one.id, one.level) for one in start.checks.findings] == [("P06", "block")]
    assert start.said == []


def test_a_gpu_that_fell_off_blocks_and_one_that_the_job_does_not_use_does_not(start):
    assert "says 1 GPUs, the host shows 1" not in str(start.judge(facts(gpus=(gpu(uuid="GPU-2"),))))
    assert "its GPU GPU-1 is no longer there" in str(start.judge(facts(gpus=(gpu(uuid="GPU-2"),))))
    assert start.checks.findings == []


def test_a_gpu_that_is_slow_is_said_if_the_job_has_it(start):
    two = facts(gpus=(gpu(), gpu(index=1, uuid="GPU-2")))
    start.judge(two, Health(gpus=(gpu_health(0), gpu_health(1, slowed_by=0x40))))
    assert start.said == []
    assert start.judge(two, Health(gpus=(gpu_health(0, slowed_by=0x40), gpu_health(1)))) is None
    (line,) = start.said
    assert line.startswith("v100: GPU 0 is slowed by heat")


def test_a_gpu_without_room_is_a_finding_that_blocks_and_one_with_room_a_line(start):
    assert start.judge(facts(gpus=(gpu(memory_used_bytes=2 << 30, occupants=(OTHER,)),))) is None
    assert start.said[0].endswith("or share it: `--share`")
    refusal = start.judge(facts(gpus=(gpu(memory_used_bytes=gpu().memory_bytes, occupants=(OTHER,)),)))
    assert "are free on GPU 0" in refusal.message
    assert [(one.id, one.level) for one in start.checks.findings] == [("P09", "warn"), ("P09", "block")]


def test_where_nvidia_smi_gives_no_answer_nobody_is_kept_from_starting(start):
    assert start.judge(facts(gpus=(), gpu_error="no answer in 30 s")) is None
    assert start.said == ["v100: nvidia-smi: no answer in 30 s; who else uses its GPUs is unknown"]
