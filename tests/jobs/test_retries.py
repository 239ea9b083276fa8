"""`orch run --retries N`: a job that its hosts failed is tried again, over real SSH servers and without."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.controller import opened
from orchestrator.errors import ConnectError, HostError, OrchError, RefusedError, TooFewError
from orchestrator.jobs import FirstFailure, launch
from orchestrator.paths import Home
from orchestrator.planning import Attempt, Earlier, HostRange, JobSpec, LaunchPlan, ParsedJob, RunRequest, parse_job
from orchestrator.planning.job_spec import SILENCE_S
from orchestrator.remote import coordinator, membership
from orchestrator.starting import Asked, Retries, retries
from tests.support.forks import Forked
from tests.support.job_states import PLAN, alive, known, over
from tests.support.local_job import Gang, gang
from tests.support.plans import CODE
from tests.support.ssh_rack import Rack, ssh_rack
from tests.support.sshd import needs_sshd, wait_for

BOTH = ("--nodes", "a2000,v100", "--retry-wait", "0.1s")
SCRIPT = """
import os, sys, time
print("of", os.environ["WORLD_SIZE"], flush=True)
while len(sys.argv) > 1 and os.environ["WORLD_SIZE"] == sys.argv[1]:
    time.sleep(0.05)
sys.exit(len(sys.argv) > 1 and 7 * (sys.argv[1] == "exits"))
"""


@pytest.fixture(scope="module")
def rack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rack]:
    with ssh_rack(tmp_path_factory.mktemp("rack")) as made:
        (made.folder / "code").mkdir()
        (made.folder / "code/train.py").write_text(SCRIPT)
        yield made


def jobs_beside(rack: Rack, known: set[str]) -> list[dict[str, Any]]:
    """By their attempts."""
    found = [job for job in json.loads(rack.types("jobs", "--json").stdout)["jobs"] if job["id"] not in known]
    return sorted(found, key=lambda job: job["attempt"]["number"])


def ids(rack: Rack) -> set[str]:
    return {path.parent.name for path in (rack.folder / "home/jobs").glob("*/job.json")}


def agent(rack: Rack, node: str, job: str) -> dict[str, Any]:
    path = rack.folder / {"a2000": "one", "v100": "two"}[node] / "jobs" / job / "agent.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


@contextmanager
def running(rack: Rack, *words: str) -> Iterator[tuple[Forked, str]]:
    """A run of both hosts, and its job, whose ranks run."""
    before = ids(rack)
    run = rack.starts("run", "--json", *BOTH, *words, "code/train.py", "2")
    try:
        wait_for(lambda: ids(rack) - before, "the job", 180)
        (job,) = ids(rack) - before
        wait_for(lambda: not (rack.folder / f"home/jobs/{job}/launching").exists(), "the end of its start", 180)
        wait_for(lambda: all(agent(rack, node, job).get("ranks") for node in ("a2000", "v100")), "its ranks", 180)
        yield run, job
    finally:
        run.kill()
        run.__exit__()


@needs_sshd
def test_a_job_whose_masters_supervisor_is_killed_is_tried_again_without_that_host(rack: Rack) -> None:
    with running(rack, "--retries", "2") as (run, job):
        (master,) = (node for node in ("a2000", "v100") if "hub_port" in agent(rack, node, job))
        os.kill(agent(rack, master, job)["pid"], signal.SIGKILL)
        out, said = run.communicate(timeout=240)
    assert out, (run.returncode, said)
    record = json.loads(out)
    assert (run.returncode, record["state"], record["nodes"]) == (0, "succeeded", [*{"a2000", "v100"} - {master}])
    why = f"{master}: the supervisor was killed by SIGKILL"
    assert record["attempt"]["earlier"] == [{"job": job, "why": why}]
    assert (record["attempt"]["number"], record["attempt"]["most"]) == (2, 3)
    assert f"note: {job} failed: {why}\nnote: attempt 2 of 3 follows in 0.1s\n" in said
    assert f"note: attempt 2 of 3, after {job} failed: {why}\n" in said
    shown = rack.types("jobs").stdout
    assert "1 of 3" in shown and "2 of 3" in shown
    shown = rack.types("collect", "--job", record["id"]).stderr
    assert f"This is attempt 2 of 3; its figures exclude the failed attempts before: {job} ({why})." in shown
    again = json.loads(rack.types("run", "--dry-run", "--json", f"runs/{record['id']}/job.yaml").stdout)
    assert (again["attempt"]["most"], again["attempt"]["earlier"]) == (3, [])


@needs_sshd
def test_what_the_script_does_itself_is_tried_again_only_where_that_is_asked_for(rack: Rack) -> None:
    known = ids(rack)
    said = rack.types("run", *BOTH, "--retries", "1", "code/train.py", "exits", exit_code=1).stderr
    (first,) = jobs_beside(rack, known)
    assert f"{first['id']} is not tried again: the script's own failure, not the hosts'; `--retry-on any` " in said
    words = ("--retries", "1", "--retry-on", "any", "code/train.py", "exits")
    said = rack.types("run", *BOTH, *words, exit_code=1).stderr
    tried = jobs_beside(rack, {*known, first["id"]})
    assert [one["attempt"]["number"] for one in tried] == [1, 2] and len({one["id"] for one in tried}) == 2
    assert [sorted(one["nodes"]) for one in tried] == [["a2000", "v100"]] * 2
    assert f"{tried[1]['id']} is not tried again: this was attempt 2 of 2" in said


@needs_sshd
def test_a_job_that_somebody_cancels_is_not_tried_again(rack: Rack) -> None:
    with running(rack, "--retries", "1") as (run, job):
        rack.types("cancel", "--job", job)
        out, _ = run.communicate(timeout=240)
    assert (run.returncode, json.loads(out)["id"], json.loads(out)["state"]) == (1, job, "cancelled")


@needs_sshd
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--retries", "1", "--rejoin", "--detach"), "--rejoin works only while `orch run` follows the job"),
        (("--retries", "1", "--notify", "https://h/x"), "--notify URL reports each attempt's end"),
        (("--priority", "high"), "--priority belongs to --wait"),
        (("--rejoin",), "--rejoin belongs to --retries"),
        (("--retry-on", "any"), "--retry-on belongs to --retries"),
    ],
)
def test_what_does_not_go_together_is_one_line(rack: Rack, words: tuple[str, ...], said: str) -> None:
    shown = rack.types("run", *words, "code/train.py", exit_code=2).stderr
    assert shown.startswith(f"error: {said}") and shown.count("error:") == 1


def test_another_attempt_in_turn_does_without_a_host_that_is_off(rack: Rack, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in rack.environment.items():
        monkeypatch.setenv(name, value)
    shown: list[LaunchPlan] = []
    with opened(Home.default()) as controller:
        cluster = controller.store.cluster("rack")
        made = parse_job(JobSpec(script=f"{rack.folder}/code/train.py", wait=True))
        made = replace(made, request=replace(made.request, hosts=HostRange(1, 2)))
        job = controller.start(Asked(cluster, made, ("a2000", "gone")), shown.append)
        assert [*job.follow()] and job.record.state == "succeeded"
    assert [tuple(node.name for node in plan.nodes) for plan in shown] == [("a2000",)]


def test_a_host_with_anything_left_of_an_earlier_attempt_refuses_the_next(tmp_path: Path) -> None:
    with gang(tmp_path, "import time\ntime.sleep(600)\n") as first:
        first.launch()
        first.wait_running()
        attempt = Attempt(number=2, most=2, earlier=(Earlier(job=first.plan.job, why="it was lost"),))
        again = Gang(first.plan.model_copy(update={"job": f"{first.plan.job}-2", "attempt": attempt}), first.blob)
        with pytest.raises(RefusedError) as caught:
            again.launch()
        words = f"{first.plan.job}, an earlier attempt at this job, has not ended there"
        assert [error.message for error in caught.value.errors] == [f"a: {words}", f"b: {words}"]
        assert not any(again.folder(node).exists() for node in "ab")


# ---- without hosts ---------------------------------------------------------------------------------------------------


class Bench:
    """Retries over three hosts that are only told of: what each says of the last attempt, as time goes on.

    says: by host, its record; None where it gives no answer.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, says: Callable[[float], dict[str, Any]], **options: Any
    ) -> None:
        self.now_s, self.said, self.started, self.cancels = 0.0, list[str](), list[RunRequest](), 0
        self._says, attempt = says, Attempt(number=1, most=3, **options)
        monkeypatch.setattr(retries, "time", self)
        monkeypatch.setattr(
            launch, "agents", lambda plan, hosts: {name: self._says(self.now_s)[name] for name in hosts}
        )
        monkeypatch.setattr(launch, "cancel", self._cancelled)
        self._plan = PLAN.model_copy(update={"attempt": attempt})
        asked = Asked(None, ParsedJob(RunRequest("script", "train.py", ()), CODE, b""))  # type: ignore[arg-type]
        self.retries = Retries(None, None, self._start, self.said.append, asked)  # type: ignore[arg-type]
        self.job: Any = self
        words = {"kind": "lost", "node": "a", "reason": "no word for 20 s", "whose": "hosts", "loses_host": True}
        self.record = known("failed", first_failure=FirstFailure.model_validate(words))

    # As a clock, and as a job.
    id = "j"

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    @property
    def plan(self) -> LaunchPlan:
        return self._plan

    @property
    def hosts(self) -> dict[str, Any]:
        return {name: name for name, record in self._says(self.now_s).items() if record is not None}

    def reach(self) -> dict[str, HostError]:
        return {n: ConnectError(n, "no answer") for n, record in self._says(self.now_s).items() if record is None}

    def _cancelled(self, plan: LaunchPlan, hosts: Any) -> None:
        self.cancels += 1

    def _start(self, asked: Asked) -> Any:
        self.started.append(replace(asked.request, command=tuple(asked.only)))
        return self


