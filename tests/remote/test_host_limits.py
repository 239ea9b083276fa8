"""A host that runs out of what a job needs (inodes, processes, memory) says so itself, and that is reported."""

import errno
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.errors import HostsError
from orchestrator.hosts import Who, work_folders
from orchestrator.hosts.probe import probe
from orchestrator.record import Owner
from orchestrator.remote import answer, cgroups, processes
from orchestrator.transport import ConnectedHost, LocalTransport
from tests.support.disks import small_disk
from tests.support.local_job import LAUNCHER, gang, launcher_arguments

WAITS = "import time\ntime.sleep(120)\n"
USES_UP_INODES = "i=0; while touch filler-$i 2>/dev/null; do i=$((i+1)); done; true"
USES_UP_INODES_FIRST = f"""
import os, subprocess, sys
subprocess.run(["sh", "-c", {USES_UP_INODES!r}], cwd=sys.argv[1])
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""

JOINS_FIRST = """
import os, pathlib, sys
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def change(job, name, **changes):
    nodes = tuple(node.model_copy(update=changes) if node.name == name else node for node in job.plan.nodes)
    job.plan = job.plan.model_copy(update={"nodes": nodes})


def left(job):
    return [process for node in job.plan.nodes for process in processes.marked(job.folder(node.name))]


# ---- inodes and processes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("node", ["a", "b"])
def test_a_host_without_inodes_for_torchruns_log_is_named_with_its_own_cause(tmp_path, node):
    with gang(tmp_path, WAITS) as job, small_disk(tmp_path / f"work-{'ab'.index(node)}", "128m", inodes=400):
        change(job, node, prepare=USES_UP_INODES)
        job.launch()
        record = job.wait()
        first = record.first_failure
        assert (record.state, record.exit_code, first.node, first.kind) == ("failed", 1, node, "torchrun")
        assert first.reason.startswith("torchrun did not start: No space left on device (")
        assert "torchrun.log): no inode is free there (`df -i`); delete files there, or set `workdir:`" in first.reason
        assert left(job) == []


def test_a_rank_that_finds_no_inode_for_its_logs_is_named_with_that(tmp_path):
    """torchrun itself could only say that its child exited 1."""
    (tmp_path / "first.py").write_text(USES_UP_INODES_FIRST)
    with gang(tmp_path, WAITS) as job, small_disk(tmp_path / "work-1", "128m", inodes=400):
        argv = launcher_arguments(str(LAUNCHER), (1, 1), 1, "127.0.0.1")
        change(job, "b", torchrun=(str(tmp_path / "first.py"), str(tmp_path / "work-1"), *argv))
        job.launch()
        record = job.wait()
        first = record.first_failure
        assert (record.state, first.node, first.kind, first.rank) == ("failed", "b", "rank", 1)
        assert first.reason.startswith("rank 1 did not start: No space left on device (")
        assert "no inode is free there" in first.reason


def test_up_counts_the_inodes_and_a_job_that_lacks_them_is_refused_with_that(tmp_path):
    here = ConnectedHost(LocalTransport("b"), sys.executable, None, str(tmp_path / "work-1"))
    with gang(tmp_path, WAITS) as job, small_disk(tmp_path / "work-1", "128m", inodes=100):
        found = probe(here, [], torch=False, timeout_s=30)
        assert 90 < found.disk_free_inodes < 100
        subprocess.run(["sh", "-c", USES_UP_INODES], cwd=tmp_path / "work-1", check=True)
        found = probe(here, [], torch=False, timeout_s=30)
        assert (found.disk_free_inodes, found.workdir_error.rpartition(": ")[2]) == (0, "No space left on device")
        with pytest.raises(HostsError, match=r"b: prepare: .*: no inode is free there \(`df -i`\): delete files there"):
            job.launch()


@contextmanager
def process_limit(limit):
    """A cgroup in which so many processes and threads may be, by the kernel's `pids` controller."""
    place = Path(f"/sys/fs/cgroup/pids/orch-test-{os.getpid()}")
    try:
        place.mkdir()
        (place / "pids.max").write_text(str(limit))
    except OSError:
        pytest.skip("needs root and the `pids` controller of cgroup v1")
    try:
        yield place / "cgroup.procs"
    finally:
        place.rmdir()


