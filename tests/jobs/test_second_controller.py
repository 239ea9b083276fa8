"""Two controllers on one job, and requests whose answers are lost: at most one gang; only `cancel` acts on a job."""

import secrets
import subprocess
import sys
import threading

import pytest

from orchestrator.controller import Controller
from orchestrator.errors import ConnectError, HostsError, OrchError
from orchestrator.hosts import Connections
from orchestrator.jobs import node_request
from orchestrator.jobs.launch import launch, peer_place
from orchestrator.paths import Home
from orchestrator.store import Store
from orchestrator.transport import ask
from tests.support.local_job import gang

TALLIES = """
import os, pathlib, time
print("began", flush=True)
while not pathlib.Path(os.environ["END"]).exists():
    time.sleep(0.02)
print("end", flush=True)
"""


@pytest.fixture
def job(tmp_path):
    with gang(tmp_path, TALLIES, env={"END": str(tmp_path / "end")}) as made:
        yield made


def controller_of(job, home):
    store = Store(Home(home))
    store.save_cluster(job.cluster(), current=True)
    return Controller(store, Connections(store.home))


def starts(job):
    """How often each rank has begun."""
    return [
        log.read_text().count("began") for n in job.plan.nodes for log in job.folder(n.name).glob("rank-*/stdout.log")
    ]


def test_a_running_job_is_not_started_a_second_time(job, tmp_path):
    job.launch()
    before = {name: agent["pid"] for name, agent in job.wait_running().items()}
    with pytest.raises(HostsError, match="already there"):
        controller_of(job, tmp_path / "second").launch(job.plan, job.blob)
    assert {name: agent["pid"] for name, agent in job.agents().items() if agent["alive"]} == before
    (tmp_path / "end").touch()
    assert job.wait().state == "succeeded"
    assert starts(job) == [1, 1]


def test_of_two_controllers_that_start_one_job_at_once_at_most_one_does(job, tmp_path):
    outcomes = []

    def start():
        try:
            launch(job.plan, job.hosts, job.blob)
            outcomes.append("started")
        except HostsError:
            outcomes.append("refused")

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("started") <= 1
    if "started" in outcomes:
        (tmp_path / "end").touch()
        assert job.wait().state == "succeeded"
        assert starts(job) == [1, 1]
    else:  # each had one host first: both gave up what they had
        assert not any(agent.get("alive") for agent in job.agents().values())


def test_a_prepare_and_a_go_whose_answers_are_lost_start_one_gang_when_repeated(job, tmp_path):
    """Each request is sent three times, two of them at once, as by somebody who never sees an answer."""
    token = secrets.token_hex(32)
    kept = job.plan.masked().model_dump(mode="json", by_alias=True)

    def prepare(node):
        request = {"action": "prepare", "workdir": node.workdir, "node": node_request(job.plan, node, token)}
        request |= {"plan": kept, "blob_bytes": len(job.blob)}
        return ask.ask(job.hosts[node.name], "prepare", request, blob=job.blob, timeout_s=60)

    def thrice(action, node):
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(action(node))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [*answers, action(node)]

    ports, peers = {}, {}
    for node in job.plan.nodes:
        answers = thrice(prepare, node)
        assert len({answer["pid"] for answer in answers}) == 1, answers
        ports[node.name] = answers[0]["hub_port"]
        peers[node.name] = peer_place(node, answers[0])

    def go(node):
        where = {"hub_port": ports["a"], "peers": peers, "at_once": False}
        request = {"action": "go", "workdir": node.workdir, "job": job.plan.job, **where}
        return ask.ask(job.hosts[node.name], "control", request, timeout_s=60)

    for node in job.plan.nodes:
        thrice(go, node)
    job.wait_running()
    (tmp_path / "end").touch()
    assert job.wait().state == "succeeded"
    assert starts(job) == [1, 1]


