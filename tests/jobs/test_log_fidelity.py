"""Logs, once and in order: links cut anywhere, files that restart, floods, and collects that are killed.

Real reader processes, real `orch` commands. ORCH_KILLS=n kills so many real `orch collect` at random moments (4 by
default) and, from 20 on, one at every write point; ORCH_LONG=1 adds a link that is down for longer than SSH waits.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.hosts import Cluster, load_inventory
from orchestrator.jobs import FilePiece, Notice, RunningJob, claimed
from orchestrator.jobs.follow import watch
from orchestrator.paths import Home, RunFolder
from orchestrator.store import Store
from tests.support import forks
from tests.support.broken_link import breaking
from tests.support.floods import FLOODS, figures_of, follower_of
from tests.support.lab import lab
from tests.support.local_job import gang
from tests.support.terminal import Person

KILLS = int(os.environ.get("ORCH_KILLS", "4"))
DRIVER = Path(__file__).parents[1] / "support" / "collect_driver.py"

COUNTS = """
import os, sys
for line in range(6000):
    print("rank", os.environ["RANK"], "line", line)
    if line % 3 == 0:
        print("trouble", line, file=sys.stderr)
"""
WAITS = """
import os, time
print("first\\nunfinished", end="", flush=True)
while not os.path.exists("go_on"):
    time.sleep(0.02)
"""
FLOOD_BYTES = 625 * 2 * 40_000
"""In three seconds. What following costs a job that writes so much, `tests/bench/flood.py` measures."""


def files_of(job) -> dict[tuple[str, str], bytes]:
    """Every file that the hosts have of this job, by node and name."""
    found = {}
    for node in job.plan.nodes:
        for pattern in ("rank-*/*.log", "rank-*/metrics.jsonl", "*.log"):
            for path in job.folder(node.name).glob(pattern):
                if path.stat().st_size:
                    found[node.name, path.relative_to(job.folder(node.name)).as_posix()] = path.read_bytes()
    return found


class Watched:
    """A job followed over links that each break after so many bytes, and what came of it."""

    def __init__(self, job, after) -> None:
        self.files: dict[tuple[str, str], bytes] = {}
        self.cuts = 0
        hosts = {name: breaking(host, after()) for name, host in job.hosts.items()}
        again = lambda name: breaking(job.hosts[name], after())  # noqa: E731
        for name, item in watch(job.plan, hosts, offsets={}, follow=True, reconnect=again):
            if isinstance(item, FilePiece):
                before = self.files.get((name, item.file), b"")
                assert item.offset == len(before)
                assert not item.restarted
                self.files[name, item.file] = before + item.data
            self.cuts += isinstance(item, Exception)


@pytest.fixture
def at_once(monkeypatch):
    """Dials a broken link again without a pause."""
    monkeypatch.setattr("orchestrator.jobs.follow.RETRY_S", 0.0)


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """An ended job with some hundred KB of numbered lines."""
    with gang(tmp_path_factory.mktemp("counted"), COUNTS, ranks=(1, 1)) as job:
        job.launch()
        assert job.wait().state == "succeeded"
        yield job


# ---- following ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_every_byte_comes_once_and_in_order_over_links_cut_at_random(counted, at_once, seed):
    dice = random.Random(seed)
    watched = Watched(counted, lambda: dice.randrange(5_000, 60_000))
    assert watched.files == files_of(counted)
    assert watched.cuts >= 5


def follow(job, hosts, reconnect):
    store = SimpleNamespace(job_record=lambda name: job.record(), change_job=lambda name, change: change(job.record()))
    return RunningJob(job.plan, store, SimpleNamespace(reopen=reconnect), hosts).follow()


def test_every_line_is_shown_once_and_in_order_over_links_cut_every_64_kib(counted, at_once):
    hosts = {name: breaking(host, 1 << 16) for name, host in counted.hosts.items()}
    shown = []
    for event in follow(counted, hosts, lambda name: breaking(counted.hosts[name], 1 << 16)):
        shown += event if isinstance(event, tuple) else ()
    for rank, node in enumerate("ab"):
        said = [line.text for line in shown if (line.node, line.stream) == (node, "stdout")]
        assert said == [f"rank {rank} line {number}" for number in range(6000)]
        said = [line.text for line in shown if (line.node, line.stream) == (node, "stderr")]
        assert said == [f"trouble {number}" for number in range(0, 6000, 3)]


@pytest.mark.parametrize("new", [b"new\n", b"a new and much longer beginning of this file\n" * 50])
def test_a_log_that_restarts_while_followed_is_shown_from_its_start_with_a_notice(tmp_path, new):
    shown = []
    with gang(tmp_path, WAITS, ranks=(1,)) as job:
        job.launch()
        log = job.folder("a") / "rank-0" / "stdout.log"
        for event in follow(job, job.hosts, None):
            if isinstance(event, tuple):
                shown += [line.text for line in event]
            elif isinstance(event, Notice):
                shown.append(event.text)
            if shown == ["first"]:
                log.write_bytes(new)
            if shown and shown[-1].startswith(new.decode()[:10].strip()):
                (job.folder("a") / "src" / "go_on").touch()
    notice = "a: rank-0/stdout.log was cut, replaced or rotated on its host; it starts again here"
    assert shown == ["first", notice, "unfinished", *new.decode().splitlines()]


# ---- floods ---------------------------------------------------------------------------------------------------


def test_a_flood_is_followed_whole_and_in_bounded_memory(tmp_path):
    with gang(tmp_path, FLOODS, ranks=(1,)) as job:
        job.launch()
        with follower_of(job) as following:
            printed = 0
            while data := following.stdout.read(1 << 20):
                printed += data.count(b"\n")
            memory_mib = int(following.stderr.read().split()[-1])
        figures_of(job)
        written = sum((job.folder("a") / "rank-0" / f"{name}.log").stat().st_size for name in ("stdout", "stderr"))
    assert (printed * 100, written) == (FLOOD_BYTES, FLOOD_BYTES)
    assert memory_mib < 200


def test_a_flood_ends_while_its_reader_stands_still(tmp_path):
    with gang(tmp_path, FLOODS, ranks=(1,)) as job:
        job.launch()
        with follower_of(job) as following:
            assert following.stdout.read(1)
            os.kill(following.pid, signal.SIGSTOP)
            figures_of(job)
            os.kill(following.pid, signal.SIGKILL)


# ---- collects that are killed ---------------------------------------------------------------------------------


def test_a_collect_killed_at_its_write_points_leaves_a_beginning_that_the_next_one_completes(counted, tmp_path):
    """Every file the host has, byte by byte; `collect_driver.py` forks, kills, compares and collects."""
    (tmp_path / "plan.json").write_text(counted.plan.model_dump_json(by_alias=True))
    step = 1 if KILLS >= 20 else 5
    driver = [sys.executable, str(DRIVER), str(tmp_path / "plan.json"), str(tmp_path / "driven"), str(step)]
    done = subprocess.run(driver, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    killed = re.search(r"killed at (\d+) of (\d+) write points: every file whole", done.stdout)
    assert killed, done.stdout
    assert int(killed[1]) >= 4


BULK = """
import os, sys
for block in range(60):
    sys.stdout.write("".join(f"rank {os.environ['RANK']} block {block} line {line}\\n" for line in range(4000)))
