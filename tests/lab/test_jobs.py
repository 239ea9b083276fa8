"""The main job on a lab of two hosts: real SSH as an ordinary user, real torchrun, and what goes wrong there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from tests.support.lab import lab
from tests.support.quick_python import quick_python
from tests.support.terminal import Person

pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

INVENTORY = """
cluster: jobs
# One thread a rank: the hosts of a lab share the machine's cores, and none of them knows.
defaults: {device: cpu, bandwidth: 2.5Gbps, env: {OMP_NUM_THREADS: "1"}}
nodes:
  - {name: alpha, host: 10.77.1.1, ranks: 1}
  - {name: beta, host: 10.77.1.2, ranks: 2}
"""
DISKS = Path("/var/lib/orch-lab")
HOSTS = {"alpha": "10.77.1.1", "beta": "10.77.1.2"}
RANKS = {"alpha": (0,), "beta": (1, 2)}
# Goes on until a file says with which code each rank is to exit. No torch: these tests count processes.
WAITS = """
import json, os, pathlib, sys, time
print("hello from", os.environ["RANK"], flush=True)
while not (end := pathlib.Path("end.json")).exists():
    time.sleep(0.05)
sys.exit(json.loads(end.read_text()).get(os.environ["RANK"], 0))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """With the real torchrun."""
    return quick_python(tmp_path_factory.mktemp("python") / "quick", torchrun=True)


@pytest.fixture(scope="module")
def person(tmp_path_factory, python):
    """To them, the hosts have a torchrun that starts ranks and nothing else: most tests count processes."""
    with lab(INVENTORY, quick=True, binds=[str(Path(python).parents[1])]) as pair:
        folder = tmp_path_factory.mktemp("work")
        someone = Person(pair, tmp_path_factory.mktemp("home"), folder)
        (folder / "waits").mkdir()
        (folder / "waits" / "waits.py").write_text(WAITS)
        someone.types("up", str(pair.inventory))
        yield someone


@pytest.fixture(scope="module")
def trainer(person, python, tmp_path_factory):
    """Another person on the same hosts, with the real torchrun."""
    someone = Person(person.lab, tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("work"))
    content = yaml.safe_load(person.lab.inventory.read_text())
    content["defaults"]["python"] = python
    (someone.folder / "rack.yaml").write_text(yaml.safe_dump(content))
    someone.types("up", "rack.yaml")
    return someone


def begin(person: Person) -> str:
    """A job that waits, with all its ranks running; its id."""
    job = person.types("run", "--detach", "--", "waits/waits.py").stdout.strip()
    disks = DISKS / person.lab.cluster
    logs = f"*/home/lab/.orch/jobs/{job}/rank-*/stdout.log"
    until(lambda: sum("hello from" in log.read_text() for log in disks.glob(logs)) == 3, "all ranks to speak")
    assert person.job(job)["state"] == "running"  # and from now on it is remembered so
    return job


def until_all_speak(shows: subprocess.Popen[str]) -> str:
    """Reads what a command shows until all three ranks have spoken; what it showed so far."""
    seen = ""
    while seen.count("hello from") < 3:
        line = shows.stdout.readline()
        assert line, f"it ended before all ranks had spoken: {seen}"
        seen += line
    return seen


def until_all_run(person: Person, run: subprocess.Popen[str]) -> tuple[str, str]:
    """What an `orch run` printed until its three ranks had spoken, and the job's id."""
    return until_all_speak(run), person.asks("jobs")["jobs"][0]["id"]


def hellos(person: Person, job: str) -> int:
    return person.types("logs", "--job", job).stdout.count("hello from")


def until(condition, what: str, within_s: float = 60) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {within_s} s for {what}"
        time.sleep(0.2)


def let_end(person: Person, job: str, codes: dict[str, int] | None = None) -> None:
    for node in ("alpha", "beta"):
        path = f"/home/lab/.orch/jobs/{job}/src/end.json"
        person.lab.host_exec(node, ["sh", "-c", f"echo '{json.dumps(codes or {})}' >{path}.new; mv {path}.new {path}"])


def test_up_names_every_host_and_says_why_the_master_is_one(person):
    shown = person.asks("status")["cluster"]
    assert [node["status"] for node in shown["nodes"]] == ["master", "connected"]
    assert "lower address" in shown["master_reason"]


