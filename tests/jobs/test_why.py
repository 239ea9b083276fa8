"""`orch why` on real ranks: the odd one out is named, and a job that gets on gives no alarm."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from orchestrator.errors import HostError
from orchestrator.jobs import HostSnapshot, Verdict, diagnose, snapshots_of
from orchestrator.remote.layout import JobFolder
from orchestrator.remote.why import see
from tests.support.disks import disk_that_freezes
from tests.support.local_job import Gang, gang

LONG_AGO_S = 300.0
MEETS = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
SAYS = "import os, time\nrank = int(os.environ['RANK'])\ndef say(word): print(word, flush=True)\n"


def folder_of(job: Gang, rank: int) -> Path:
    node = next(node for node in job.plan.nodes if rank in node.rank_numbers)
    return job.folder(node.name) / f"rank-{rank}"


def wait_said(job: Gang, word: str) -> None:
    """Until each rank has printed it."""
    for rank in range(job.plan.world_size):
        while word not in read(folder_of(job, rank) / "stdout.log"):
            assert not job.is_over(), read(folder_of(job, rank) / "stderr.log")
            time.sleep(0.05)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def asked(job: Gang, ago_s: float = LONG_AGO_S) -> Mapping[str, HostSnapshot | HostError]:
    """As if the ranks had written last so long ago."""
    for rank in range(job.plan.world_size):
        for path in folder_of(job, rank).iterdir():
            os.utime(path, (time.time() - ago_s,) * 2)
    return snapshots_of(job.plan, job.hosts)


def verdict_once(job: Gang, kind: str, place: str, reason: str = "") -> Verdict:
    """Once all ranks stand where they will; else the last of several verdicts. reason: a part of it."""
    for _ in range(20):
        found = diagnose(job.plan, asked(job))
        if (found.kind, found.place) == (kind, place) and reason in found.reason:
            break
    return found


def launched(job: Gang, word: str = "up") -> Gang:
    job.launch()
    wait_said(job, word)
    return job


ELSEWHERE = {"time.sleep(600)": "missed-collective", "while True: pass": "still-busy"}


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
def test_a_rank_that_misses_a_collective_is_named(tmp_path: Path, elsewhere: str) -> None:
    """One that computes meanwhile is named, too, and gives no alarm: it may come yet."""
    skips = f"def skips():\n    {elsewhere}\nsay('up')\nif rank == 1: skips()\ndist.all_reduce(torch.ones(1))\n"
    kind = ELSEWHERE[elsewhere]
    with gang(tmp_path, MEETS + SAYS + skips) as job:
        found = verdict_once(launched(job), kind, "script.py:7 in skips", "rank 0 on a waits")
        assert (found.kind, found.node, found.rank, found.place) == (kind, "b", 1, "script.py:7 in skips")
        assert found.line == elsewhere and found.is_alarm == (kind == "missed-collective")
        assert "rank 0 on a waits" in found.reason and "script.py:10" in found.reason
        assert diagnose(job.plan, asked(job, ago_s=0)).kind == "no-stall"


def test_a_worker_of_a_loader_that_never_returns_is_named_with_its_line(tmp_path: Path) -> None:
    script = """
import time
from torch.utils.data import DataLoader
class Data:
    def __len__(self): return 4
    def __getitem__(self, index):
        if index == 2:
            time.sleep(600)
        return index
for batch in DataLoader(Data(), num_workers=1):
    print('up', flush=True)
"""
    with gang(tmp_path, script, ranks=(1,)) as job:
        found = verdict_once(launched(job), "loader", "script.py:8 in __getitem__")
        assert (found.kind, found.rank, found.place) == ("loader", 0, "script.py:8 in __getitem__")
        assert "DataLoader's worker, pid" in found.reason


LOCKS = """
import threading
one, two = threading.Lock(), threading.Lock()
def other():
    with two:
        ready.set()
        with one: pass
ready = threading.Event()
def main():
    with one:
        threading.Thread(target=other, daemon=True).start()
        ready.wait()
        say('up')
        with two: pass
