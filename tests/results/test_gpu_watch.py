"""The watch over a job's GPUs, with a shell script in nvidia-smi's place, under the real supervisor."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.files import write_json
from orchestrator.jobs import FilePiece, launch
from orchestrator.jobs.collect import collect
from orchestrator.jobs.follow import watch
from orchestrator.paths import RunFolder
from orchestrator.record import write_record
from orchestrator.remote import gpus, processes
from orchestrator.results.analyse import analyse
from tests.support.local_job import gang

WAITS = "import time\ntime.sleep(120)\n"
# Waits until a folder of ours holds what its name says: the gang's scripts run in <job>/src.
UNTIL_SEEN = """
import os, time
while not os.path.exists("../gpu.jsonl"):
    time.sleep(0.01)
"""
KEYS = list(gpus.FIELDS.values())
# uuid, index, use, memory, SM clock, power, temperature, what slows it, the highest clock, the power limit
ANSWER = """
GPU-b, 1, 40, 2048, 1800, 65.10, 60, 0x0000000000000000, 2100, 70.00
GPU-stranger, 7, 99, 99, 99, 99.00, 99, 0x0000000000000004, 99, 99.00
GPU-a, 0, 90, 1024, 1290, 69.75, 71, 0x0000000000000004, 2100, 70.00
"""
STAYS = "exec sleep 1000"


def nvidia_smi(folder, script):
    """A PATH whose nvidia-smi is this shell script."""
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def with_gpus(job, *uuids):
    """Gives the job's first node these GPUs."""
    first, *others = job.plan.nodes
    job.plan = job.plan.model_copy(update={"nodes": (first.model_copy(update={"gpu_uuids": uuids}), *others)})


def watching(job, words="nvidia-smi"):
    """Waits until an nvidia-smi of the job runs below its supervisor; what of it runs. words: of its command line."""
    agents = job.wait_running()
    while not (found := [p for p in processes.descendants(agents["a"]["pid"]) if words in command(p.pid)]):
        time.sleep(0.01)
    return found


def command(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except OSError:
        return ""


def left(job):
    return [pid for node in job.plan.nodes for pid in processes.marked(job.folder(node.name))]


def test_use_and_memory_of_every_gpu_of_the_job_reach_the_summary_under_its_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path / "bin", f"echo '{ANSWER}'; {STAYS}"))
    run = RunFolder(tmp_path / "runs" / "job")
    with gang(tmp_path, UNTIL_SEEN, ranks=(2,)) as job:
        with_gpus(job, "GPU-a", "GPU-b")
        job.launch()
        record = job.wait()
        assert record.state == "succeeded"
        first, second = map(json.loads, (job.folder("a") / "gpu.jsonl").read_text().splitlines()[:2])
        assert collect(job.plan, job.hosts, run).errors == {}
        write_record(run.plan, job.plan)
        write_json(run.job, record.model_dump(mode="json", by_alias=True))
    assert (first["rank"], first["index"], first["utilisation"], first["memory_bytes"]) == (1, 1, 40, 2048 << 20)
    assert (second["rank"], second["index"], second["utilisation"], second["memory_bytes"]) == (0, 0, 90, 1024 << 20)
    host = analyse(run).nodes[0]
    assert (host.gpu_utilisation, host.peak_memory_bytes) == (65, 2048 << 20)
    assert (second["sm_mhz"], second["watts"], second["celsius"], second["slowed_by"]) == (1290, 69.75, 71, 4)
    assert (second["max_sm_mhz"], second["limit_watts"]) == (2100, 70.0)
    assert [(end.rank, end.exit_code) for end in host.ends] == [(0, 0), (1, 0)]
    assert left(job) == []


@pytest.mark.parametrize("script", ["trap '' INT TERM; sleep 1000 & wait; sleep 1000", "exec sleep 1000"])
def test_an_nvidia_smi_that_hangs_delays_no_end_and_leaves_no_process(tmp_path, monkeypatch, script):
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path / "bin", f"touch {tmp_path}/asked; {script}"))
    waits = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'asked')!r}):\n    time.sleep(0.01)\n"
    with gang(tmp_path, waits, ranks=(1,), grace_s=100.0) as job:
        with_gpus(job, "GPU-a")
        began = time.monotonic()
        job.launch()
        record = job.wait()
        assert time.monotonic() - began < 90  # the ladder alone would take its grace of 100 s twice
        assert (record.state, job.agents()["a"]["leftovers"]) == ("succeeded", [])
        assert not (job.folder("a") / "gpu.jsonl").exists()
    assert left(job) == []


def test_a_cancelled_job_takes_a_hanging_nvidia_smi_along(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path / "bin", "trap '' INT TERM; while :; do sleep 1000; done"))
    with gang(tmp_path, WAITS, ranks=(1,), grace_s=100.0) as job:
        with_gpus(job, "GPU-a")
        job.launch()
        found = watching(job)
        began = time.monotonic()
        launch.cancel(job.plan, job.hosts)
        assert job.wait().state == "cancelled"
        assert time.monotonic() - began < 90
        assert [process for process in found if process.is_alive()] == []
    assert left(job) == []