def test_ranks_are_right_on_hosts_of_one_and_two_ranks_as_a_users_script_sees_them(trainer):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ORCH_NODE")
    script = f"import json, os\nprint('@' + json.dumps({{n: os.environ[n] for n in {names}}}))\n"
    (trainer.folder / "who").mkdir()
    (trainer.folder / "who" / "who.py").write_text(script)
    shown = trainer.types("run", "--", "who/who.py").stdout
    said = [json.loads(line.partition("@")[2]) for line in shown.splitlines() if "@" in line]
    seen = sorted(tuple(one[name] for name in names) for one in said)
    assert seen == [("0", "0", "3", "1", "alpha"), ("1", "0", "3", "2", "beta"), ("2", "1", "3", "2", "beta")]


def test_arguments_of_a_script_arrive_as_they_were_typed(person):
    nasty = ["--lr", "0.1", "", "a b", "$(touch x)", "'\"", "*", "-x", "ünï", "line\nbreak", "{job_dir}"]
    (person.folder / "args").mkdir()
    (person.folder / "args" / "args.py").write_text("import json, sys\nprint('@' + json.dumps(sys.argv[1:]))\n")
    shown = person.types("run", "--nodes", "alpha", "--", "args/args.py", *nasty).stdout
    (said,) = [json.loads(line.partition("@")[2]) for line in shown.splitlines() if "@" in line]
    assert said == nasty


def test_a_job_outlives_its_killed_controller_and_a_new_one_learns_the_true_exit_code(person):
    with person.starts("run", "--", "waits/waits.py") as run:
        _, job = until_all_run(person, run)
        os.kill(controller_pid(run.pid), signal.SIGKILL)
    assert person.job(job)["state"] == "running"
    assert hellos(person, job) == 3
    person.types("collect", "--job", job)
    let_end(person, job, {"2": 7})
    person.types("logs", "-f", "--job", job, exit_code=1)
    ended = person.job(job)
    assert (ended["state"], ended["exit_code"]) == ("failed", 7)
    assert (ended["first_failure"]["node"], ended["first_failure"]["rank"]) == ("beta", 2)
    assert person.processes_of(job) == []


def test_hosts_without_an_answer_are_named_and_a_cancel_from_a_new_process_leaves_nothing(person):
    job = begin(person)
    away = [["ip", "route", change, "unreachable", host] for change in ("add", "del") for host in HOSTS.values()]
    for line in away[:2]:
        person.lab.controller_exec(line, check=True)
    listed, status = person.types("jobs", "--json"), person.types("status", "--json")
    for line in away[2:]:
        person.lab.controller_exec(line, check=True)
    for shown in (listed, status):
        row = json.loads(shown.stdout)["jobs"][0]
        assert (row["id"], row["state"], row["unheard"]) == (job, "running", ["alpha", "beta"])
        assert f"note: {job}: no answer from alpha, beta (" in shown.stderr
    assert [node["status"] for node in json.loads(status.stdout)["cluster"]["nodes"]] == ["no answer", "no answer"]
    again = person.types("jobs", "--json")
    assert json.loads(again.stdout)["jobs"][0]["unheard"] == [] and "no answer" not in again.stderr
    person.types("cancel", "--job", job)
    assert person.job(job)["state"] == "cancelled"
    assert person.processes_of(job) == []


def test_one_interrupt_detaches_and_a_second_cancels(person):
    with person.starts("run", "--", "waits/waits.py") as run:
        seen, job = until_all_run(person, run)
        os.kill(controller_pid(run.pid), signal.SIGINT)
        while "Ctrl-C again" not in seen:
            seen += run.stdout.readline()
        os.kill(controller_pid(run.pid), signal.SIGINT)
        seen += run.stdout.read()
    assert run.returncode == 130, seen
    assert f"orch logs -f --job {job}" in seen
    assert person.job(job)["state"] == "cancelled"
    assert person.processes_of(job) == []


@pytest.mark.parametrize("node", ["alpha", "beta"])
def test_whatever_is_killed_nothing_is_left_and_the_first_cause_is_named(person, node):
    """Three jobs side by side, one a victim: most of an end is waiting."""
    victims = ("rank", "torchrun", "supervisor")
    with ThreadPoolExecutor(len(victims)) as pool:
        jobs = dict(zip(victims, pool.map(lambda _: begin(person), victims), strict=True))
    pids = {victim: pid_of(person, victim, node, job) for victim, job in jobs.items()}
    killed = time.monotonic()
    person.lab.host_exec(node, ["kill", "-9", *pids.values()], check=True)
    for victim, job in jobs.items():
        until(lambda job=job: person.processes_of(job) == [], "the last process to end", within_s=30)
        left_s = 30 - (time.monotonic() - killed)
        until(lambda job=job: person.job(job)["state"] == "failed", "the verdict", within_s=left_s)
        first = person.job(job)["first_failure"]
        assert first["node"] == node
        assert victim in first["reason"]
        if victim == "rank":
            assert (first["rank"], first["signal"]) == (max(RANKS[node]), "SIGKILL")


