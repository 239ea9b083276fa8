import contextlib
import json
import os
import random
import re
import stat
import threading

import pytest

from orchestrator.errors import OrchError, StateError, UsageError
from orchestrator.hosts import Connections, Problem
from orchestrator.jobs import JobList
from orchestrator.paths import Home
from orchestrator.store import Store
from tests.support.plans import a2000_v100
from tests.support.probed_hosts import facts
from tests.support.remembered import cluster, job


@pytest.fixture
def store(tmp_path):
    return Store(Home(tmp_path / "home"))


def test_a_cluster_comes_back_as_it_was_saved(store):
    saved = cluster(
        added={"a": "2026-11-21"}, released=("b",), master="a", master_pin="a", facts={"a": facts(node="a")},
        problems={"b": Problem(message="no answer", remedy="switch it on")},
    )  # fmt: skip
    store.save_cluster(saved, current=True)
    assert Store(store.home).cluster() == saved
    assert Store(store.home).known_cluster("lab") == saved


def test_the_current_cluster_is_the_last_one_saved_as_such(store):
    store.save_cluster(cluster("one"), current=True)
    store.save_cluster(cluster("two"))
    assert store.cluster().name == "one"
    assert store.cluster("two").name == "two"
    store.save_cluster(cluster("two"), current=True)
    assert store.cluster().name == "two"


def test_without_a_cluster_the_first_step_is_said(store):
    with pytest.raises(UsageError, match="no cluster yet: start with `orch up INVENTORY`"):
        store.cluster()
    assert store.known_cluster("lab") is None


def test_an_unknown_cluster_is_refused_with_the_known_ones(store):
    store.save_cluster(cluster("one"))
    store.save_cluster(cluster("two"))
    with pytest.raises(UsageError, match=r"no cluster named 'tow' .*known: one, two"):
        store.cluster("tow")


def test_a_cluster_with_brackets_in_a_path_which_inventories_could_once_have_comes_back(store):
    store.save_cluster(cluster("one"), current=True)
    file = store.home.root / "clusters" / "one.json"
    content = json.loads(file.read_text())
    content["nodes"][0] |= {"workdir": "~/.orch-[01-16]", "key_file": "~/[a]", "python": "/opt/[b]/python"}
    file.write_text(json.dumps(content))
    assert Store(store.home).cluster().nodes[0].workdir == "~/.orch-[01-16]"


def test_an_unknown_node_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="c: no such node in cluster lab: its nodes: a, b"):
        cluster().node("c")


def test_a_released_node_takes_no_part(store):
    assert [node.name for node in cluster(released=("a",)).active()] == ["b"]


def test_a_job_and_its_plan_come_back_as_they_were_saved(store):
    plan = a2000_v100()
    record = job(plan.job)
    store.save_job(record, plan)
    store.save_job(record.model_copy(update={"state": "succeeded", "exit_code": 0}))
    assert store.plan(plan.job) == plan
    assert (store.job_record(plan.job).state, store.job_record(plan.job).exit_code) == ("succeeded", 0)


def test_a_job_counts_as_not_collected_until_its_files_are_here(store):
    for name in ("one", "two"):
        store.save_job(job(name), a2000_v100())
    assert sorted(store.uncollected("lab")) == ["one", "two"] and store.uncollected("rack") == []
    store.nothing_to_collect("one")
    store.save_job(job("one", state="succeeded"))
    assert store.uncollected("lab") == ["two"]


def test_jobs_are_listed_newest_first(store):
    for name, started in (("b", "2026-11-21T09:00"), ("a", "2026-11-21T10:00"), ("c", "2026-11-20T23:00")):
        store.save_job(job(name, started))
    assert [found.id for found in store.jobs()] == ["a", "b", "c"]