@pytest.mark.parametrize("killed", [("pid",), ("keeper", "pid")], ids=["supervisor", "keeper and supervisor"])
def test_a_killed_supervisor_leaves_no_nvidia_smi(tmp_path, monkeypatch, killed):
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path / "bin", "exec sleep 1000"))
    with gang(tmp_path, WAITS, ranks=(1,)) as job:
        with_gpus(job, "GPU-a")
        job.launch()
        (found,) = watching(job, "sleep\x001000")
        agent = job.agents()["a"]
        for who in killed:
            os.kill(agent["keeper"]["pid"] if who == "keeper" else agent["pid"], signal.SIGKILL)
        end = time.monotonic() + 30
        while found.is_alive():
            assert time.monotonic() < end, "nvidia-smi outlived those who started it"
            time.sleep(0.01)


def noted(tmp_path, script, rank_of, readings):
    """What a watch of this nvidia-smi has noted once there are so many readings; it is ended then."""
    path, log = nvidia_smi(tmp_path / "bin", script), tmp_path / "gpu.jsonl"
    program = path.partition(":")[0] + "/nvidia-smi"
    command = f"""
from pathlib import Path
from orchestrator.remote import gpus
gpus.GATHER_S = gpus.EVERY_S = 0.01
gpus.watch({program!r}, {rank_of!r}, Path({str(log)!r}))"""
    watch = subprocess.Popen([sys.executable, "-c", command], start_new_session=True)
    try:
        end = time.monotonic() + 60
        while not log.exists() or log.read_bytes().count(b"\n") < readings:
            assert watch.poll() is None and time.monotonic() < end
            time.sleep(0.01)
    finally:
        os.killpg(watch.pid, signal.SIGKILL)
        watch.wait()
    return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]


def test_one_nvidia_smi_gives_all_readings(tmp_path):
    counts = f"echo x >> {tmp_path}/started; while :; do echo '{ANSWER}'; sleep 0.02; done"
    found = noted(tmp_path, counts, {"GPU-a": 0, "GPU-b": 1}, 40)
    assert (tmp_path / "started").read_text() == "x\n"
    assert {each["rank"] for each in found} == {0, 1}
    # What does not change is written once.
    assert [each["rank"] for each in found if "max_sm_mhz" in each or "limit_watts" in each] == [1, 0]


def test_an_nvidia_smi_that_ends_is_started_again(tmp_path):
    found = noted(tmp_path, f"echo x >> {tmp_path}/started; echo '{ANSWER}'", {"GPU-a": 0}, 4)
    assert {each["sm_mhz"] for each in found} == {1290}
    assert (tmp_path / "started").read_text().count("x") >= 4


def test_a_driver_is_asked_for_what_it_knows_by_the_name_that_it_knows(tmp_path):
    """An old driver that calls one field otherwise, and lacks another."""
    refuses = "echo 'Field \"{}\" is not a valid field to query.'; exit 2"
    script = f"""
echo "$1" >> {tmp_path}/asked
case $1 in *clocks_event_reasons.active*) {refuses.format("clocks_event_reasons.active")};; esac
case $1 in *clocks.max.sm*) {refuses.format("clocks.max.sm")};; esac
echo 'GPU-a, 0, 90, 1024, 1290, [N/A], 71, 0x0000000000000004, 70.00'
{STAYS}"""
    (found,) = noted(tmp_path, script, {"GPU-a": 0}, 1)
    assert (found["slowed_by"], found["limit_watts"], found["celsius"]) == (4, 70.0, 71)
    assert not {"watts", "max_sm_mhz"} & found.keys()
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 3
    assert "clocks_throttle_reasons.active" in asked[2]
    assert "clocks.max.sm" not in asked[2]


@pytest.mark.parametrize(
    "script",
    [
        "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
        "head -c 300 /dev/urandom",
        "echo 'GPU-a, 0, [N/A], [Not Supported], [N/A], [N/A], ERR!, [N/A], [N/A], [N/A]'",
        "echo 'GPU-a, 0, 5, 5'",
        "exit 0",
    ],
)
def test_garbage_is_no_reading_and_asking_ends_with_the_reason_in_the_log(tmp_path, monkeypatch, capfd, script):
    monkeypatch.setattr(gpus, "EVERY_S", 0.0)
    monkeypatch.setattr(gpus, "GATHER_S", 0.01)
    path = nvidia_smi(tmp_path / "bin", script)
    gpus.watch(path.partition(":")[0] + "/nvidia-smi", {"GPU-a": 0}, tmp_path / "gpu.jsonl")
    assert not (tmp_path / "gpu.jsonl").exists()
    assert "GPU use is unknown from here on: nvidia-smi exited" in capfd.readouterr().err


