"""The real supervisor, hub and rank wrapper on two local nodes, with a torch-free gang in torchrun's place."""

import contextlib
import json
import os
import select
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path

import pytest

from orchestrator.errors import HostsError
from orchestrator.jobs import FilePiece, launch
from orchestrator.jobs.follow import watch
from orchestrator.remote import processes
from tests.support.local_job import LAUNCHER, gang, launcher_arguments, left

WAITS = "import time\ntime.sleep(120)\n"
SAYS_WHO = """
import json, os
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ORCH_JOB", "ORCH_NODE")
print(json.dumps({name: os.environ[name] for name in names}))
"""
MEETS = """
import pathlib, time
here = pathlib.Path(os.environ["HERE"])
(here / f"{os.environ['ORCH_JOB']}-{os.environ['RANK']}").touch()
until = time.monotonic() + 60
while len(list(here.iterdir())) < int(os.environ["ALL"]) and time.monotonic() < until:
    time.sleep(0.02)
"""
SAYS_ALL = f"""{SAYS_WHO}
import subprocess
import ours
print([name for name, value in os.environ.items() if value == "stale"])
print(ours.word)
subprocess.Popen(["setsid", "-f", "sleep", "1002"])
"""


def outputs(job, name="stdout.log") -> list[str]:
    files = sorted(path for node in job.plan.nodes for path in job.folder(node.name).glob(f"rank-*/{name}"))
    return [path.read_text() for path in files]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A job that has ended, and its record: each rank said who it is, its stale variables and what it imported."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "lib").mkdir()
    (folder / "lib" / "ours.py").write_text("word = 'found'")
    profile = "export MASTER_ADDR=stale PET_NNODES=stale TORCHELASTIC_RUN_ID=stale OF_A_PROFILE=stale"
    env = {"PYTHONPATH": str(folder / "lib")}
    with gang(folder, SAYS_ALL, ranks=(1, 2), env=env, activate=profile) as job:
        job.launch()
        yield job, job.wait()


def test_every_rank_runs_with_its_own_numbers_on_unequal_hosts(finished):
    job, record = finished
    said = [json.loads(text.splitlines()[0]) for text in outputs(job)]
    assert (record.state, record.exit_code, record.first_failure) == ("succeeded", 0, None)
    seen = {(one["ORCH_NODE"], one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) for one in said}
    assert seen == {("a", "0", "0", "3"), ("b", "1", "0", "3"), ("b", "2", "1", "3")}
    assert left(job) == []


def test_what_a_finished_script_left_running_is_ended(finished):
    job, record = finished
    assert record.state == "succeeded"
    assert left(job) == []


def test_leftover_torchrun_variables_of_a_profile_do_not_reach_the_ranks(finished):
    assert [text.splitlines()[1] for text in outputs(finished[0])] == ["['OF_A_PROFILE']"] * 3


def test_pythonpath_of_the_inventory_reaches_the_ranks(finished):
    assert [text.splitlines()[2] for text in outputs(finished[0])] == ["found"] * 3


def test_launching_a_finished_job_again_is_refused_and_destroys_nothing(finished):
    job, _ = finished
    before = outputs(job)
    with pytest.raises(HostsError, match="already there"):
        job.launch()
    assert outputs(job) == before
    assert [len(text.splitlines()) for text in before] == [3, 3, 3]


def test_a_rank_that_exits_7_is_reported_as_7_and_ends_the_others(tmp_path):
    fails = (
        "import os, sys\nif os.environ['RANK'] == '1':\n    print('ValueError: no', file=sys.stderr)\n    sys.exit(7)\n"
    )
    with gang(tmp_path, fails + WAITS, ranks=(1, 2)) as job:
        job.launch()
        record = job.wait()
    assert (record.state, record.exit_code) == ("failed", 7)
    assert (record.first_failure.node, record.first_failure.rank) == ("b", 1)
    assert record.first_failure.log_line == "ValueError: no"
    assert left(job) == []


@pytest.mark.parametrize("node", ["a", "b"])
def test_a_killed_rank_is_the_first_cause_and_nothing_stays(tmp_path, node):
    with gang(tmp_path, WAITS) as job:
        job.launch()
        agents = job.wait_running()
        (rank,) = agents[node]["ranks"]
        os.kill(agents[node]["ranks"][rank]["pid"], signal.SIGKILL)
        record = job.wait()
    assert (record.state, record.exit_code) == ("failed", 137)
    assert (record.first_failure.node, record.first_failure.rank) == (node, int(rank))
    assert record.first_failure.signal == "SIGKILL"
    assert left(job) == []