def test_the_latest_job_is_the_one_that_was_started_last_whatever_the_clock_said(store):
    store.save_job(job("of-an-older-orch", "2031-01-01T00:00"))
    for name, started in (("first", "2026-11-27T23:30"), ("second", "2026-11-27T21:32"), ("third", "1970-01-01T00:00")):
        plan = a2000_v100().model_copy(update={"job": name})
        with store.launching(job(name, started), plan) as launch:
            launch.over()
    newest = ["third", "second", "first", "of-an-older-orch"]
    assert [found.id for found in store.jobs()] == newest and store.find_job("latest") == "third"
    # What a controller writes of it later has no number; and it may be found on its hosts again.
    store.save_job(job("third", "1970-01-01T00:00", state="cancelled"))
    store.change_job("second", lambda known: known.model_copy(update={"state": "failed"}))
    store.save_job(job("first", "2026-11-27T23:30"), a2000_v100().model_copy(update={"job": "first"}))
    store.save_job(job("found", "2040-01-01T00:00"), a2000_v100().model_copy(update={"job": "found"}))
    assert [found.id for found in store.jobs()] == [*newest[:3], "found", newest[3]]
    store.home.last_number.write_text("damaged")
    with store.launching(job("fourth", "1969-01-01T00:00"), a2000_v100().model_copy(update={"job": "fourth"})):
        assert store.find_job("latest") == "fourth"


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("latest", "mnist_lenet-20261121-1000-abd"),
        ("mnist_lenet-20261121-0900-abc", "mnist_lenet-20261121-0900-abc"),
        ("resnet", "resnet152_cifar-20261121-0800-k3f"),
        ("mnist_lenet-20261121-10", "mnist_lenet-20261121-1000-abd"),
        ("exact", "exact"),
    ],
)
def test_a_job_is_found_by_its_id_a_unique_prefix_or_latest(store, wanted, found):
    store.save_job(job("mnist_lenet-20261121-0900-abc", "2026-11-21T09:00"))
    store.save_job(job("mnist_lenet-20261121-1000-abd", "2026-11-21T10:00"))
    store.save_job(job("resnet152_cifar-20261121-0800-k3f", "2026-11-21T08:00"))
    store.save_job(job("exact", "2026-11-01"))
    store.save_job(job("exactly", "2026-11-02"))
    assert store.find_job(wanted) == found


def test_the_latest_job_is_that_of_the_current_cluster(store, monkeypatch):
    store.save_cluster(cluster("lab"), current=True)
    store.save_cluster(cluster("rack"))
    store.save_cluster(cluster("new"))
    store.save_job(job("ours", "2026-11-21T09:00"))
    store.save_job(job("theirs", "2026-11-21T10:00", cluster="rack"))
    assert (store.find_job("latest"), store.find_job("latest", "rack")) == ("ours", "theirs")
    assert store.find_job("their") == "theirs"  # an id says enough by itself
    monkeypatch.setenv("ORCH_CLUSTER", "rack")
    assert (store.cluster().name, store.find_job("latest"), store.find_job("ours")) == ("rack", "theirs", "ours")
    with pytest.raises(UsageError, match="theirs ran on cluster rack, not on lab: leave --cluster out"):
        store.find_job("theirs", "lab")
    with pytest.raises(UsageError, match="no job yet on cluster new: the latest of cluster rack: --job theirs"):
        store.find_job("latest", "new")
    with pytest.raises(UsageError, match=r"no cluster named 'rak' is remembered: did you mean rack\?"):
        store.find_job("theirs", "rak")


def test_an_unknown_cluster_of_the_terminal_is_named_with_the_variable_and_the_nearest(store, monkeypatch):
    store.save_cluster(cluster("lab-pair"), current=True)
    monkeypatch.setenv("ORCH_CLUSTER", "labpair")
    store.save_job(job("one", cluster="lab-pair"))
    for ask in (store.cluster, lambda: store.find_job("latest")):
        with pytest.raises(UsageError, match=r"ORCH_CLUSTER: no cluster named 'labpair' .*did you mean lab-pair\?"):
            ask()
    assert store.cluster("lab-pair").name == "lab-pair"
    monkeypatch.setenv("ORCH_CLUSTER", "")
    assert store.cluster().name == "lab-pair"
    store.home.current_cluster.write_text("lab-pairs\n")
    with pytest.raises(UsageError, match=r"current names no cluster that is remembered: did you mean lab-pair\?"):
        store.cluster()


def test_a_prefix_of_several_jobs_is_refused_with_their_names(store):
    store.save_job(job("mnist-1"))
    store.save_job(job("mnist-2"))
    with pytest.raises(UsageError, match=r"'mnist' matches several jobs: mnist-[12], mnist-[12]"):
        store.find_job("mnist")


