"""What lies in one work folder and belongs to several: two homes, two clusters, and a person's own files.

Nobody's `down` or `reap` touches what is not theirs. Jobs are real (a supervisor, ranks without torch) on local nodes
that share one work folder each; hosts are asked directly where no controller is needed.
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.controller import Controller
from orchestrator.errors import HostError, HostsError, UsageError
from orchestrator.hosts import Connections, Inventory, Node, Who, checks, work_folders
from orchestrator.hosts.probe import probe
from orchestrator.jobs import launch
from orchestrator.owner import read_owner
from orchestrator.paths import Home
from orchestrator.provision import venvs
from orchestrator.record import Owner
from orchestrator.remote import claim, layout, processes
from orchestrator.store import Store
from orchestrator.transport import ConnectedHost, LocalTransport
from tests.support.local_job import gang

WAITS = "import os, time\nopen('weights', 'w').write('w')\nprint('on', flush=True)\ntime.sleep(300)\n"
ADA, BOB = (Owner(id=letter * 32, name=f"{name}@desk") for letter, name in (("a", "ada"), ("b", "bob")))


def here(workdir, name="here"):
    return ConnectedHost(LocalTransport(name), sys.executable, None, str(workdir))


def hashes(folder):
    """Every file below, by its content; but for what a job that runs writes itself."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        live = path.name in ("agent.json", "gpu.jsonl", "supervisor.log") or path.suffix == ".pyc"
        if path.is_file() and not path.is_symlink() and not live and not path.name.startswith("."):
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


@contextlib.contextmanager
def two_homes(folder):
    """Two people with one login: two controllers with an $ORCH_HOME each."""
    with Connections(Home(folder / "home-ada")) as one, Connections(Home(folder / "home-bob")) as other:
        yield [
            Controller(Store(Home(folder / f"home-{name}")), connections)
            for name, connections in (("ada", one), ("bob", other))
        ]


@contextlib.contextmanager
def job_of_each(folder, homes):
    """One running job of each person, in the same work folders."""
    ada, bob = homes
    (folder / "one").mkdir()
    (folder / "two").mkdir()
    with gang(folder / "one", WAITS) as one, gang(folder / "two", WAITS + "# another code\n") as other:
        nodes = tuple(
            n.model_copy(update={"workdir": o.workdir}) for n, o in zip(other.plan.nodes, one.plan.nodes, strict=True)
        )
        other.plan = other.plan.model_copy(update={"nodes": nodes})
        other.hosts = {n.name: here(n.workdir, n.name) for n in nodes}
        for controller, job_ in ((ada, one), (bob, other)):
            controller.store.save_cluster(job_.cluster(), current=True)
            controller.launch(job_.plan, job_.blob)
        for job_ in (one, other):
            job_.wait_running()
            wait_for(lambda job_=job_: all(said(job_.folder(node)) for node in "ab"))
        yield one, other


@pytest.fixture
def homes(tmp_path):
    with two_homes(tmp_path) as made:
        yield made


@pytest.fixture
def two_jobs(tmp_path, homes):
    """For a test that ends one of them."""
    with job_of_each(tmp_path, homes) as made:
        yield made


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    with two_homes(folder) as homes, job_of_each(folder, homes) as jobs:
        yield homes, jobs


@pytest.fixture
def undisturbed(shared):
    """The two homes and their two jobs, for tests after which both still run."""
    homes, jobs = shared
    for controller, job_ in zip(homes, jobs, strict=True):
        controller.store.save_cluster(job_.cluster(), current=True)
    return homes, jobs


def said(folder):
    """Whether the rank there has printed its line: from then on it writes nothing."""
    return any(log.read_text() for log in folder.glob("rank-*/stdout.log"))


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ---- two people, two clusters ---------------------------------------------------------------------------------


