"""Pure functions that read what scontrol prints, and the text for sbatch."""

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.slurm.answers import PHASES, Broken, GpuCount, fields, gpu_counts, read_account, read_hosts, read_job
from orchestrator.slurm.batch_script import BatchJob, Component, script_of

NEWER = (
    "NodeName=gpu[01 Arch=x86_64\n"
    "NodeName=gpu02 Arch=x86_64 CoresPerSocket=32 CPUAlloc=4 CPUEfctv=128 CPUTot=128 CPULoad=1.02 "
    "AvailableFeatures=a100,ib ActiveFeatures=a100,ib Gres=gpu:a100:4(S:0-1),shard:a100:16(S:0) NodeAddr=gpu02 "
    "NodeHostName=gpu02 Version=24.05.3 OS=Linux 5.14.0-427.el9 #1 SMP RealMemory=515000 AllocMem=8000 "
    "Sockets=2 Boards=1 State=MIXED+DRAIN* ThreadsPerCore=1 Partitions=gpu,long  CfgTRES=cpu=128,mem=515000M "
    "Reason=fan 3 State=IDLE [root@2026-11-02T10:00:00]\n"
    "NodeName=old1 Gres=gpu:2 State=DOWN* Partitions=gpu Reason=Not responding [slurm@2026-11-02T10:00:00]\n"
    "NodeName=mix Gres=gpu:a16:2,gpu:v100:1 State=IDLE Partitions=gpu\n"
    "NodeName=cpu1 Gres=(null) State=IDLE+CLOUD~ Partitions=cpu\n"
    "slurm_load_node error\n"
)


def test_hosts_as_slurm_declares_them():
    hosts, broken = read_hosts(NEWER)
    by_name = {host.name: host for host in hosts}
    assert by_name["gpu02"].gpus == (GpuCount("a100", 4),)
    assert by_name["gpu02"].features == ("a100", "ib")
    assert by_name["gpu02"].partitions == ("gpu", "long")
    assert by_name["old1"].gpus == (GpuCount(None, 2),)
    assert by_name["old1"].state == "down"
    assert not by_name["old1"].is_up
    assert by_name["old1"].reason.startswith("Not responding")
    assert by_name["mix"].gpus == (GpuCount("a16", 2), GpuCount("v100", 1))
    assert by_name["cpu1"].gpus == ()
    assert by_name["cpu1"].is_up
    assert [line.partition(": ")[2] for line in broken] == ["NodeName is 'gpu[01'", "NodeName is ''"]


VERSIONS = (Path(__file__).parents[1] / "data/slurm/nodes.txt").read_text()


def test_hosts_as_versions_from_17_to_25_print_them():
    """S1."""
    hosts, broken = read_hosts(VERSIONS)
    assert broken == []
    assert {host.name: (host.gpus, host.partitions[0], host.state, host.is_up) for host in hosts} == {
        "gpu01": ((GpuCount(None, 4),), "gpu", "mixed", True),
        "nid00009": ((GpuCount(None, 1),), "system", "idle", True),
        "cn0001": ((GpuCount("a100", 4),), "interactive", "down+drain", False),
        "dgx01": ((GpuCount("A800", 8),), "defq", "mixed", True),
        "g01": ((GpuCount("ampere", 2),), "gpgpu", "idle+planned", True),
        "cg14": ((GpuCount("a40", 1),), "gpua40", "mixed+drain", False),
        "hpc-gpu-16": ((GpuCount("V100", 4),), "free-gpu", "mixed", True),
        "cloud-1": ((GpuCount("l4", 1),), "main", "idle+cloud+powered_down", True),
    }
    by_name = {host.name: host for host in hosts}
    assert by_name["dgx01"].features == ("location=local",)
    assert by_name["cn0001"].reason == "Not responding [slurm@2022-12-21T15:00:01]"


def test_a_line_that_is_cut_is_named_and_the_others_count():
    lines = VERSIONS.splitlines()
    hosts, broken = read_hosts("\n".join([lines[0][: lines[0].index(" State=")], *lines[1:]]))
    assert len(hosts) == len(lines) - 1
    assert [line.partition(": ")[2] for line in broken] == ["it has no State"]


def test_200_hosts_are_read_in_time():
    """S14: in less than 0.2 s."""
    text = "\n".join(line.replace("NodeName=", f"NodeName=n{n}") for n in range(25) for line in VERSIONS.splitlines())
    began_s = time.process_time()
    hosts, _ = read_hosts(text)
    assert len(hosts) == 200
    assert time.process_time() - began_s < 0.2


def test_a_text_that_an_administrator_wrote_changes_no_state():
    (host,), _ = read_hosts("NodeName=a State=DRAINED Partitions=p Reason=was State=IDLE Gres=gpu:9")
    assert host.state == "drained"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("gpu:a16:2(S:0-1),gpu:v100:1", (GpuCount("a16", 2), GpuCount("v100", 1))),
        ("gpu:4", (GpuCount(None, 4),)),
        ("gpu", (GpuCount(None, 1),)),
        ("gpu:a100", (GpuCount("a100", 1),)),
        ("shard:8,mps:100", ()),
        ("(null)", ()),
    ],
)
def test_gpus_of_a_gres(text, found):
    assert gpu_counts(text) == found


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=200))
def test_no_line_raises_anything_but_broken(line):
    hosts, broken = read_hosts(line)
    assert len(hosts) + len(broken) == len([part for part in line.splitlines() if part.strip()])
    try:
        read_job(line, "12")
    except Broken:
        return