"""


@pytest.fixture(scope="module")
def bulk(tmp_path_factory):
    """An ended job with 6 MB of lines on each of two hosts."""
    with gang(tmp_path_factory.mktemp("bulk"), BULK, ranks=(1, 1)) as job:
        job.launch()
        assert job.wait().state == "succeeded"
        yield job


@pytest.fixture
def remembered(bulk, tmp_path, monkeypatch):
    """`orch` here knows that job and its hosts, without SSH; gives the job's id."""
    monkeypatch.chdir(tmp_path)
    nodes = "".join(
        f"  - {{name: {node.name}, host: {node.name}, address: 127.0.0.1, workdir: {node.workdir}}}\n"
        for node in bulk.plan.nodes
    )
    defaults = f"defaults: {{transport: local, device: cpu, python: {sys.executable}}}\n"
    Path("rack.yaml").write_text(f"cluster: test\n{defaults}nodes:\n{nodes}")
    store = Store(Home.default())
    inventory = load_inventory(Path("rack.yaml"))
    store.save_cluster(Cluster(schema=1, name="test", file="rack.yaml", nodes=inventory.nodes), current=True)
    store.save_job(bulk.record(), bulk.plan)
    return bulk.plan.job


def orch(*words: str) -> subprocess.CompletedProcess[str]:
    done = forks.run(forks.ORCH, words, timeout=100)
    assert done.returncode == 0, done.stderr
    return done


