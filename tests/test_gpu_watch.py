"""The watch over a job's GPUs, with a shell script in nvidia-smi's place, under the real supervisor."""

import json
import os
import signal
import time

import pytest
from gang import gang
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import job as jobs
from orchestrator.analyse import analyse
from orchestrator.collect import collect
from orchestrator.files import write_json
from orchestrator.frames import Piece
from orchestrator.paths import RunFolder
from orchestrator.records import write_record
from orchestrator.remote import gpus, processes

WAITS = "import time\ntime.sleep(120)\n"
# Waits until a folder of ours holds what its name says: the gang's scripts run in <job>/src.
UNTIL_SEEN = """
import os, time
while not os.path.exists("../gpu.jsonl"):
    time.sleep(0.01)
"""
ANSWER = """
GPU-b, 1, 40, 2048
GPU-stranger, 7, 99, 99
GPU-a, 0, 90, 1024
"""


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


def watching(job):
    """Waits until an nvidia-smi of the job runs below its supervisor; returns what of it runs."""
    agents = job.wait_running()
    while not (found := [p for p in processes.descendants(agents["a"]["pid"]) if "nvidia-smi" in command(p.pid)]):
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
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path / "bin", f"echo '{ANSWER}'"))
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
    assert [(end.rank, end.exit_code) for end in host.ends] == [(0, 0), (1, 0)]
    assert left(job) == []


@pytest.mark.parametrize("script", ["trap '' INT TERM; sleep 1000 & wait; sleep 1000", "exec sleep 1000"])
def test_an_nvidia_smi_that_hangs_delays_no_end_and_leaves_no_process(tmp_path, monkeypatch, script):
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path / "bin", f"touch {tmp_path}/asked; {script}"))
    waits = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'asked')!r}):\n    time.sleep(0.01)\n"
    with gang(tmp_path, waits, ranks=(1,), grace_s=30.0) as job:
        with_gpus(job, "GPU-a")
        began = time.monotonic()
        job.launch()
        record = job.wait()
        assert time.monotonic() - began < 15  # the ladder alone would take its grace of 30 s twice
        assert (record.state, job.agents()["a"]["leftovers"]) == ("succeeded", [])
        assert not (job.folder("a") / "gpu.jsonl").exists()
    assert left(job) == []


def test_a_cancelled_job_takes_a_hanging_nvidia_smi_along(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path / "bin", "trap '' INT TERM; while :; do sleep 1000; done"))
    with gang(tmp_path, WAITS, ranks=(1,), grace_s=30.0) as job:
        with_gpus(job, "GPU-a")
        job.launch()
        found = watching(job)
        began = time.monotonic()
        jobs.cancel(job.plan, job.hosts)
        assert job.wait().state == "cancelled"
        assert time.monotonic() - began < 15
        assert [process for process in found if process.is_alive()] == []
    assert left(job) == []


def test_a_killed_supervisor_leaves_no_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path / "bin", "exec sleep 1000"))
    with gang(tmp_path, WAITS, ranks=(1,)) as job:
        with_gpus(job, "GPU-a")
        job.launch()
        agents = job.wait_running()
        os.kill(agents["a"]["pid"], signal.SIGKILL)
        assert job.wait().state == "failed"
    assert left(job) == []


@pytest.mark.parametrize(
    "script",
    [
        "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
        "head -c 300 /dev/urandom",
        "echo 'GPU-a, 0, [N/A], [Not Supported]'",
        "exit 0",
    ],
)
def test_garbage_is_no_reading_and_asking_ends_with_the_reason_in_the_log(tmp_path, monkeypatch, capfd, script):
    monkeypatch.setattr(gpus, "EVERY_S", 0.0)
    path = nvidia_smi(tmp_path / "bin", script)
    gpus.watch(path.partition(":")[0] + "/nvidia-smi", {"GPU-a": 0}, tmp_path / "gpu.jsonl")
    assert not (tmp_path / "gpu.jsonl").exists()
    assert "GPU use is not known from here on: nvidia-smi exited" in capfd.readouterr().err


def test_endless_output_is_no_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "ANSWER_S", 0.2)
    path = nvidia_smi(tmp_path / "bin", "exec yes GPU-a, 0, 1, 1")
    answer, why = gpus.ask(path.partition(":")[0] + "/nvidia-smi")
    assert (answer, why) == ("", "nvidia-smi did not answer within 0.2 s")


def test_a_host_without_gpus_is_not_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path / "bin", f"touch {tmp_path}/asked"))
    with gang(tmp_path, "print('done')", ranks=(1,)) as job:
        job.launch()
        job.wait()
    assert not (tmp_path / "asked").exists()


def test_what_the_driver_does_not_know_is_left_out():
    told = "GPU-a, 0, [N/A], 512\nGPU-b, 1, 250, [N/A]\nGPU-c, [N/A], 3, 99999999999\n"
    found = gpus.readings(told, {"GPU-a": 0, "GPU-b": 1, "GPU-c": 2}, 7.0)
    assert found == [
        {"event": "gpu", "rank": 0, "index": 0, "memory_bytes": 512 << 20, "wall": 7.0},
        {"event": "gpu", "rank": 2, "utilisation": 3, "wall": 7.0},
    ]


@given(st.text())
def test_any_text_gives_readings_of_our_gpus_alone(text):
    for event in gpus.readings(f"{text}\nGPU-a, {text}", {"GPU-a": 0}, 1.0):
        assert event["rank"] == 0
        assert 0 <= event.get("utilisation", 0) <= 100


def test_readings_come_with_the_stream_that_follows_a_job(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path / "bin", "echo 'GPU-a, 0, 5, 5'"))
    with gang(tmp_path, UNTIL_SEEN, ranks=(1,)) as job:
        with_gpus(job, "GPU-a")
        job.launch()
        pieces = [p for _, p in jobs.watch(job.plan, job.hosts, offsets={}, follow=True) if isinstance(p, Piece)]
    assert "gpu.jsonl" in {piece.file for piece in pieces}
