"""`--elastic MIN:MAX`: the plan, what is reported of faults, and jobs of three hosts on this machine that lose some."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import UsageError
from orchestrator.jobs import control
from orchestrator.jobs.faults import fault_words, faults_of, lost_nodes
from orchestrator.jobs.record import Fault, JobRecord
from orchestrator.jobs.state import combine
from orchestrator.planning.elastic import parse_elastic
from orchestrator.planning.launch_plan import Elastic
from orchestrator.remote import processes
from orchestrator.views import launch_plan
from tests.support.job_states import HOSTILE, PLAN, known
from tests.support.local_job import Gang, gang, left
from tests.support.plans import SCRIPT, host, node
from tests.support.plans import plan as planned
from trainer.shared.config import parse_settings
from trainer.shared.shares import without_absent

LONG = pytest.mark.skipif(not os.environ.get("ORCH_LONG"), reason="minutes of torchrun meeting again: ORCH_LONG=1")

TWO_OF_THREE = Elastic(min_nodes=2, max_nodes=3, max_restarts=3)
CLUSTER = (41, 42, 43)


def plan(elastic="2:3", *, max_restarts=3, **wish):
    nodes = [node(number) for number in CLUSTER]
    found = {f"n{number}": host(number, peers=CLUSTER) for number in CLUSTER}
    request = replace(SCRIPT, elastic=parse_elastic(elastic, max_restarts), **wish)
    return planned(nodes, found, request, master="n42")


def option(one, name):
    return one.torchrun[one.torchrun.index(name) + 1]


# ---- the plan -------------------------------------------------------------------------------------------------------


def test_no_host_meets_by_c10d_whose_store_runs_what_anybody_lays_into_it():
    made = plan(max_restarts=5)
    for one in made.nodes:
        assert option(one, "--rdzv-backend") == "static"
        assert (option(one, "--master-addr"), option(one, "--master-port")) == ("192.168.1.42", "{rendezvous_port}")
        assert (option(one, "--nnodes"), option(one, "--node-rank")) == ("{nodes}", "{node_rank}")
        assert option(one, "--max-restarts") == "0"
    assert made.elastic == Elastic(min_nodes=2, max_nodes=3, max_restarts=5)


def test_a_dry_run_shows_that_a_job_is_elastic(capsys):
    launch_plan.print_plan(plan())
    shown = capsys.readouterr().out
    assert "rendezvous 192.168.1.42:29500 (static)" in shown
    assert "elastic: 2 to 3 nodes, at most 3 restarts of a host's ranks" in shown


def test_no_more_hosts_take_part_than_may():
    made = plan("1:2")
    assert [one.name for one in made.nodes] == ["n42", "n41"]
    assert made.world_size == sum(one.ranks for one in made.nodes)
    assert "n43: left out, --elastic takes at most 2 nodes" in made.notes


@pytest.mark.parametrize(("every", "notes"), [(0, 1), (500, 0)])
def test_an_experiment_without_checkpoints_gets_a_note_of_what_that_means(every, notes):
    settings = parse_settings("mnist_lenet", {"batch": "6", "checkpoint_every": str(every)})
    made = plan(kind="experiment", settings=settings)
    assert len([note for note in made.notes if "begin at step 0" in note]) == notes


@pytest.mark.parametrize("text", ["", "2", "2:", ":2", "0:2", "3:2", "-1:2", "2:3:4", "a:b", "2 : 3", "1:999999"])
def test_what_is_no_range_of_nodes_is_refused_with_the_form(text):
    with pytest.raises(UsageError, match="expected MIN:MAX"):
        parse_elastic(text, 3)


def test_more_nodes_than_there_are_cannot_be_wanted():
    with pytest.raises(UsageError, match="3 nodes take part, not 4"):
        plan("2:4")


# ---- what is reported of faults --------------------------------------------------------------------------------------

ELASTIC = PLAN.model_copy(update={"elastic": TWO_OF_THREE})


def fault(node, rank=None, after_s=1.0, *, secondary=False, restart=0):
    reason = "no word for 20 s" if rank is None else f"rank {rank} exited 1"
    restart = None if rank is None else restart
    return dict(node=node, rank=rank, reason=reason, after_s=after_s, restart=restart, secondary=secondary)


def places(faults):
    return [(found.node, found.rank, found.after_s) for found in faults]


def test_faults_of_all_hosts_stand_in_the_order_of_time():
    records = {"a": {"faults": [fault("c", None, 9.0)]}, "b": {"faults": [fault("b", 1, 4.0)]}}
    assert places(faults_of(ELASTIC, records)) == [("b", 1, 4.0), ("c", None, 9.0)]
    assert lost_nodes(faults_of(ELASTIC, records)) == {"c"}


def test_who_only_felt_anothers_death_is_named_where_nobody_says_more():
    echo, cause = fault("a", 0, 3.0, secondary=True), fault("b", 1, 4.0)
    assert places(faults_of(ELASTIC, {"a": {"faults": [echo]}, "b": {"faults": [cause]}})) == [("b", 1, 4.0)]
    assert places(faults_of(ELASTIC, {"a": {"faults": [echo]}})) == [("a", 0, 3.0)]


def test_a_host_speaks_of_its_own_ranks_and_the_master_alone_of_lost_hosts():
    lies = [fault("a"), fault("a", 0), fault("b", 0), fault("b", 7), fault("nobody")]
    assert faults_of(ELASTIC, {"b": {"faults": lies}}) == ()


def test_what_was_reported_before_stays_when_its_host_is_away():
    before = faults_of(ELASTIC, {"b": {"faults": [fault("b", 1, 4.0)]}})
    assert places(faults_of(ELASTIC, {"a": {"faults": [fault("b", None, 9.0)]}}, before)) == [
        ("b", 1, 4.0),
        ("b", None, 9.0),
    ]


KEYS = ("node", "rank", "reason", "after_s", "restart", "secondary", "log_line", "signal", "exit_code")


@given(st.dictionaries(st.sampled_from("abc"), st.lists(st.dictionaries(st.sampled_from(KEYS), HOSTILE)) | HOSTILE))
def test_whatever_hosts_report_of_faults_it_is_a_job_record(faults):
    found = {name: {"faults": reported} for name, reported in faults.items()}
    record = combine(ELASTIC, found, known(), datetime.now(timezone.utc))
    assert JobRecord.model_validate_json(record.model_dump_json(by_alias=True)) == record
    assert all(fault_words(one).isprintable() for one in record.faults)


def test_a_lost_hosts_own_word_says_why_also_when_it_comes_late():
    guess = {**fault("c", None, 9.0), "reason": "its supervisor is gone: killed, or the host went down"}
    own = {"kind": "supervisor", "node": "c", "reason": "the supervisor was killed by SIGKILL", "signal": "SIGKILL"}
    now = datetime.now(timezone.utc)
    records = {"a": {"faults": [guess], "state": "succeeded"}, "b": {"state": "succeeded"}}
    ended = combine(ELASTIC, records, known("running"), now)
    assert [one.reason for one in ended.faults] == [guess["reason"]]
    late = {**records, "c": {"state": "failed", "first_failure": own}}
    for before in (known("running"), ended):
        found = combine(ELASTIC, late, before, now).faults
        assert places(found) == [("c", None, 9.0)]
        assert (found[0].reason, found[0].signal) == (own["reason"], own["signal"])
    of_another = {**late, "c": {"state": "failed", "first_failure": {**own, "node": "a"}}}
    assert combine(ELASTIC, of_another, ended, now).faults == ended.faults


@pytest.mark.parametrize("kind", ["lost", "supervisor"])
def test_a_lost_host_speaks_of_its_own_end_alone(kind):
    own = {
        "state": "failed",
        "alive": False,
        "first_failure": {"kind": kind, "node": "c", "reason": "its lease is over"},
    }
    now = datetime.now(timezone.utc)
    assert combine(ELASTIC, {"c": own}, known("running"), now).state == "running"
    assert combine(PLAN, {"c": own}, known("running"), now).state == "failed"


def test_a_job_of_an_earlier_version_has_no_faults():
    assert known().faults == ()
    assert isinstance(Fault(node="a", reason="because", after_s=0.0), Fault)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("a=5,b=2,c=1", "a=5,b=2"),
        ("a:0=5, b=2,c:0=1,c:1=3", "a:0=5, b=2"),
        ("c=1", "equal"),
        ("a=0,c=1", "equal"),
        ("a=0,b=2,c=1", "a=0,b=2"),
        ("equal", "equal"),
        ("auto", "auto"),
    ],
)
def test_a_batch_is_split_without_the_parts_of_hosts_that_are_gone(wanted, expected):
    assert without_absent(wanted, [("a", 0), ("b", 0)]) == expected


# ---- jobs that lose something, with real torchrun and Gloo ----------------------------------------------------------

BATCH, EVERY, LAST = 12, 10, 40
AB = (("a", "0"), ("b", "1"))
TRAINS = {
    "exp": "mnist_lenet",
    "data": "synthetic",
    "samples": 120,
    "batch": BATCH,
    "epochs": 100,
    "steps": LAST,
    "eval_every": 0,
    "num_workers": 0,
    "checkpoint_every": EVERY,
    "device": "cpu",
    "backend": "gloo",
    "slow": "rank:0,at:start,ms:100",
}
TRAINER = ("-m", "trainer", *(f"--{name}={value}" for name, value in TRAINS.items()))


def trains(tmp_path: Path, *, hosts=3, command=TRAINER):
    return gang(tmp_path, "", ranks=(1,) * hosts, torch_free=False, elastic=TWO_OF_THREE, command=command, grace_s=3.0)


def runs(made: Gang, node: str) -> list[dict[int, float]]:
    """Of each start of this node's rank the loss of every step."""
    found: list[dict[int, float]] = []
    (path,) = made.folder(node).glob("rank-*/metrics.jsonl")
    for line in map(json.loads, path.read_text().splitlines()):
        if line["event"] == "start":
            found.append({})
        elif line["event"] == "step":
            found[-1][line["step"]] = line["loss"]
    return found