ENDED = {"a": over("failed"), "b": over("failed"), "c": over("failed")}


def test_the_constants_are_those_of_the_supervisors() -> None:
    ladder_s = coordinator.REPORT_S + 2 * coordinator.KILL_S
    assert (membership.LEASE_S, ladder_s) == (SILENCE_S, retries.LADDER_S)


def test_where_all_hosts_answer_the_next_attempt_waits_for_its_pause_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, lambda _: ENDED)
    assert bench.retries.after(bench.job) is bench
    (request,) = bench.started
    assert (bench.now_s, request.command, request.hosts) == (10.0, ("b", "c"), HostRange(1, 2))
    assert request.attempt and request.attempt.earlier == (Earlier(job="j", why="a: no word for 20 s"),)


def test_a_host_that_gives_no_answer_has_the_time_in_which_it_ends_its_ranks_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, lambda _: {**ENDED, "b": None})
    bench.retries.after(bench.job)
    assert bench.now_s > SILENCE_S + retries.LADDER_S + 2 * PLAN.grace_s > 30
    assert [request.command for request in bench.started] == [("c",)]  # neither is to be counted on
    assert any("b: no answer; at most" in line for line in bench.said)


def test_one_that_comes_back_in_that_time_is_asked_and_nobody_waits_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, lambda now_s: {**ENDED, "b": None if now_s < 15 else over("failed")})
    bench.retries.after(bench.job)
    assert bench.now_s == 15.0 and [request.command for request in bench.started] == [("b", "c")]


