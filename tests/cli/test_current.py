"""Which cluster and which job a line is about when it names none; and that nobody cancels by mistake."""

import io
import json
import os
import sys

import click
import pytest

from orchestrator.cli import main
from orchestrator.clusters import Clusters, Up
from orchestrator.jobs import RunningJob
from orchestrator.jobs.job_store import SlurmLoan
from orchestrator.jobs.slurm_queue import SlurmQueue
from orchestrator.paths import Home
from orchestrator.store import Store
from tests.support.commands import COMMANDS, options_of
from tests.support.plans import a2000_v100
from tests.support.remembered import cluster, job


@pytest.fixture
def orch(capfd, tmp_path, monkeypatch):
    """Types a command; gives exit code, standard output and standard error. rack is current, and lab has newer jobs."""
    monkeypatch.chdir(tmp_path)
    store = Store(Home.default())
    store.save_cluster(cluster("lab"))
    store.save_cluster(cluster("rack", master="a"), current=True)
    for name, of, state in (("r-1", "rack", "succeeded"), ("r-2", "rack", "running"), ("l-1", "lab", "failed")):
        record = job(name, f"2026-11-2{1 + (of == 'lab')}T0{name[-1]}:00:00+00:00", cluster=of, state=state)
        store.save_job(record, a2000_v100().model_copy(update={"job": name, "cluster": of}))

    def types(*words):
        with pytest.raises(SystemExit) as end:
            main(list(words), prog_name="orch")
        shown = capfd.readouterr()
        return end.value.code or 0, shown.out, shown.err

    return types


def test_clusters_are_listed_with_the_current_one(orch, monkeypatch):
    code, out, err = orch("clusters")
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert lines[1][:3] == ["lab", "2", "0"] and lines[2][:4] == ["*", "rack", "2", "a"]
    assert "current: rack (by " in err
    document = json.loads(orch("clusters", "--json")[1])
    assert document["current"]["name"] == "rack" and document["current"]["by"].endswith("/current")
    assert [(row["name"], row["running"]) for row in document["clusters"]] == [("lab", []), ("rack", ["r-2"])]
    monkeypatch.setenv("ORCH_CLUSTER", "lab")
    assert json.loads(orch("clusters", "--json")[1])["current"] == {"name": "lab", "by": "ORCH_CLUSTER"}
    Home.default().cluster("lab").write_text("{")
    assert "lab.json is damaged" in orch("clusters")[2]


@pytest.mark.parametrize(
    "line",
    [
        "run --dry-run --exp mnist_lenet",
        "run --resume r-1",
        "plan --exp mnist_lenet",
        "profile --exp mnist_lenet",
        "setup --yes",
        "data push .",
        "pull r-2",
    ],
)
def test_a_pattern_that_fits_no_node_is_refused_before_any_host_is_asked(orch, line):
    name, *words = line.split()
    at = 2 if name == "data" else 1
    words = [name, *words]
    code, out, err = orch(*words[:at], "--nodes", "x[1-3]*", *words[at:])
    assert (code, out) == (2, "") and "x[1-3]* matches no node of" in err and "its nodes: " in err


def test_use_switches_all_terminals_but_those_that_chose_by_themselves(orch, monkeypatch):
    assert orch("use", "lab")[1] == "lab is the current cluster: a, b\n"
    assert Store(Home.default()).cluster().name == "lab"
    code, out, err = orch("use", "lob")
    assert (code, out) == (2, "") and "did you mean lab?" in err
    monkeypatch.setenv("ORCH_CLUSTER", "lab")
    assert "note: ORCH_CLUSTER=lab still chooses in this terminal: unset ORCH_CLUSTER" in orch("use", "rack")[2]


def test_jobs_are_those_of_all_clusters_unless_one_is_named(orch, monkeypatch):
    def listed(*words):
        return [row["id"] for row in json.loads(orch("jobs", "--json", *words)[1])["jobs"]]

    assert listed() == ["l-1", "r-2", "r-1"] and listed("--cluster", "lab") == ["l-1"]
    monkeypatch.setenv("ORCH_CLUSTER", "rack")
    assert listed() == ["r-2", "r-1"]
    assert "jobs of cluster rack (ORCH_CLUSTER); `ORCH_CLUSTER= orch jobs` shows all" in orch("jobs")[2]
    assert orch("jobs", "--cluster", "lob")[0] == 2


@pytest.mark.parametrize("words", [("report",), ("collect",), ("pull", "*.pt"), ("pull",), ("logs",)], ids=" ".join)
def test_a_line_that_names_no_job_is_about_the_latest_of_its_cluster(words, orch, monkeypatch):
    assert "job r-2, the latest of cluster rack" in orch(*words)[2]
    assert "job l-1, the latest of cluster lab" in orch(*words, "--cluster", "lab")[2]
    monkeypatch.setenv("ORCH_CLUSTER", "lab")
    assert "job l-1, the latest of cluster lab" in orch(*words)[2]
    named = ("--job", "r-1", "--cluster", "lab")
    assert "r-1 ran on cluster rack, not on lab" in orch(*words, *named)[2]