main()
"""
WAITS = {
    LOCKS: ("deadlock", "script.py:17 in main", "script.py:10 in other"),
    "import queue\nsay('up')\nqueue.Queue().get()\n": ("deadlock", "script.py:6", ""),
    "say('up')\ntime.sleep(600)\n": ("stands-still", "script.py:5", ""),
    "say('up')\nos.execvp('sh', ['sh', '-c', 'sleep 600; true'])\n": ("stands-still", "", "(sh, state S"),
}


@pytest.mark.parametrize(("script", "kind", "place", "words"), [(key, *value) for key, value in WAITS.items()])
def test_what_a_rank_waits_for_is_told(tmp_path: Path, script: str, kind: str, place: str, words: str) -> None:
    with gang(tmp_path, SAYS + script, ranks=(1,)) as job:
        found = verdict_once(launched(job), kind, place)
        assert (found.kind, found.node, found.rank, found.place) == (kind, "a", 0, place)
        assert words in found.reason


def test_a_stopped_rank_is_told_at_once(tmp_path: Path) -> None:
    prints = "say('up')\nwhile True:\n    say('x' * 1000)\n    time.sleep(0.01)\n"
    with gang(tmp_path, SAYS + prints) as job:
        record = launched(job).wait_running()["b"]["ranks"]["1"]
        os.kill(record["pid"], signal.SIGSTOP)
        found = diagnose(job.plan, snapshots_of(job.plan, job.hosts))
        assert (found.kind, found.node, found.rank) == ("stopped", "b", 1)
        assert f"kill -CONT {record['pid']}" in found.remedy
        os.kill(record["pid"], signal.SIGCONT)


def test_a_pipe_that_nobody_reads_is_told(tmp_path: Path) -> None:
    floods = "say('up')\nread, write = os.pipe()\nos.dup2(write, 1)\nwhile True: os.write(1, b'x' * 1000)\n"
    with gang(tmp_path, SAYS + floods, ranks=(1,)) as job:
        found = verdict_once(launched(job), "full-pipe", "script.py:7")
        assert (found.kind, found.rank, found.place) == ("full-pipe", 0, "script.py:7")
        assert "stdout" in found.reason


def test_a_disk_that_gives_no_answer_is_told(tmp_path: Path) -> None:
    """A thread that waits in the kernel takes no signal, and so no line of it is named."""
    script = f"say('up')\nfile = open({str(tmp_path / 'disk' / 'weights')!r}, 'ab', buffering=0)\n"
    writes = "def save():\n    file.write(b'x')\nwhile True:\n    save()\n    time.sleep(0.01)\n"
    with (
        gang(tmp_path, SAYS + script + writes, ranks=(1,)) as job,
        disk_that_freezes(tmp_path / "disk", tmp_path / "image") as freeze,
    ):
        launched(job)
        freeze()
        found = verdict_once(job, "dead-mount", "")
    assert (found.kind, found.node, found.rank) == ("dead-mount", "a", 0)


SENDS = """
import socket, threading
def sends(ours):
    while True:
        time.sleep(0.1)
        ours.sendall(bytes(1 << 14))
server = socket.create_server(('127.0.0.1', 0))
client = socket.create_connection(server.getsockname())
threading.Thread(target=sends, args=(server.accept()[0],), daemon=True).start()
say('up')
def takes():
    while client.recv(1 << 20): pass
takes()
"""


def test_who_waits_for_a_slow_network_is_no_alarm(tmp_path: Path) -> None:
    """It uses next to no CPU and stands at one line."""
    with gang(tmp_path, SAYS + SENDS, ranks=(1,)) as job:
        found = verdict_once(launched(job), "still-busy", "script.py:15 in takes")
        assert (found.kind, found.place) == ("still-busy", "script.py:15 in takes")


HEALTHY = {
    "prints": "while True:\n    say('up')\n    time.sleep(0.5)\n",
    "computes": "say('up')\nwhile True: sum(range(10**6))\n",
    "reduces": "say('up')\nwhile True:\n    dist.all_reduce(torch.ones(9))\n    say(1)\n    time.sleep(rank / 5)\n",
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_job_that_gets_on_gives_no_alarm(tmp_path: Path, name: str) -> None:
    with gang(tmp_path, (MEETS if name == "reduces" else "") + SAYS + HEALTHY[name]) as job:
        launched(job)
        for _ in range(3):
            found = diagnose(job.plan, snapshots_of(job.plan, job.hosts))
            assert not found.is_alarm, found


def test_what_was_registered_is_gone_with_the_rank(tmp_path: Path) -> None:
    with gang(tmp_path, SAYS + "say('up')\nwhile not os.path.exists('end'): time.sleep(0.01)\n", ranks=(2,)) as job:
        agents = launched(job).wait_running()
        for number, record in agents["a"]["ranks"].items():
            (seen,), _ = see(JobFolder(job.folder("a")), int(number), record["pid"])
            assert seen.threads
        assert all((folder_of(job, rank) / "stacks").stat().st_mode & 0o777 == 0o600 for rank in (0, 1))
        (job.folder("a") / "src" / "end").touch()
        assert job.wait().state == "succeeded"
        assert not any((folder_of(job, rank) / "stacks").exists() for rank in (0, 1))
