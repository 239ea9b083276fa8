"""Full disks: of a host, where the job goes on and keeps what was written; of the controller, where it alone waits."""

import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.hosts import Connections
from orchestrator.jobs import FilePiece, Notice, RunningJob
from orchestrator.jobs.follow import watch
from orchestrator.paths import Home
from orchestrator.remote import processes
from orchestrator.remote.output_writer import PIPE_BYTES, OutputWriter
from orchestrator.store import Store
from tests.support import forks
from tests.support.disks import fill, small_disk
from tests.support.local_job import gang

EXT4_IOC_SHUTDOWN, EXT4_GOING_FLAGS_NOLOGFLUSH = 0x8004587D, 2
CHATS = """
import os, pathlib, sys, time
def chat(word):
    for number in range(20000):  # twice what the pipe holds
        print(word, number, "." * 90)
    print(word, "is over", file=sys.stderr)
    sys.stdout.flush()
    pathlib.Path(os.environ["TALK"], word).touch()
for word in ("before", "during", "after"):
    while not pathlib.Path(os.environ["TALK"], "say-" + word).exists():
        time.sleep(0.01)
    chat(word)
"""


@contextmanager
def ext4_disk(place, size):
    """A disk that can be made to fail (`fail`), as a loop device has them; only root may make one."""
    place.mkdir()
    image = place.with_name(f"{place.name}.img")
    image.touch()
    os.truncate(image, size)
    made = ["mkfs.ext4", "-q", "-F", image], ["mount", "-o", "loop", image, place]
    if os.geteuid() != 0 or any(subprocess.run(words, capture_output=True).returncode for words in made):
        pytest.skip("needs root, mkfs.ext4 and a loop device, to mount a disk that fails")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def fail(disk):
    """From now on every access gives EIO, but for what the kernel has in its cache."""
    handle = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(handle, EXT4_IOC_SHUTDOWN, struct.pack("I", EXT4_GOING_FLAGS_NOLOGFLUSH))
    finally:
        os.close(handle)


def until(path, holds=lambda content: True):
    """Waits until the script has made this file, with a content of which `holds` is true."""
    deadline = time.monotonic() + 30
    while not (path.exists() and holds(path.read_bytes())):
        assert time.monotonic() < deadline, f"waited for {path}"
        time.sleep(0.01)


# ---- a host's -----------------------------------------------------------------------------------------------------


@pytest.mark.lab
@pytest.mark.parametrize("room_again", [True, False], ids=["room again", "full to the end"])
def test_a_hosts_full_disk_loses_nothing_that_was_written_and_does_not_stop_the_job(tmp_path, room_again):
    talk = tmp_path / "talk"
    talk.mkdir()
    with (
        small_disk(tmp_path / "disk", "80m") as disk,
        gang(tmp_path, CHATS, ranks=(1, 1), env={"TALK": str(talk)}) as job,
    ):
        nodes = tuple(n.model_copy(update={"workdir": str(disk / n.name)}) for n in job.plan.nodes)
        job.plan = job.plan.model_copy(update={"nodes": nodes})
        job.launch()
        (talk / "say-before").touch()
        wait_for(job, b"before 19999 ")
        ballast = fill(disk)
        (talk / "say-during").touch()
        until(talk / "during")
        if room_again:
            ballast.unlink()
        (talk / "say-after").touch()
        record = job.wait()
        assert (record.state, record.exit_code) == ("succeeded", 0)
        for node, agent in job.agents().items():
            assert agent["state"] == "succeeded"
            (rank, reported) = next(iter(agent["ranks"].items()))
            log = (job.folder(node) / f"rank-{rank}" / "stdout.log").read_text()
            assert log.count("before ") == 20000
            assert reported["dropped_bytes"] > 0
            if room_again:
                assert log.count("after ") == 20000
                assert log.endswith(f"after 19999 {'.' * 90}\n")
                notices = re.findall(r"\[orch\] the disk was full: (\d+) bytes of output are missing here\n", log)
                assert [int(size) for size in notices] == [reported["dropped_bytes"]]
                said = sum(len(f"{w} {n} {'.' * 90}\n") for w in ("before", "during", "after") for n in range(20000))
                here = len(log) - len("[orch] the disk was full:  bytes of output are missing here\n" + notices[0])
                # The notice begins on a line of its own: its newline may be one more.
                assert said - here in (reported["dropped_bytes"], reported["dropped_bytes"] - 1)