class Typist(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("answer", "words", "ended"),
    [
        (None, (), []),
        (None, ("--yes",), ["r-2"]),
        ("\n", (), []),
        ("n\n", (), []),
        ("y\n", (), ["r-2"]),
        (None, ("--job", "latest"), ["r-2"]),
    ],
)
def test_nobody_cancels_by_mistake(answer, words, ended, orch, monkeypatch):
    cancelled = []

    def cancel(self):
        cancelled.append(self.id)
        return self.record, []

    monkeypatch.setattr(RunningJob, "cancel", cancel)
    monkeypatch.setattr(sys, "stdin", io.StringIO() if answer is None else Typist(answer))
    code, _, err = orch("cancel", *words)
    assert cancelled == ended
    assert code == (0 if ended else 2)
    if not ended:
        assert "no job was cancelled" in err and "try: orch cancel --job r-2" in err
    if answer:
        assert "Cancel r-2 (running) on a, b?" in err


def test_a_latest_that_waits_for_slurm_is_asked_about_too(orch, monkeypatch):
    loan = SlurmLoan(job="7", folder="r-3")
    Store(Home.default()).save_job(job("r-3", "2026-11-22T09:00:00+00:00", cluster="rack", state="queued", slurm=loan))
    cancelled = []
    monkeypatch.setattr(SlurmQueue, "refreshed", lambda self, record: record)
    monkeypatch.setattr(SlurmQueue, "cancel", lambda self, record: cancelled.append(record.id) or record)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    code, _, err = orch("cancel")
    assert (code, cancelled) == (2, []) and "try: orch cancel --job r-3" in err
    assert (orch("cancel", "--yes")[0], cancelled) == (0, ["r-3"])


@pytest.mark.parametrize("yes", [False, True])
def test_cancel_of_a_latest_that_has_ended_asks_about_the_only_one_that_runs(yes, orch, monkeypatch):
    """`--yes` was about the latest job."""
    record = job("r-3", "2026-11-22T09:00:00+00:00", cluster="rack", state="failed")
    Store(Home.default()).save_job(record, a2000_v100().model_copy(update={"job": "r-3", "cluster": "rack"}))
    cancelled = []
    monkeypatch.setattr(RunningJob, "cancel", lambda self: (cancelled.append(self.id) or self.record, []))
    monkeypatch.setattr(sys, "stdin", Typist("y\n"))
    if yes:
        code, _, err = orch("cancel", "--yes")
        assert (code, cancelled) == (2, [])
        assert "r-3 has ended already (failed)" in err and "still running: r-2: `orch cancel --job r-2`" in err
        return
    code, _, err = orch("cancel")
    assert code == 0
    assert "it has ended (failed); only r-2 runs" in err and "Cancel r-2 (running) on a, b?" in err


def test_cancel_of_a_latest_that_has_ended_names_what_still_runs(orch, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Typist("y\n"))
    code, _, err = orch("cancel", "--cluster", "lab", "--yes")
    assert code == 2
    assert "l-1 has ended already (failed)" in err and "still running: r-2: `orch cancel --job r-2`" in err


def test_up_says_where_the_terminal_keeps_to_another_cluster(orch, monkeypatch, tmp_path):
    (tmp_path / "new.yaml").write_text("cluster: new\nnodes: [{name: a, host: 10.0.0.1, user: me}]\n")
    monkeypatch.setattr(Clusters, "up", lambda self, loaded: Up(cluster("new"), None, {}, ()))
    monkeypatch.setenv("ORCH_CLUSTER", "rack")
    assert "ORCH_CLUSTER=rack still chooses in this terminal: unset ORCH_CLUSTER" in orch("up", "new.yaml")[2]
    monkeypatch.setenv("ORCH_CLUSTER", "new")
    assert "ORCH_CLUSTER" not in orch("up", "new.yaml")[2]


def test_every_command_about_hosts_or_jobs_takes_a_cluster():
    own = {"up", "clusters", "use", "help"}
    for words, command in COMMANDS.items():
        if not isinstance(command, click.Group) and words[0] not in own:
            assert "--cluster" in {name for option in options_of(command) for name in option.opts}, words


def test_names_are_completed_from_the_terminals_cluster(orch, monkeypatch, capfd):
    store = Store(Home.default())
    other = cluster("lab").model_copy(update={"nodes": (cluster().nodes[0].model_copy(update={"name": "zeta"}),)})
    store.save_cluster(other)
    for variable, offered in (("", "a"), ("lab", "zeta")):
        monkeypatch.setenv("ORCH_CLUSTER", variable)
        assert _completed("orch master ", monkeypatch, orch).split()[0] == f"plain,{offered}"
    assert _completed("orch use ", monkeypatch, orch).split() == ["plain,lab", "plain,rack"]


def _completed(line, monkeypatch, orch):
    words = {"_ORCH_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    with monkeypatch.context() as patch:
        for name, value in words.items():
            patch.setitem(os.environ, name, value)
        return orch()[1]
