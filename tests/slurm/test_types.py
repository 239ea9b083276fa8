"""Types of hosts: from Slurm's answers to an inventory, from there to hosts and to a job; and how a job has ended."""

import io
import tarfile
from pathlib import Path

import pytest

from orchestrator.errors import ConnectError, InventoryError, UsageError
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.connections import Connections
from orchestrator.hosts.forms.slurm import hosts_of, slurm_inventory
from orchestrator.hosts.inventory_file import load_inventory
from orchestrator.jobs.job_list import JobList
from orchestrator.jobs.job_store import FirstFailure, JobRecord, SlurmLoan
from orchestrator.jobs.running import RunningJob
from orchestrator.jobs.slurm_queue import QUEUED, SlurmQueue
from orchestrator.jobs.state import ended_by
from orchestrator.paths import Home
from orchestrator.planning.job_spec import JobSpec
from orchestrator.planning.request import parse_job
from orchestrator.slurm.answers import SlurmJob, phase_of, read_hosts
from orchestrator.starting.retries import Asked
from orchestrator.starting.submission import Submission, Submissions, travelling, wanted_types
from orchestrator.store import Store
from tests.support.job_states import PLAN, known, over

DECLARED, _ = read_hosts(
    "NodeName=v1 Gres=gpu:v100:1 State=IDLE Partitions=volta,long ActiveFeatures=ib\n"
    "NodeName=v2 Gres=gpu:v100:1 State=DOWN* Partitions=volta Reason=fan [root]\n"
    "NodeName=a1 Gres=gpu:a16:2 State=MIXED Partitions=gpu ActiveFeatures=a16,ib\n"
    "NodeName=both Gres=gpu:a16:2,gpu:v100:1 State=IDLE Partitions=gpu\n"
    "NodeName=plain Gres=gpu:4 State=IDLE Partitions=gpu\n"
    "NodeName=c1 Gres=(null) State=IDLE Partitions=cpu\n"
)
HEAD = "cluster: hpc\nengine: {slurm: {login: me@login.hpc, workdir: /scratch/orch, partition: gpu}}\nnodes:\n"
V100 = '  - {name: v100, gpus: 1, slurm: {gres: "gpu:v100:1", partition: volta}}\n'
A16 = "  - {name: a16, gpus: 2, most: 3, slurm: {constraint: a16}}\n"


def inventory(tmp_path: Path, text: str):
    (tmp_path / "hpc.yaml").write_text(text)
    return load_inventory(tmp_path / "hpc.yaml")


def test_an_inventory_of_what_slurm_declares(tmp_path):
    """S2: untyped GPUs, two kinds in a host, hosts that are down."""
    text, left_out = slurm_inventory("me@login.hpc", "hpc", "hpc.yaml", DECLARED)
    types = {node.name: node.slurm for node in inventory(tmp_path, text).nodes}
    assert {name: kind.gres for name, kind in types.items()} == {
        "v100": "gpu:v100:1",
        "a16": "gpu:a16:2",
        "gpu": "gpu:4",
    }
    assert types["v100"].partition == "volta"
    assert left_out == [
        "v2: is down now (fan [root])",
        "both: left out, it has two kinds of GPU (2 a16 and 1 v100); write a `slurm:` of its own",
        "c1: left out, it has no GPU",
    ]


def test_without_a_gpu_there_is_no_inventory():
    with pytest.raises(UsageError, match="declares no host with a single kind of GPU"):
        slurm_inventory("login", "hpc", "hpc.yaml", DECLARED[-1:])


def test_every_type_has_its_hosts_with_a_work_folder_each(tmp_path):
    nodes, warnings = hosts_of(inventory(tmp_path, HEAD + V100 + A16), DECLARED, str.split, "/scratch/orch/nodes")
    assert [(node.name, node.kind, node.workdir) for node in nodes] == [
        ("v1", "v100", "/scratch/orch/nodes/v1"),
        ("v2", "v100", "/scratch/orch/nodes/v2"),
        ("a1", "a16", "/scratch/orch/nodes/a1"),
    ]
    assert nodes[1].note == "declared by Slurm: down, volta"
    assert warnings == []