def until_step(made: Gang, step: int) -> dict:
    """Until the master's rank has written this step; the agents by node."""
    agents = made.wait_running()
    path = made.folder("a") / "rank-0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while f'"step": {step},' not in (path.read_text() if path.exists() else ""):
        assert time.monotonic() < deadline, "no step came"
        time.sleep(0.05)
    return agents


def power_off(made: Gang, agents: dict, name: str) -> None:
    """Kills all that is there of the job, supervisor and keeper first, so that nobody says a last word."""
    ours = [agents[name]["pid"], agents[name]["keeper"]["pid"]]
    for pid in [*ours, *(found.pid for found in processes.marked(made.folder(name)))]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def check_that_it_went_on(made: Gang, left: str) -> None:
    """On the hosts that are left a second start begins at a checkpoint, with the losses of before."""
    names = [node.name for node in made.plan.nodes]
    firsts, seconds = [runs(made, name)[0] for name in names], [runs(made, name)[1] for name in left]
    begun = min(seconds[0])
    assert begun > 0
    assert begun % EVERY == 0
    assert all(list(second) == list(range(begun, begun + len(second))) for second in seconds)
    done_twice = range(begun, min(max(first) for first in firsts) + 1)
    assert len(done_twice) > 0
    for step in done_twice:
        before, after = sum(first[step] for first in firsts), sum(second[step] for second in seconds)
        assert after == pytest.approx(before, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [pytest.param("a", marks=LONG), "b"])