@pytest.mark.lab
def test_the_master_reports_at_the_end_what_output_a_failing_disk_dropped(tmp_path):
    """The host's own record lies on the disk that failed, and nobody can read it."""
    talk = tmp_path / "talk"
    talk.mkdir()
    with (
        ext4_disk(tmp_path / "disk", 128 << 20) as disk,
        gang(tmp_path, CHATS, ranks=(1, 1), env={"TALK": str(talk)}) as job,
    ):
        a, b = job.plan.nodes
        job.plan = job.plan.model_copy(update={"nodes": (a, b.model_copy(update={"workdir": str(disk / "work")}))})
        store = Store(Home(tmp_path / "orch-home"))
        store.save_cluster(job.cluster(), current=True)
        store.save_job(job.record(), job.plan)
        job.launch()
        (talk / "say-before").touch()
        notices, over = [], set()
        with Connections(store.home) as connections:
            for event in RunningJob(job.plan, store, connections, job.hosts).follow():
                if isinstance(event, Notice):
                    notices.append(event.text)
                elif isinstance(event, tuple) and not (talk / "say-during").exists():
                    last = [line for line in event if line.text.startswith(("before 19999 ", "before is over"))]
                    over |= {(line.node, line.stream) for line in last}
                    if len(over) == 4:
                        fail(disk)
                        for word in ("during", "after"):
                            (talk / f"say-{word}").touch()
            record = store.job_record(job.plan.job)
            assert (record.state, record.exit_code) == ("succeeded", 0)
            size = sum(len(f"{w} {n} {'.' * 90}\n") for w in ("during", "after") for n in range(20000))
            size += len("during is over\nafter is over\n")
            lost = f"{size} bytes of what rank 1 printed are lost"
            assert f"b: the disk of its work folder was full or failed, {lost}; the job went on" in notices
            assert [n for n in notices if "(EIO)" in n and n.endswith("not all that this host printed is shown here")]
            assert not [notice for notice in notices if notice.startswith("a:")]


def wait_for(job, text):
    waiting = set(range(job.plan.world_size))
    for _, item in watch(job.plan, job.hosts, offsets={}, follow=True):
        if isinstance(item, FilePiece) and text in item.data:
            waiting.discard(item.rank)
        if not waiting:
            return


def test_what_a_rank_wrote_before_everything_of_its_job_was_killed_is_in_its_log(tmp_path):
    script = """
import mmap, os, time
with open(os.environ["WRITTEN"], "w+b") as file:
    file.truncate(8)
    written = mmap.mmap(file.fileno(), 8)
total = 0
while total < 1 << 29:
    total += os.write(1, b"." * 50_000)
    written[:] = total.to_bytes(8, "little")
time.sleep(60)
"""
    with gang(tmp_path, script, ranks=(1,), env={"WRITTEN": str(tmp_path / "written")}) as job:
        job.launch()
        agents = job.wait_running()
        until(tmp_path / "written", holds=any)
        os.kill(agents["a"]["pid"], signal.SIGKILL)
        assert job.wait().state == "failed"
        written = int.from_bytes((tmp_path / "written").read_bytes(), "little")
        assert (job.folder("a") / "rank-0" / "stdout.log").stat().st_size >= written > 0


def test_a_wrapper_that_has_no_processor_for_a_while_has_its_last_words_all_the_same(tmp_path):
    script = """
import os, pathlib, time
folder = pathlib.Path(os.environ["FOLDER"])
while not (folder / "go").exists():
    time.sleep(0.01)
os.write(1, b"x" * 900_000)
(folder / "written").touch()
time.sleep(60)
"""
    with gang(tmp_path, script, ranks=(1,), env={"FOLDER": str(tmp_path)}) as job:
        job.launch()
        agents = job.wait_running()
        wrapper = processes.identify(agents["a"]["ranks"]["0"]["wrapper"])
        wrapper.signal(signal.SIGSTOP)
        (tmp_path / "go").touch()
        until(tmp_path / "written")  # all of it is in the pipe
        os.kill(agents["a"]["pid"], signal.SIGKILL)
        while processes.start_time(agents["a"]["ranks"]["0"]["pid"]) is not None:
            time.sleep(0.01)
        time.sleep(0.3)  # many looks of who ends them
        wrapper.signal(signal.SIGCONT)
        assert job.wait().state == "failed"
        assert (job.folder("a") / "rank-0" / "stdout.log").read_bytes() == b"x" * 900_000