def test_a_type_without_a_host_is_a_mistake_with_its_line(tmp_path):
    text = HEAD + V100.replace("volta", "urgent")
    with pytest.raises(UsageError, match=r"hpc.yaml:4: node v100: Slurm declares no such host"):
        hosts_of(inventory(tmp_path, text), DECLARED, str.split, "/scratch")


def test_a_type_whose_hosts_are_all_down_is_a_warning(tmp_path):
    found = inventory(tmp_path, HEAD + V100.replace("volta}", "volta, nodelist: v2}"))
    _, warnings = hosts_of(found, DECLARED, str.split, "/scratch")
    assert warnings == ["v100: no host of this type is up now (down)"]


@pytest.mark.parametrize(
    ("listed", "counts"),
    [([], {"v100": 1, "a16": 3}), (["2xa16", "v100"], {"v100": 1, "a16": 2}), (["a16", "a16"], {"a16": 2})],
)
def test_hosts_that_a_job_asks_for(tmp_path, listed, counts):
    assert wanted_types(inventory(tmp_path, HEAD + V100 + A16), listed) == counts


@pytest.mark.parametrize("word", ["a17", "0xa16", "2x", "2xa17"])
def test_an_unknown_type_is_named(tmp_path, word):
    with pytest.raises(UsageError, match=f"--nodes {word}: .* has no such type of host"):
        wanted_types(inventory(tmp_path, HEAD + V100 + A16), [word])


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        (HEAD + V100.replace("gpus: 1", "host: x"), "4: node 'v100': `host`: Slurm chooses the hosts, by `slurm:`"),
        (HEAD + V100.replace("gres:", "gress:"), "4: node v100: slurm: unknown key 'gress'; did you mean `gres`?"),
        (HEAD + V100.replace("v100:1", "v100:1 --x"), "4: node v100: slurm.gres: 'gpu:v100:1 --x' must be one word"),
        (HEAD.replace("me@", "-x@") + V100, "2: engine.slurm.login: '-x' must be a login name"),
        (HEAD.replace("partition:", "parttion:") + V100, "2: engine.slurm: unknown key 'parttion'; did you mean `part"),
        (HEAD.replace("gpu}", "gpu, options: [--output=x]}") + V100, "2: engine.slurm.options[0]: --output is set by"),
        ("cluster: x\nnodes:\n  - {name: a, host: h, most: 2}\n", "3: node 'a': `most`: it needs `engine: {slurm:"),
    ],
)
def test_mistakes_have_a_line(tmp_path, text, mistake):
    with pytest.raises(InventoryError) as raised:
        inventory(tmp_path, text)
    assert [str(each).partition("hpc.yaml:")[2][: len(mistake)] for each in raised.value.mistakes] == [mistake]