def test_down_ends_and_removes_the_jobs_of_its_own_home_alone(homes, two_jobs):
    ada, bob = homes
    mine, others = two_jobs
    before = [hashes(others.folder(node)) for node in "ab"]
    answers = ada.down(ada.store.cluster())
    # The host that is asked first ends the job on the other one, too, perhaps before that is asked.
    assert {job for answer in answers.values() for job in answer.ended} == {mine.plan.job}
    for node, answer in answers.items():
        assert set(answer.jobs) == {mine.plan.job}
        assert [(there.job, there.owner, there.alive) for there in answer.left] == [
            (others.plan.job, read_owner(bob.store.home).name, True)
        ]
        assert not mine.folder(node).exists()
    assert [hashes(others.folder(node)) for node in "ab"] == before
    assert all(agent["alive"] for agent in others.agents().values())
    assert bob.jobs.find(others.plan.job).refresh().state == "running"
    # The victim's code is still there, the remover's is not.
    codes = {path.name for path in (mine.folder("a").parents[1] / "code").iterdir()}
    assert codes == {others.plan.code.sha256}
    # And it says what became of its own.
    record = ada.store.job_record(mine.plan.job)
    assert record.state == "cancelled"
    assert ada.store.removal(mine.plan.job).nodes == ("a", "b")
    bob.down(bob.store.cluster())
    assert not mine.folder("a").parents[1].exists()


def test_two_clusters_of_one_home_are_as_strange_to_each_other(undisturbed):
    (ada, _), (mine, _) = undisturbed
    other = mine.cluster().model_copy(update={"name": "other"})
    ada.store.save_cluster(other, current=True)
    before = [hashes(mine.folder(node)) for node in "ab"]
    for answer in ada.down(other).values():
        assert (answer.ended, answer.jobs) == ((), {})
        assert mine.plan.job in {there.job for there in answer.left}
    assert [hashes(mine.folder(node)) for node in "ab"] == before
    assert ada.jobs.find(mine.plan.job).refresh().state == "running"


def test_reap_ends_what_is_ours_and_says_whose_the_rest_is(undisturbed):
    (ada, bob), (mine, others) = undisturbed
    strays = [
        subprocess.Popen(["sleep", "300"], env={**os.environ, "ORCH_JOB_DIR": str(job_.folder("a").parent / name)})
        for job_, name in ((mine, "gone-ada"), (others, "gone-bob"))
    ]
    try:
        for controller, name in ((ada, "gone-ada"), (bob, "gone-bob")):
            folder = mine.folder("a").parent / name
            folder.mkdir()
            owner = read_owner(controller.store.home).model_dump()
            (folder / "node.json").write_text(json.dumps({"job": name, "owner": owner, "cluster": "test"}))
        found = ada.clusters.reap(ada.store.cluster(), end=True)["a"].found
        assert {(one.there.job, one.mine, one.stayed) for one in found} == {
            ("gone-ada", True, ()),
            ("gone-bob", False, None),
        }
        assert strays[0].wait(10) == -9
        assert strays[1].poll() is None
        assert next(one for one in found if not one.mine).there.owner == read_owner(bob.store.home).name
        assert all(agent["alive"] for one in (mine, others) for agent in one.agents().values())
    finally:
        for stray in strays:
            stray.kill()
            stray.wait()
        for name in ("gone-ada", "gone-bob"):
            shutil.rmtree(mine.folder("a").parent / name, ignore_errors=True)


@pytest.mark.parametrize(
    "look", [work_folders.survey_host, lambda *who: work_folders.reap(*who, end=False)], ids=["look", "reap"]
)
def test_a_look_blanks_what_ended_jobs_of_an_older_orch_still_hold(tmp_path, look):
    work = layout.WorkFolder(str(tmp_path / "work"))
    ended, runs = {"state": "succeeded", "pid": 1}, {"state": "running", **processes.identify(os.getpid())._asdict()}
    jobs = {
        "older": (None, "test", ended), "mine": (ADA, "test", ended),
        "died": (ADA, "test", {"state": "running", "pid": 1}),
        "bobs": (BOB, "test", ended), "runs": (ADA, "test", runs), "elsewhere": (None, "other", ended),
    }  # fmt: skip
    for name, (owner, cluster, agent) in jobs.items():
        made = work.job(name)
        made.root.mkdir(parents=True)
        node = {"job": name, "cluster": cluster, "token": "aa", "env": {"KEY": "secret"}, "prepare": "log in as secret"}
        layout.write_json(made.node, {**node, "owner": owner.model_dump()} if owner else node)
        layout.write_json(made.agent, {"job": name, **agent})
    look(here(work.root), Who(ADA, "test"))
    assert {name for name in jobs if "secret" in work.job(name).node.read_text()} == {"bobs", "runs", "elsewhere"}
    assert work.job("older").has_token("aa") and work.job("older").read_node()["cluster"] == "test"


