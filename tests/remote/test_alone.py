"""A job that its hosts queue, retry and notify of by themselves: no controller takes part after the start."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from orchestrator.jobs import JobRecord, combine
from orchestrator.jobs import launch as control
from orchestrator.planning import Attempt, JobSpec
from orchestrator.remote import agent, gpu_claim, gpu_queue, keeper, turn
from orchestrator.remote.layout import JobFolder, write_record
from orchestrator.remote.messages import Order, Status, TurnReport
from tests.support.disks import fill, small_disk
from tests.support.local_job import Gang, gang
from tests.support.sshd import wait_for

UNTIL = "import os, sys, time\nprint('begins', flush=True)\nwhile not os.path.exists({go!r}): time.sleep(0.02)\n"
DIES = """import os, signal, sys
from pathlib import Path
count = Path({folder!r}, "count-" + os.environ["RANK"])
count.write_text(count.read_text() + "x" if count.exists() else "x")
print("attempt", os.environ.get("ORCH_ATTEMPT", "1"), flush=True)
if len(count.read_text()) < {times} and os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def uuids(count: int = 2) -> list[str]:
    return [f"GPU-{uuid.uuid4()}" for _ in range(count)]


@contextlib.contextmanager
def alone(
    tmp_path: Path,
    script: str,
    gpus: Sequence[str] = (),
    *,
    spec: Mapping[str, Any] | None = None,
    attempt: Attempt | None = None,
    notify: str | None = None,
    ranks: Sequence[int] = (1, 1),
) -> Iterator[Gang]:
    """gpus: of its hosts, in order."""
    tmp_path.mkdir(exist_ok=True)
    asked = JobSpec(script="script.py", **(spec or {}))
    changes: dict[str, Any] = {"detached": True, "asked": asked, "attempt": attempt, "notify": notify, "grace_s": 0.5}
    with gang(tmp_path, script, ranks=ranks, **changes) as job:
        nodes = [
            node.model_copy(update={"gpu_uuids": tuple(gpus[at : at + 1])}) for at, node in enumerate(job.plan.nodes)
        ]
        made = Gang(job.plan.model_copy(update={"nodes": tuple(nodes)}), job.blob)
        try:
            yield made
        finally:
            control.cancel(made.plan, made.hosts)
            wait_for(lambda: not any(record.get("alive") for record in made.agents().values()), "its end", 60)


def seen(job: Gang) -> JobRecord:
    return combine(job.plan, job.agents(), JobRecord.of(job.plan, "starting"), datetime.now(timezone.utc))


def state(job: Gang) -> str:
    return seen(job).state


def waits_for(job: Gang) -> str:
    return seen(job).waits_for or ""


def test_a_job_starts_on_all_its_hosts_when_the_last_gpu_is_free_and_two_of_them_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks, at_once = control.ask_host, list[bool]()

    def asked(*given: Any, **more: Any) -> dict[str, Any]:
        at_once.extend([more["at_once"]] if "at_once" in more else [])
        return asks(*given, **more)

    monkeypatch.setattr(control, "ask_host", asked)
    gpus, go = uuids(), [tmp_path / "go-1", tmp_path / "go-2"]
    waits = {"spec": {"wait": True}}
    with (
        alone(tmp_path / "one", UNTIL.format(go=str(go[0])), gpus, **waits) as one,
        alone(tmp_path / "two", UNTIL.format(go=str(go[1])), gpus, **waits) as two,
    ):
        one.launch()
        wait_for(lambda: state(one) == "running", "the first job", 60)
        two.launch()
        assert at_once == [True, True, False, False]
        words = re.compile(rf"place 1 in the queue, behind \w+'s job {one.plan.job} \(has GPUs of a, b for")
        wait_for(lambda: words.match(waits_for(two)), "the second in the queue", 60)
        wait_for(lambda: len(tickets(gpus)) == 2, "its tickets", 60)
        assert state(two) == "queued"
        assert all(gpu_claim.holder_of(gpu).job == one.plan.job for gpu in gpus)  # type: ignore[union-attr]
        assert [ticket.job for ticket in tickets(gpus)] == [two.plan.job] * 2
        go[0].touch()
        assert one.wait().state == "succeeded"
        wait_for(lambda: state(two) == "running", "the second job", 60)
        assert all(gpu_claim.holder_of(gpu).job == two.plan.job for gpu in gpus)  # type: ignore[union-attr]
        assert tickets(gpus) == []
        go[1].touch()
        assert two.wait().state == "succeeded"
    assert [gpu_claim.holder_of(gpu) for gpu in gpus] == [None, None]