def test_all_that_a_killed_script_wrote_is_in_its_log(tmp_path):
    script = (
        "import os, signal\nos.write(1, b'x' * 900_000)\nos.write(1, b'last')\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    writer = OutputWriter(tmp_path / "log")
    child = subprocess.Popen([sys.executable, "-c", script], stdout=writer.entry)
    writer.start()
    assert child.wait() == -signal.SIGKILL
    assert writer.finish() == 0
    assert (tmp_path / "log").read_bytes() == b"x" * 900_000 + b"last"


@pytest.mark.parametrize("grandchild", ["sleep 60", "yes"], ids=["silent", "flooding"])
def test_a_daemonised_grandchild_that_keeps_the_pipe_does_not_keep_the_wrapper(tmp_path, grandchild):
    writer = OutputWriter(tmp_path / "log")
    child = subprocess.Popen(["sh", "-c", f"echo said; {grandchild} & echo $!"], stdout=writer.entry)
    writer.start()
    child.wait()
    writer.finish()
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0] == "said"
    os.kill(next(int(line) for line in lines if line.isdigit()), signal.SIGKILL)
    assert len("\n".join(lines)) < 64 * PIPE_BYTES


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_script_goes_on_at_full_speed_where_nothing_can_be_written(tmp_path):
    writer = OutputWriter(Path("/dev/full"))
    child = subprocess.Popen([sys.executable, "-c", "print('x' * 9_999_999)"], stdout=writer.entry)
    writer.start()
    assert child.wait() == 0
    assert writer.finish() == 10_000_000


def test_bytes_arrive_as_they_are_and_in_order(tmp_path):
    content = os.urandom(3 * PIPE_BYTES + 17)
    (tmp_path / "in").write_bytes(content)
    writer = OutputWriter(tmp_path / "log")
    child = subprocess.Popen(["cat", str(tmp_path / "in")], stdout=writer.entry)
    writer.start()
    child.wait()
    assert writer.finish() == 0
    assert (tmp_path / "log").read_bytes() == content
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


# ---- the controller's ---------------------------------------------------------------------------------------------


@pytest.mark.lab
def test_a_full_disk_of_the_controller_is_one_line_and_afterwards_collect_completes(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk, gang(tmp_path, "print('x' * 3_000_000)", ranks=(1,)) as job:
        store = Store(Home(tmp_path / "orch-home"))
        store.save_cluster(job.cluster(), current=True)
        store.save_job(job.record(), job.plan)
        job.launch()
        job.wait()
        words = ["collect", "--job", "latest", "--out", str(disk / "runs")]
        done = forks.run(forks.ORCH, words)
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        assert (done.returncode, len(errors)) == (1, 1), done.stderr
        assert "No space left on device" in errors[0]
        assert "Traceback" not in done.stderr
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        assert forks.run(forks.ORCH, words).returncode == 0
        collected = disk / "runs" / job.plan.job / "nodes" / "a" / "rank-0" / "stdout.log"
        assert collected.read_bytes() == (job.folder("a") / "rank-0" / "stdout.log").read_bytes()


@pytest.mark.lab
@pytest.mark.parametrize("why", ["No space left on device", "Read-only file system"])
def test_where_the_home_cannot_be_written_all_is_read_and_cancelled_all_the_same(tmp_path, why):
    script = """
import os, pathlib, time
print("hello", flush=True)
pathlib.Path(os.environ["SAID"]).touch()
time.sleep(600)
"""
    said = tmp_path / "said"
    with (
        small_disk(tmp_path / "disk", "1m") as disk,
        gang(tmp_path, script, ranks=(1,), env={"SAID": str(said)}) as job,
    ):
        store = Store(Home(disk))
        store.save_cluster(job.cluster(), current=True)
        store.save_job(job.record(), job.plan)
        job.launch()
        until(said)
        ballast = fill(disk)
        if why == "Read-only file system":
            subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        before = (store.home.job_folder(job.plan.job) / "job.json").read_bytes()

        def types(*words):
            """Runs it to its end, which is a good one, with one word about the home; gives what it printed."""
            done = forks.run(forks.ORCH, words, env={**os.environ, "ORCH_HOME": str(disk)}, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            assert done.stderr.count(why) <= 1 and "Traceback" not in done.stderr
            return done

        runs = str(tmp_path / "runs")
        listed = types("jobs", "--json")
        assert json.loads(listed.stdout)["jobs"][0]["state"] == "running"
        assert f"note: results are not remembered: {disk} cannot be written ({why})" in listed.stderr
        types("collect", "--job", "latest", "--out", runs)
        if why == "Read-only file system":
            assert json.loads(types("status", "--json").stdout)["jobs"][0]["state"] == "running"
            assert "hello" in types("logs", "--job", "latest").stdout
            types("report", "--job", "latest", "--out", runs)
        assert "hello" in Path(runs, job.plan.job, "nodes", "a", "rank-0", "stdout.log").read_text()
        cancelled = types("cancel", "--job", "latest", "--json")
        assert json.loads(cancelled.stdout)["state"] == "cancelled"
        assert cancelled.stderr.index("ended on every host") < cancelled.stderr.index(why)
        assert types("jobs", "--json").stderr.count(why) == 1
        assert (store.home.job_folder(job.plan.job) / "job.json").read_bytes() == before
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
        ballast.unlink()
        assert why not in types("jobs").stderr
        assert store.job_record(job.plan.job).state == "cancelled"