def test_nobody_cancels_a_job_that_is_anothers(undisturbed):
    (ada, bob), (_, others) = undisturbed
    found = ada.lost_jobs.rescan(["test"])
    assert [record.id for record in found.records] == [others.plan.job]
    job = ada.jobs.find(others.plan.job)
    assert job.plan.owner == read_owner(bob.store.home)
    with pytest.raises(UsageError, match="belongs to"):
        job.cancel()
    assert all(agent["alive"] for agent in others.agents().values())
    assert ada.store.uncollected("test") != [others.plan.job]


def test_files_that_somebody_removed_by_hand_make_a_job_lost_and_not_starting(homes, two_jobs):
    ada, _ = homes
    mine, _ = two_jobs
    launch.cancel(mine.plan, mine.hosts)
    mine.wait()
    for node in "ab":
        shutil.rmtree(mine.folder(node))
    assert ada.store.job_record(mine.plan.job).state == "starting"
    record = ada.jobs.find(mine.plan.job).refresh()
    assert (record.state, record.first_failure.reason) == ("lost", "its files are gone from every host")


# ---- a person's own files -------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path):
    """A folder of a person's own, with the names that a work folder has."""
    for name in ("code/thesis.tex", "jobs/2024/results.csv", "venv/keep.txt", "locks/gpu-mine.lock"):
        path = tmp_path / "proj" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "proj"


def test_down_of_a_folder_that_is_a_persons_own_removes_nothing(project):
    before = hashes(project)
    answer = work_folders.down(here(project), Who(ADA, "rack"))
    assert (answer.removed, answer.jobs) == ((), {})
    assert "no work folder of orch" in answer.why[0]
    assert hashes(project) == before


def test_up_and_prepare_refuse_a_folder_that_holds_something_and_is_not_ours(project, tmp_path):
    node = Node(
        name="a", host="127.0.0.1", transport="local", python=sys.executable, workdir=str(project), device="cpu"
    )
    before = hashes(tmp_path / "proj")
    facts = probe(here(project, "a"), (), torch=False, timeout_s=60)
    problem = checks.unusable(node, facts)
    assert "holds code, jobs, locks, ..." in problem.message
    assert "`workdir:`" in problem.remedy
    assert ".orch-work" in problem.remedy
    (tmp_path / "job").mkdir()
    with gang(tmp_path / "job", WAITS) as job_:
        nodes = (job_.plan.nodes[0].model_copy(update={"workdir": str(project)}), *job_.plan.nodes[1:])
        job_.plan = job_.plan.model_copy(update={"nodes": nodes})
        job_.hosts["a"] = here(project, "a")
        with pytest.raises(HostsError, match="no work folder of orch"):
            job_.launch()
        assert hashes(project) == before
        assert {path.name for path in project.iterdir()} == {"code", "jobs", "venv", "locks"}
        job_.plan = job_.plan.model_copy(update={"nodes": job_.plan.nodes[1:]})  # what the gang looks at in the end


