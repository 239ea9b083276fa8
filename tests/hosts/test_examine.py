"""What a host says of itself for `orch doctor`, on real processes: this machine, with the tools that it meets stood in
for; and what is made of the answer.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import ProbeError
from orchestrator.hosts import Health, examine, outlived, read_health
from orchestrator.remote import cgroups, health, outlives, probe
from orchestrator.remote import examine as program
from orchestrator.remote import health as gpu_health
from orchestrator.transport import ConnectedHost, LocalTransport
from tests.support.fuzz import strings
from tests.support.quick_python import quick_python

DATA = Path(__file__).parents[1] / "data" / "health"
PLAIN = json.loads((DATA / "sound_a2000.json").read_text())


def here(workdir, python=sys.executable):
    return ConnectedHost(LocalTransport("here"), python, None, str(workdir))


def test_one_question_brings_facts_and_health_of_this_machine(tmp_path):
    (tmp_path / "data" / "MNIST").mkdir(parents=True)
    python = quick_python(tmp_path / "quick")
    found = examine(here(tmp_path / "work", python), ["127.0.0.1"], data=str(tmp_path / "data"), timeout_s=60)
    assert found.facts.torch
    assert found.health.data == ("MNIST",)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert found.health.limits["nofile"].soft == soft
    assert found.health.uptime_s > 0
    assert found.health.disk
    assert found.health.disk.path.endswith("/work")
    assert not (tmp_path / "work").exists()
    assert outlived(here(tmp_path), found.began, timeout_s=30)
    assert not outlived(here(tmp_path), found.began, timeout_s=30)  # the first look ended it


def test_what_began_and_was_killed_with_its_session_is_missed(tmp_path):
    began = outlives.start()
    os.kill(began[0], signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(began[0], 0)
    assert not outlived(here(tmp_path), tuple(began), timeout_s=30)


def test_who_asks_after_its_time_is_told_that_nobody_knows(tmp_path, monkeypatch):
    """The second login may take its time."""
    began = outlives.start()
    os.kill(began[0], signal.SIGKILL)
    os.waitpid(began[0], 0)
    assert outlives.is_alive(began) is False
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    monkeypatch.setattr(outlives.time, "clock_gettime", lambda clock: now_s + outlives.SLEEP_S)
    assert outlives.is_alive(began) is None


def test_where_nobody_hears_the_answer_nothing_stays_behind(tmp_path, monkeypatch):
    """A Ctrl-C while a host still looks for what it has to say."""
    began, start = [], outlives.start
    monkeypatch.setattr(outlives, "start", lambda: began.append(start()) or began[0])
    read, write = os.pipe()
    os.close(read)
    request = {"workdir": str(tmp_path), "peers": [], "torch": False, "limit_s": 20, "data": str(tmp_path)}
    with contextlib.suppress(BrokenPipeError), open(write, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        program.main({**request, "marker": "M"})
    os.waitpid(began[0][0], 0)
    assert outlives.is_alive(began[0]) is False


# ---- GPUs ----------------------------------------------------------------------------------------------------------

ROW = "0, GPU-1, 00000000:3B:00.0, 2, No, Yes, No, 0x0000000000000040, 1200, [N/A], 180.00, 250.00, 8, 16, [N/A]"
FIRST = "0, Tesla V100-PCIE-16GB, GPU-1, 16384, 0, 525.105.17, 00000000:3B:00.0, Default, 7.0"


def test_what_gpus_say_of_their_health_is_asked_beside_what_they_are(tool, tmp_path):
    tool("nvidia-smi", f"case $1 in *fabric*) echo '{ROW}';; *compute-apps*) ;; *) echo '{FIRST}';; esac")
    answer = program.examine(
        {"workdir": str(tmp_path), "peers": [], "torch": False, "limit_s": 20, "data": str(tmp_path)}
    )
    assert outlives.is_alive(answer["began"])
    (gpu,) = read_health("here", answer).gpus
    assert (gpu.uncorrected, gpu.replacement_due, gpu.replacement_failed, gpu.slowed_by) == (2, True, False, 0x40)
    assert (gpu.clock_mhz, gpu.default_clock_mhz) == (1200, None)
    assert (gpu.limit_watts, gpu.default_limit_watts) == (180, 250)
    assert (gpu.link_width, gpu.most_link_width, gpu.fabric) == (8, 16, None)


def test_fields_that_a_driver_does_not_know_are_asked_for_by_their_older_name_or_left_out(tool):
    refuse = "echo 'Field \"%s\" is not a valid field to query.'; exit 2"
    tool(
        "nvidia-smi",
        f"case $1 in *clocks_event*) {refuse % 'clocks_event_reasons.active'};; *fabric*) {refuse % 'fabric.state'};;"
        f" *) echo '0, GPU-1, 00000000:3B:00.0, 0, No, No, No, 1200, 1200, 250, 250, 16, 16, 0x4';; esac",
    )
    (row,) = gpu_health.look(10)
    assert row["clocks_event_reasons.active"] == "0x4"
    assert "fabric.state" not in row
    assert row["pcie.link.width.max"] == "16"


def test_a_driver_that_hangs_or_is_not_there_costs_its_facts_alone(tool):
    assert gpu_health.look(5) == []
    tool("nvidia-smi", "exec sleep 60")
    began = time.monotonic()
    assert gpu_health.look(0.5) == []
    assert time.monotonic() - began < 20


def test_how_the_iommu_treats_a_gpu_is_read_by_its_bus(tmp_path):
    group = tmp_path / "0000:3b:00.0" / "iommu_group"
    group.mkdir(parents=True)
    (group / "type").write_text("DMA-FQ\n")
    assert gpu_health.translated("00000000:3B:00.0", tmp_path) == "DMA-FQ"
    assert gpu_health.translated("00000000:AF:00.0", tmp_path) is None


COMPUTES = """
class CUDA:
    def is_available(): return True
    def device_count(): return 2
    def get_arch_list(): return []
