"""A job that stands still: what its hosts see of each rank, and how a person hears of it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from orchestrator.hosts import Connections
from orchestrator.jobs import (
    JobList,
    JobRecord,
    News,
    Notice,
    RunningJob,
    Stall,
    StallProbe,
    Standstill,
    StillRank,
    Verdict,
    answered,
    combine,
    is_due,
    launch,
    stall_of,
    stall_words,
    standstill,
)
from orchestrator.paths import Home, RunFolder
from orchestrator.planning import LaunchPlan
from orchestrator.remote import stillness
from orchestrator.remote.layout import JobFolder
from orchestrator.remote.processes import Use
from orchestrator.remote.stillness import Sample, Stillness, what_it_does
from orchestrator.results.analyse import analyse
from orchestrator.store import Store
from orchestrator.transport import ask
from orchestrator.views import documents, job_table
from tests.support.local_job import gang
from tests.support.run_folders import Host, write_run

SLEEPS = "import time; time.sleep(600)"
COMPUTES = "while True: pass"
TALKS = "import time\nwhile True: print(1, flush=True); time.sleep(0.05)"


# ---- one host -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def ranks_of(root: Path, *scripts: str) -> Iterator[tuple[JobFolder, dict[str, dict[str, Any]]]]:
    """A rank for each script: a process with its log, and what the supervisor would know of it."""
    job, children, records = JobFolder(root), [], {}
    with contextlib.ExitStack() as logs:
        for rank, script in enumerate(scripts):
            job.rank(rank).mkdir(parents=True)
            log = logs.enter_context(open(job.rank(rank) / "stdout.log", "wb"))
            children.append(subprocess.Popen([sys.executable, "-c", script], stdout=log))
            records[str(rank)] = {"pid": children[-1].pid, "wrapper": children[-1].pid}
        try:
            yield job, records
        finally:
            for child in children:
                child.kill()
                child.wait()


def look_until_quiet(still: Stillness, records: Mapping[str, Mapping[str, Any]], looks: int = 600) -> dict[str, str]:
    for _ in range(looks):
        if found := still.look(records, time.monotonic()):
            return found
        time.sleep(0.1)
    return {}


def test_ranks_that_print_nothing_are_distinguished_by_what_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stillness, "QUIET_S", 1.5)
    stopped = f"import os, signal; os.kill(os.getpid(), {int(signal.SIGSTOP)})"
    with ranks_of(tmp_path, SLEEPS, COMPUTES, stopped) as (job, records):
        still = Stillness(job)
        assert still.look(records, time.monotonic()) == {}
        expected = {"0": "waits", "1": "busy", "2": "stopped"}
        deadline = time.monotonic() + 60
        while (
            found := look_until_quiet(still, records)
        ) != expected:  # one may still be at its start in the first window
            assert time.monotonic() < deadline, found
            time.sleep(0.1)
        (job.rank(1) / "metrics.jsonl").write_text("a step")  # any sign of life on this host is one of the job
        assert still.look(records, time.monotonic()) == {}
        records["1"]["ended"] = 1.0
        assert still.look(records, time.monotonic()) == {"0": "waits", "2": "stopped"}


def test_a_rank_that_prints_now_and_then_never_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stillness, "QUIET_S", 3.0)
    with ranks_of(tmp_path, SLEEPS, TALKS) as (job, records):
        while not (job.rank(1) / "stdout.log").stat().st_size:
            time.sleep(0.05)
        assert look_until_quiet(Stillness(job), records, looks=40) == {}


def seen(*uses: tuple[int, str]) -> deque[Sample]:
    """Samples of a minute: CPU ticks so far, and the state."""
    return deque(Sample(60.0 * at / (len(uses) - 1), Use(*use)) for at, use in enumerate(uses))


@pytest.mark.parametrize(
    ("samples", "does"),
    [
        (seen((0, "S"), (0, "S"), (20, "S")), "waits"),  # 0.3 % of a core
        (seen((0, "S"), (0, "R"), (20, "S")), "waits"),  # a timer that was met at work
        (seen((0, "S"), (300, "S"), (600, "S")), "busy"),  # 10 %: its data loaders, say
        (seen(*[(0, "R")] * 4), "busy"),  # starved by a neighbour: it would compute
        (seen(*[(0, "D")] * 4), "disk"),
        (seen((0, "S"), (6000, "S"), (6000, "T")), "stopped"),
    ],
)
def test_what_a_rank_does_is_judged_by_cpu_time_and_state(samples: deque[Sample], does: str) -> None:
    assert what_it_does(samples) == does


# ---- a whole job --------------------------------------------------------------------------------------------------


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervisors that call a second of silence a minute."""
    short = {"QUIET_S = 60.0": "QUIET_S = 1.0", "LOOK_S = 5.0": "LOOK_S = 0.3"}
    sources = dict(ask.shipped_sources())
    for long, brief in short.items():
        assert long in sources["orch_remote.stillness"]
        sources["orch_remote.stillness"] = sources["orch_remote.stillness"].replace(long, brief)
    monkeypatch.setattr(ask, "shipped_sources", lambda: sources)