@pytest.mark.parametrize("node", ["a", "b"])
def test_a_killed_launcher_is_named_and_its_ranks_go_with_it(tmp_path, node):
    with gang(tmp_path, WAITS) as job:
        job.launch()
        agents = job.wait_running()
        (rank,) = agents[node]["ranks"].values()
        launcher = int(Path(f"/proc/{rank['wrapper']}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(launcher, signal.SIGKILL)
        record = job.wait()
    assert record.state == "failed"
    assert record.first_failure.node == node
    assert "torchrun was killed by SIGKILL" in record.first_failure.reason
    assert left(job) == []


def test_a_killed_supervisor_takes_its_ranks_along_and_is_named(tmp_path):
    def run(node):  # both at once: each waits for a lease to run out
        (tmp_path / node).mkdir()
        with gang(tmp_path / node, WAITS) as job:
            job.launch()
            os.kill(job.wait_running()[node]["pid"], signal.SIGKILL)
            return job.wait(), left(job), job.agents()["a"]["first_failure"]

    with ThreadPoolExecutor(2) as pool:
        ends = dict(zip("ab", pool.map(run, "ab"), strict=True))
    for node, (record, stayed, masters) in ends.items():
        assert (record.state, record.exit_code) == ("failed", 128 + signal.SIGKILL)
        assert (record.first_failure.node, record.first_failure.kind) == (node, "supervisor")
        assert record.first_failure.reason == "the supervisor was killed by SIGKILL"
        assert masters["kind"] == ("supervisor" if node == "a" else "lost")  # of b the hub can but guess
        assert stayed == []


def test_ranks_that_ignore_term_and_children_that_daemonise_end_too(tmp_path):
    script = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
subprocess.Popen(["setsid", "-f", "sleep", "1000"])
subprocess.Popen(["env", "-i", "setsid", "-f", "sleep", "1001"])
print("ready", flush=True)
time.sleep(120)
"""
    with gang(tmp_path, script, grace_s=0.3) as job:
        job.launch()
        supervisors = [agent["pid"] for agent in job.wait_running().values()]
        wait_for_files(job, "ready")
        strays: list[int] = []
        deadline_s = time.monotonic() + 30
        while len(strays) < 4 and time.monotonic() < deadline_s:  # `setsid -f` comes back before its child is a sleep
            strays = [pid for pid in all_below(supervisors) if command(pid).startswith("sleep\x00100")]
        launch.cancel(job.plan, job.hosts)
        record = job.wait()
    assert len(strays) == 4
    assert record.state == "cancelled"
    assert [pid for pid in strays if processes.start_time(pid) is not None] == []
    assert left(job) == []


@pytest.mark.parametrize(("handles", "expected"), [("TERM", "saved"), ("INT", "interrupted"), ("nothing", "Keyboard")])
def test_a_script_that_saves_on_term_is_cancelled_by_term(tmp_path, handles, expected):
    script = f"""
import signal, sys, time
def save(signum, frame):
    print("saved" if signum == signal.SIGTERM else "interrupted", flush=True)
    sys.exit(0)
if {handles!r} != "nothing":
    signal.signal(getattr(signal, "SIG" + {handles!r}), save)
print("ready", flush=True)
time.sleep(120)
"""
    with gang(tmp_path, script, grace_s=5.0) as job:
        job.launch()
        wait_for_files(job, "ready")
        launch.cancel(job.plan, job.hosts)
        record = job.wait()
        printed = [(job.folder(node) / f"rank-{rank}" / name).read_text()
                   for rank, node in enumerate("ab") for name in ("stdout.log", "stderr.log")]  # fmt: skip
    assert record.state == "cancelled"
    assert sum(expected in text for text in printed) == 2, printed


def test_if_one_host_refuses_nothing_starts_and_all_is_undone(tmp_path):
    blocked = tmp_path / "work-1"
    blocked.write_text("a file where the work folder should be")
    with gang(tmp_path, "open('ran', 'w')") as job:
        with pytest.raises(HostsError, match="b: prepare: "):
            job.launch()
        assert not job.folder("a").exists()


def test_a_second_job_on_a_gpu_is_refused_with_the_holder_named(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    work = str(tmp_path / "work")

    def on_gpu(job):
        nodes = tuple(n.model_copy(update={"gpu_uuids": ("GPU-1",), "workdir": work}) for n in job.plan.nodes)
        job.plan = job.plan.model_copy(update={"nodes": nodes})

    with gang(tmp_path / "one", WAITS, ranks=(1,)) as first, gang(tmp_path / "two", WAITS, ranks=(1,)) as second:
        on_gpu(first)
        on_gpu(second)
        first.launch()
        with pytest.raises(HostsError, match="GPU GPU-1 is in use by job test-one"):
            second.launch()
        second.plan = second.plan.model_copy(update={"share_gpus": True})
        second.launch()


def test_prepare_runs_once_a_host_before_the_ranks_and_its_failure_is_the_cause(tmp_path):
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()

    def preparing(job, line):
        nodes = tuple(node.model_copy(update={"prepare": line}) for node in job.plan.nodes)
        job.plan = job.plan.model_copy(update={"nodes": nodes})

    script = "print(open('prepared').read(), 'Bearer' in open('seen').read())"
    with gang(tmp_path / "good", script, env={"line": "of the job's own"}) as job:
        # What it says stands in no command line, nor in the environment of what it starts.
        preparing(job, "cat /proc/$$/cmdline >seen; env >>seen; : Bearer; echo yes >> prepared")
        job.launch()
        assert job.wait().state == "succeeded"
        assert outputs(job) == ["yes\n False\n"] * 2
    with gang(tmp_path / "bad", "print('ran')") as job:
        preparing(job, "echo Error: no such disk; exit 3")
        job.launch()
        record = job.wait()
        assert (record.state, record.exit_code) == ("failed", 3)
        assert record.first_failure.log_line == "Error: no such disk"
        assert outputs(job) == []


def test_the_time_limit_ends_a_job(tmp_path):
    with gang(tmp_path, WAITS, time_limit_s=0.5) as job:
        job.launch()
        record = job.wait()
    assert record.state == "failed"
    assert "time limit of 0.5 s" in record.first_failure.reason
    assert left(job) == []


def test_the_token_stands_in_files_of_mode_0600_alone(tmp_path):
    script = "import os, json\nprint(json.dumps(dict(os.environ)), flush=True)\n" + WAITS
    with gang(tmp_path, script, ranks=(1,)) as job:
        job.launch()
        wait_for_files(job, "ORCH_JOB")
        node = job.folder("a") / "node.json"
        token = json.loads(node.read_text())["token"]
        assert node.stat().st_mode & 0o777 == 0o600
        holders = [p.name for p in job.folder("a").rglob("*") if p.is_file() and token.encode() in p.read_bytes()]
    assert holders == ["node.json"]


def test_real_torchrun_gives_ranks_and_true_exit_codes(tmp_path):
    script = (
        SAYS_WHO
        + """
import pathlib, sys, time
sys.stdout.flush()
folder = pathlib.Path(os.environ["SAID"])
(folder / os.environ["RANK"]).touch()
while len(list(folder.iterdir())) < 3:
    time.sleep(0.01)
sys.exit(7 if os.environ["RANK"] == "2" else 0)
"""
    )
    (tmp_path / "said").mkdir()
    said_in = {"SAID": str(tmp_path / "said")}
    with gang(tmp_path, script, ranks=(1, 2), torch_free=False, warm=False, env=said_in) as job:
        job.launch()
        record = job.wait()
        said = [json.loads(text) for text in outputs(job)]
    seen = {(one["ORCH_NODE"], one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) for one in said}
    assert seen == {("a", "0", "0", "3"), ("b", "1", "0", "3"), ("b", "2", "1", "3")}
    assert (record.state, record.exit_code, record.first_failure.rank) == ("failed", 7, 2)
    assert left(job) == []


def wait_for_files(job, text):
    """Until every rank has printed it; follows the files as `orch logs -f` does."""
    waiting = set(range(job.plan.world_size))
    for _, item in watch(job.plan, job.hosts, offsets={}, follow=True):
        if isinstance(item, FilePiece) and text.encode() in item.data:
            waiting.discard(item.rank)
        if not waiting:
            return


def all_below(pids):
    return [below.pid for pid in pids for below in processes.descendants(pid)]


def command(pid):
    """ "" of one that has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
        return file.read()
    return ""


def test_a_job_that_shares_a_gpu_still_keeps_it_from_one_that_does_not(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    work = str(tmp_path / "work")
    with gang(tmp_path / "one", WAITS, ranks=(1,)) as first, gang(tmp_path / "two", WAITS, ranks=(1,)) as second:
        for job in (first, second):
            nodes = tuple(n.model_copy(update={"gpu_uuids": ("GPU-1",), "workdir": work}) for n in job.plan.nodes)
            job.plan = job.plan.model_copy(update={"nodes": nodes, "share_gpus": job is first})
        first.launch()
        with pytest.raises(HostsError, match="GPU GPU-1 is in use by job test-one"):
            second.launch()


def test_a_removed_job_folder_ends_the_job(tmp_path):
    with gang(tmp_path, f"print('ready', flush=True)\n{WAITS}") as job:
        job.launch()
        agents = job.wait_running()
        wait_for_files(job, "ready")  # its script is read: removing that is no error of the rank's own
        pids = [rank["pid"] for agent in agents.values() for rank in agent["ranks"].values()]
        handles = [os.pidfd_open(pid) for pid in pids]
        job.folder("b").rename(tmp_path / "elsewhere")
        for handle in handles:
            assert select.select([handle], [], [], 30)[0], "a rank outlived its job's folder"
            os.close(handle)
        assert job.wait().first_failure.reason.startswith("the job's folder was removed")


def test_what_fails_because_the_job_folder_was_removed_does_not_hide_it(tmp_path):
    """A rank notices before the supervisor looks."""
    script = """
import os, time
print("ready", flush=True)
while os.environ["RANK"] == "0" or os.path.exists(os.environ["THERE"]):
    time.sleep(0.001)
raise SystemExit(3)
"""
    (tmp_path / "there").touch()
    with gang(tmp_path, script, env={"THERE": str(tmp_path / "there")}) as job:
        job.launch()
        job.wait_running()
        wait_for_files(job, "ready")
        job.folder("b").rename(tmp_path / "elsewhere")
        (tmp_path / "there").unlink()
        assert job.wait().first_failure.reason.startswith("the job's folder was removed")


def test_a_cancel_during_prepare_is_a_cancel(tmp_path):
    with gang(tmp_path, "print('ran')", grace_s=0.2) as job:
        nodes = tuple(node.model_copy(update={"prepare": "touch begun; sleep 1000"}) for node in job.plan.nodes)
        job.plan = job.plan.model_copy(update={"nodes": nodes})
        job.launch()
        launch.cancel(job.plan, job.hosts)
        record = job.wait()
        assert (record.state, record.first_failure) == ("cancelled", None)
        assert outputs(job) == []
    assert left(job) == []


@pytest.mark.parametrize("ends_after_s", [0, 1], ids=["at once", "a second later"])
def test_a_rank_that_aborts_after_a_lost_connection_is_not_the_cause(tmp_path, ends_after_s):
    script = """
import os, pathlib, sys, time
fell = pathlib.Path(os.environ["FELL"])
if os.environ["RANK"] == "0":
    while not fell.exists():
        time.sleep(0.001)
    print("RuntimeError: Connection closed by peer", file=sys.stderr, flush=True)
    os.abort()
print("ValueError: the true one", file=sys.stderr, flush=True)
fell.touch()
time.sleep(float(os.environ["ENDS_AFTER_S"]))  # a large process may take as long to end
os._exit(1)
"""
    environment = {"FELL": str(tmp_path / "fell"), "ENDS_AFTER_S": str(ends_after_s)}
    with gang(tmp_path, script, env=environment) as job:
        job.launch()
        first = job.wait().first_failure
    assert (first.rank, first.log_line) == (1, "ValueError: the true one")


def test_a_real_time_signal_is_reported_by_its_number(tmp_path):
    with gang(tmp_path, "import os\nos.kill(os.getpid(), 40)", ranks=(1,)) as job:
        job.launch()
        record = job.wait()
    assert record.first_failure.signal == "SIG40"
    assert record.exit_code == 168


def test_nodes_that_share_one_work_folder_are_refused_in_words(tmp_path):
    with gang(tmp_path, WAITS) as job:
        nodes = tuple(node.model_copy(update={"workdir": str(tmp_path / "shared")}) for node in job.plan.nodes)
        job.plan = job.plan.model_copy(update={"nodes": nodes})
        with pytest.raises(HostsError, match="`workdir:` of its own"):
            job.launch()
        assert list((tmp_path / "shared" / "jobs").iterdir()) == []


@pytest.mark.parametrize(
    "torch_free",
    [
        True,
        pytest.param(
            False,
        ),
    ],
)
def test_where_a_stranger_has_the_port_the_ranks_meet_at_another(tmp_path, torch_free):
    with socket.create_server(("", 0)) as stranger:
        taken = stranger.getsockname()[1]
        with gang(tmp_path, "print('ran', flush=True)", torch_free=torch_free, rendezvous_port=taken) as job:
            job.launch()
            record = job.wait()
            ports = {agent["rendezvous_port"] for agent in job.agents().values()}
            assert (record.state, record.first_failure) == ("succeeded", None)
            assert len(ports - {taken}) == len(ports) == 1
            assert outputs(job) == ["ran\n", "ran\n"]
        assert left(job) == []


def test_jobs_that_start_on_one_machine_in_the_same_moment_do_not_meet_each_other(tmp_path):
    """And none of them ends before all have begun, so that each needs a port of its own."""
    here = tmp_path / "here"
    here.mkdir()

    def run(number):
        (tmp_path / str(number)).mkdir()
        with gang(tmp_path / str(number), SAYS_WHO + MEETS, env={"HERE": str(here), "ALL": "6"}) as job:
            barrier.wait(30)
            job.launch()
            record = job.wait()
            ports = {agent["rendezvous_port"] for agent in job.agents().values()}
            return record.state, ports, {json.loads(text)["ORCH_JOB"] for text in outputs(job)} == {job.plan.job}

    barrier = threading.Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(run, range(3)))
    assert [(state, len(ports), own) for state, ports, own in found] == [("succeeded", 1, True)] * 3
    assert len({port for _, ports, _ in found for port in ports}) == 3


ENDS = """
import json, os, sys, time
after_s, code, words = json.loads(os.environ["ENDS"])[os.environ["ORCH_NODE"]]
time.sleep(after_s)
print(words, file=sys.stderr, flush=True)
os._exit(code)
"""
FATES = [(0.0, 0, "done"), (0.5, 7, "ValueError: the true one"), (0.45, 1, "RuntimeError: Connection closed by peer")]


def test_whichever_hosts_succeed_fail_and_echo_the_first_cause_is_the_one_that_failed_by_itself(tmp_path):
    def run(fates):
        place = tmp_path / "".join(str(code) for _, code, _ in fates)
        place.mkdir()
        ends = dict(zip("abc", fates, strict=True))
        with gang(place, ENDS, ranks=(1, 1, 1), env={"ENDS": json.dumps(ends)}) as job:
            job.launch()
            record = job.wait()
        first = record.first_failure
        return (record.state, record.exit_code, first.node, first.log_line) == (
            "failed", 7, "abc"[fates.index(FATES[1])], "ValueError: the true one"
        ) or record  # fmt: skip

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, permutations(FATES))) == [True] * 6