def test_an_unknown_job_is_refused_with_the_known_ones(store):
    with pytest.raises(UsageError, match="no job yet: start one"):
        store.find_job("latest")
    store.save_job(job("other-1"))
    with pytest.raises(UsageError, match="no job 'mnist': the latest: other-1"):
        store.find_job("mnist")


def test_home_is_for_its_owner_alone_even_where_it_was_not(store):
    store.home.root.mkdir(mode=0o755)
    before = os.umask(0)
    try:
        store.save_cluster(cluster(), current=True)
        store.save_job(job("j"), a2000_v100())
    finally:
        os.umask(before)
    assert stat.S_IMODE(store.home.root.stat().st_mode) == 0o700
    files = [path for path in store.home.root.rglob("*.json") if path.is_file()]
    assert len(files) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


def test_a_file_of_a_newer_version_is_refused_and_left_alone(store):
    store.save_job(job("j"))
    path = store.home.job_folder("j") / "job.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 2}))
    before = path.read_bytes()
    with pytest.raises(OrchError, match=r"job.json was written by a newer orch \(schema 2\): update this one"):
        store.job_record("j")
    assert path.read_bytes() == before


def test_what_a_newer_version_stored_besides_is_no_error(store):
    store.save_job(job("j"))
    path = store.home.job_folder("j") / "job.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "colour": "blue"}))
    assert store.job_record("j") == job("j")


DAMAGED = [
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"schema": 1}',
    b'{"schema": "1"}',
    b'{"schema": null}',
    b"\xff\xfe",
    b"[" * 9999,
]


@pytest.mark.parametrize("content", DAMAGED)
@pytest.mark.parametrize("name", ["job.json", "plan.json"])
def test_a_damaged_job_is_named_with_what_to_do_and_hides_no_other(store, name, content):
    store.save_job(job("j"), a2000_v100().model_copy(update={"job": "j"}))
    store.save_job(job("sound"), a2000_v100().model_copy(update={"job": "sound"}))
    (store.home.job_folder("j") / name).write_bytes(content)
    (error,) = store.damaged().values()
    assert re.fullmatch(rf".*/j/{name} is damaged \(.+\): `orch jobs --rescan` rebuilds it from the hosts", str(error))
    assert "sound" in [found.id for found in store.jobs()]
    assert store.find_job("sound") == "sound"
    assert store.find_job("j") == "j"


@pytest.mark.parametrize("content", DAMAGED)
@pytest.mark.parametrize("name", ["job.json", "plan.json"])
def test_a_list_names_a_damaged_job_that_has_ended_too(store, name, content):
    for each in ("j", "sound"):
        store.save_job(job(each, state="succeeded"), a2000_v100().model_copy(update={"job": each}))
    assert store.listed() == (store.jobs(), {})
    (store.home.job_folder("j") / name).write_bytes(content)
    records, wrong = store.listed()
    assert (records, wrong.keys()) == (store.jobs(), {"j"})
    assert f"/j/{name} is damaged" in str(wrong["j"])


def test_a_job_without_its_plan_is_damaged_too(store):
    store.save_job(job("j"))
    assert "plan.json is damaged (it is missing)" in str(store.damaged()["j"])


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_cluster_is_named_with_what_to_do_and_hides_no_other(store, content):
    store.save_cluster(cluster("one"))
    store.save_cluster(cluster("two"), current=True)
    store.home.cluster("two").write_bytes(content)
    with pytest.raises(StateError, match=r"two.json is damaged \(.*\): `orch up INVENTORY` writes it again"):
        store.cluster()
    assert store.cluster("one").name == "one"


@pytest.mark.parametrize("content", [b"", b"\0\0\0\0", b"\xff\xfe", b"../one", b"gone\n", b"one\ntwo\n", b"x" * 5000])
def test_a_damaged_choice_of_cluster_is_named_with_the_known_ones(store, content):
    store.save_cluster(cluster("one"), current=True)
    store.home.current_cluster.write_bytes(content)
    with pytest.raises(UsageError, match=r"current names no cluster that is remembered: .*known: one"):
        store.cluster()
    assert store.cluster("one").name == "one"