def test_a_hung_job_is_reported_by_its_hosts_and_not_ended_for_it(tmp_path: Path, soon: None) -> None:
    hangs = "import os, time\nif os.environ['RANK'] != '1':\n    time.sleep(600)\n"
    with gang(tmp_path, hangs, ranks=(1, 2)) as job:
        job.launch()
        agents = job.wait_for(lambda found: stall_of(job.plan, found) is not None)
        record = combine(job.plan, agents, job.record(), datetime.now(timezone.utc))
        assert record.state == "running"
        assert record.stall is not None
        assert {rank.rank: rank.does for rank in record.stall.ranks} == {0: "waits", 1: "ended", 2: "waits"}
        launch.cancel(job.plan, job.hosts)
        ended = job.wait()
    assert ended.state == "cancelled"
    assert ended.stall is not None and {rank.does for rank in ended.stall.ranks} == {"waits", "ended"}


STANDS = "import time\ndef stands():\n    time.sleep(600)\nprint('up', flush=True)\nstands()\n"


def test_who_follows_is_told_why_and_so_is_who_looks_later(
    tmp_path: Path, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.jobs.diagnosis.QUIET_S", 0.0)
    store = Store(Home(tmp_path / "home"))
    with gang(tmp_path, STANDS) as job, Connections(store.home) as connections:
        store.save_cluster(job.cluster(), current=True)
        store.save_job(job.record(), job.plan)
        job.launch()
        one = RunningJob(job.plan, store, connections, job.hosts)
        one.reach()
        told = list[Any]()
        for event in one.follow():
            told.append(event)
            if isinstance(event, Notice) and "stands still" in event.text:
                break
        place = "script.py:3 in stands: time.sleep(600)"
        assert f"it is at {place}; try: what does it wait for there?" in told[-1].text
        assert told[-2] == Standstill(told[-1].text.partition("; try")[0], True)

        def looked(found: JobRecord) -> None:
            assert found.stall and found.stall.answer
            assert (found.stall.answer.verdict.kind, found.stall.answer.verdict.line) == (
                "stands-still",
                "time.sleep(600)",
            )

        looked(store.job_record(one.id))
        store.change_job(one.id, lambda known: known.model_copy(update={"stall": None}))  # as if nobody had followed
        (listed,) = JobList(store, connections).all(why=True).records
        looked(listed)
        run = RunFolder(tmp_path / "collected")
        run.root.mkdir()
        one.collect(run)
        looked(JobRecord.model_validate_json(run.job.read_text()))
        one.cancel()
        looked(one.record)


def plan_of(tmp_path: Path, **changes: Any) -> LaunchPlan:
    run = write_run(tmp_path / "run", [Host("a"), Host("b", ranks=2)], {}, kind="script", exp="train.py", settings={})
    return LaunchPlan.model_validate_json(run.plan.read_text()).model_copy(update=changes)


def quiet(does: Mapping[int, str | None], quiet_s: float = 120.0) -> dict[str, Any]:
    """A host's record: None of a rank that has ended."""
    ranks = {str(rank): {"pid": 1, "does": word} if word else {"exit_code": 0} for rank, word in does.items()}
    return {"alive": True, "state": "running", "quiet_s": quiet_s, "quiet_since": 50, "ranks": ranks}


def test_only_when_all_are_quiet_a_job_may_stand_still(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    hung = {"a": quiet({0: "busy"}, 180), "b": quiet({1: "waits", 2: None}, 120)}
    found = stall_of(plan, hung)
    assert found == Stall(
        quiet_s=120,
        ranks=(
            StillRank(node="a", rank=0, does="busy"),
            StillRank(node="b", rank=1, does="waits"),
            StillRank(node="b", rank=2, does="ended"),
        ),
        since=(50, 50),
    )
    words = "no output for 2m00s: waiting, with no CPU use: b (rank 1); using the CPU: a (rank 0); ended: b (rank 2)"
    assert stall_words(found) == words
    prints = {"alive": True, "state": "running", "ranks": {"0": {"pid": 1}}}
    assert stall_of(plan, {**hung, "a": prints}) is None
    assert stall_of(plan, {"b": hung["b"]}) is None  # a host that nobody hears may print
    computes = stall_of(plan, {"a": quiet({0: "busy"}), "b": quiet({1: "busy", 2: "busy"})})
    assert computes is not None and not computes.waits
    assert stall_of(plan, {"a": quiet({0: None}), "b": quiet({1: None, 2: None})}) is None


@pytest.mark.parametrize(
    "lie", [{"ranks": 3}, {"ranks": {"0": 3}}, quiet({0: "\x1b[2J"}), quiet({0: "waits"}, 1e300), 3]
)
def test_no_host_is_believed_what_makes_no_sense(tmp_path: Path, lie: Any) -> None:
    found = stall_of(plan_of(tmp_path), {"a": lie, "b": quiet({1: "waits", 2: "waits"})})
    assert found is None or found.quiet_s == 0


def test_who_follows_sees_it_once_and_again_when_it_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of(tmp_path)
    known = JobRecord(schema=1, id=plan.job, state="running", exp="e", cluster="c", nodes=("a", "b"))
    news = News(plan)

    def shown(*does: str, quiet_s: float = 60) -> list[str]:
        ranks = tuple(StillRank(node="a", rank=n, does=word) for n, word in enumerate(does))  # type: ignore[arg-type]
        stall = Stall(quiet_s=quiet_s, ranks=ranks) if ranks else None
        return list(news.of(known.model_copy(update={"stall": stall})))

    assert shown() == []
    assert shown("waits", "busy") == [
        "no output for 1m00s: waiting, with no CPU use: a (rank 0); using the CPU: a (rank 1); "
        f"`orch why {plan.job}` names who holds it up; the job keeps running"
    ]
    assert shown("waits", "busy", quiet_s=120) == []
    assert len(shown("waits", "waits", quiet_s=180)) == 1
    assert shown() == []
    assert len(shown("waits", "waits")) == 1
    stalled = known.model_copy(update={"stall": Stall(quiet_s=60, ranks=(StillRank(node="a", rank=0, does="waits"),))})
    job_table.warn_stalls([known, stalled])
    assert capsys.readouterr().err.count("no output for 1m00s: waiting") == 1
    assert documents.jobs_json([stalled])["jobs"][0]["stall"]["ranks"][0]["does"] == "waits"


IDLE = Verdict("missed-collective", "rank 1 on b is idle", "look there", "b", 1, "train.py:9 in f", "sleep(9)")
BUSY = Verdict("still-busy", "rank 1 on b is at work", "", "b", 1, "eval.py:5")


def stalled(since: float = 50, quiet_s: float = 60, **changes: Any) -> Stall:
    still = (StillRank(node="a", rank=0, does="waits"), StillRank(node="b", rank=1, does="busy"))
    return Stall(quiet_s=quiet_s, ranks=still, since=(since, since), **changes)


def record_of(tmp_path: Path, stall: Stall | None, **changes: Any) -> JobRecord:
    plain = {"id": "j", "state": "running", "exp": "e", "cluster": "c", "nodes": ("a", "b")}
    return JobRecord.model_validate({"schema": 1, **plain, "stall": stall, **changes})


def test_an_answer_counts_as_long_as_its_stall_lasts(tmp_path: Path) -> None:
    plan, hung = plan_of(tmp_path), {"a": quiet({0: "waits"}), "b": quiet({1: "waits", 2: "waits"})}
    first = answered(record_of(tmp_path, stall_of(plan, hung)), IDLE).stall
    assert first and first.answer and first.answer.verdict == IDLE
    read = JobRecord.model_validate_json(record_of(tmp_path, first).model_dump_json()).stall
    assert stall_of(plan, hung, read) == first
    gone = {key: value for key, value in quiet({1: "waits", 2: "waits"}).items() if key != "quiet_since"}
    assert (ended := stall_of(plan, {**hung, "b": gone}, first)) and ended.answer == first.answer
    printed = {"a": {**hung["a"], "quiet_since": 70}, "b": hung["b"]}
    assert (second := stall_of(plan, printed, first)) and second.answer is None
    assert answered(record_of(tmp_path, None), IDLE).stall is None


def test_who_looks_healthy_is_asked_again_ever_more_seldom(tmp_path: Path) -> None:
    assert not is_due(None) and is_due(stalled())
    healthy = answered(record_of(tmp_path, stalled()), BUSY).stall
    assert healthy
    later = [healthy.model_copy(update={"quiet_s": quiet_s}) for quiet_s in (60, 119, 120)]
    assert [is_due(stall) for stall in later] == [False, False, True]
    alarm = answered(record_of(tmp_path, stalled()), IDLE).stall
    assert alarm and not is_due(alarm.model_copy(update={"quiet_s": 9999}))


def test_an_alarm_is_said_once_and_a_healthy_job_gives_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    news = News(plan_of(tmp_path))
    busy, alarm = (answered(record_of(tmp_path, stalled()), verdict) for verdict in (BUSY, IDLE))
    assert list(news.of(busy)) == []
    assert standstill(busy) == Standstill("still busy: rank 1 on b is at work; it is at eval.py:5", False)
    words = "missed collective: rank 1 on b is idle; it is at train.py:9 in f: sleep(9)"
    assert list(news.of(alarm)) == [f"{words}; try: look there; the job keeps running"]
    assert list(news.of(alarm)) == []
    assert standstill(alarm) == Standstill(words, True)
    job_table.warn_stalls([busy, alarm, record_of(tmp_path, alarm.stall, state="cancelled")])
    shown = " ".join(capsys.readouterr().err.split())
    assert shown.count("missed collective") == 1 and "still busy" not in shown
    assert documents.jobs_json([alarm])["jobs"][0]["stall"]["answer"]["verdict"]["rank"] == 1


def test_who_asks_is_not_waited_for_and_asks_once(tmp_path: Path) -> None:
    may_answer, asked = threading.Event(), list[str]()

    def ask() -> JobRecord:
        asked.append("asked")
        may_answer.wait()
        return answered(record_of(tmp_path, stalled()), IDLE)

    probe = StallProbe(ask)
    probe.tell(record_of(tmp_path, None))
    assert not probe.is_at_work
    for _ in range(3):
        probe.tell(record_of(tmp_path, stalled()))
    assert probe.is_at_work and probe.answer() is None
    may_answer.set()
    while (found := probe.answer()) is None:
        pass
    probe.tell(found)
    assert asked == ["asked"] and not probe.is_at_work
    broken = StallProbe(lambda: JobRecord.model_validate({}))
    broken.tell(record_of(tmp_path, stalled()))
    with pytest.raises(ValidationError):
        while broken.answer() is None:
            pass


def test_a_report_says_how_the_ranks_were_found_last(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [Host("a")], {}, kind="script", exp="train.py", settings={}, state="cancelled")
    stall = {"quiet_s": 720, "ranks": [{"node": "a", "rank": 0, "does": "waits"}]}
    run.job.write_text(json.dumps(json.loads(run.job.read_text()) | {"stall": stall}))
    assert analyse(run).warnings == (
        "How its ranks were seen last: no output for 12m00s: waiting, with no CPU use: a (rank 0).",
    )
    told = {**stall, "answer": {"quiet_s": 60, "verdict": asdict(IDLE)}}
    run.job.write_text(json.dumps(json.loads(run.job.read_text()) | {"stall": told}))
    assert analyse(run).warnings == (
        "How its ranks were seen last: missed collective: rank 1 on b is idle; it is at train.py:9 in f: sleep(9).",
    )
    told["answer"]["verdict"] = asdict(BUSY)
    run.job.write_text(json.dumps(json.loads(run.job.read_text()) | {"stall": told}))
    assert analyse(run).warnings == ()