def test_a_killed_rank_starts_again_from_the_last_checkpoint(tmp_path, victim):
    with trains(tmp_path, hosts=2) as made:
        made.launch()
        agents = until_step(made, 12)
        (rank,) = agents[victim]["ranks"]
        os.kill(agents[victim]["ranks"][rank]["pid"], signal.SIGKILL)
        record = made.wait()
        assert (record.state, record.exit_code, record.first_failure) == ("succeeded", 0, None)
        faults = [(one.node, one.rank, one.signal, one.restart) for one in record.faults]
        assert faults == [(victim, int(rank), "SIGKILL", 0)]
        check_that_it_went_on(made, "ab")
        assert all(max(runs(made, name)[1]) == LAST - 1 for name in "ab")
    assert left(made) == []


@pytest.mark.slow
def test_two_hosts_go_on_without_a_third_and_fail_without_the_second(tmp_path):
    endless = [part for part in TRAINER if not part.startswith("--steps")]
    with trains(tmp_path, command=endless) as made:
        made.launch()
        agents = until_step(made, 12)
        power_off(made, agents, "c")
        began = time.monotonic()
        met = made.wait_for(lambda found: all(found[name]["ranks"][rank].get("world_size") == 2 for name, rank in AB))
        while len(runs(made, "a")) < 2 or len(runs(made, "a")[1]) < 10:
            assert time.monotonic() - began < 60, "the others did not go on"
            time.sleep(0.1)
        assert [one["node"] for one in met["a"]["faults"] if one["rank"] is None] == ["c"]

        power_off(made, met, "b")
        record = made.wait()
        assert (record.state, record.exit_code, record.first_failure.node) == ("failed", 1, "b")
        assert "its supervisor is gone" in record.first_failure.reason
        assert lost_nodes(record.faults) == {"c"}
        check_that_it_went_on(made, "ab")
        assert time.monotonic() - began < 90
    assert left(made) == []


@LONG
@pytest.mark.slow
def test_a_rank_that_always_fails_is_the_cause_when_it_has_had_its_restarts(tmp_path):
    fails = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
if os.environ["ORCH_NODE"] == "b":
    sys.exit("ValueError: no")
dist.barrier()
"""
    once = TWO_OF_THREE.model_copy(update={"max_restarts": 1})
    with gang(tmp_path, fails, ranks=(1, 1, 1), torch_free=False, elastic=once) as made:
        made.launch()
        record = made.wait()
    assert (record.state, record.exit_code) == ("failed", 1)
    assert (record.first_failure.node, record.first_failure.rank) == ("b", 1)
    assert record.first_failure.log_line == "ValueError: no"
    assert left(made) == []


@LONG
@pytest.mark.slow
def test_a_cancel_starts_nothing_again(tmp_path):
    says = "import os, signal, time\nprint('began', flush=True)\ntime.sleep(600)\n"
    with gang(tmp_path, says, ranks=(1, 1, 1), torch_free=False, elastic=TWO_OF_THREE, grace_s=5.0) as made:
        made.launch()
        made.wait_running()
        control.cancel(made.plan, made.hosts)
        assert made.wait().state == "cancelled"
        causes = [rank["cause"] for agent in made.agents().values() for rank in agent["ranks"].values()]
        assert causes == ["asked by SIGINT"] * 3
        logs = [path.read_text() for name in "abc" for path in made.folder(name).glob("rank-*/stdout.log")]
        assert all(log.count("began") <= 1 for log in logs)
    assert left(made) == []