def pid_of(person: Person, victim: str, node: str, job: str) -> str:
    """As its host numbers it; of the last rank there."""
    agent = person.agent(node, job)
    rank = agent["ranks"][max(agent["ranks"])]
    if victim == "torchrun":
        stat = person.lab.host_exec(node, ["cat", f"/proc/{rank['wrapper']}/stat"]).stdout
        return stat.rpartition(")")[2].split()[1]
    return str({"rank": rank, "supervisor": agent}[victim]["pid"])


def test_a_dry_run_prints_what_a_run_executes_and_starts_nothing(person):
    before = len(person.asks("jobs")["jobs"])
    plan = person.asks("run", "--exp", "mnist_lenet", "--set", "epochs=1", "--dry-run")
    assert [(node["name"], node["ranks"], node["first_rank"]) for node in plan["nodes"]] == [
        ("alpha", 1, 0),
        ("beta", 2, 1),
    ]
    assert plan["nodes"][1]["env"]["GLOO_SOCKET_IFNAME"] == "eth0,eth0"
    assert "--rdzv-backend" in plan["nodes"][0]["torchrun"]
    assert sum(sum(node["shares"]) for node in plan["nodes"]) == plan["settings"]["batch"]
    assert "orch_remote.launch" in person.types("run", "--exp", "mnist_lenet", "--dry-run").stdout
    assert len(person.asks("jobs")["jobs"]) == before


def test_a_collected_run_can_be_reported_without_the_hosts(person):
    (person.folder / "steps").mkdir()
    (person.folder / "steps" / "steps.py").write_text(
        "import json, os, time\n"
        "with open(os.environ['ORCH_METRICS'], 'a') as file:\n"
        "    for step in range(8):\n"
        "        file.write(json.dumps({'event': 'step', 'step': step, 'samples': 4, 't_ms': 10.0}) + '\\n')\n"
    )
    job = person.types("run", "--detach", "--", "steps/steps.py").stdout.strip()
    person.types("logs", "-f", "--job", job)
    first = person.asks("collect", "--job", job)
    assert first["samples_total"] == 8 * 4 * 3
    again = person.types("collect", "--job", job)
    assert "0B new" in again.stderr
    run = person.folder / "runs" / job
    assert {"plan.json", "job.json", "summary.json", "steps.parquet", "report.html"} <= {p.name for p in run.iterdir()}
    assert person.asks("report", "--job", job)["samples_total"] == first["samples_total"]


def test_a_released_node_takes_no_job_until_it_is_restored(person):
    person.types("node", "release", "beta")
    try:
        plan = person.asks("run", "--exp", "mnist_lenet", "--dry-run")
        assert [node["name"] for node in plan["nodes"]] == ["alpha"]
    finally:
        person.types("node", "restore", "beta")
    person.types("master", "beta")
    assert person.asks("run", "--exp", "mnist_lenet", "--dry-run")["master"] == "beta"
    person.types("master", "--elect")
    assert person.asks("status")["cluster"]["master"] == "alpha"


def test_mnist_reaches_95_percent_and_every_sample_counts_once(trainer):
    raw = mnist_files()
    for node in ("alpha", "beta"):
        trainer.lab.host_exec(node, ["mkdir", "-p", "data/MNIST/raw"], as_user=True, check=True)
        for file in raw:
            target = f"data/MNIST/raw/{file.name}"
            with open(file, "rb") as content:
                trainer.lab.host_exec(node, ["sh", "-c", f"cat >{target}"], as_user=True, stdin=content, check=True)
    trainer.types("run", "--exp", "mnist_lenet", "--set", "epochs=1", "--set", "num_workers=0")
    summary = trainer.asks("collect", "--job", "latest")
    assert summary["accuracy"] > 0.95
    assert summary["samples_total"] == 60_000


def mnist_files() -> list[Path]:
    here = Path(__file__).resolve().parents[2]
    folder = Path(os.environ.get("ORCH_TEST_MNIST", here.parent / "shared" / "data" / "mnist"))
    found = sorted((folder / "MNIST" / "raw").glob("*.gz"))
    if len(found) != 4:
        pytest.skip(f"no MNIST in {folder}; name its folder in ORCH_TEST_MNIST")
    return found


def controller_pid(pid: int) -> int:
    """The orch process itself: the lab's `exec` may stand before it."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        children = file.read().split()
    return controller_pid(int(children[0])) if children else pid