import torch
torch.cuda = CUDA
class Square(list):
    def __matmul__(self, other): return {(0, 0): 64.0}
def ones(*size, device):
    if device == "cuda:1":
        raise RuntimeError("CUDA error: no kernel image is available\\nfor execution")
    return Square()
torch.ones = ones
"""


def test_each_gpu_is_given_something_to_compute(tool, tmp_path, monkeypatch):
    """No GPU is here: torch's words for one are stood in for."""
    from orchestrator.remote.probe import TORCH

    python = quick_python(tmp_path / "quick")
    monkeypatch.setattr(probe, "TORCH", TORCH.replace("import torch\n", f"import torch\n{COMPUTES}", 1))
    monkeypatch.setattr(sys, "executable", python)
    tool("nvidia-smi", f"case $1 in *fabric*) echo '{ROW}'; echo '1{ROW[1:]}';; *) exit 1;; esac")
    request = {"workdir": str(tmp_path), "peers": [], "torch": True, "limit_s": 20}
    found = read_health("here", probe.gather({**request, "computes": True}))
    assert [gpu.computes for gpu in found.gpus] == [None, "CUDA error: no kernel image is available"]
    plainly = probe.gather(request)
    assert plainly["facts"]["torch"] and "computes" not in plainly["facts"]["torch"]


# ---- the system ----------------------------------------------------------------------------------------------------


def test_only_variables_that_steer_ranks_are_reported(monkeypatch):
    for name in ("NCCL_ALGO", "RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "PET_NNODES", "LD_PRELOAD"):
        monkeypatch.setenv(name, "x" * 300)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    found = health.environment()
    assert {"NCCL_ALGO", "RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "PET_NNODES", "LD_PRELOAD"} <= found.keys()
    assert not {"AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PATH", "HOME"} & found.keys()
    assert len(found["RANK"]) == health.MOST_TEXT


def test_a_reboot_that_is_due_names_its_packages(tmp_path):
    assert health.reboot(str(tmp_path)) is None
    (tmp_path / "reboot-required").write_text("*** System restart required ***\n")
    assert health.reboot(str(tmp_path)) == []
    (tmp_path / "reboot-required.pkgs").write_text("linux-base\nlibc6\nlibc6\n")
    assert health.reboot(str(tmp_path)) == ["libc6", "linux-base"]


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({}, False),
        ({"logind.conf": "[Login]\n#KillUserProcesses=yes\n"}, False),
        ({"logind.conf": "[Login]\nKillUserProcesses=yes\n"}, True),
        ({"logind.conf": "[Login]\nKillUserProcesses=yes\nKillExcludeUsers=root USER\n"}, False),
        ({"logind.conf": "[Login]\nKillUserProcesses=yes\nKillOnlyUsers=alice\n"}, False),
        ({"logind.conf": "[Login]\nKillUserProcesses=yes\n", "logind.conf.d/x.conf": "KillUserProcesses=no\n"}, False),
    ],
)
def test_whether_logind_ends_processes_is_read_as_it_reads_it(tmp_path, monkeypatch, files, kills):
    monkeypatch.setattr(health, "user_name", lambda uid: "USER")
    (tmp_path / "logind.conf.d").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text + "KillExcludeUsers=\n" if "Exclude" not in text else text)
    cgroup = tmp_path / "cgroup"
    cgroup.write_text("0::/user.slice/user-1000.slice/session-4.scope\n")
    assert health.kills_left((str(tmp_path / "logind.conf"),), str(cgroup)) is kills
    cgroup.write_text("0::/system.slice/ssh.service\n")
    assert health.kills_left((str(tmp_path / "logind.conf"),), str(cgroup)) is None


def test_the_tightest_of_all_control_groups_counts(tmp_path):
    """As a container shows them: a group of version 2 below another one."""
    (tmp_path / "self").mkdir()
    outer = tmp_path / "fs"
    inner = outer / "job" / "step"
    inner.mkdir(parents=True)
    (tmp_path / "self" / "cgroup").write_text("0::/job/step\n")
    (tmp_path / "self" / "mountinfo").write_text(f"30 1 0:26 / {outer} rw - cgroup2 cgroup2 rw\n")
    (inner / "memory.max").write_text("max\n")
    (outer / "job" / "memory.max").write_text(f"{8 << 30}\n")
    (inner / "pids.max").write_text("512\n")
    (outer / "job" / "cpu.max").write_text("150000 100000\n")
    assert cgroups.limits(tmp_path) == {"memory_bytes": 8 << 30, "pids": 512, "cpus": 1.5}
    (outer / "job" / "memory.max").write_text("max\n")
    assert cgroups.limits(tmp_path)["memory_bytes"] is None


