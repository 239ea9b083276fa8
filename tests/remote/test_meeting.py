"""Whether a job's ranks ever met: seen from their connections, however short, and never warned of falsely."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from orchestrator.jobs import JobRecord, News, alone_words, combine, joined
from orchestrator.planning import LaunchPlan
from orchestrator.remote.host_state import ALONE_S
from orchestrator.remote.meeting import Meeting, connections
from orchestrator.remote.script_start import WATCH
from orchestrator.results.analyse import analyse
from orchestrator.transport import ask
from tests.support.local_job import gang
from tests.support.run_folders import Host, write_run

CONNECTS = """
import socket, sys
ends = [socket.create_connection(("127.0.0.1", int(port))) for port in sys.argv[1:]]
print("there", flush=True)
sys.stdin.readline()
"""
TALKS_TO_ITSELF = """
import socket, subprocess, sys
server = socket.create_server(("127.0.0.1", 0))
connect = f"import socket, sys; s = socket.create_connection({server.getsockname()!r}); sys.stdin.read()"
helper = subprocess.Popen([sys.executable, "-c", connect], stdin=subprocess.PIPE)
guest = server.accept()[0]
print("there", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def script(text: str, *arguments: int) -> Iterator[subprocess.Popen[str]]:
    """A rank's script, once it has said that it is there."""
    words = [sys.executable, "-c", text, *map(str, arguments)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "there\n"
        try:
            yield child
        finally:
            child.communicate("\n")


@contextlib.contextmanager
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_connection_to_the_rendezvous_is_seen_while_it_is_there_and_after(tmp_path: Path) -> None:
    with listening() as port:
        meeting, late = Meeting(port), Meeting(port)
        with script(CONNECTS, port) as child:
            assert meeting.look(child.pid)
            assert not Meeting(port + 1).look(1 << 22)  # a process that is not there
        assert late.is_over()
        again = Meeting(port)  # what others left behind before this rank began is no sign of it
        assert not again.is_over()


def test_somebody_else_on_this_host_or_another_host_of_the_job_counts_too() -> None:
    with listening() as other, script(CONNECTS, other) as child:
        assert Meeting(1).look(child.pid)
        assert Meeting(1, {"127.0.0.1"}).look(child.pid)
        assert not Meeting(1, {"127.0.0.1"}).is_over()


def test_a_script_that_talks_to_its_own_helpers_has_met_nobody() -> None:
    with script(TALKS_TO_ITSELF) as child:
        meeting = Meeting(1)
        assert not meeting.look(child.pid)
    assert not meeting.is_over()


def test_addresses_of_both_families_are_read() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), socket.create_connection(("::1", port)):
            found = {row.theirs[0] for row in connections() if row.theirs[1] == port}
    assert found == {"127.0.0.1", "::1"}


# ---- a whole job --------------------------------------------------------------------------------------------------


def record_of(job: Any) -> JobRecord:
    return combine(job.plan, job.agents(), job.wait(), datetime.now(timezone.utc))


def test_ranks_that_never_met_are_reported_where_there_are_several(tmp_path: Path) -> None:
    with gang(tmp_path, "print(1)") as job:
        job.launch()
        record = record_of(job)
        words = list(News(job.plan).of(record))
    assert (record.state, record.joined) == ("succeeded", False)
    assert len(words) == 1 and words[0].startswith("the 2 ranks joined no process group, each runs by itself")


def test_a_rank_alone_has_nobody_to_meet(tmp_path: Path) -> None:
    with gang(tmp_path, "print(1)", ranks=(1,)) as job:
        job.launch()
        assert record_of(job).joined is None


def test_a_job_that_goes_on_alone_is_reported_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = dict(ask.shipped_sources())
    for module, long, brief in (
        ("host_state", "ALONE_S = 120.0", "ALONE_S = 0.5"),
        ("stillness", "LOOK_S = 5.0", "LOOK_S = 0.2"),
    ):
        assert long in sources[f"orch_remote.{module}"]
        sources[f"orch_remote.{module}"] = sources[f"orch_remote.{module}"].replace(long, brief)
    monkeypatch.setattr(ask, "shipped_sources", lambda: sources)
    with gang(tmp_path, "import time; time.sleep(600)") as job:
        job.launch()
        agents = job.wait_for(lambda found: joined(job.plan, found) is False)
        record = combine(job.plan, agents, job.record(), datetime.now(timezone.utc))
        assert "joined no process group" in alone_words(job.plan, record)


TRAINS = """
import sys, time, torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
"""


def test_ranks_that_train_alone_are_reported_after_their_first_steps(tmp_path: Path) -> None:
    with gang(tmp_path, TRAINS, torch_free=False, env={WATCH: "on"}) as job:
        job.launch()
        began = time.monotonic()
        agents = job.wait_for(lambda found: joined(job.plan, found) is False)
        record = combine(job.plan, agents, job.record(), datetime.now(timezone.utc))
        assert "joined no process group" in alone_words(job.plan, record)
    assert time.monotonic() - began < ALONE_S


def test_torch_ranks_that_meet_for_a_moment_have_met(tmp_path: Path) -> None:
    """What a first try looks like: it joins, and ends."""
    # With a barrier, since a rank that leaves while another still connects to it takes that one along.
    meet = 'dist.init_process_group("gloo")\ndist.barrier()\ndist.destroy_process_group()\n'
    brief = f"import torch.distributed as dist\n{meet}"
    with gang(tmp_path, brief, torch_free=False) as job:
        job.launch()
        record = record_of(job)
    assert (record.state, record.joined) == ("succeeded", True)


def test_only_what_all_ranks_say_counts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [Host("a"), Host("b", ranks=2)], {}, kind="script", exp="train.py", settings={})
    plan = LaunchPlan.model_validate_json(run.plan.read_text())

    def joined_when(*met: Any) -> bool | None:
        ranks = [{"met": one} for one in met]
        return joined(plan, {"a": {"ranks": {"0": ranks[0]}}, "b": {"ranks": {"1": ranks[1], "2": ranks[2]}}})

    assert [joined_when(False, False, False), joined_when(False, True, False), joined_when(False, None, False)] == [
        False,
        True,
        None,
    ]
    assert joined(plan, {"a": {"ranks": {"0": {"met": False}}}}) is None
    ended = {"met": False, "exit_code": 1, "signal": None}  # its failure is the news
    assert joined(plan, {"a": {"ranks": {"0": ended}}, "b": {"ranks": {"1": ended, "2": ended}}}) is None
    fine = {**ended, "exit_code": 0}
    assert joined(plan, {"a": {"ranks": {"0": fine}}, "b": {"ranks": {"1": fine, "2": fine}}}) is False
    record = JobRecord.model_validate_json(run.job.read_text()).model_copy(update={"joined": False})
    run.job.write_text(record.model_dump_json(by_alias=True))
    assert analyse(run).warnings[0].startswith("The 3 ranks joined no process group")
    assert alone_words(plan.model_copy(update={"kind": "experiment"}), record) == ""  # our own trainer always joins
    assert alone_words(plan, record.model_copy(update={"state": "failed"})) == ""