def tickets(gpus: Sequence[str]) -> list[gpu_queue.Ticket]:
    return [ticket for ticket in gpu_queue.all_tickets()[0] if set(ticket.gpus) & set(gpus)]


def test_of_two_jobs_that_each_hold_what_the_other_needs_none_waits_for_ever(tmp_path: Path) -> None:
    """Both are submitted at once, and need both GPUs."""
    gpus, go = uuids(), tmp_path / "go"
    go.touch()
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(alone(tmp_path / name, UNTIL.format(go=str(go)), gpus, spec={"wait": True}))
            for name in ("one", "two", "three")
        ]
        starts = [threading.Thread(target=job.launch) for job in jobs]
        for start in starts:
            start.start()
        for start in starts:
            start.join()
        assert [job.wait().state for job in jobs] == ["succeeded"] * 3
        times = sorted((record["started_ranks"], record["ended"]) for job in jobs for record in [lasting(job)])
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(times)), times


def lasting(job: Gang) -> dict[str, float]:
    records = [json.loads((job.folder(node.name) / "agent.json").read_text()) for node in job.plan.nodes]
    began = min(rank["started"] for record in records for rank in record["ranks"].values())
    return {"started_ranks": began, "ended": max(rank["ended"] for r in records for rank in r["ranks"].values())}


