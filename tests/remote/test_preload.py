"""Ranks that are forks of a process with torch: like fresh ones in all that a script can see, and gone in time.

Beside each other: one job as it is, one with --no-preload.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from orchestrator.planning.job_spec import JobSpec
from orchestrator.remote.preload import READ_AT_IMPORT, script_folder
from tests.support.local_job import gang, left

FACTS = """
import sys
had_torch = "torch" in sys.modules
import json, os, resource, signal, threading
def sees():
    import multiprocessing, random
    import numpy, torch
    own = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "MASTER", "ORCH"))}
    path = [one for one in sys.path if one]
    with open("/proc/self/status") as file:
        masks = [line for line in file if line.startswith(("SigIgn", "SigBlk", "SigCgt", "Umask", "Threads"))]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.map(len, ["four"])
    return {
        "argv": sys.argv, "orig_argv": sys.orig_argv, "flags": repr(sys.flags), "path": path, "name": __name__,
        "file": __file__, "main": sys.modules["__main__"].__dict__ is globals(), "doc": __doc__,
        "cwd": os.getcwd(), "env": own, "masks": masks, "spawned": spawned, "had_torch": had_torch,
        "int": str(signal.getsignal(signal.SIGINT)), "term": str(signal.getsignal(signal.SIGTERM)),
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE), "stdin": os.readlink("/proc/self/fd/0"),
        "out": [sys.stdout.encoding, sys.stdout.errors, sys.stdout.line_buffering, sys.stdout.seekable()],
        "leads": os.getsid(0) == os.getpid(), "fds": sorted(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(), "main_thread": threading.current_thread() is threading.main_thread(),
        "command": open("/proc/self/cmdline").read(), "torch": torch.get_num_threads(),
        "cuda": torch.cuda._is_in_bad_fork(), "spec": torch.__spec__.name, "origin": torch.__spec__.origin,
        "authkey": len(multiprocessing.current_process().authkey),
    }, [random.random(), numpy.random.random(), torch.rand(1).item()]
if __name__ == "__main__":
    facts, draws = sees()
    with open(f"/proc/{os.getppid()}/cmdline") as file:
        parent = file.read()
    folder = os.environ["SEEN"]
    with open(f"{folder}/{os.environ['RANK']}.json", "w") as file:
        json.dump([facts, draws, parent], file)
"""


def seen(tmp_path: Path, name: str, asked: JobSpec) -> dict[int, list]:
    folder = tmp_path / name / "job"
    folder.mkdir(parents=True)
    env = {"SEEN": str(folder), "OMP_NUM_THREADS": "1"}
    command = ("-u", "script.py", "--lr", "two words")
    with gang(folder, FACTS, command=command, env=env, torch_free=False, warm=False, ranks=(2,), asked=asked) as job:
        job.launch()
        state = job.wait().state
        assert state == "succeeded", [path.read_text() for path in job.folder("a").glob("rank-*/stderr.log")]
    return {rank: json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)}


def test_a_script_sees_what_it_would_in_a_process_of_its_own(tmp_path):
    fresh, forked = (seen(tmp_path, name, JobSpec(no_preload=name == "fresh")) for name in ("fresh", "forked"))
    assert all("orch_remote.rank" in fresh[rank][2] for rank in fresh)
    assert all(f"orch_remote.preload rank {rank}" in forked[rank][2] for rank in forked)
    for rank in fresh:
        place = str(tmp_path)
        one, other = (
            json.loads(json.dumps(found[rank][0]).replace(f"{place}/{name}", "PLACE"))
            for found, name in ((fresh, "fresh"), (forked, "forked"))
        )
        assert {name: (one[name], other[name]) for name in one if one[name] != other[name]} == {}
    draws = [*fresh[0][1], *fresh[1][1], *forked[0][1], *forked[1][1]]
    assert len(set(draws)) == len(draws)  # no rank draws another's numbers


ENDS = """
import os, signal, subprocess, sys, time
import torch
subprocess.Popen(["sleep", "600"], start_new_session=True)  # nobody's child in the end
if os.environ["RANK"] == "1":
    {how}
time.sleep(600)
"""
HOW = {
    "exit": ("sys.exit(7)", 7, None),
    "signal": ("os.kill(os.getpid(), signal.SIGSEGV)", None, "SIGSEGV"),
    "minder": ("os.kill(os.getppid(), signal.SIGKILL)", None, None),
}


@pytest.mark.parametrize("how", ["exit", "signal", "minder"])
def test_its_end_is_reported_and_nothing_stays(tmp_path, how):
    does, code, number = HOW[how]
    script = ENDS.format(how=does)
    with gang(tmp_path, script, torch_free=False, warm=False, ranks=(2,)) as job:
        job.launch()
        record = job.wait()
        assert record.state == "failed"
        assert record.first_failure
        cause = record.first_failure
        if how == "minder":
            assert (cause.kind, cause.rank) == ("torchrun", None)
        else:
            assert (cause.rank, cause.exit_code, cause.signal) == (1, code, number)
        assert left(job) == []


def test_a_script_that_sets_what_a_library_reads_at_its_start_imports_torch_by_itself(tmp_path):
    sets = 'import os\nos.environ["MKL_NUM_THREADS"] = "1"\nimport torch\n'
    script = sets + 'print(open(f"/proc/{os.getppid()}/cmdline").read())'
    with gang(tmp_path, script, torch_free=False, warm=False, ranks=(1,)) as job:
        job.launch()
        assert job.wait().state == "succeeded"
        assert "orch_remote.rank" in (job.folder("a") / "rank-0/stdout.log").read_text()
        assert "script.py names MKL_NUM_THREADS" in (job.folder("a") / "torchrun.log").read_text()


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_LOGS", "LD_PRELOAD"])
def test_variables_that_count_only_before_the_import(name):
    assert READ_AT_IMPORT.search(f'os.environ["{name}"] = "1"'.encode())


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_HOME", "MASTER_ADDR"])
def test_variables_that_count_later(name):
    assert not READ_AT_IMPORT.search(f'os.environ["{name}"] = "1"'.encode())


@pytest.mark.parametrize(
    ("words", "folder"),
    [(["a/b.py", "-m"], "a"), (["-u", "b.py"], ""), (["-u", "-m", "b"], ""), (["-c", "1"], None), ([], None)],
)
def test_the_folder_that_python_takes_modules_from_first(words, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert script_folder(words) == (None if folder is None else os.path.join(tmp_path, folder).rstrip("/"))