def test_a_host_where_no_further_process_may_start_says_so(tmp_path):
    with process_limit(1) as members, gang(tmp_path, WAITS) as job:
        change(job, "b", prepare=f"echo $PPID > {members}")  # its supervisor and what that starts from now on
        job.launch()
        record = job.wait()
    first = record.first_failure
    assert (record.state, first.node, first.kind) == ("failed", "b", "torchrun")
    assert first.reason.startswith("torchrun did not start: Resource temporarily unavailable: this user may start no ")
    assert "`ulimit -u`" in first.reason


@pytest.mark.parametrize("limit", [2, 3, 4], ids=["no script", "no thread for its output", "one thread of two"])
def test_a_rank_that_may_start_no_process_or_thread_says_so(tmp_path, limit):
    (tmp_path / "first.py").write_text(JOINS_FIRST)
    with process_limit(limit) as members, gang(tmp_path, WAITS) as job:
        argv = launcher_arguments(str(LAUNCHER), (1, 1), 1, "127.0.0.1")
        change(job, "b", torchrun=(str(tmp_path / "first.py"), str(members), *argv))
        job.launch()
        record = job.wait()
    first = record.first_failure
    assert (record.state, first.node, first.kind, first.rank) == ("failed", "b", "rank", 1)
    assert first.reason.startswith("rank 1 did not start: ")
    assert "`ulimit -u`" in first.reason
    assert left(job) == []


@pytest.mark.parametrize(
    ("number", "says", "try_this"),
    [
        (
            errno.ENOLCK,
            "No locks available (/data)",
            "that file system has no locks (NFS without a lock server?): move",
        ),
        (errno.EIO, "Input/output error (/data)", "that disk or its server fails: look at `dmesg` there, and move"),
        (errno.EROFS, "Read-only file system (/data)", "it is mounted read-only"),
        (errno.EAGAIN, "Resource temporarily unavailable: this user may start no further process", "`ulimit -u`"),
        (errno.EMFILE, "Too many open files: a process may open no further file there", "`ulimit -n`"),
        (errno.ENOSPC, "No space left on device (/data)", "free space there, or move"),
        (errno.EISDIR, "Is a directory (/data)", ""),
    ],
)
def test_an_error_of_a_hosts_system_gets_the_remedy_of_its_own_cause(number, says, try_this):
    error = OSError(number, os.strerror(number))
    assert answer.words(error, "/data").startswith(says)
    assert answer.remedy(error, "/data", "move").startswith(try_this) or try_this in answer.remedy(error)


def test_what_nobody_expected_in_a_supervisor_is_reported_by_that_host(tmp_path):
    with gang(tmp_path, WAITS) as job:
        change(job, "b", torchrun=("no program has a \0 in its arguments",))
        job.launch()
        record = job.wait()
    first = record.first_failure
    assert (record.state, first.node, first.kind) == ("failed", "b", "supervisor")
    assert first.reason == "the supervisor failed: ValueError('embedded null byte')"


# ---- memory -------------------------------------------------------------------------------------------------------

EATS = "eaten = []\nwhile True:\n    eaten.append(bytearray(1 << 20))\n"


@contextmanager
def memory_limit(name, size):
    """A cgroup beside our own that may use so much memory."""
    own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
    place = Path(f"/sys/fs/cgroup/memory/{own.rpartition(':')[2]}/orch-test-{name}-{os.getpid()}")
    try:
        place.mkdir()
        (place / "memory.limit_in_bytes").write_text(str(size))
    except OSError:
        pytest.skip("needs root and the memory controller of cgroup v1")
    try:
        yield place / "cgroup.procs"
    finally:
        place.rmdir()


def test_a_rank_that_outgrows_its_cgroup_is_reported_as_out_of_memory_and_its_launcher_survives(tmp_path):
    with memory_limit("own", 400 << 20) as members, gang(tmp_path, EATS, ranks=(1,)) as job:
        change(job, "a", prepare=f"echo $PPID > {members}")
        job.launch()
        record = job.wait()
    first = record.first_failure
    assert (record.state, record.exit_code, first.kind, first.rank) == ("failed", 137, "rank", 0)
    assert first.reason.startswith("rank 0 was killed by SIGKILL: this host, or the cgroup that it runs in, ran out of")