KEYS = st.text(alphabet="ABCabc_/:", min_size=1, max_size=8).map(lambda text: f"K{text}")
VALUES = st.text(alphabet="abc=,.-:() 09", max_size=12).map(str.strip)


@given(st.dictionaries(KEYS, VALUES, max_size=8))
def test_every_key_and_value_is_read_back(written):
    assert fields(" ".join(f"{key}={value}" for key, value in written.items())) == written


PENDING = (
    "JobId=12 HetJobId=12 HetJobOffset=0 JobName=x UserId=me(1001) JobState=PENDING Reason=Resources Dependency=(null) "
    "Requeue=1 Restarts=1 BatchFlag=1 Reboot=0 ExitCode=0:0 StartTime=2026-11-28T21:00:00 EndTime=Unknown\n"
    "JobId=13 HetJobId=12 HetJobOffset=1 JobName=x UserId=me(1001) JobState=PENDING Reason=None StartTime=Unknown\n"
)


def test_a_heterogeneous_job_that_waits():
    job = read_job(PENDING, "12")
    assert (job.phase, job.is_over) == ("queued", False)
    assert job.words == "PENDING (Resources), expected start 2026-11-28T21:00:00"


def test_reasons_that_never_end_are_explained():
    job = read_job(PENDING.replace("Resources", "ReqNodeNotAvail,_UnavailableNodes:a16"), "12")
    assert "a host that it needs is down or reserved" in job.words
    job = read_job(PENDING.replace("Resources", "QOSMaxGRESPerUser"), "12")
    assert "fewer GPUs than it and your other jobs use" in job.words


@pytest.mark.parametrize(
    ("state", "phase", "code"),
    [
        ("CANCELLED", "cancelled", "0:15"),
        ("TIMEOUT", "time", "0:0"),
        ("NODE_FAIL", "hosts", "0:1"),
        ("X", "unknown", ""),
    ],
)
def test_ends(state, phase, code):
    job = read_job(f"JobId=7 JobName=x JobState={state} Reason=None ExitCode={code}", "7")
    assert (job.phase, job.is_over) == (phase, True)
    assert job.exit_code == {"0:15": 143, "0:0": 0, "0:1": 129, "": None}[code]


def test_every_state_has_a_phase():
    assert {"PENDING", "RUNNING", "COMPLETED", "PREEMPTED", "OUT_OF_MEMORY"} <= PHASES.keys()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("COMPLETED|0:0|525600|0\n", ("done", 0, 525600 * 60)),
        ("CANCELLED by 1001|0:0|1|85\n", ("cancelled", 0, -25)),
        ("FAILED|3:0||7\nFAILED|3:0||7\n", ("failed", 3, float("inf"))),
        ("FAILED|0:9|UNLIMITED|7\n", ("failed", 137, float("inf"))),
        ("", ("unknown", None, float("inf"))),
    ],
)
def test_what_sacct_prints_of_a_job_that_scontrol_has_forgotten(text, expected):
    """S11."""
    job = read_account(text, "7")
    assert (job.phase, job.exit_code, job.left_s) == expected


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (
            "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions",
            "are down, drained",
        ),
        ("ReqNodeNotAvail,_Reserved_for_maintenance", "is down or reserved"),
        ("QOSMaxJobsPerUserLimit", "(QOSMaxJobsPerUserLimit)"),
        ("QOSMaxWallDurationPerJobLimit", "(QOSMaxWallDurationPerJobLimit): the QOS does not allow that time"),
        ("BeginTime", "(BeginTime), expected start 2026-11-28T21:00:00"),
    ],
)
def test_reasons_as_versions_print_them(reason, words):
    assert words in read_job(PENDING.replace("Resources", reason), "12").words


def test_another_jobs_line_is_broken():
    with pytest.raises(Broken, match="no line is about job 8"):
        read_job("JobId=7 JobState=RUNNING", "8")


def test_the_text_that_sbatch_gets():
    common = (("partition", "gpu"), ("time", "12:00:00"))
    types = [
        Component("v100", 1, (("gres", "gpu:v100:1"), ("partition", "volta"))),
        Component("a16", 2, (("constraint", "a16&ib"), ("gres", "gpu:a16:2"))),
    ]
    text = script_of(
        BatchJob(
            "lr-k3f", types, common, ["--mail-type=END"], "~/venv/bin/python", ". ~/venv/bin/activate", "../../c-1"
        )
    )
    assert text.splitlines()[2:] == [
        "# v100",
        "#SBATCH --job-name=lr-k3f",
        "#SBATCH --output=slurm.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "#SBATCH --signal=B:TERM@120",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --partition=volta",
        "#SBATCH --time=12:00:00",
        "#SBATCH --mail-type=END",
        "#SBATCH --gres=gpu:v100:1",
        "#SBATCH hetjob",
        "# a16",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --partition=gpu",
        "#SBATCH --time=12:00:00",
        "#SBATCH --mail-type=END",
        "#SBATCH --constraint='a16&ib'",
        "#SBATCH --gres=gpu:a16:2",
        "umask 077",
        ". ~/venv/bin/activate",
        'export ORCH_HOME="$PWD/home" PYTHONPATH="$PWD/../../c-1" COLUMNS=150',
        "exec ~/venv/bin/python -u -m orchestrator.cli.slurm",
    ]
