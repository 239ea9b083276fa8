"""Jobs of which this controller has lost everything, asked back from their hosts; and hosts that answer nonsense."""

import json
import shutil
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.controller import Controller
from orchestrator.hosts import Cluster, Connections, Node
from orchestrator.jobs import JobRecord, recalled_plans
from orchestrator.paths import Home
from orchestrator.planning import Attempt, LaunchPlan
from orchestrator.store import Store
from tests.support import forks
from tests.support.job_states import PLAN
from tests.support.local_job import gang
from tests.support.quick_python import quick_python

SAYS_AND_WAITS = "import time\nprint('hello', flush=True)\ntime.sleep(120)\n"
HERE = Cluster(name="lab", file="lab.yaml", nodes=tuple(Node(name=n, host=f"10.0.0.{i}") for i, n in enumerate("abc")))
JOB = "mnist-20261121-0912-k3f"
PLAN_JSON = PLAN.model_copy(update={"job": JOB}).model_dump(mode="json", by_alias=True)


@pytest.fixture
def controller(tmp_path):
    """Of a person with an empty $ORCH_HOME."""
    home = Home(tmp_path / "orch-home")
    with Connections(home) as connections:
        yield Controller(Store(home), connections)


@contextmanager
def a_job(folder):
    with gang(folder, SAYS_AND_WAITS, env={"API_TOKEN": "hunter2"}) as job:
        job.launch()
        job.wait_running()
        yield job


@pytest.fixture
def running(tmp_path):
    """A job that a test may end."""
    with a_job(tmp_path) as job:
        yield job


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """A job that tests look at, and none ends."""
    with a_job(tmp_path_factory.mktemp("seen")) as job:
        yield job


def test_a_job_that_nobody_here_remembers_is_found_on_its_hosts_with_all_that_can_be_done_to_it(
    running, controller, tmp_path
):
    controller.store.save_cluster(running.cluster(), current=True)
    assert controller.jobs.all().records == ()
    found = controller.lost_jobs.rescan(["test"])
    assert ([job.id for job in found.records], found.problems) == ([running.plan.job], {})
    job = controller.jobs.find("latest")
    record, plan = job.record, job.plan
    assert (record.state, record.started, record.nodes) == ("running", running.plan.created, ("a", "b"))
    assert plan == running.plan.masked()
    said = [item for item in job.follow(until_end=False)]
    assert sum(line.text == "hello" for lines in said if isinstance(lines, tuple) for line in lines) == 2
    ended, stayed = job.cancel()
    assert (ended.state, stayed) == ("cancelled", [])
    run = controller.collect(job, tmp_path / "runs").run
    assert (run.rank("b", 1) / "stdout.log").read_text() == "hello\n"


@pytest.mark.parametrize("name", ["job.json", "plan.json"])
def test_a_damaged_file_is_rebuilt_and_the_sound_ones_stay_as_they_are(seen, controller, name):
    controller.store.save_cluster(seen.cluster(), current=True)
    controller.lost_jobs.rescan(["test"])
    path = controller.store.home.job_folder(seen.plan.job) / name
    path.write_bytes(path.read_bytes()[:100])
    listed = controller.jobs.all()
    assert list(listed.problems) == [seen.plan.job]
    assert [job.id for job in controller.lost_jobs.rescan(["test"]).records] == [seen.plan.job]
    assert controller.jobs.all().problems == {}
    assert controller.lost_jobs.rescan(["test"]).records == ()


def test_the_hosts_keep_the_plan_without_its_secrets_and_for_its_owner_alone(seen):
    for node in ("a", "b"):
        plan = seen.folder(node) / "plan.json"
        assert plan.stat().st_mode & 0o777 == 0o600
        assert "hunter2" not in plan.read_text()


def test_a_damaged_job_that_no_host_knows_is_named_with_how_to_forget_it(seen, controller):
    controller.store.save_cluster(seen.cluster(), current=True)
    controller.lost_jobs.rescan(["test"])
    job = controller.store.home.job_folder(seen.plan.job)
    shutil.copytree(job, job.with_name("other"))
    found = controller.lost_jobs.rescan(["test"])
    assert "no host that answered has it" in str(found.problems["other"])


def test_a_job_of_a_newer_version_is_left_alone(seen, controller):
    controller.store.save_cluster(seen.cluster(), current=True)
    controller.lost_jobs.rescan(["test"])
    path = controller.store.home.job_folder(seen.plan.job) / "job.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 2}))
    before = path.read_bytes()
    assert controller.lost_jobs.rescan(["test"]).records == ()
    assert path.read_bytes() == before
    assert "update this one" in str(controller.jobs.all().problems[seen.plan.job])