def test_a_cgroup_of_others_that_runs_out_of_memory_explains_no_kill_of_ours(tmp_path):
    with (
        memory_limit("ours", 1 << 30) as ours,
        memory_limit("theirs", 50 << 20) as theirs,
        gang(tmp_path, WAITS, ranks=(1,)) as job,
    ):
        change(job, "a", prepare=f"echo $PPID > {ours}")
        job.launch()
        agent = job.wait_running()["a"]
        before = host_wide_kills()
        died = subprocess.run(["sh", "-c", f"echo $$ > {theirs}; exec {sys.executable} -c '{EATS}'"])
        assert (died.returncode, host_wide_kills() > before) == (-signal.SIGKILL, True)
        os.kill(agent["ranks"]["0"]["pid"], signal.SIGKILL)
        record = job.wait()
    assert record.first_failure.reason == "rank 0 was killed by SIGKILL"


def host_wide_kills():
    return int(re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)[1])


SAYS_ITS_SCORE = """
import os, time
def score(pid):
    return int(open(f"/proc/{pid}/oom_score_adj").read())
while score("self") == score(os.getppid()):
    time.sleep(0.01)
print(score("self"), score(os.getppid()))
"""


def test_a_rank_goes_before_its_launcher_where_memory_runs_out(tmp_path):
    with gang(tmp_path, SAYS_ITS_SCORE, ranks=(1,), time_limit_s=60) as job:
        job.launch()
        job.wait()
        own, launchers = map(int, (job.folder("a") / "rank-0" / "stdout.log").read_text().split())
    assert own == min(1000, launchers + cgroups.RANKS_FIRST)


CGROUPS = {
    "v2": (
        "0::/user.slice/session-3.scope",
        "/ {at} rw - cgroup2 cgroup rw",
        "user.slice/session-3.scope",
        "memory.events",
    ),
    "v2, counted above": (
        "0::/user.slice/session-3.scope",
        "/ {at} rw - cgroup2 cgroup rw",
        "user.slice",
        "memory.events",
    ),
    "v1": ("9:cpu:/x\n4:memory:/job", "/ {at} rw - cgroup cgroup rw,memory", "job", "memory.oom_control"),
    "a container's v1": (
        "4:memory:/docker/ab",
        "/docker/ab {at} rw - cgroup cgroup rw,memory",
        "",
        "memory.oom_control",
    ),
    "a container's v2": ("0::/", "/ {at} rw - cgroup2 cgroup rw", "", "memory.events"),
    "no cgroup counts": ("0::/", "/ {at} rw - cgroup2 cgroup rw", None, None),
}


@pytest.mark.parametrize("case", CGROUPS)
def test_the_kernels_count_of_kills_is_that_of_our_own_cgroup(tmp_path, case):
    cgroup, mount, folder, name = CGROUPS[case]
    proc, at = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    at.mkdir()
    (proc / "self/cgroup").write_text(cgroup + "\n")
    (proc / "self/mountinfo").write_text(f"30 23 0:26 {mount.format(at=at)},nsdelegate\n")
    (proc / "vmstat").write_text("nr_free_pages 9\noom_kill 7\n")
    if name:
        (at / folder).mkdir(parents=True, exist_ok=True)
        content = (
            "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n" if "oom" in name else "low 0\nmax 5\noom 4\noom_kill 3\n"
        )
        (at / folder / name).write_text(content)
    assert cgroups.out_of_memory_kills(proc) == (3 if name else 7)
    assert cgroups.out_of_memory_kills(tmp_path / "none") == 0


# ---- a keeper that stands still -----------------------------------------------------------------------------------


def test_a_stopped_keeper_is_listed_by_reap_and_goes_on_by_it(tmp_path):
    with gang(tmp_path, WAITS, ranks=(1,)) as job:

        def reap(end):
            return work_folders.reap(job.hosts["a"], ada, end=end).found

        ada = Who(Owner(id="a" * 32, name="ada@desk"), job.plan.cluster)
        job.plan = job.plan.model_copy(update={"owner": ada.owner})
        job.launch()
        agent = job.wait_running()["a"]
        assert reap(end=False) == ()
        keeper = processes.Identity(**agent["keeper"])
        keeper.signal(signal.SIGSTOP)
        os.kill(agent["pid"], signal.SIGKILL)
        (left_there,) = reap(end=False)
        assert left_there.processes[0].startswith(f"its keeper is stopped, pid {keeper.pid} (")
        assert keeper.is_alive()
        (ended,) = reap(end=True)
        assert (ended.stayed, keeper.is_alive(), reap(end=False)) == ((), False, ())
        assert job.wait().first_failure.reason == "the supervisor was killed by SIGKILL"