def test_a_program_that_is_gone_is_no_crash(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(gpus, "EVERY_S", 0.0)
    gpus.watch(str(tmp_path / "nvidia-smi"), {"GPU-a": 0}, tmp_path / "gpu.jsonl")
    assert "nvidia-smi did not start (No such file or directory)" in capfd.readouterr().err


def test_one_that_says_nothing_is_stuck(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(gpus, "EVERY_S", 0.0)
    monkeypatch.setattr(gpus, "SILENT_S", 0.1)
    monkeypatch.setattr(gpus, "GATHER_S", 0.01)
    path = nvidia_smi(tmp_path / "bin", f"echo $$ >> {tmp_path}/started; exec sleep 1000")
    gpus.watch(path.partition(":")[0] + "/nvidia-smi", {"GPU-a": 0}, tmp_path / "gpu.jsonl")
    assert "nvidia-smi did not answer for 0.1 s" in capfd.readouterr().err
    started = (tmp_path / "started").read_text().split()
    assert len(started) == gpus.GIVE_UP
    assert not [pid for pid in started if os.path.exists(f"/proc/{pid}")]


def test_endless_output_is_heard_in_pieces(tmp_path, monkeypatch):
    """However much it says, no more than a reading of each GPU a moment is kept."""
    monkeypatch.setattr(gpus, "GATHER_S", 0.05)
    path = nvidia_smi(tmp_path / "bin", f"exec yes '{ANSWER.splitlines()[1]}'")
    child = gpus.start(path.partition(":")[0] + "/nvidia-smi", gpus.FIELDS)
    try:
        heard = gpus.answers(child)
        for lines in (next(heard), next(heard)):
            assert 100 < sum(map(len, lines)) <= gpus.ANSWER_BYTES + gpus.LINE_BYTES
            assert len(gpus.readings(lines, KEYS, {"GPU-b": 1}, 1.0)) == 1
    finally:
        child.kill()
        gpus.end(child)


def test_a_line_without_an_end_is_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "GATHER_S", 0.01)
    path = nvidia_smi(tmp_path / "bin", f"head -c 500000 /dev/zero; echo; echo '{ANSWER}'; {STAYS}")
    child = gpus.start(path.partition(":")[0] + "/nvidia-smi", gpus.FIELDS)
    try:
        for lines in gpus.answers(child):
            assert sum(map(len, lines)) <= gpus.ANSWER_BYTES + gpus.LINE_BYTES
            if found := gpus.readings(lines, KEYS, {"GPU-a": 0}, 1.0):
                break
        assert found[0]["sm_mhz"] == 1290
    finally:
        child.kill()
        gpus.end(child)


def test_a_host_without_gpus_is_not_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path / "bin", f"touch {tmp_path}/asked"))
    with gang(tmp_path, "print('done')", ranks=(1,)) as job:
        job.launch()
        job.wait()
    assert not (tmp_path / "asked").exists()


def test_what_the_driver_does_not_know_is_left_out():
    unknown = ", [N/A]" * 6
    readings = [
        f"GPU-a, 0, [N/A], 512{unknown}",
        f"GPU-b, 1, 250, [N/A]{unknown}",
        f"GPU-c, [N/A], 3, 99999999999{unknown}",
        "GPU-d, 3, 1, 1, 0, 0.0, 0, 0x0000000000000001, -5, 1e9",
    ]
    found = gpus.readings(readings, KEYS, {"GPU-a": 0, "GPU-b": 1, "GPU-c": 2, "GPU-d": 3}, 7.0)
    idle = {"utilisation": 1, "sm_mhz": 0, "watts": 0.0, "celsius": 0, "slowed_by": 1, "memory_bytes": 1 << 20}
    assert found == [
        {"event": "gpu", "rank": 0, "index": 0, "memory_bytes": 512 << 20, "wall": 7.0},
        {"event": "gpu", "rank": 2, "utilisation": 3, "wall": 7.0},
        {"event": "gpu", "rank": 3, "index": 3, **idle, "wall": 7.0},
    ]


def test_every_gpu_of_a_rank_that_has_several_is_noted():
    found = gpus.readings(ANSWER.splitlines(), KEYS, {"GPU-a": 0, "GPU-b": 0}, 7.0)
    assert [(each["rank"], each["index"]) for each in found] == [(0, 1), (0, 0)]
    limits = {}
    assert ["limit_watts" in gpus.without_known(each, limits) for each in [*found, *found]] == [
        True,
        True,
        False,
        False,
    ]


@given(st.text())
def test_any_text_gives_readings_of_our_gpus_alone(text):
    for event in gpus.readings([*text.splitlines(), f"GPU-a, {text}"], KEYS, {"GPU-a": 0}, 1.0):
        assert event["rank"] == 0
        assert 0 <= event.get("utilisation", 0) <= 100


def test_readings_come_with_the_stream_that_follows_a_job(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path / "bin", f"echo '{ANSWER}'"))
    with gang(tmp_path, UNTIL_SEEN, ranks=(1,)) as job:
        with_gpus(job, "GPU-a")
        job.launch()
        pieces = [p for _, p in watch(job.plan, job.hosts, offsets={}, follow=True) if isinstance(p, FilePiece)]
    assert "gpu.jsonl" in {piece.file for piece in pieces}