def test_after_a_lost_home_up_and_rescan_bring_everything_back(running, tmp_path):
    python = quick_python(tmp_path / "quick")
    nodes = "".join(
        f"  - {{name: {n.name}, address: 127.0.0.1, workdir: {n.workdir}, python: {python}}}\n"
        for n in running.plan.nodes
    )
    (tmp_path / "test.yaml").write_text(
        f"cluster: test\ndefaults: {{transport: local, device: cpu, ranks: 1}}\nnodes:\n{nodes}"
    )

    def orch(*words):
        done = forks.run(forks.ORCH, words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done

    orch("up", "test.yaml", "--allow-local")
    assert json.loads(orch("jobs", "--json").stdout)["jobs"] == []
    (found,) = json.loads(orch("jobs", "--rescan", "--json").stdout)["jobs"]
    assert (found["id"], found["state"]) == (running.plan.job, "running")
    assert orch("logs", "--job", "latest").stdout.count("hello") == 2
    orch("cancel", "--job", "latest")
    orch("collect", "--job", "latest")
    assert json.loads(orch("jobs", "--json").stdout)["jobs"][0]["state"] == "cancelled"


# ---- hosts that are not to be trusted ----------------------------------------------------------------------------


def changed(**more):
    return {**PLAN_JSON, **more}


def node(index, **more):
    nodes = [dict(one) for one in PLAN_JSON["nodes"]]
    nodes[index] |= more
    return changed(nodes=nodes)


UNFIT = {
    "another job": (changed(job="x"), "names another job"),
    "an unknown node": (node(1, name="d"), "has no node d"),
    "one node twice": (node(1, name="a"), "nodes contradict"),
    "not the node that answers": (changed(nodes=PLAN_JSON["nodes"][1:], world_size=2), "nodes contradict"),
    "a master that is none": (changed(master="z"), "nodes contradict"),
    "no nodes": (changed(nodes=[]), "nodes contradict"),
    "ranks without end": (node(2, ranks=10**12), "ranks contradict"),
    "negative ranks": (node(0, ranks=-1), "ranks contradict"),
    "ranks that overlap": (node(1, first_rank=0), "ranks contradict"),
    "another world": (changed(world_size=7), "ranks contradict"),
    "an endless grace": (changed(grace_s=1e300), "a grace of"),
    "a grace that is none": (changed(grace_s=float("nan")), "a grace of"),
    "no time": (changed(created="yesterday"), "yesterday"),
    "a newer form": (changed(schema=2), "newer orch"),
    "no plan": ([], ""),
    "nothing": (None, ""),
}


@pytest.mark.parametrize(("plan", "why"), UNFIT.values(), ids=list(UNFIT))
def test_a_plan_that_does_not_fit_is_left_out_and_the_reason_said(plan, why):
    found = recalled_plans.recall({"a": {JOB: {"plan": plan, "agent": {}}}}, HERE)
    plans, left_out = found.plans, found.left_out
    assert plans == {}
    assert len(left_out) == 1
    assert why in left_out[0]


def test_a_job_of_another_cluster_is_no_mistake_and_is_reported_once():
    remembered = {"plan": changed(cluster="theirs"), "agent": {}}
    found = recalled_plans.recall({"a": {JOB: remembered}, "b": {JOB: remembered}}, HERE)
    assert (found.plans, found.left_out, found.elsewhere) == ({}, [], {"theirs": [JOB]})


def test_a_job_is_taken_from_the_next_host_where_one_talks_nonsense():
    found = recalled_plans.recall({"a": {JOB: {"plan": {}}}, "b": {JOB: {"plan": PLAN_JSON}}}, HERE)
    plans, left_out = found.plans, found.left_out
    assert (list(plans), len(left_out)) == ([JOB], 1)


@pytest.mark.parametrize("job", ["../../etc/cron.d/x", "a/b", ".hidden", "", "x" * 200, "a\n"])
def test_a_job_whose_name_is_no_folders_name_is_left_out(job):
    assert recalled_plans.recall({"a": {job: {"plan": changed(job=job)}}}, HERE).plans == {}


def test_where_the_hosts_are_is_the_inventorys_word():
    claimed = node(1, workdir="/etc", python="/tmp/evil", activate="rm -rf /")
    plan = recalled_plans.adopt(claimed, HERE, node="a", job=JOB)
    assert (plan.node("b").workdir, plan.node("b").python, plan.node("b").activate) == ("~/.orch", "python3", None)


def test_texts_of_a_host_lose_their_control_characters():
    plan = recalled_plans.adopt(changed(exp="\x1b]0;owned\x07train\x1b[2J"), HERE, node="a", job=JOB)
    assert plan.exp == "train"


HOSTILE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([JOB, "a", PLAN_JSON]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*PLAN_JSON, "plan", "x"]), inner, max_size=6)
    ),
    max_leaves=8,
)


def test_a_record_has_all_that_a_plan_says_of_its_job():
    plan = PLAN.model_copy(update={"name": "night", "note": "warmer", "attempt": Attempt(number=2, most=3)})
    record = JobRecord.of(plan, "starting")
    both = (JobRecord.model_fields.keys() & LaunchPlan.model_fields.keys()) - {"nodes"}
    assert {"name", "note", "hosts", "attempt"} <= both
    assert {name: getattr(record, name) for name in both} == {name: getattr(plan, name) for name in both}
    assert (record.id, record.started, record.nodes) == (plan.job, plan.created, ("a", "b", "c"))


@given(st.dictionaries(st.sampled_from([*PLAN_JSON]), HOSTILE, max_size=4), HOSTILE)
def test_whatever_a_host_remembers_it_is_a_plan_that_fits_or_a_reason(twisted, agent):
    answers = {"a": {JOB: {"plan": changed(**twisted), "agent": agent}}}
    found = recalled_plans.recall(answers, HERE)
    plans, left_out = found.plans, found.left_out
    assert len(plans) + len(left_out) + len(found.elsewhere) == 1
    for plan in plans.values():
        assert {one.name for one in plan.nodes} <= set("abc")
        assert JobRecord.of(plan, "lost").id == JOB
        recalled_plans.agents_of(JOB, plan, answers)