def test_in_a_marked_folder_what_a_person_put_there_stays(project, two_jobs, homes, tmp_path):
    """The names match, the marks do not."""
    ada, _ = homes
    mine, _ = two_jobs
    work = mine.folder("a").parents[1]
    for path in project.rglob("*.*"):
        (work / path.relative_to(project)).parent.mkdir(parents=True, exist_ok=True)
        (work / path.relative_to(project)).write_bytes(path.read_bytes())
    (work / "venv/torch-2.3.1").mkdir(parents=True)
    (work / "venv/torch-2.3.1/mine").write_text("x")
    (work / "code" / ("f" * 64)).symlink_to(project)
    (work / "notes").write_text("x")
    answer = ada.down(ada.store.cluster())["a"]
    kept = ["code/thesis.tex", "jobs/2024/results.csv", "venv/keep.txt", "venv/torch-2.3.1/mine", "notes"]
    kept += ["locks/gpu-mine.lock"]  # a lock of ours holds nothing, or a job's id
    assert [name for name in kept if not (work / name).is_file()] == []
    assert hashes(project)
    assert {"code/thesis.tex", "jobs/2024", "venv/keep.txt", "venv/torch-2.3.1", "notes"} <= set(answer.strange)


@pytest.mark.skipif(os.getuid() != 0, reason="makes files of two users")
def test_down_opens_what_a_script_closed_and_goes_on_where_another_users_file_stays():
    with tempfile.TemporaryDirectory() as folder:
        work, request = Path(folder) / "work", {"owner": ADA.model_dump(), "cluster": "rack"}
        for name in ("closed", "foreign", "plain"):
            root = work / "jobs" / name
            (root / "src/out").mkdir(parents=True)
            (root / "src/out/weights").write_text("w")
            (root / "node.json").write_text(json.dumps({"job": name, **request}))
        (work / ".orch-work").touch()
        subprocess.run(["chown", "-R", "65534", folder], check=True)
        (work / "jobs/closed/src/out").chmod(0o500)
        os.chown(work / "jobs/foreign/src/out", 0, 0)
        asked = json.dumps({"action": "down", "workdir": str(work), **request})
        program = "import json, os, shutil; from orchestrator.remote import belongings; os.setuid(65534);"
        program += f"print(json.dumps(belongings.down({asked})))"
        for gone in (["closed", "foreign", "plain"], []):
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
            answer = json.loads(done.stdout)
            assert sorted(answer["jobs"]) == gone, done.stderr
            [why] = answer["why"]
            assert why.startswith("a part of jobs/") and "Permission denied" in why
        assert [path.name for path in work.rglob("*") if path.is_file()] == [".orch-work", "weights"]


def test_a_folder_of_an_older_orch_is_taken_once_it_is_marked_by_hand(project):
    (project / ".orch-work").touch()
    assert work_folders.down(here(project), Who(ADA, "rack")).why == ()
    assert (project / "code/thesis.tex").exists()


def test_an_empty_folder_of_a_persons_own_may_be_used_and_goes_when_it_is_empty_again(tmp_path):
    work = layout.WorkFolder(str(tmp_path / "empty"))
    work.root.mkdir()
    with claim.claimed(work):
        assert (work.root / ".orch-work").is_file()
    assert work_folders.down(here(work.root), Who(ADA, "rack")).removed == (str(work.root),)
    assert not work.root.exists()


# ---- what several share ---------------------------------------------------------------------------------------


def venv_of(work, *users):
    venv = work / "venv/torch-2.3.1"
    venv.mkdir(parents=True)
    owners = [{"owner": who.owner.model_dump(), "cluster": who.cluster} for who in users]
    (venv / "orch-venv.json").write_text(json.dumps({"requirements": [], "found": {}, "users": owners}))
    return venv