@pytest.mark.parametrize("record", [alive(), over("running", left=2), over("failed", leftovers=["pid 7"])])
def test_while_anything_of_it_is_left_on_a_host_that_answers_no_other_attempt_starts(
    monkeypatch: pytest.MonkeyPatch, record: dict[str, Any]
) -> None:
    bench = Bench(monkeypatch, lambda now_s: {**ENDED, "b": record if now_s < 40 else over("failed")})
    bench.retries.after(bench.job)
    assert 40 <= bench.now_s < 42 and bench.cancels and len(bench.started) == 1
    bench = Bench(monkeypatch, lambda _: {**ENDED, "b": record})
    with pytest.raises(OrchError, match="j has not ended on b, so that no other attempt may start"):
        bench.retries.after(bench.job)
    assert bench.started == []


def test_a_lost_host_is_taken_in_again_only_where_it_may_rejoin(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, lambda _: {**ENDED, "b": None}, rejoin=True)
    bench.retries.after(bench.job)
    assert [request.command for request in bench.started] == [("a", "b", "c")]


def test_a_start_that_too_few_hosts_answer_for_is_another_attempt_where_hosts_may_rejoin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(monkeypatch, lambda _: ENDED, rejoin=True)
    start, fails = bench._start, iter([True, False])

    def starts(*words: Any) -> Any:
        if next(fails):
            raise TooFewError("2 of 3 hosts can take part")
        return start(*words)

    monkeypatch.setattr(bench.retries, "_start", starts)
    bench.retries.after(bench.job)
    (request,) = bench.started
    assert request.attempt and request.attempt.number == 3 and len(request.attempt.earlier) == 1
    assert bench.now_s == 10.0 + 20.0
    bench = Bench(monkeypatch, lambda _: ENDED)
    monkeypatch.setattr(bench.retries, "_start", lambda *_: starts())
    fails = iter([True])
    with pytest.raises(TooFewError):
        bench.retries.after(bench.job)


def test_with_fewer_hosts_left_than_are_needed_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, lambda _: ENDED)
    asked = bench.retries._asked
    job = replace(asked.job, request=replace(asked.request, hosts=HostRange(3, 3)))
    monkeypatch.setattr(bench.retries, "_asked", replace(asked, job=job))
    with pytest.raises(TooFewError) as caught:
        bench.retries.after(bench.job)
    assert caught.value.message == "2 hosts of 3 remain, and 3 are needed: a was lost in j"
    assert "--rejoin" in caught.value.remedy