def test_a_job_is_known_by_the_mark_of_its_processes(tmp_path):
    child = subprocess.Popen(["sleep", "60"], env={"ORCH_JOB_DIR": f"{tmp_path}/jobs/mnist-1-abc"})
    try:
        assert "mnist-1-abc" in health.jobs()
    finally:
        child.kill()
        child.wait()


def test_a_process_that_ends_while_jobs_are_looked_for_is_passed_over(monkeypatch):
    stat = os.stat

    def ended(path, **options):
        if str(path).endswith("/environ"):
            raise ProcessLookupError(3, "No such process", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", ended)
    with subprocess.Popen(["sleep", "60"], env={"ORCH_JOB_DIR": "/work/jobs/mnist-2-abc"}) as process:
        try:
            assert "mnist-2-abc" in health.jobs()
        finally:
            process.kill()


# ---- what is made of it --------------------------------------------------------------------------------------------


def answer_of(**changes):
    gpus = [gpu_health.health_of(row) for row in PLAIN["rows"]]
    return {"health": copy.deepcopy({**PLAIN["health"], "gpus": gpus, **changes})}


@pytest.mark.parametrize("case", sorted(path.stem for path in DATA.glob("*.json")))
def test_a_recorded_answer_becomes_this_health(case):
    recorded = json.loads((DATA / f"{case}.json").read_text())
    gpus = [{**gpu_health.health_of(row), "iommu": row["iommu"]} for row in recorded["rows"]]
    found = read_health("n", answer_of(**recorded["health"], gpus=gpus)).model_dump(mode="json")
    assert {name: found[name] for name in recorded["expect"]} == recorded["expect"]


NONSENSE = {
    "limits.nofile.hard": [{"limits": {"nofile": {"soft": 1}}}],
    "limits.nofile.soft": [{"limits": {"nofile": {"soft": "1", "hard": 1}}}],
    "limits": [{"limits": [1]}, {"limits": {f"limit {n}": {"soft": 1, "hard": 1} for n in range(300)}}],
    "group_memory_bytes": [{"group_memory_bytes": "8"}],
    "environment": [{"environment": ["A"]}],
    "environment.A": [{"environment": {"A": 3}}],
    "cards.eno1.crc_errors": [{"cards": {"eno1": {"crc_errors": "x"}}}],
    "cards.eno1.duplex": [{"cards": {"eno1": {"duplex": 1}}}],
    "jobs": [{"jobs": "all"}, {"jobs": ["x"] * 300}],
    "gpus": [{"gpus": "fine"}],
    "gpus.0.index": [{"gpus": [{"index": "first"}]}],
    "gpus.0": [{"gpus": [7]}],
    "data": [{"data": "{"}],
    "disk": [{"disk": [1]}],
    "uptime_s": [{"uptime_s": -1}],
    "kills_left": [{"kills_left": "no"}],
}


@pytest.mark.parametrize(("fact", "parts"), [(fact, case) for fact, cases in NONSENSE.items() for case in cases])
def test_nonsense_is_refused_and_names_the_node_and_the_fact(fact, parts):
    with pytest.raises(ProbeError, match=rf"^v100: its answer makes no sense \({re.escape(fact)}: "):
        read_health("v100", answer_of(**parts))


def test_words_of_a_host_are_cut_and_printable():
    found = read_health("n", answer_of(environment={"RANK": "\x1b[2J0"}, jobs=["x" * 5000]))
    assert found.environment == {"RANK": "0"}
    assert len(found.jobs[0]) == 200


def test_a_name_of_a_host_stays_one_printable_line_in_an_error():
    with pytest.raises(ProbeError) as refused:
        read_health("n", answer_of(environment={"\x1b[2J\nA": 3}))
    assert str(refused.value).isprintable()


WORDS = st.text(max_size=20) | st.sampled_from(["\x1b[0m", "1e999", "-1", "[N/A]", "NaN", "9" * 5000, "Yes", "\ud800"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(list(answer_of()["health"])), JSON)
def test_whatever_a_host_answers_it_is_health_or_a_probe_error(name, value):
    health_or_error(answer_of(**{name: value}))


@given(st.sampled_from(list(PLAIN["rows"][0])), WORDS)
def test_whatever_nvidia_smi_prints_it_is_health_or_a_probe_error(field, text):
    if field != "index":  # without which there is no row
        health_or_error(answer_of(gpus=[gpu_health.health_of({**PLAIN["rows"][0], field: text})]))


def health_or_error(answer):
    try:
        found = read_health("n", answer)
    except ProbeError as error:
        assert str(error).isprintable()
        return
    assert all(text.isprintable() for text in strings(found.model_dump(mode="json")))
    assert Health.model_validate_json(found.model_dump_json()) == found