def test_what_ranks_daemonised_ends_even_where_supervisor_and_keeper_are_both_killed(tmp_path):
    script = """
import subprocess, time
for scrubbed in (["env", "-i"], []):
    subprocess.run([*scrubbed, "setsid", "-f", "sleep", "1003"])
print("ready", flush=True)
time.sleep(120)
"""
    with gang(tmp_path, script) as job:
        job.launch()
        agent = job.wait_running()["b"]
        wait_for_files(job, "ready")
        below = processes.descendants(agent["keeper"]["pid"])
        assert sum("sleep\x001003" in command(process.pid) for process in below) == 2
        for pid in (agent["keeper"]["pid"], agent["pid"]):
            os.kill(pid, signal.SIGKILL)
        record = job.wait()
        deadline = time.monotonic() + 10
        while any(process.is_alive() for process in below):
            assert time.monotonic() < deadline, [processes.describe(p) for p in below if p.is_alive()]
            time.sleep(0.05)
    assert (record.state, record.first_failure.node) == ("failed", "b")


STARTS_ALL = """
import os, sys
print(sorted(name for name in os.environ if name.startswith(("RANK", "LOCAL_", "WORLD_", "MASTER_"))))
for rank in range(2):
    with open(os.environ["ORCH_METRICS"].replace("{rank}", str(rank)), "w") as file:
        file.write(f"of {rank}\\n")
sys.exit(3)
"""


def test_a_command_that_starts_its_ranks_itself_stands_for_all_of_them(tmp_path):
    with gang(tmp_path, STARTS_ALL, ranks=(2,)) as job:
        one_wrapper = launcher_arguments(str(LAUNCHER), (1,), 0, "127.0.0.1")
        node = job.plan.nodes[0].model_copy(update={"starts_ranks": True, "torchrun": one_wrapper})
        job.plan = job.plan.model_copy(update={"nodes": (node,)})
        job.launch()
        record = job.wait()
        ranks = job.agents()["a"]["ranks"]
    assert (record.state, record.exit_code, record.first_failure.rank) == ("failed", 3, 0)
    assert [ranks[number]["exit_code"] for number in "01"] == [3, 3]
    assert outputs(job) == ["[]\n", ""]
    assert outputs(job, "metrics.jsonl") == ["of 0\n", "of 1\n"]
    assert [json.loads(text)["exit_code"] for text in outputs(job, "exit.json")] == [3, 3]
    assert left(job) == []