def test_an_environment_goes_with_its_last_user(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    (work / ".orch-work").touch()
    users = [Who(ADA, "rack"), Who(ADA, "lab"), Who(BOB, "rack")]
    venv = venv_of(work, *users)
    for number, who in enumerate(users, 1):
        answer = work_folders.down(here(work), who)
        assert venv.exists() == (number < 3)
        assert len(answer.why) == (number < 3)
    assert not work.exists()


def test_while_others_are_at_work_there_shared_things_stay(tmp_path):
    work = layout.WorkFolder(str(tmp_path / "work"))
    with claim.claimed(work):
        (work.codes / ("c" * 64)).mkdir(parents=True)
        answer = work_folders.down(here(work.root), Who(ADA, "rack"))
        assert "at work there" in answer.why[0]
        assert (work.codes / ("c" * 64)).is_dir()
    assert work_folders.down(here(work.root), Who(ADA, "rack")).why == ()
    assert not work.root.exists()


def test_a_start_never_meets_a_folder_that_is_being_removed(tmp_path):
    """Claims and removals at once: whoever holds a claim has a marked folder for as long."""
    work, broken, over = layout.WorkFolder(str(tmp_path / "work")), [], threading.Event()

    def start():
        while not over.is_set():
            with claim.claimed(work):
                if not (work.root / ".orch-work").is_file():
                    broken.append("no mark")

    def clear():
        while not over.is_set():
            with claim.alone_in(work, 0.5) as alone:
                if alone:
                    (work.root / ".orch-work").unlink()
                    with contextlib.suppress(OSError):  # as `orch down` does: a start may have made its mark
                        work.root.rmdir()

    threads = [threading.Thread(target=target) for target in (start, start, clear)]
    [thread.start() for thread in threads]
    over.wait(2)
    over.set()
    [thread.join() for thread in threads]
    assert broken == []


# ---- who is who -----------------------------------------------------------------------------------------------


def test_a_rebuilt_home_takes_its_jobs_back_when_asked_to_and_never_by_itself(homes, two_jobs, tmp_path):
    ada, bob = homes
    _, others = two_jobs
    with Connections(Home(tmp_path / "rebuilt")) as connections:
        rebuilt = Controller(Store(Home(tmp_path / "rebuilt")), connections)
        rebuilt.store.save_cluster(others.cluster(), current=True)
        rebuilt.lost_jobs.rescan(["test"])
        assert all(others.plan.job not in answer.jobs for answer in rebuilt.down(rebuilt.store.cluster()).values())
        former = rebuilt.lost_jobs.not_ours(["test"])
        assert {owner.name for owner in former} == {read_owner(c.store.home).name for c in (ada, bob)}
        chosen = former[read_owner(bob.store.home)]
        assert chosen == [others.plan.job]
        assert rebuilt.lost_jobs.adopt(chosen) == {}
        assert rebuilt.lost_jobs.not_ours(["test"]).keys() == {read_owner(ada.store.home)}
        assert bob.down(bob.store.cluster())["a"].jobs == {}
        assert set(rebuilt.down(rebuilt.store.cluster())["a"].jobs) == {others.plan.job}


def test_another_file_does_not_silently_take_over_a_cluster_whose_jobs_have_not_ended(homes, two_jobs, tmp_path):
    ada, _ = homes
    mine, _ = two_jobs
    node = Node(name="z", host="127.0.0.1", port=1)  # where nothing listens
    stranger = Inventory(cluster="test", nodes=(node,), file=str(tmp_path / "other.yaml"))
    with pytest.raises(UsageError, match="jobs that have not ended") as refused:
        ada.clusters.up(stranger)
    assert "another `cluster:` name" in refused.value.remedy
    assert [n.name for n in ada.store.cluster("test").nodes] == ["a", "b"]
    ada.jobs.of(mine.plan).cancel()
    assert any("this file replaces it" in warning for warning in ada.clusters.up(stranger).warnings)


def test_setup_does_not_replace_an_environment_that_somebody_else_uses(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    (work / ".orch-work").touch()
    venv_of(work, Who(BOB, "rack"))
    bare = replace(here(work), python=getattr(sys, "_base_executable", sys.executable))  # the one without a torch
    wanted = venvs.choose("2.3.1", None)
    made = venvs.set_up({"here": bare}, replace(wanted, any_torch=False), {}, lambda _: None, owner=ADA, cluster="x")
    assert isinstance(made["here"], HostError)
    assert "bob@desk uses" in made["here"].message