class Deaf:
    """A transport that delivers what is said and loses the answer to one action."""

    def __init__(self, transport, action):
        self._transport, self._action = transport, f'"action": "{action}"'.encode()

    @property
    def node(self):
        return self._transport.node

    def run(self, command, *, stdin=b"", timeout_s):
        answer = self._transport.run(command, stdin=stdin, timeout_s=timeout_s)
        if self._action in stdin:
            raise ConnectError(self.node, "the command did not end in time")
        return answer

    def stream(self, command, *, stdin=b""):
        return self._transport.stream(command, stdin=stdin)


@pytest.mark.parametrize("action", ["prepare", "go"])
def test_a_launch_that_loses_an_answer_undoes_itself_everywhere(job, action):
    host = job.hosts["b"]
    hosts = {**job.hosts, "b": ask.ConnectedHost(Deaf(host.transport, action), host.python, None, host.workdir)}
    undone = []
    with pytest.raises(HostsError, match="did not end in time"):
        launch(job.plan, hosts, job.blob, lambda: undone.append(True))
    assert undone == [True]
    job.wait()
    assert not any(agent.get("alive") for agent in job.agents().values())


@pytest.mark.parametrize("action", ["prepare", "go", "undo"])
def test_a_launch_that_cannot_undo_itself_is_settled_by_the_next_look(job, tmp_path, monkeypatch, action):
    controller = controller_of(job, tmp_path / "home")
    real = ask.ask

    def cut(host, program, request, **options):
        """The link to b breaks with this request: it arrives, and its answer is lost."""
        answer = real(host, program, request, **options)
        if host.node == "b" and request["action"] in (action, "undo"):
            raise ConnectError("b", "no route to host")
        if request["action"] == "prepare" and action == "undo":
            raise ConnectError(host.node, "no route to host")
        return answer

    monkeypatch.setattr(ask, "ask", cut)
    with pytest.raises(HostsError):
        controller.launch(job.plan, job.blob)
    monkeypatch.undo()
    controller.jobs.all()
    job.wait()  # where all had been asked to start, they were asked to end, too
    (record,) = controller.jobs.all().records
    assert record.state == "cancelled"
    assert not any(agent.get("alive") for agent in job.agents().values())


def test_two_who_follow_see_the_same_and_their_end_is_not_the_jobs(job, tmp_path):
    job.launch()
    job.wait_running()
    home = tmp_path / "home"
    controller_of(job, home).store.save_job(job.record(), job.plan)
    words = [sys.executable, "-m", "orchestrator.cli", "logs", "-f", "--job", "latest"]
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "ORCH_HOME": str(home)}
    watchers = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) for _ in range(3)]
    first = [watcher.stdout.readline() for watcher in watchers]
    assert all("began" in line for line in first)
    watchers[0].kill()
    watchers[0].communicate()
    assert all(agent["alive"] for agent in job.agents().values())
    (tmp_path / "end").touch()
    seen = [sorted((line + w.communicate()[0]).splitlines()) for line, w in zip(first[1:], watchers[1:], strict=True)]
    assert seen[0] == seen[1]
    assert [line.split()[-1] for line in seen[0]] == ["began", "end"] * 2
    assert job.wait().state == "succeeded"


def test_a_cancel_while_another_controller_still_uploads_ends_that_start(job, tmp_path, monkeypatch):
    uploads, is_cancelled, outcome = threading.Event(), threading.Event(), []
    real = ask.ask

    def slow(host, program, *rest, **more):
        if program == "prepare":
            uploads.set()
            assert is_cancelled.wait(60)
        return real(host, program, *rest, **more)

    def start():
        try:
            outcome.append(controller_of(job, tmp_path / "home").launch(job.plan, job.blob))
        except OrchError as error:
            outcome.append(error)

    monkeypatch.setattr(ask, "ask", slow)
    thread = threading.Thread(target=start)
    thread.start()
    assert uploads.wait(60)
    record, stayed = controller_of(job, tmp_path / "home").jobs.find(job.plan.job).cancel()
    is_cancelled.set()
    thread.join()
    assert (record.state, stayed) == ("cancelled", [])
    assert isinstance(outcome[0], OrchError) and "was cancelled while it started" in str(outcome[0])
    assert not any(agent.get("alive") for agent in job.agents().values())
    assert controller_of(job, tmp_path / "home").jobs.find(job.plan.job).refresh().state == "cancelled"