def test_a_gpu_that_cannot_be_claimed_gives_the_others_back(tmp_path: Path) -> None:
    """The second host's is locked by a start that no look can see yet."""
    gpus, go = uuids(), tmp_path / "go"
    go.touch()
    with alone(tmp_path / "job", UNTIL.format(go=str(go)), gpus, spec={"wait": True}) as job:
        locks = Path(job.plan.node("b").workdir) / "locks"
        locks.mkdir(parents=True)
        (locks.parent / ".orch-work").write_text(json.dumps({"schema": 1, "what": "work folder of orch"}) + "\n")
        with open(locks / f"gpu-{gpus[1]}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            job.launch()
            wait_for(lambda: gpu_claim.holder_of(gpus[0]) is not None, "the claim of the first", 60)
            wait_for(lambda: gpu_claim.holder_of(gpus[0]) is None, "its end", 60)
            assert state(job) == "queued"
        assert job.wait().state == "succeeded"


def test_priority_goes_ahead_of_those_who_wait_and_ends_no_job(tmp_path: Path) -> None:
    gpus, go = uuids(1), tmp_path / "go"
    script = UNTIL.format(go=str(go))
    with contextlib.ExitStack() as stack:

        def submitted(name: str, **spec: Any) -> Gang:
            job = stack.enter_context(alone(tmp_path / name, script, gpus, spec={"wait": True, **spec}, ranks=(1,)))
            job.launch()
            return job

        first = submitted("first", priority="low")
        wait_for(lambda: state(first) == "running", "the first job", 60)
        waiting = []
        for name, priority in (("low", "low"), ("normal", "normal"), ("high", "high"), ("late", "normal")):
            waiting.append(submitted(name, priority=priority))
            wait_for(lambda: len(tickets(gpus)) == len(waiting), f"the ticket of {name}", 60)
        names = {job.plan.job: name for job, name in zip(waiting, ("low", "normal", "high", "late"), strict=True)}
        assert [names[ticket.job] for ticket in tickets(gpus)] == ["high", "normal", "late", "low"]
        assert state(first) == "running"
        go.touch()
        assert {job.wait().state for job in (first, *waiting)} == {"succeeded"}
        began = sorted(waiting, key=lambda job: lasting(job)["started_ranks"])
        assert [names[job.plan.job] for job in began] == ["high", "normal", "late", "low"]


def test_a_queued_job_is_cancelled_and_leaves_nothing(tmp_path: Path) -> None:
    gpus = uuids()
    with (
        alone(tmp_path / "one", UNTIL.format(go="/none"), gpus[:1], ranks=(1,)) as one,
        alone(tmp_path / "two", UNTIL.format(go="/none"), gpus, spec={"wait": True}) as two,
    ):
        one.launch()
        two.launch()
        wait_for(lambda: "place 1" in waits_for(two), "the second in the queue", 60)
        control.cancel(two.plan, two.hosts)
        assert two.wait().state == "cancelled"
        assert tickets(gpus) == [] and not any((two.folder(node) / "rank-0").exists() for node in "ab")


def test_who_waits_too_long_gives_up(tmp_path: Path) -> None:
    gpus = uuids(1)
    with (
        alone(tmp_path / "one", UNTIL.format(go="/none"), gpus, ranks=(1,)) as one,
        alone(tmp_path / "two", "", gpus, spec={"wait": True, "wait_limit_s": 1.0}, ranks=(1,)) as two,
    ):
        one.launch()
        two.launch()
        record = two.wait()
        assert record.state == "failed" and record.first_failure
        assert record.first_failure.reason == "it was still queued after 1 s (--wait-limit)"
        assert record.first_failure.whose == "person"


# ---- attempts --------------------------------------------------------------------------------------------------------


def attempts(most: int = 3, **more: Any) -> Attempt:
    return Attempt(number=1, most=most, wait_s=0.1, **more)


@pytest.mark.parametrize("waits", [False, True])
def test_a_rank_that_is_killed_is_tried_again_until_the_job_succeeds(tmp_path: Path, waits: bool) -> None:
    script, gpus = DIES.format(folder=str(tmp_path), times=3), uuids()
    with alone(tmp_path / "job", script, gpus, spec={"wait": waits}, attempt=attempts()) as job:
        job.launch()
        record = job.wait()
        assert record.state == "succeeded" and record.first_failure is None
        assert [(tmp_path / f"count-{rank}").read_text() for rank in (0, 1)] == ["xxx", "xxx"]
        for name, rank in (("a", 0), ("b", 1)):
            logs = [job.folder(name) / "attempt-1", job.folder(name) / "attempt-2", job.folder(name)]
            printed = [(folder / f"rank-{rank}/stdout.log").read_text() for folder in logs]
            assert printed == [f"attempt {number}\n" for number in (1, 2, 3)]
        whys = [one["why"] for one in job.agents()["a"]["earlier"]]
        assert whys == ["b: rank 1 was killed by SIGKILL"] * 2
        assert [gpu_claim.holder_of(gpu) for gpu in gpus] == [None, None]


def test_after_the_last_attempt_and_after_the_scripts_own_failure_it_ends(tmp_path: Path) -> None:
    with alone(tmp_path / "job", DIES.format(folder=str(tmp_path), times=9), attempt=attempts(2)) as job:
        job.launch()
        record = job.wait()
        assert record.state == "failed" and record.exit_code == 137 and len(job.agents()["b"]["earlier"]) == 1
    with alone(tmp_path / "own", "raise SystemExit(7)", attempt=attempts(3)) as job:
        job.launch()
        record = job.wait()
        assert (record.state, record.exit_code) == ("failed", 7) and "earlier" not in job.agents()["a"]


def filled(job: Gang, disk: Path) -> None:
    """The disk of its last host."""
    nodes = [*job.plan.nodes]
    nodes[-1] = nodes[-1].model_copy(update={"workdir": str(disk)})
    job.plan = job.plan.model_copy(update={"nodes": tuple(nodes)})
    job.hosts[nodes[-1].name] = Gang(job.plan, job.blob).hosts[nodes[-1].name]
    job.launch()
    job.wait_running()
    fill(disk)


def test_a_full_disk_ends_the_attempts_with_a_record_and_the_true_cause(tmp_path: Path) -> None:
    waits = UNTIL.format(go="/none")
    with (
        small_disk(tmp_path / "disk", "80m") as disk,
        alone(tmp_path / "job", waits, attempt=attempts(), ranks=(1,)) as job,
    ):
        filled(job, disk)
        os.kill(job.agents()["a"]["pid"], signal.SIGKILL)
        first = job.wait().first_failure
        assert first and (first.kind, first.node, first.whose) == ("supervisor", "a", "hosts")
        assert first.reason.startswith("the supervisor was killed by SIGKILL; no further attempt: a: No space left on")
        assert (job.folder("a") / "rank-0" / "stdout.log").exists()  # of the last attempt


@pytest.mark.parametrize(
    ("victim", "why"),
    [
        ("rank", "rank 1 was killed by SIGKILL"),
        ("supervisor", "the supervisor was killed by SIGKILL; no further attempt:"),
    ],
)
def test_a_full_disk_of_one_host_is_no_firewall_on_it(tmp_path: Path, victim: str, why: str) -> None:
    waits = UNTIL.format(go="/none")
    with small_disk(tmp_path / "disk", "80m") as disk, alone(tmp_path / "two", waits, attempt=attempts()) as job:
        filled(job, disk)
        found = job.agents()["b"]
        os.kill(found["pid"] if victim == "supervisor" else found["ranks"]["1"]["pid"], signal.SIGKILL)
        first = job.wait().first_failure
        assert first and first.node == "b" and first.reason.startswith(why)
        assert [one["state"] for one in job.agents().values()] == ["failed", "failed"]


def test_what_prevents_a_decided_attempt_is_named_after_the_cause_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with alone(tmp_path / "job", "raise SystemExit(7)", attempt=attempts(), ranks=(1,)) as job:
        job.launch()
        job.wait()
        folder = JobFolder(job.folder("a"))
        earlier = [{"why": "b: rank 1 was killed by SIGKILL", "ended": 1.0}]
        starting = {**folder.read_agent(), "state": "starting", "failures": [], "earlier": earlier}
        write_record(folder, starting)
        monkeypatch.setattr(keeper, "kill_all", lambda *_: ["pid 7 (python train.py)"])  # a process in state D
        its = keeper.Keeper(folder, {**folder.read_node(), "token": "", "retries": None})
        its._line.close()
        monkeypatch.setattr(keeper.signal, "signal", lambda *_: None)  # or the next tests ignore SIGTERM
        assert not its._is_tried_again(75 << 8, 0)
        first = seen(job).first_failure
        why = "rank 1 was killed by SIGKILL; no further attempt: a: pid 7 (python train.py) does not end"
        assert first and (first.node, first.reason) == ("b", why)


@pytest.mark.parametrize("node", ["a", "b"])
def test_a_supervisor_that_is_killed_is_replaced_and_the_job_is_tried_again(tmp_path: Path, node: str) -> None:
    """a: the master's, which is the hub."""
    go = tmp_path / "go"
    with alone(tmp_path / "job", UNTIL.format(go=str(go)), attempt=attempts()) as job:
        job.launch()
        found = job.wait_running()
        os.kill(found[node]["pid"], signal.SIGKILL)
        wait_for(lambda: job.agents()[node].get("earlier"), "the next attempt", 60)
        wait_for(lambda: all(is_running(record) for record in job.agents().values()), "its ranks", 120)
        assert all(record["pid"] != found[name]["pid"] for name, record in job.agents().items())
        go.touch()
        assert job.wait().state == "succeeded"


def is_running(record: Mapping[str, Any]) -> bool:
    return bool(record.get("earlier")) and record.get("state") == "running" and any(record["ranks"].values())


def test_a_job_that_rests_between_two_attempts_is_seen_and_cancelled(tmp_path: Path) -> None:
    script = DIES.format(folder=str(tmp_path), times=9)
    with alone(tmp_path / "job", script, attempt=Attempt(number=1, most=3, wait_s=600.0)) as job:
        job.launch()
        wait_for(lambda: all(one.get("next_at") for one in job.agents().values()), "the pause", 60)
        assert state(job) == "starting"
        assert waits_for(job) == "attempt 2 of 3 follows, after b: rank 1 was killed by SIGKILL"
        ended = {"rank": 1, "event": "ended", "exit_code": 1, "signal": None, "cause": None}
        assert agent.tell(JobFolder(job.folder("b")), ended)  # late, of a rank of the first attempt
        control.cancel(job.plan, job.hosts)
        assert job.wait().state == "cancelled"
        assert (tmp_path / "count-1").read_text() == "x" and job.agents()["b"]["ranks"] == {"1": {}}


def test_while_a_job_rests_another_has_its_gpus_only_if_it_queues(tmp_path: Path) -> None:
    gpus, go = uuids(), tmp_path / "go"
    script, rests = DIES.format(folder=str(tmp_path), times=9), Attempt(number=1, most=3, wait_s=600.0)
    go.touch()
    with alone(tmp_path / "one", script, gpus, spec={"wait": True}, attempt=rests) as one:
        one.launch()
        wait_for(lambda: all(record.get("next_at") for record in one.agents().values()), "the pause", 60)
        with alone(tmp_path / "two", UNTIL.format(go=str(go)), gpus, spec={"wait": True}) as two:
            two.launch()
            assert two.wait().state == "succeeded"
    (tmp_path / "count-1").unlink()
    with alone(tmp_path / "three", script, gpus, attempt=rests) as three:
        three.launch()
        wait_for(lambda: all(record.get("next_at") for record in three.agents().values()), "the pause", 60)
        assert all(gpu_claim.holder_of(gpu).job == three.plan.job for gpu in gpus)  # type: ignore[union-attr]


def test_a_request_to_cancel_between_two_supervisors_waits_for_the_next(tmp_path: Path) -> None:
    with alone(tmp_path / "job", UNTIL.format(go="/none"), attempt=attempts(), ranks=(1,)) as job:
        job.launch()
        found = job.wait_running()
        folder = JobFolder(job.folder("a"))
        keeper = found["a"]["keeper"]["pid"]
        os.kill(keeper, signal.SIGSTOP)
        os.kill(found["a"]["pid"], signal.SIGKILL)
        try:
            assert agent.tell(folder, {"request": "cancel"})
        finally:
            os.kill(keeper, signal.SIGCONT)
        assert job.wait().state == "cancelled"


# ---- notification ----------------------------------------------------------------------------------------------------


def test_the_master_runs_the_command_at_the_end_of_the_last_attempt_alone(tmp_path: Path) -> None:
    script = DIES.format(folder=str(tmp_path), times=2)
    line = f'echo "$ORCH_JOB|$ORCH_STATE|$ORCH_EXIT_CODE|$ORCH_REASON|$SECRET" >> {tmp_path}/told; exit 3'
    with alone(tmp_path / "job", script, attempt=attempts(2), notify=line) as job:
        job.launch()
        assert job.wait().state == "succeeded"
        assert (tmp_path / "told").read_text() == f"{job.plan.job}|succeeded|0||\n"
        assert job.agents()["a"]["notified"] == "the command ended with exit code 3"
        assert "notified" not in job.agents()["b"]
        for node in "ab":
            left = b"".join(path.read_bytes() for path in job.folder(node).rglob("*") if path.is_file())
            assert b"ORCH_REASON|" not in left.replace(b"orch_remote", b"")


def silent(job: Gang) -> None:
    """Its hosts bear less silence than the command line allows, which is 20 s."""
    job.plan = job.plan.model_copy(update={"asked": job.plan.asked.model_copy(update={"silence_s": 4.0})})


def test_if_the_master_is_silent_one_other_host_runs_the_command(tmp_path: Path) -> None:
    line = f'echo "$ORCH_STATE|$ORCH_REASON" >> {tmp_path}/told'
    with alone(tmp_path / "job", "import time\ntime.sleep(600)", notify=line, ranks=(1, 1, 1)) as job:
        silent(job)
        job.launch()
        wait_for(lambda: state(job) == "running", "the ranks", 60)
        record = json.loads((job.folder("a") / "agent.json").read_text())
        frozen = [record["keeper"]["pid"], record["pid"]]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        try:
            wait_for(lambda: (tmp_path / "told").exists(), "the notification", 60)
        finally:
            for pid in frozen:
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not any(record.get("alive") for record in job.agents().values()), "its end", 60)
        assert (tmp_path / "told").read_text().startswith("failed|a: no word from the master for 4 s")
        assert "notified" in job.agents()["b"] and "notified" not in job.agents()["c"]