def test_what_travels_has_no_paths_of_this_machine_and_no_secret(tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code/train.py").write_text("print(1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKEN", "s3cret")
    spec = JobSpec(script="code/train.py", args=["--lr", "1"], folder="code", env={"TOKEN": None}, nodes=["v100"])
    made = travelling(parse_job(spec).request)
    assert (made.script, made.args, made.folder, made.env, made.nodes) == ("train.py", ["--lr", "1"], None, {}, [])
    assert "s3cret" not in made.model_dump_json()


def record(state, kind="supervisor"):
    failure = FirstFailure(kind=kind, node="v1", reason="the supervisor was asked to end")
    return JobRecord(schema=1, id="j", state=state, exp="x", cluster="hpc", nodes=("v1",), first_failure=failure)


@pytest.mark.parametrize(
    ("state", "left_s", "expected"),
    [
        ("CANCELLED", 1e9, ("cancelled", None)),
        ("TIMEOUT", 0, ("failed", "time")),
        ("FAILED", 100, ("failed", "time")),
        ("FAILED", 1e9, ("failed", "slurm")),
        ("PREEMPTED", 1e9, ("failed", "slurm")),
        ("PENDING", 1e9, ("failed", "slurm")),
        ("NODE_FAIL", 1e9, ("failed", "slurm")),
        ("OUT_OF_MEMORY", 1e9, ("failed", "memory")),
        ("RUNNING", 1e9, ("failed", "supervisor")),
    ],
)
def test_slurms_state_completes_a_weak_last_word(state, left_s, expected):
    ended = ended_by(record("failed"), SlurmJob("7", state, phase_of(state), left_s=left_s))
    assert (ended.state, ended.first_failure.kind if ended.first_failure else None) == expected


def test_a_hosts_own_cause_wins_and_a_forgotten_job_is_lost():
    own = record("failed", "rank")
    assert ended_by(own, SlurmJob("7", "CANCELLED", "cancelled")) is own
    lost = record("lost")
    assert ended_by(lost, SlurmJob("7", "unknown", "unknown")) is lost
    assert ended_by(lost, SlurmJob("7", "CANCELLED", "cancelled")).state == "cancelled"


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (SlurmJob("7", "COMPLETING", "ending"), "running"),
        (ConnectError("login", "does not answer"), "running"),
        (SlurmJob("7", "TIMEOUT", "time"), "failed"),
        (SlurmJob("7", "unknown", "unknown"), "failed"),
    ],
)
def test_an_end_without_a_cause_is_recorded_once_slurm_has_its_own(monkeypatch, answer, state):
    """A record of an end stays for ever."""
    jobs = Store(Home.default())
    jobs.save_job(known("running", slurm=SlurmLoan(job="7", folder="j", hosts={"a": "7"})), PLAN)

    def settled(self, record):
        if isinstance(answer, ConnectError):
            raise answer
        return answer

    monkeypatch.setattr(SlurmQueue, "settled", settled)
    failure = {"kind": "supervisor", "node": "a", "reason": "the supervisor was asked to end"}
    ends = {name: over("failed", first_failure=failure) for name in "abc"}
    assert RunningJob(PLAN, jobs, Connections(jobs.home))._remember(ends).state == state
    assert jobs.job_record("j").state == state


def test_a_profile_is_also_found_in_the_queue_by_a_home_that_lost_it(tmp_path):
    jobs = Store(Home.default())
    (tmp_path / "train.py").write_text("print(1)\n")
    file = inventory(tmp_path, HEAD + V100).file
    asked = Asked(
        Cluster(name="hpc", file=str(file), nodes=()), parse_job(JobSpec(script=str(tmp_path / "train.py"))), ()
    )
    made = Submissions(jobs, Connections(jobs.home), JobList(jobs, Connections(jobs.home)), print, print).prepared(
        asked, "all"
    )
    with tarfile.open(fileobj=io.BytesIO(made.files)) as tar:
        assert QUEUED in tar.getnames()


def test_a_submission_without_an_answer_names_the_way_to_it(monkeypatch):
    said, jobs = list[str](), Store(Home.default())
    connections = Connections(jobs.home)
    submissions = Submissions(jobs, connections, JobList(jobs, connections), said.append, print)
    made = Submission("train-1", "", b"", known("queued"))
    for name, value in (("prepared", made), ("_send", "controller-1"), ("_pythons", {})):
        monkeypatch.setattr(Submissions, name, lambda self, *_, value=value: value)

    class Silent:
        def submit(self, *_, **__):
            raise ConnectError("login", "does not answer")

    monkeypatch.setattr(SlurmQueue, "login", lambda self, cluster: Silent())
    with pytest.raises(ConnectError):
        submissions.submit(Asked(Cluster(name="hpc", file="x", nodes=()), parse_job(JobSpec(exp="mnist_lenet")), ()))
    assert said == ["train-1: Slurm may have it without an answer; `orch jobs --rescan` finds it"]