def hashes(root: Path) -> dict[str, str]:
    """Of every file of a rank, by its name below the folder."""
    names = ("stdout.log", "stderr.log", "metrics.jsonl")
    found = [path for name in names for path in root.glob(f"rank-*/{name}") if path.stat().st_size]
    return {path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def same_as_hosts(job, out: Path) -> bool:
    names = [node.name for node in job.plan.nodes]
    there = {name: hashes(job.folder(name)) for name in names}
    assert all(there.values())
    return there == {name: hashes(out / job.plan.job / "nodes" / name) for name in names}


def test_collects_killed_at_random_moments_lose_and_double_nothing(bulk, remembered):
    began = time.monotonic()
    orch("collect", "--job", remembered, "--out", "first")
    took_s, dice = time.monotonic() - began, random.Random(7)
    assert same_as_hosts(bulk, Path("first"))
    for number in range(KILLS):
        out = f"out-{number}"
        for _ in range(2):  # the second finds what the first left
            with forks.start(forks.ORCH, ["collect", "--job", remembered, "--out", out]) as victim:
                try:
                    victim.wait(dice.uniform(0.3, 1.0) * took_s)
                except subprocess.TimeoutExpired:
                    victim.kill()
            for path in Path(out).glob("*/nodes/*/rank-*/stdout.log"):
                there = bulk.folder(path.parts[3]).joinpath(*path.parts[4:])
                assert there.read_bytes().startswith(path.read_bytes())
        done = orch("collect", "--job", remembered, "--out", out)
        assert "damaged" not in done.stderr
        assert same_as_hosts(bulk, Path(out))
        assert not list(Path(out, remembered).rglob("stdout.log.*"))


def test_two_collects_at_once_do_no_harm_and_the_second_only_reads(bulk, remembered):
    words = ["collect", "--job", remembered]
    with forks.start(forks.ORCH, words) as one, forks.start(forks.ORCH, words) as other:
        two = (one, other)
        said = [one.communicate(timeout=100)[1] for one in two]
    assert {one.returncode for one in two} <= {0, 1}, said
    assert 0 in {one.returncode for one in two}
    assert same_as_hosts(bulk, Path("runs"))

    with claimed(RunFolder(Path("runs") / remembered)):
        second = forks.run(forks.ORCH, ["collect", "--job", remembered], timeout=100)
        assert second.returncode == 0
        assert f"note: process {os.getpid()} on " in second.stderr
        assert "0B new" in second.stderr
        empty = RunFolder(Path("other") / remembered)
        with claimed(empty):
            third = forks.run(forks.ORCH, ["collect", "--job", remembered, "--out", "other"], timeout=100)
        assert (third.returncode, len(third.stderr.splitlines())) == (1, 2), third.stderr
        assert f"error: process {os.getpid()} on " in third.stderr


# ---- on the lab -----------------------------------------------------------------------------------------------

NUMBERS = """
import os, time
line = 0
while not os.path.exists("go_on"):
    print("line", line, flush=True)
    line += 1
    time.sleep(0.002)
print("the end of", line)
"""


@pytest.mark.lab
def test_over_real_links_that_break_every_line_is_shown_once_and_collected_whole(tmp_path):
    with lab(
        "cluster: logs\ndefaults: {device: cpu}\nnodes: [{name: alpha, host: 10.77.9.1, ranks: 1}]", quick=True
    ) as one:
        person = Person(one, tmp_path / "home", tmp_path)
        (tmp_path / "talks").mkdir()
        (tmp_path / "talks" / "talks.py").write_text(NUMBERS)
        person.types("up", str(one.inventory))
        job = person.types("run", "--detach", "--", "talks/talks.py").stdout.strip()
        with open(tmp_path / "shown", "wb") as shown, open(tmp_path / "said", "wb") as said:
            following = person.starts("logs", "-f", "--job", job, stdout=shown, stderr=said)
            until(lambda: (tmp_path / "shown").stat().st_size > 1000, "the first lines")
            one.link("alpha", "down")
            time.sleep(30 if os.environ.get("ORCH_LONG") else 2)  # how long a link is down is the fault itself
            one.link("alpha", "up")
            for cuts in (1, 2):
                end_ssh_session(one)
                connected = lambda: (tmp_path / "said").read_text().count("connected again") >= cuts  # noqa: B023, E731
                until(connected, "the link to be dialled again")
            one.host_exec("alpha", ["touch", f"/home/lab/.orch/jobs/{job}/src/go_on"], check=True)
            assert following.wait(60) == 0
        lines = (tmp_path / "shown").read_text().splitlines()
        count = int(lines[-1].split()[-1])
        assert lines == [f"[alpha 0] line {number}" for number in range(count)] + [f"[alpha 0] the end of {count}"]
        person.types("collect", "--job", job)
        there = one.host_exec("alpha", ["sha256sum", f"/home/lab/.orch/jobs/{job}/rank-0/stdout.log"]).stdout.split()[0]
        here = tmp_path / "runs" / job / "nodes" / "alpha" / "rank-0" / "stdout.log"
        assert hashlib.sha256(here.read_bytes()).hexdigest() == there


def end_ssh_session(one) -> None:
    """Ends the server's process that carries our reader, as a restarted sshd's session or a firewall would."""
    look = 'for p in /proc/[0-9]*; do grep -qs orch-reader "$p/cmdline" && tr "\\0" " " <"$p/stat" && echo; done'
    stat = one.host_exec("alpha", ["sh", "-c", look]).stdout.splitlines()
    reader = next(line for line in stat if "(sh)" not in line)
    one.host_exec("alpha", ["kill", "-9", reader.rpartition(")")[2].split()[1]], check=True)


def until(condition, what: str, within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {within_s} s for {what}"
        time.sleep(0.1)