@pytest.mark.parametrize("attempt", [None, Attempt(number=1, most=1)])
def test_if_only_the_masters_supervisor_is_lost_its_keeper_runs_the_command(
    tmp_path: Path, attempt: Attempt | None
) -> None:
    line = f'echo "$ORCH_STATE|$ORCH_REASON" >> {tmp_path}/told; sleep 8'
    with alone(tmp_path / "job", UNTIL.format(go="/none"), notify=line, attempt=attempt) as job:
        silent(job)
        job.launch()
        os.kill(job.wait_running()["a"]["pid"], signal.SIGKILL)
        wait_for(lambda: not any(record.get("alive") for record in job.agents().values()), "its end", 60)
        assert (tmp_path / "told").read_text() == "failed|a: the supervisor was killed by SIGKILL\n"
        assert "notified" in job.agents()["a"] and "notified" not in job.agents()["b"]


def test_a_webhook_gets_the_facts_as_json_and_its_address_stays_nowhere(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(503 if len(told) == 1 else 204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/hook/s3cr3t-token"
    try:
        with alone(tmp_path / "job", "raise SystemExit(7)", notify=url) as job:
            job.launch()
            assert job.wait().exit_code == 7
            assert job.agents()["a"]["notified"] == "the webhook answered 204"
            assert [(one["job"], one["state"], one["exit_code"]) for one in told] == [(job.plan.job, "failed", 7)] * 2
            assert told[0]["text"].startswith(f"{job.plan.job} failed: ") and told[0]["nodes"] == ["a", "b"]
            for node in "ab":
                for path in job.folder(node).rglob("*"):
                    assert not path.is_file() or b"s3cr3t" not in path.read_bytes(), path
    finally:
        server.shutdown()
        server.server_close()


# ---- the rule of the master's host --------------------------------------------------------------------------------


def report(**more: Any) -> Status:
    full: TurnReport = {"next": 5, "number": 0, "has_come": False, "claimed": 0, "refused": 0}
    return {"phase": "queued", "turn": {**full, **more}}  # type: ignore[typeddict-item]


def test_hosts_claim_together_or_give_back_together() -> None:
    rule = turn.Turn()

    def order(one: Status | None, other: Status | None, now_s: float = 0.0) -> Order | None:
        return rule.order({"a": one, "b": other}, now_s)

    assert order(report(next=5), report(next=9)) == {"do": "queue", "number": 9}
    ready = report(number=9, has_come=True)
    assert order(report(number=9), ready) == {"do": "queue", "number": 9}
    assert order(report(number=8, has_come=True), ready) == {"do": "queue", "number": 9}
    assert order(ready, ready) == {"do": "queue", "number": 9, "claim": 1}
    claimed = report(number=9, has_come=True, claimed=1)
    assert order(claimed, ready) == {"do": "queue", "number": 9, "claim": 1}
    assert order(claimed, report(number=9, refused=1)) == {"do": "queue", "number": 9}
    assert order(claimed, ready) == {"do": "queue", "number": 9}  # until a has given its GPUs back
    assert order(ready, ready) == {"do": "queue", "number": 9, "claim": 2}
    assert order(ready, None) == {"do": "queue", "number": 9}  # b has become silent
    assert order(ready, ready, 10.0) == {"do": "queue", "number": 9, "claim": 3}
    assert order(ready, ready, 10.0 + turn.CLAIM_S + 1) == {"do": "queue", "number": 9}
    assert order(ready, ready, 30.0) == {"do": "queue", "number": 9, "claim": 4}
    both = report(number=9, has_come=True, claimed=4)
    assert order(both, both, 30.0) is None


def test_numbers_of_a_priority_follow_each_other_and_those_of_another_stay_apart() -> None:
    after = gpu_queue.number_after
    high, normal, low = (after([], priority) for priority in ("high", "normal", "low"))
    assert high < normal < low
    assert after([high, normal, low], "high") == high + 1 < normal
    assert after([high, normal, low], "normal") == normal + 1 < low
    assert after([high, normal, low], "low") == low + 1
    assert after([3], "normal") == normal  # an older orch's: it goes ahead
    assert after([low - 1], "normal") == low - 1 and after([gpu_queue.MOST_NUMBER], "low") == gpu_queue.MOST_NUMBER


def test_other_programs_memory_counts_as_in_a_start_with_a_controller(tmp_path: Path, monkeypatch: Any) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU-1, 16384, 12000, Default'\necho 'GPU-2, 16384, 500, Default'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert turn.occupied(["GPU-1"], 8 << 30) == (
        "other programs leave 4384 MiB of 16384 on GPU GPU-1, and it needs about 8192"
    )
    assert turn.occupied(["GPU-1"], 2 << 30) == turn.occupied(["GPU-2"], 99 << 30) == ""
    smi.write_text("""#!/bin/sh
case $1 in
  --query-gpu=*compute_mode*) printf 'GPU-%s, 16384, 500, Exclusive_Process\n' 1 2;;
  --query-compute-apps=*) echo 'GPU-1, 4711, 400, python3';;
esac
""")
    assert turn.occupied(["GPU-1"], 0) == "another program uses GPU GPU-1, which is in exclusive compute mode"
    assert turn.occupied(["GPU-2"], 99 << 30) == ""
    began = time.monotonic()
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert turn.occupied(["GPU-1"], 8 << 30) == "" and time.monotonic() < began + 20