def test_whatever_byte_of_a_state_file_is_lost_or_changed_only_its_own_part_is_damaged(store):
    """Cut after any byte, and a bit flipped in any byte: an answer or a clear word, and never another's loss."""
    store.save_cluster(cluster("lab", master="a"), current=True)
    store.save_job(job("j"), a2000_v100().model_copy(update={"job": "j"}))
    store.save_job(job("sound"), a2000_v100().model_copy(update={"job": "sound"}))
    rng = random.Random(5)
    for path in (
        store.home.cluster("lab"),
        store.home.job_folder("j") / "job.json",
        store.home.job_folder("j") / "plan.json",
    ):
        whole = path.read_bytes()
        for at in range(0, len(whole), 17):
            flipped = bytes([whole[at] ^ (1 << rng.randrange(8))])
            for content in (whole[:at], whole[:at] + flipped + whole[at + 1 :]):
                path.write_bytes(content)
                assert "sound" in [found.id for found in store.jobs()]
                assert store.damaged().keys() <= {"j"}
                with contextlib.suppress(OrchError):
                    store.cluster()
        path.write_bytes(whole)


def test_a_record_that_speaks_of_another_job_is_damaged(store):
    store.save_job(job("j"), a2000_v100().model_copy(update={"job": "../../x"}))
    store.save_job(job("k"), a2000_v100().model_copy(update={"job": "k"}))
    (store.home.job_folder("k") / "job.json").write_bytes((store.home.job_folder("j") / "job.json").read_bytes())
    assert store.damaged().keys() == {"j", "k"}


# ---- starts -----------------------------------------------------------------------------------------------------


def test_a_start_is_remembered_before_it_begins_and_forgotten_when_it_is_over(store):
    plan = a2000_v100()
    with store.launching(job(plan.job), plan) as launch:
        assert (store.job_record(plan.job), store.plan(plan.job)) == (job(plan.job, number=1), plan.masked())
        assert store.half_started() == []  # somebody is at it
        launch.over()
    assert store.half_started() == []
    assert not store.is_half_started(plan.job)


def test_a_start_that_was_given_up_counts_as_half_done_until_it_is_over(store):
    plan = a2000_v100()
    with pytest.raises(RuntimeError), store.launching(job(plan.job), plan):
        raise RuntimeError("no word from a host")
    assert store.half_started() == [plan.job]
    store.start_is_over(plan.job)
    assert store.half_started() == []


def test_a_start_that_looked_abandoned_a_moment_ago_stays_remembered_where_somebody_is_at_it(store, monkeypatch):
    """Another controller looks between the marker's `open` and its lock."""
    plan = a2000_v100()
    seen = [plan.job]
    monkeypatch.setattr(Store, "half_started", lambda _: seen)
    monkeypatch.setattr(Store, "job_ids", lambda _: [])
    with store.launching(job(plan.job), plan):
        JobList(store, Connections(store.home)).settle_half_starts()
        assert store.home.launching(plan.job).exists()
    JobList(store, Connections(store.home)).settle_half_starts()
    assert not store.home.launching(plan.job).exists()


def test_a_reader_beside_writers_meets_only_whole_files(store):
    plans = {n: a2000_v100().model_copy(update={"job": "j", "notes": (n * 20_000,)}) for n in ("x", "y")}
    stop = threading.Event()
    store.save_job(job("j"), plans["x"])

    def write(name):
        while not stop.is_set():
            store.save_job(job("j"), plans[name])

    writers = [threading.Thread(target=write, args=(name,)) for name in plans]
    for writer in writers:
        writer.start()
    try:
        seen = {store.plan("j").notes[0] for _ in range(60)}
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert seen <= {"x" * 20_000, "y" * 20_000}
    assert sorted(path.name for path in store.home.job_folder("j").iterdir()) == [
        "job.json",
        "plan.json",
        "uncollected",
    ]


def test_a_write_waits_for_the_lock(store):
    from orchestrator.files import locked

    store.save_job(job("j"))
    writer = threading.Thread(target=store.save_job, args=(job("j", state="failed"),))
    with locked(store.home.root / ".lock"):
        writer.start()
        writer.join(0.2)
        assert writer.is_alive()
        assert store.job_record("j").state == "running"
    writer.join(10)
    assert store.job_record("j").state == "failed"
